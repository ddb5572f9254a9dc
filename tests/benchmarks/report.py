"""What the benchmark found, as a table (markdown), numbers (JSON) and a picture (PNG)."""

from __future__ import annotations

import json
import math
import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

__all__ = ["Report", "Row", "Section", "Target", "load_average", "machine", "write"]


@dataclass(kw_only=True)
class Row:
    """One peer's numbers: medians over the repeats. None: not measured, or it has no meaning for this peer.

    Args:
        peer: its name.
        about: what it is.
        ms_per_step: of the slowest replica; the mean over whole rounds, so that no round falls out of a median.
        spread_ms: difference between the slowest and the fastest repeat.
        to_single: its step time over that of one process without communication.
        ddp_to_it: DDP's step time over its own.
        hidden: share of the communication time that does not show in the step time.
        claimed_hidden: the share that the strategy itself says it hid.
        mb_per_step: sent by one replica, in MB (10**6 bytes) per step.
        samples_per_s: of all replicas together.
        error: why there are no numbers.
        claims: further numbers of the strategy's own summary.
        repeats_ms: ``ms_per_step`` of each repeat.
    """

    peer: str
    about: str
    ms_per_step: float | None = None
    spread_ms: float | None = None
    to_single: float | None = None
    ddp_to_it: float | None = None
    hidden: float | None = None
    claimed_hidden: float | None = None
    mb_per_step: float | None = None
    samples_per_s: float | None = None
    error: str | None = None
    claims: dict[str, float] = field(default_factory=dict)

    @property
    def round_ms(self) -> float | None:
        """What a round took, as the strategy says: its payload and commit."""
        rounds = self.claims.get("rounds", 0.0)
        return 1e3 * self.claims["exchange_s"] / rounds if rounds else None

    repeats_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Target:
    """A line that must be held: ``value`` at most or at least ``limit``."""

    about: str
    value: float | None
    limit: float
    at_most: bool = False

    @property
    def held(self) -> bool:
        if self.value is None or not math.isfinite(self.value):
            return False
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def line(self) -> str:
        value = "no number" if self.value is None else f"{self.value:.3f}"
        return (
            f"{'pass' if self.held else 'FAIL'}: {self.about}: {value} ({'<=' if self.at_most else '>='} {self.limit})"
        )


@dataclass(kw_only=True)
class Section:
    """One scenario on one link with one number of replicas."""

    title: str
    notes: list[str]
    rows: list[Row]
    targets: list[Target]
    load: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Report:
    """The whole run."""

    command: str
    machine: str
    sections: list[Section] = field(default_factory=list)


COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("ms/step", "ms_per_step", "{:.1f}"),
    ("spread", "spread_ms", "{:.1f}"),
    ("/ single", "to_single", "{:.3f}"),
    ("DDP / it", "ddp_to_it", "{:.2f}"),
    ("hidden", "hidden", "{:.1%}"),
    ("claimed", "claimed_hidden", "{:.1%}"),
    ("ms/round", "round_ms", "{:.0f}"),
    ("MB/step", "mb_per_step", "{:.3f}"),
    ("samples/s", "samples_per_s", "{:.1f}"),
)


def load_average() -> str:
    """The machine's load over 1, 5 and 15 minutes."""
    return " ".join(f"{load:.2f}" for load in os.getloadavg())


def machine() -> str:
    """What the numbers were measured on."""
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{cores} cores, {memory_gb:.0f} GB, {platform.platform()}, {versions}"


def section_markdown(section: Section) -> str:
    """The table of one section."""
    lines = [f"## {section.title}", ""]
    lines += [f"- {note}" for note in section.notes]
    lines += [f"- load average (1, 5, 15 min): {'; '.join(section.load)}", ""]
    lines += ["| peer | " + " | ".join(name for name, _, _ in COLUMNS) + " | what it is |"]
    lines += ["|---|" + "---:|" * len(COLUMNS) + "---|"]
    for row in section.rows:
        cells = []
        for _, attribute, form in COLUMNS:
            value = getattr(row, attribute)
            cells.append("" if value is None else form.format(value))
        about = row.about if row.error is None else f"FAILED: {row.error.splitlines()[-1] if row.error else ''}"
        lines.append(f"| {row.peer} | {' | '.join(cells)} | {about} |")
    lines += ["", *(f"- {target.line()}" for target in section.targets), ""]
    return "\n".join(lines)


def markdown(report: Report) -> str:
    """The whole report."""
    head = ["# Speed of asynchronous averaging", "", f"- {report.machine}", f"- repeat with `{report.command}`", ""]
    return "\n".join(head) + "\n" + "\n".join(section_markdown(section) for section in report.sections)


def write(report: Report, folder: Path) -> list[Path]:
    """Write ``averaging.md``, ``averaging.json`` and ``averaging.png`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    table, numbers, picture = (folder / f"averaging.{ending}" for ending in ("md", "json", "png"))
    table.write_text(markdown(report))
    as_dict = asdict(report)
    for section, made in zip(report.sections, as_dict["sections"], strict=True):
        for target, saved in zip(section.targets, made["targets"], strict=True):
            saved["held"] = target.held
    numbers.write_text(json.dumps(as_dict, indent=1))
    draw(report, picture)
    return [table, numbers, picture]


def draw(report: Report, path: Path) -> None:
    """Horizontal bars, one panel per section: step times, or samples per second where steps differ."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    heights = [len(section.rows) + 1.5 for section in report.sections] or [1.0]
    size = (9, 0.42 * sum(heights) + 0.6)
    figure, panels = plt.subplots(
        len(heights), 1, figsize=size, squeeze=False, height_ratios=heights, layout="constrained"
    )
    for section, axes in zip(report.sections, panels[:, 0], strict=False):
        by_step = any(row.ms_per_step is not None for row in section.rows)
        attribute, unit = ("ms_per_step", "ms per step") if by_step else ("samples_per_s", "samples per second")
        values = [getattr(row, attribute) or 0.0 for row in section.rows]
        colors = ["#2a6fbb" if row.about.startswith("ours") else "#b8bec6" for row in section.rows]
        bars = axes.barh([row.peer for row in section.rows], values, color=colors, height=0.7)
        axes.bar_label(bars, [f"{value:.1f}" if value else "failed" for value in values], padding=4, fontsize=9)
        single = next((row.ms_per_step for row in section.rows if row.peer == "single"), None)
        if by_step and single is not None:
            axes.axvline(single, color="#444444", linewidth=1, linestyle=":")
        axes.set_xlim(right=1.15 * (max(values) or 1.0))
        axes.invert_yaxis()
        axes.set_title(section.title, loc="left", fontsize=10)
        axes.set_xlabel(unit, fontsize=9)
        axes.tick_params(labelsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)

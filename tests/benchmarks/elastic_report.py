"""What the benchmark of deaths found, as a table (markdown), numbers (JSON) and a picture (PNG)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.benchmarks.elastic_trace import Death, Return, percentile
from tests.benchmarks.report import Target

__all__ = ["Outcome", "targets_of", "write"]

RECOVERY_S, PAUSE_S, DOUBLE_S, JOIN_S = 1.0, 0.25, 3.0, 0.074  # to join: a step of 24 ms, and 50


@dataclass(kw_only=True)
class Outcome:
    """One scenario.

    Args:
        name: of it.
        deaths: that were measured.
        returns: of ranks that were started again.
        codes: exit codes of the launcher.
        facts: what else was seen, in words.
        errors: why there are no numbers.
        load: before and after.
    """

    name: str
    deaths: list[Death] = field(default_factory=list)
    returns: list[Return] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    load: list[str] = field(default_factory=list)


def targets_of(outcomes: Sequence[Outcome]) -> list[Target]:
    """The lines that must hold."""
    targets: list[Target] = []
    for outcome in outcomes:
        deaths, name = outcome.deaths, outcome.name
        if name in ("averaging", "synchronous") and deaths:
            p95 = percentile([death.excess_s for death in deaths], 0.95)
            targets.append(
                Target(about=f"{name}: s to the next round, beyond the period (p95)", value=p95, limit=RECOVERY_S,
                       at_most=True)
            )  # fmt: skip
            repeated = float(max(death.repeated for death in deaths))
            targets.append(Target(about=f"{name}: rounds repeated", value=repeated, limit=1.0, at_most=True))
        if name == "averaging" and deaths:
            pause = max(death.pause_s for death in deaths)
            targets.append(Target(about=f"{name}: s between two steps", value=pause, limit=PAUSE_S, at_most=True))
        if name == "reforming" and deaths:
            slowest = max(death.excess_s for death in deaths)
            targets.append(
                Target(about=f"{name}: s to the next round, beyond the period", value=slowest, limit=DOUBLE_S,
                       at_most=True)
            )  # fmt: skip
        if outcome.returns:
            pause = max(each.pause_s for each in outcome.returns)
            about = f"{name}: s between two steps of others, as one joins"
            targets.append(Target(about=about, value=pause, limit=JOIN_S, at_most=True))
        different = float(sum(not death.alike for death in deaths) + len(outcome.errors))
        targets.append(Target(about=f"{name}: errors", value=different, limit=0.0, at_most=True))
    return targets


def markdown(outcomes: Sequence[Outcome], notes: Sequence[str]) -> str:
    """The report."""
    lines = ["# What deaths cost", "", *(f"- {note}" for note in notes), ""]
    lines += ["| scenario | where | deaths | excess p50 ms | p95 | worst | pause ms | repeated | alike |"]
    lines += ["|---|---|" + "---:|" * 6 + "---|"]
    for outcome in outcomes:
        places = list(dict.fromkeys(death.place for death in outcome.deaths))
        for place in [*places, "all"] if len(places) > 1 else places:
            chosen = [death for death in outcome.deaths if place in (death.place, "all")]
            excess = [1e3 * death.excess_s for death in chosen]
            cells = [
                f"{percentile(excess, 0.5):.0f}", f"{percentile(excess, 0.95):.0f}", f"{max(excess):.0f}",
                f"{1e3 * max(death.pause_s for death in chosen):.0f}", str(max(death.repeated for death in chosen)),
                "yes" if all(death.alike for death in chosen) else "NO",
            ]  # fmt: skip
            lines.append(f"| {outcome.name} | {place} | {len(chosen)} | {' | '.join(cells)} |")
    lines.append("")
    for outcome in outcomes:
        lines += [
            f"- {outcome.name}: rank {back.name} is one of {back.ranks} again {back.away_s:.1f} s after its death, "
            f"{back.joining_s:.1f} s after its imports; the others paused for {1e3 * back.pause_s:.0f} ms at most"
            for back in outcome.returns
        ]
        lines += [f"- {outcome.name}: {fact}" for fact in outcome.facts]
        lines += [f"- {outcome.name}: ERROR: {error.splitlines()[0]}" for error in outcome.errors]
        codes = sorted(set(outcome.codes))
        lines.append(f"- {outcome.name}: {len(outcome.codes)} launches, exit codes {codes}; load average before and "
                     f"after (1, 5, 15 min): {'; '.join(outcome.load)}")  # fmt: skip
    return "\n".join([*lines, "", *(f"- {target.line()}" for target in targets_of(outcomes)), ""])


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """Each death as a point: how much later than without it the next round came."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows: dict[str, list[float]] = {}
    for outcome in outcomes:
        for death in outcome.deaths:
            rows.setdefault(f"{outcome.name}: {death.place}", []).append(death.excess_s)
    figure, axes = plt.subplots(figsize=(8, 0.4 * len(rows) + 1.2), layout="constrained")
    for row, values in enumerate(rows.values()):
        axes.scatter(values, [row] * len(values), s=22, alpha=0.6, color="#2a6fbb")
    axes.axvline(RECOVERY_S, color="#444444", linewidth=1, linestyle=":")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlabel("seconds from a kill to the survivors' next round, beyond the period", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def write(folder: Path, notes: Sequence[str], outcomes: Sequence[Outcome]) -> None:
    """Write ``elastic.md``, ``elastic.json`` and ``elastic.png`` into ``folder``."""
    (folder / "elastic.md").write_text(markdown(outcomes, notes))
    numbers = {"notes": list(notes), "outcomes": [asdict(outcome) for outcome in outcomes]}
    (folder / "elastic.json").write_text(json.dumps(numbers, indent=1, default=str))
    if any(outcome.deaths for outcome in outcomes):
        draw(outcomes, folder / "elastic.png")

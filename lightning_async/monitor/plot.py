"""A picture of a run, drawn from the file that Lightning's `CSVLogger` wrote."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Series = tuple[list[int], list[float]]

PREFIXES = ("averaging/", "gradients/", "servers/")
HIDDEN_SHARE = "share of communication hidden"
PANELS = {
    "rounds": "rounds committed",
    "windows": "windows of gradients reduced",
    "version": "version that was pulled last",
    "pushes": "pushes and pulls",
    "pulls": "pushes and pulls",
    "lag": "lag of pushes, in updates",
    "mean_lag": "lag of pushes, in updates",
    "hidden_share": HIDDEN_SHARE,
    "staleness_steps": "steps a round was in flight",
    "round_s": "seconds per round",
    "window_s": "seconds per window",
    "batches_in_window": "batches in a window",
    "waited_s": "seconds idle",
    "idle_s": "seconds idle",
    "spread": "spread between replicas",
    "bytes": "bytes sent, and pulled",
    "pulled_bytes": "bytes sent, and pulled",
    "samples": "samples",
}
"""Titles of this package's own metrics, in the order of their panels. Metrics with one title share a panel."""
_NOT_DRAWN = ("failed_rounds", "dropped_gradients")

MAX_OWN_PANELS = 4
_SETTINGS = ("lr-", "accumulation/")
"""Prefixes of settings that callbacks log. A `CSVLogger` sorts its columns, and these would come before a loss."""


def read_metrics(metrics_csv: Path) -> dict[str, Series]:
    """Return each metric of a `CSVLogger` file by name, as its steps and values, in the order of the columns.

    A row of the file has the metrics that were logged together; fields of other metrics are empty. Values that are not
    finite numbers are skipped.

    Raises:
        FileNotFoundError: There is no such file, such as when the run ended before anything was logged.
        ValueError: The file has no column ``step``, so no `CSVLogger` wrote it.
    """
    with Path(metrics_csv).open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        names = [name for name in reader.fieldnames or () if name]
        if "step" not in names:
            raise ValueError(
                f"`metrics_csv` must be a file of Lightning's CSVLogger, with a column 'step': {metrics_csv}"
            )
        series: dict[str, Series] = {name: ([], []) for name in names if name not in ("step", "epoch")}
        for row in reader:
            step = _number(row["step"])
            if step is None:
                continue
            for name, (steps, values) in series.items():
                value = _number(row[name])
                if value is not None:
                    steps.append(int(step))
                    values.append(value)
    return {name: (steps, values) for name, (steps, values) in series.items() if steps}


def plot_run(metrics_csv: Path, out: Path) -> Path:
    """Draw a run: panels of the user's metrics (loss, accuracy, ...), then panels of communication over the steps.

    The panels of communication depend on the strategy. They show averaging rounds, with the part of their time that was
    hidden behind training and the distance between replicas; or windows of gradients; or pushes to servers with their
    version, lag and waiting times. Metrics whose names have the same last part share a panel, such as ``train/loss``
    and ``val/loss``, and so do the metrics of several dataloaders. Settings that callbacks log, as
    `LearningRateMonitor` does, come after the user's metrics, if there is room. Panels without values are not drawn.

    Args:
        metrics_csv: File ``metrics.csv`` that Lightning's `CSVLogger` wrote.
        out: File for the picture, which is also returned; its suffix (.png, .svg, .pdf) chooses the format.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: The file holds no metric.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("`plot_run` draws with matplotlib: pip install 'lightning-async[plot]'") from error

    panels = _panels(read_metrics(metrics_csv))
    if not panels:
        raise ValueError(f"`metrics_csv` holds no metric yet: {metrics_csv}")
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    # Without pyplot there is no global state, and no display is needed.
    figure = Figure(figsize=(4.6 * columns, 3.0 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for index, (title, lines) in enumerate(panels.items()):
        _draw(figure.add_subplot(rows, columns, index + 1), title, lines)
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    return out


def _panels(series: Mapping[str, Series]) -> dict[str, dict[str, Series]]:
    """Return the panels by title, each with its metrics: first panels of the user's metrics, then this package's."""
    own: dict[str, dict[str, Series]] = {}
    for name, line in series.items():
        if not _is_ours(name):
            own.setdefault(_title(name), {})[name] = line
    own = dict(sorted(own.items(), key=lambda panel: next(iter(panel[1])).startswith(_SETTINGS)))
    panels = dict(list(own.items())[:MAX_OWN_PANELS])
    for key, title in PANELS.items():
        # A key names one metric, or one for each replica: `averaging/rounds`, or `averaging/samples/rank_0` and so on.
        names = tuple(f"{prefix}{key}/" for prefix in PREFIXES)
        found = {name: line for name, line in series.items() if (name + "/").startswith(names)}
        if found:
            panels[title] = {**panels.get(title, {}), **found}
    return panels


def _title(name: str) -> str:
    """Return the title of the panel of a user's metric, which other metrics may share.

    It is ``loss`` for ``train/loss_step`` and ``val/loss/dataloader_idx_1``, and ``learning rate`` for all learning
    rates of `LearningRateMonitor`.
    """
    # `LearningRateMonitor` names its metrics so.
    if name.startswith("lr-"):
        ends = {"-momentum": "momentum", "-weight_decay": "weight decay"}
        return next((title for end, title in ends.items() if name.endswith(end)), "learning rate")
    name = re.sub(r"/dataloader_idx_\d+$", "", name)
    return name.rsplit("/", 1)[-1].removesuffix("_step").removesuffix("_epoch")


def _is_ours(name: str) -> bool:
    """Return whether a metric is this package's, not a user's metric with the same prefix, as `gradients/norm` is."""
    prefix, _, key = name.partition("/")
    return prefix == "averaging" or (f"{prefix}/" in PREFIXES and key.split("/")[0] in (*PANELS, *_NOT_DRAWN))


def _draw(axes: Any, title: str, lines: Mapping[str, Series]) -> None:
    for name, (steps, values) in lines.items():
        short = name.partition("/")[2] if _is_ours(name) else name
        few = len(steps) <= 12
        axes.plot(steps, values, label=short, linewidth=1.4, marker="o" if few else None, markersize=4, alpha=0.9)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel("step", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if title == HIDDEN_SHARE:
        axes.set_ylim(-0.02, 1.05)
    if len(lines) > 1:
        axes.legend(fontsize=8, frameon=False)


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return value if math.isfinite(value) else None

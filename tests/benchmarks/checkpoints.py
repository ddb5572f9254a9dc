"""Measure what a save costs training, against other tools: ``python -m tests.benchmarks.checkpoints --out DIR``.

One process trains on one thread, with a state of 400 MB: parameters and Adam's moments. Peers run in turn, each in a
process and into a folder of its own, again and again; numbers are medians over the repeats, slowdowns those of the
ratios within a repeat. Folders lie in ``--out``: put it on the disk in question.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.benchmarks.averaging import termination_as_exception
from tests.benchmarks.checkpoint_peers import PEERS, Job
from tests.benchmarks.checkpoint_run import Measured
from tests.benchmarks.ranks import RankFailed
from tests.benchmarks.report import Target, load_average, machine
from tests.benchmarks.scenarios import paired, ratio, say

MODULE = "tests.benchmarks.checkpoints"
ROOT = Path(__file__).resolve().parents[2]
QUICK_PEERS = ("nothing", "ours")
STALL_MS, SLOWDOWN = 150.0, 0.05


@dataclass(kw_only=True)
class Row:
    """One peer's numbers. None: it has no meaning for this peer.

    Args:
        peer: its name.
        about: what it is.
        step_ms: one step, without what is between it and the next.
        stall_ms: the training thread was held by a save, the median of all but the first of each run.
        work_ms: of that, the processor's time: what is left where nobody else wants the machine, and no disk is slow.
        first_ms: by the first save of a run, the median over the repeats: memory is taken, processes are started.
        worst_ms: by any save.
        slowdown: the run's time over that of the run without saves, less 1.
        save_ms: what the whole run took longer, per save.
        written_s: from the beginning of a save until its last byte is written.
        durable: whether it has been brought to the disk by then.
        saves: in the measured steps of a run.
        mb: of one checkpoint (10**6 bytes).
        error: why there are no numbers.
    """

    peer: str
    about: str
    step_ms: float | None = None
    stall_ms: float | None = None
    work_ms: float | None = None
    first_ms: float | None = None
    worst_ms: float | None = None
    slowdown: float | None = None
    save_ms: float | None = None
    written_s: float | None = None
    durable: str | None = None
    saves: float | None = None
    mb: float | None = None
    error: str | None = None
    repeats: list[Measured] = field(default_factory=list, repr=False)


COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("ms/step", "step_ms", "{:.1f}"),
    ("stall ms", "stall_ms", "{:.0f}"),
    ("work ms", "work_ms", "{:.0f}"),
    ("first", "first_ms", "{:.0f}"),
    ("worst", "worst_ms", "{:.0f}"),
    ("slowdown", "slowdown", "{:.1%}"),
    ("ms/save", "save_ms", "{:.0f}"),
    ("written s", "written_s", "{:.2f}"),
    ("fsync", "durable", "{}"),
    ("saves", "saves", "{:.0f}"),
    ("MB", "mb", "{:.0f}"),
)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True, help="folder for the table, the numbers and the picture")
    parser.add_argument("--peers", nargs="+", choices=PEERS, help="default: all")
    parser.add_argument("--repeats", type=int, default=3, help="how often each peer runs (default: %(default)s)")
    parser.add_argument("--width", type=int, default=1024, help="of the model's layers (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=88, help="samples of a step (default: %(default)s)")
    parser.add_argument("--every", type=int, default=60, help="steps between saves (default: %(default)s)")
    parser.add_argument("--saves", type=int, default=2, help="in the measured steps (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a functional check: one short repeat, few peers")
    parser.add_argument("--strict", action="store_true", help="exit with status 1 where a target is missed")
    options = parser.parse_args(arguments)
    if options.quick:
        options.repeats, options.width, options.batch, options.every, options.saves = 1, 32, 2, 10, 2
    options.peers = options.peers or (QUICK_PEERS if options.quick else tuple(PEERS))
    return options


def run(job: Job, timeout_s: float) -> Measured:
    """Train in a process of its own.

    Raises:
        RankFailed: it has failed, or taken too long. It is gone.
    """
    result = Path(job.folder, "..", "result.json")
    command = [sys.executable, "-m", "tests.benchmarks.checkpoint_run", json.dumps(asdict(job)), str(result)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    try:
        subprocess.run(
            [*command, str(os.getpid())], cwd=ROOT, env=environment, timeout=timeout_s, check=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    except subprocess.SubprocessError as error:
        said = getattr(error, "output", None) or b""
        raise RankFailed(f"`{job.peer}`: {error}\n{said.decode(errors='replace')[-4000:]}") from None
    return Measured(**json.loads(result.read_text()))


def measure(options: argparse.Namespace, command: str) -> list[Row]:
    """The peers' numbers; what there is is written after each repeat."""
    rows = [Row(peer=name, about=PEERS[name].about) for name in options.peers]
    load = [load_average()]
    for repeat in range(options.repeats):
        for row in rows:
            if row.error is None:
                try:
                    row.repeats.append(measure_once(options, row.peer))
                except RankFailed as error:
                    row.error = str(error)
                say(f"  repeat {repeat + 1}/{options.repeats} {row.peer}: {row.error or row.repeats[-1]}")
        load.append(load_average())
        base = next((row.repeats for row in rows if row.peer == "nothing"), [])
        for row in rows:
            if row.repeats and row.error is None:
                count(row, base)
        write(options, command, rows, load)
    return rows


def measure_once(options: argparse.Namespace, peer: str) -> Measured:
    """One training, into a folder of its own; what it leaves to the system to write is not the next one's load."""
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=options.out) as folder:
        place = Path(folder, "saved")
        place.mkdir()
        job = Job(peer=peer, folder=str(place), width=options.width, batch=options.batch, every=options.every,
                  saves=options.saves)  # fmt: skip
        try:
            return run(job, timeout_s=120.0 + job.steps * 0.5)
        finally:
            os.sync()


def count(row: Row, base: Sequence[Measured]) -> None:
    """Put the medians into a row."""
    runs = row.repeats
    row.step_ms = 1e3 * statistics.median(run.step_s for run in runs)
    run_s, base_s = [run.run_s for run in runs], [run.run_s for run in base]
    if not any(run.stalls_s for run in runs):
        return
    row.worst_ms = 1e3 * max(stall for run in runs for stall in run.stalls_s)
    if later := [stall for run in runs for stall in run.stalls_s[1:]]:
        row.stall_ms = 1e3 * statistics.median(later)
        row.work_ms = 1e3 * statistics.median(work for run in runs for work in run.work_s[1:])
    row.first_ms = 1e3 * statistics.median(run.stalls_s[0] for run in runs if run.stalls_s)
    row.saves = statistics.median(run.saves for run in runs)
    row.mb = statistics.median(run.bytes for run in runs) / 1e6
    row.durable = "yes" if PEERS[row.peer].durable else "no"
    if written := [seconds for run in runs for seconds in run.written_s]:
        row.written_s = statistics.median(written)
    if (slower := ratio(run_s, base_s)) is not None:
        row.slowdown = slower - 1.0
    longer_s = paired(run_s, base_s, lambda mine, without: mine - without)
    if longer_s is not None and row.saves:
        row.save_ms = 1e3 * longer_s * row.repeats[0].steps / row.saves


def targets_of(rows: Sequence[Row]) -> list[Target]:
    """The lines that ours must hold."""
    by_name = {row.peer: row for row in rows}
    targets = []
    if (row := by_name.get("ours")) is not None:
        targets.append(Target(about="ours: ms that a save stalls", value=row.stall_ms, limit=STALL_MS, at_most=True))
    if (row := by_name.get("ours adaptive")) is not None:
        targets.append(Target(about="ours adaptive: slowdown", value=row.slowdown, limit=SLOWDOWN, at_most=True))
    return targets


def markdown(rows: Sequence[Row], targets: Sequence[Target], notes: Sequence[str]) -> str:
    """The report."""
    lines = ["# What a save costs", "", *(f"- {note}" for note in notes), ""]
    lines += ["| peer | " + " | ".join(name for name, _, _ in COLUMNS) + " | what it is |"]
    lines += ["|---|" + "---:|" * len(COLUMNS) + "---|"]
    for row in rows:
        cells = []
        for _, attribute, form in COLUMNS:
            value = getattr(row, attribute)
            cells.append("" if value is None else form.format(value))
        about = row.about if row.error is None else f"FAILED: {row.error.splitlines()[-1]}"
        lines.append(f"| {row.peer} | {' | '.join(cells)} | {about} |")
    return "\n".join([*lines, "", *(f"- {target.line()}" for target in targets), ""])


def draw(rows: Sequence[Row], path: Path) -> None:
    """Two panels of bars: how long a save holds the training thread, and what it costs in all."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in rows if row.stall_ms is not None]
    figure, panels = plt.subplots(1, 2, figsize=(11, 0.45 * len(rows) + 1), sharey=True, layout="constrained")
    for axes, attribute, title in zip(
        panels, ("stall_ms", "save_ms"), ("ms that a save stalls training", "ms that a save costs in all"), strict=True
    ):
        values = [getattr(row, attribute) or 0.0 for row in rows]
        colors = ["#2a6fbb" if row.peer.startswith("ours") else "#b8bec6" for row in rows]
        bars = axes.barh([row.peer for row in rows], values, color=colors, height=0.7)
        axes.bar_label(bars, [f"{value:.0f}" for value in values], padding=4, fontsize=9)
        axes.set_xlim(right=1.15 * max([*values, 1.0]))
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def write(options: argparse.Namespace, command: str, rows: Sequence[Row], load: Sequence[str]) -> None:
    """Write ``checkpoints.md``, ``checkpoints.json`` and ``checkpoints.png``."""
    base_ms = next((1e3 * row.repeats[0].run_s for row in rows if row.repeats), 0.0)
    notes = [
        machine(),
        f"repeat with `{command}`",
        f"a save every {options.every} steps, which take {options.every * base_ms / 1e3:.1f} s; "
        f"{len(load) - 1} repeats, peers interleaved",
        "stall: the training thread is held, by all saves of a run but the first; work: the processor's time of that; "
        "slowdown: of the run beside one without saves; ms/save: the same, per save; fsync: written means on the disk",
        f"load average (1, 5, 15 min): {'; '.join(load)}",
    ]
    (options.out / "checkpoints.md").write_text(markdown(rows, targets_of(rows), notes))
    numbers = {"command": command, "notes": notes, "rows": [asdict(row) for row in rows]}
    (options.out / "checkpoints.json").write_text(json.dumps(numbers, indent=1))
    draw(rows, options.out / "checkpoints.png")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    command = shlex.join(["python", "-m", MODULE, *(sys.argv[1:] if arguments is None else arguments)])
    print(machine(), f"load average {load_average()}", f"repeat with `{command}`\n", sep="\n", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    with termination_as_exception():
        rows = measure(options, command)
    print((options.out / "checkpoints.md").read_text())
    failed = any(row.error is not None for row in rows)
    return int(failed or (options.strict and not all(target.held for target in targets_of(rows))))


if __name__ == "__main__":
    sys.exit(main())

"""Measure `Synchronous()` beside DDP, in time and in processors' work: ``python -m tests.benchmarks.synchronous``.

Both train a model with next to no compute, of 1, 10 and 100 MB of gradients, and the char-level transformer; first
where nothing limits the link, then over a slow one. A repeat has both, one after the other.

With ``--accumulate 4`` a step is of four batches: DDP accumulates them, and beside it are windows of as many, without a
delay. Milliseconds are those of a batch then.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tests.benchmarks.averaging import RATE_MBIT, make_link, termination_as_exception
from tests.benchmarks.horovod_peers import DEPTH
from tests.benchmarks.link import Link
from tests.benchmarks.measured import Job, RankResult
from tests.benchmarks.ranks import forking, run_ranks
from tests.benchmarks.report import load_average, machine
from tests.benchmarks.scenarios import START_S, interleave, job_on, say, step_time

__all__ = ["Compared", "cpu_time", "main", "parse", "width_of"]

MODULE = "tests.benchmarks.synchronous"
SIZES = (0, 1, 10, 100)
WIDE, CHAR = ("wide ddp", "wide synchronous"), ("ddp", "ours synchronous")
WIDE_WINDOWS, CHAR_WINDOWS = ("wide ddp", "wide windows"), ("ddp", "ours windows")


@dataclass(kw_only=True)
class Compared:
    """One model on one link; lists are by repeat: milliseconds of a step, DDP's and ours.

    Args:
        about: the model.
        link: a few words.
        wall_ms: of the slowest rank.
        cpu_ms: of all threads of a rank, the mean over ranks.
    """

    about: str
    link: str
    wall_ms: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    cpu_ms: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    def row(self) -> str:
        """Of a table: medians, and the medians of the ratios within a repeat."""
        cells = [self.about, self.link]
        for ddp, ours in (self.wall_ms, self.cpu_ms):
            ratio = statistics.median(b / a for a, b in zip(ddp, ours, strict=True))
            cells += [f"{statistics.median(ddp):.2f}", f"{statistics.median(ours):.2f}", f"{ratio:.3f}"]
        return f"| {' | '.join(cells)} |"


def width_of(megabytes: float) -> int:
    """Of the wide model's layers, for so many MB of gradients.

    >>> width_of(1), width_of(100)
    (102, 1021)
    """
    return round(math.sqrt(megabytes * 1e6 / 4 / DEPTH))


def cpu_time(job: Job, ranks: Sequence[RankResult]) -> float:
    """Seconds of processors per step over the measured part, the mean over the ranks."""
    return statistics.mean(rank.cpu_s[1] - rank.cpu_s[0] for rank in ranks) / job.steps


def compare(link: Link, megabytes: float, options: argparse.Namespace) -> Compared:
    """Both on one link; no ``megabytes``: the transformer."""
    each = options.accumulate
    wide, char = (WIDE, CHAR) if each == 1 else (WIDE_WINDOWS, CHAR_WINDOWS)
    peers, steps = (wide if megabytes else char), options.steps
    if link.rate_mbit is not None:  # a step sends all gradients once, and takes that long
        steps = max(3, min(steps, round(options.seconds / ((megabytes or 6.6) * 8 / link.rate_mbit))))
    jobs = [
        replace(
            job_on(link, peer, options.replicas, warmup=5 * each, steps=steps * each),
            width=width_of(megabytes) or 1024,
            accumulate=each,
        )
        for peer in peers
    ]
    outcomes, load = interleave(
        jobs,
        options.repeats,
        lambda job: run_ranks(link, job, timeout_s=START_S + 3 * options.seconds),
        lambda *done: f"{step_time(*done) * 1e3:.2f} ms/step, {cpu_time(*done) * 1e3:.2f} ms of processors",
    )
    where = "loopback" if link.rate_mbit is None else f"{link.rate_mbit:g} Mbit/s"
    about = f"{megabytes:g} MB" if megabytes else "transformer, 6.6 MB"
    found = Compared(about=about if each == 1 else f"{about}, {each} batches a step", link=where)
    for number, peer in enumerate(peers):
        if (error := outcomes[peer].error) is not None:
            raise RuntimeError(error)
        for ranks in outcomes[peer].repeats:
            found.wall_ms[number].append(step_time(jobs[number], ranks) * 1e3)
            found.cpu_ms[number].append(cpu_time(jobs[number], ranks) * 1e3)
    say(f"  {found.row()}  load {load[0]}, {load[-1]}")
    return found


def markdown(all_: Sequence[Compared]) -> str:
    """A table of it."""
    head = [
        "| gradients | link | DDP, ms | ours, ms | ratio | DDP, ms of processors | ours | ratio |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    return "\n".join([*head, *(each.row() for each in all_)])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description="`Synchronous()` beside DDP.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the table and the numbers")
    parser.add_argument("--sizes", nargs="*", type=float, default=SIZES, help="MB of gradients; 0: the transformer")
    parser.add_argument("--links", nargs="+", choices=("loopback", "speed"), default=("loopback", "speed"))
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5, help="how often each of the two runs")
    parser.add_argument("--accumulate", type=int, default=1, help="batches of a step; more than one: windows")
    parser.add_argument("--steps", type=int, default=100, help="that are measured, where the link allows")
    parser.add_argument("--seconds", type=float, default=20.0, help="on the slow link, about so long")
    parser.add_argument("--rate-mbit", type=float, default=RATE_MBIT)
    parser.add_argument("--quick", action="store_true", help="a functional check: one model, a few steps")
    options = parser.parse_args(arguments)
    if options.quick:
        options.sizes, options.links, options.repeats, options.steps = (1,), ("loopback",), 1, 4
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    command = shlex.join(["python", "-m", MODULE, *(sys.argv[1:] if arguments is None else arguments)])
    print(f"{machine()}\nload average {load_average()}\nrepeat with `{command}`\n", flush=True)
    found = []
    for kind in options.links:
        with (
            termination_as_exception(),
            make_link(kind, options.replicas, options.rate_mbit) as link,
            forking(link) if kind == "loopback" else nullcontext(link) as link,
        ):
            found += [compare(link, size, options) for size in options.sizes]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "synchronous.md").write_text(markdown(found) + "\n")
    (options.out / "synchronous.json").write_text(json.dumps([asdict(each) for each in found], indent=1))
    print(markdown(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Train for minutes while ranks are killed at random: ``python -m tests.benchmarks.soak --out DIR --seconds 600``.

First all ranks train undisturbed: that is the fault-free pace. Then one of them, whoever it is, is killed every so
often, and the launcher starts it again; where it cannot come back, the others go on, and nobody is killed any more when
few are left.
What counts are samples that have not been lost: of a rank that was killed, those up to its last round. Where torchft is
installed, it does the same afterwards, by averaging of its own; its ranks are started again at once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.benchmarks.averaging import termination_as_exception
from tests.benchmarks.elastic import FEWEST
from tests.benchmarks.elastic_run import Run, training
from tests.benchmarks.elastic_trace import BATCH, Death, Life, alike, measure_death, percentile
from tests.benchmarks.ranks import RankFailed
from tests.benchmarks.report import Target, load_average, machine
from tests.benchmarks.scenarios import say
from tests.benchmarks.torchft_run import Torchft, torchft_problem, torchft_training

MODULE = "tests.benchmarks.soak"
GOODPUT = 0.85
RESTARTS = 10_000
STEP_S, PERIOD = 0.024, 10


@dataclass(kw_only=True)
class Soak:
    """What came of it. Samples a second are of all ranks together.

    Args:
        ranks: at first.
        fault_free: samples a second before the first kill.
        with_kills: the same from there on, of samples that were not lost.
        kills: how many.
        back: ranks that came back, each time.
        living: ranks that trained, on average over the time with kills.
        deaths: what each has cost the others.
        moments: of the kills, whom, and the others.
        code: the launcher's exit code.
        alike: all that was committed was the same on all.
        load: before and after.
    """

    ranks: int
    fault_free: float = 0.0
    with_kills: float = 0.0
    kills: int = 0
    back: int = 0
    living: float = 0.0
    deaths: list[Death] = field(default_factory=list)
    moments: list[tuple[float, str, list[Life]]] = field(default_factory=list, repr=False)
    code: int | None = None
    alike: bool = False
    load: list[str] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        return self.with_kills / self.fault_free if self.fault_free else 0.0

    def targets(self) -> list[Target]:
        """The lines that must hold."""
        return [
            Target(about="share of the fault-free samples", value=self.goodput, limit=GOODPUT),
            Target(about="exit code", value=None if self.code is None else float(self.code), limit=0.0, at_most=True),
            Target(about="ranks differ", value=float(not self.alike), limit=0.0, at_most=True),
        ]


def kept(life: Life, killed: bool, since: float, until: float) -> int:
    """Steps of a process within a time that were not lost with it."""
    last_round = max((commit["t"] for commit in life.commits), default=0.0)
    until = min(until, last_round) if killed else until
    return sum(since < step["t"] <= until for step in life.of("step"))


def pace(all_: Sequence[Life], killed: set[int], since: float, until: float) -> float:
    """Samples a second that were not lost."""
    steps = sum(kept(life, life.process in killed, since, until) for life in all_)
    return BATCH * steps / (until - since)


def ours(options: argparse.Namespace) -> Soak:
    """This package, under its launcher."""
    with training(
        options.out, options.ranks, max_restarts=RESTARTS, min_replicas=1, step_s=STEP_S, period=PERIOD
    ) as run:
        return soak(options, run)


def torchft(options: argparse.Namespace) -> Soak:
    """torchft's ``LocalSGD``, with a lighthouse."""
    with torchft_training(options.out, options.ranks, step_s=STEP_S, period=PERIOD) as run:
        return soak(options, run)


def soak(options: argparse.Namespace, run: Run | Torchft) -> Soak:
    """One training, with its kills."""
    result = Soak(ranks=options.ranks, load=[load_average()])
    begun = time.monotonic()
    rest(run, options.free_seconds, [])
    since, killed = time.monotonic(), set[int]()
    moments: list[int] = []
    while (left := since + options.seconds - time.monotonic()) > 0.0:
        here = training_in(run)
        moments.append(len(here))
        if len(here) > FEWEST and left > options.every / 2:
            kill(run, random.choice(here), killed, result)
        rest(run, min(options.every, max(0.0, left)), moments)
    until = time.monotonic()
    result.code = run.end()
    all_ = run.traces.read()
    result.fault_free, result.with_kills = pace(all_, killed, begun, since), pace(all_, killed, since, until)
    for killed_at, name, others in result.moments:  # now, for all is written down
        found = measure_death(others, "anywhere", [name], killed_at)
        assert found is not None
        result.deaths.append(found)
    result.moments.clear()
    result.kills, result.back = len(killed), len([life for life in all_ if life.commits]) - options.ranks
    result.living = sum(moments) / len(moments)
    result.alike = alike(all_)
    result.load.append(load_average())
    return result


def kill(run: Run | Torchft, victim: Life, killed: set[int], result: Soak) -> None:
    """One of them, at whatever moment; waits for the others' next round."""
    killed_at = time.monotonic()
    os.kill(victim.process, signal.SIGKILL)
    killed.add(victim.process)

    def death(all_: Sequence[Life]) -> Death | None:
        others = [life for life in all_ if life.process not in killed and life.alive]
        return measure_death(others, "anywhere", [victim.name], killed_at)

    all_ = run.wait("for the others' next round", lambda all_: death(all_) is not None)
    say(f"  {death(all_)}")
    others = [life for life in all_ if life.process not in killed and life.alive]
    result.moments.append((killed_at, victim.name, others))


def training_in(run: Run | Torchft) -> list[Life]:
    """Those that have committed a round, and live; who is yet to join is left alone."""
    return [life for life in run.living().values() if life.commits]


def rest(run: Run | Torchft, seconds: float, moments: list[int]) -> None:
    """Let them train.

    Raises:
        RankFailed: they have ended.
    """
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if run.ended():
            raise RankFailed(f"all have ended\n{run.said()}")
        time.sleep(min(0.1, max(0.0, until - time.monotonic())))
        moments.append(len(training_in(run)))


def rows_of(result: Soak) -> dict[str, str]:
    excess = [death.excess_s for death in result.deaths]
    return {
        "samples a second, fault-free": f"{result.fault_free:.1f}",
        "samples a second with kills": f"{result.with_kills:.1f} ({100 * result.goodput:.1f}%)",
        "kills, and ranks that came back": f"{result.kills}, {result.back}",
        "ranks that trained, of all": f"{result.living:.2f} of {result.ranks}",
        "s to the next round, beyond the period: p50, p95": (
            f"{percentile(excess, 0.5):.2f}, {percentile(excess, 0.95):.2f}"
        ),
        "longest pause of a survivor, s": f"{max((death.pause_s for death in result.deaths), default=0.0):.2f}",
        "exit code": f"{result.code}",
        "load average before; after": "; ".join(result.load),
    }


def markdown(results: Mapping[str, Soak], notes: Sequence[str]) -> str:
    """The report."""
    tables = {name: rows_of(result) for name, result in results.items()}
    lines = ["# Training while ranks are killed", "", *(f"- {note}" for note in notes), ""]
    lines += [f"| | {' | '.join(tables)} |", "|---|" + "---:|" * len(tables)]
    first = next(iter(tables.values()), {})
    lines += [f"| {row} | {' | '.join(table[row] for table in tables.values())} |" for row in first]
    targets = results["ours"].targets() if "ours" in results else []
    return "\n".join([*lines, "", *(f"- {target.line()}" for target in targets), ""])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True, help="folder for the table and the numbers")
    parser.add_argument("--seconds", type=float, default=600.0, help="with kills (default %(default)s)")
    parser.add_argument("--free-seconds", type=float, default=60.0, help="without, before (default %(default)s)")
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two kills (default %(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="at first (default %(default)s)")
    parser.add_argument("--strict", action="store_true", help="exit with status 1 where a target is missed")
    options = parser.parse_args(arguments)
    command = shlex.join(["python", "-m", MODULE, *(sys.argv[1:] if arguments is None else arguments)])
    print(machine(), f"load average {load_average()}", f"repeat with `{command}`\n", sep="\n", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    notes = [machine(), f"repeat with `{command}`", f"steps of {1e3 * STEP_S:g} ms, a round every {PERIOD}"]
    peers = {"ours": ours, "torchft": torchft}
    if (problem := torchft_problem()) is not None:
        notes.append(f"without torchft: {problem}")
        del peers["torchft"]
    else:
        notes.append("of torchft the next round may be one that the dead one had still taken part in")
    results, failed = {}, False
    with termination_as_exception():
        for name, run in peers.items():
            say(name)
            try:
                results[name] = run(options)
            except RankFailed as error:
                say(f"  {error}")
                notes.append(f"{name} FAILED: {str(error).splitlines()[0]}")
                failed = failed or name == "ours"
            (options.out / "soak.md").write_text(markdown(results, notes))
            numbers = {name: asdict(result) for name, result in results.items()}
            (options.out / "soak.json").write_text(json.dumps({"notes": notes, **numbers}, indent=1))
    print((options.out / "soak.md").read_text())
    held = not failed and all(target.held for target in results["ours"].targets())
    return int(failed or results["ours"].code != 0 or (options.strict and not held))


if __name__ == "__main__":
    sys.exit(main())

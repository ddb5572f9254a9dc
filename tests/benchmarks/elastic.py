"""Measure what deaths cost those that are left: ``python -m tests.benchmarks.elastic --out DIR``.

Real ranks under ``lightning-async launch``. One after the other dies of SIGKILL, at a place of its own: between steps,
in a header, in a collective, before a commit, in an optimizer's step, in a merge, at a sync point, as a checkpoint is
saved, or wherever it is.

Beside that: a second death while the others form their groups anew, a rank that is stopped, and one
that is slow.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.benchmarks.averaging import termination_as_exception
from tests.benchmarks.elastic_report import Outcome, targets_of, write
from tests.benchmarks.elastic_run import START_S, Run, training
from tests.benchmarks.elastic_trace import Death, Life, alike, measure_death, measure_return
from tests.benchmarks.ranks import RankFailed
from tests.benchmarks.report import load_average, machine
from tests.benchmarks.scenarios import say

MODULE = "tests.benchmarks.elastic"
PLACES = ("anywhere", "step", "header", "payload", "commit", "optimizer", "merge", "sync_point", "checkpoint")
SAVE_EVERY = 40
NOT_IN_STEPS = ("merge",)  # what synchronous steps have not
SCENARIOS = ("averaging", "synchronous", "returning", "reforming", "stopped", "straggler")
FEWEST = 2


def kills(options: argparse.Namespace, outcome: Outcome, **job: object) -> None:
    """Ranks die in turn until two are left, launch after launch."""
    where = [place for place in options.places if not job.get("synchronous") or place not in NOT_IN_STEPS]
    places = itertools.cycle(where)
    left, job = options.kills, {**job, "save_every": SAVE_EVERY * ("checkpoint" in where)}
    job |= {"untold": options.untold or options.apart, "apart": options.apart}
    while left > 0 and not outcome.errors:
        with training(options.out, options.ranks, num_workers=options.num_workers, **job) as run:
            dead: list[Life] = []
            for _ in range(min(left, options.ranks - FEWEST)):
                place, victim = next(places), random.choice(list(run.living().values()))
                killed_at = run.kill(victim, place)
                dead.append(victim)
                left -= 1
                all_ = run.wait(f"for the others after a death in {place}", run.settled(dead))
                outcome.deaths.append(measured(all_, place, [victim], killed_at, run))
                say(f"  {outcome.deaths[-1]}")
            outcome.codes.append(run.end())
            check_end(run, outcome)


def measured(all_: Sequence[Life], place: str, victims: Sequence[Life], killed_at: float, run: Run) -> Death:
    others = [life for life in all_ if life not in victims and life.alive]
    death = measure_death(others, place, [victim.name for victim in victims], killed_at)
    if death is None:
        raise RankFailed(f"no round after a death in {place}\n{run.said()}")
    return death


def check_end(run: Run, outcome: Outcome) -> None:
    """Those that are left have ended in order, with one model."""
    if outcome.codes[-1] != 0:
        outcome.errors.append(f"exit code {outcome.codes[-1]}\n{run.said()}")
    if not alike(run.traces.read()):
        outcome.errors.append("the ranks have committed, or ended with, different models")


def returning(options: argparse.Namespace, outcome: Outcome) -> None:
    """A rank dies, is started again, and joins those that train; rank 0 among them."""
    with training(options.out, 3, max_restarts=options.repeats, gate_every=5_000) as run:
        for _ in range(options.repeats):
            victim = random.choice(list(run.living().values()))
            killed_at = run.kill(victim, "anywhere")
            all_ = run.wait("for the others", run.settled([victim]))
            outcome.deaths.append(measured(all_, "anywhere", [victim], killed_at, run))
            others = [life for life in run.living().values() if life.name != victim.name and life.commits]
            all_ = run.wait(
                "for it to come back",
                lambda all_, name=victim.name: any(
                    life.name == name and life.commits and life.alive for life in all_
                ) and run.settled()(all_),
                START_S,
            )  # fmt: skip
            back = next(life for life in reversed(all_) if life.name == victim.name and life.alive)
            outcome.returns.append(measure_return(others, back, killed_at))
            say(f"  {outcome.deaths[-1]}\n  {outcome.returns[-1]}")
        outcome.codes.append(run.end())
        check_end(run, outcome)


def reforming(options: argparse.Namespace, outcome: Outcome) -> None:
    """A rank dies, and a second one while the others form their groups anew."""
    for _ in range(options.repeats):
        with training(options.out, 4) as run:
            first, second = random.sample(list(run.living().values()), 2)
            run.order(second, "reform")
            killed_at = run.kill(first, "anywhere")
            all_ = run.wait("for two that are left", run.settled([first, second]))
            outcome.deaths.append(measured(all_, "reform", [first, second], killed_at, run))
            say(f"  {outcome.deaths[-1]}")
            outcome.codes.append(run.end())
            check_end(run, outcome)


def stopped(options: argparse.Namespace, outcome: Outcome) -> None:
    """A rank is stopped until the others have gone on without it, and wakes up."""
    dead_after_s = 3.0
    for _ in range(options.repeats):
        with training(options.out, 3, dead_after_s=dead_after_s) as run:
            victim = random.choice(list(run.living().values()))
            stopped_at = time.monotonic()
            os.kill(victim.process, signal.SIGSTOP)
            all_ = run.wait("for the others to go on", run.settled([victim]))
            death = measured(all_, f"stopped ({dead_after_s:g} s)", [victim], stopped_at, run)
            outcome.deaths.append(death)
            say(f"  {death}")
            os.kill(victim.process, signal.SIGCONT)
            run.wait("for it to end", lambda _, victim=victim: not victim.alive)
            run.traces.read()
            said = [event["error"] for event in victim.of("error")]
            outcome.facts.append(
                f"awake, rank {victim.name} ended with {said[0].partition(':')[0] if said else 'nothing'}"
            )
            if not said or not said[0].startswith("Evicted"):
                outcome.errors.append(f"a rank that was stopped ended with {said}")
            outcome.codes.append(run.end())
            check_end(run, outcome)


def straggler(options: argparse.Namespace, outcome: Outcome) -> None:
    """A rank whose steps take three times as long is taken for lost by nobody."""
    steps = options.straggler_steps
    with training(options.out, 3, dead_after_s=3.0, slow={"1": 3.0}) as run:
        all_ = run.wait(
            f"for {steps} steps",
            lambda all_: all(len(life.of("step")) >= steps for life in all_ if life.name != "1"),
            timeout_s=60.0 + steps * 0.2,
        )
        generations = {commit["generation"] for life in all_ for commit in life.commits}
        taken = {life.name: len(life.of("step")) for life in all_}
        outcome.facts.append(f"steps by rank {taken}; generations {sorted(generations)}")
        if generations != {0}:
            outcome.errors.append(f"a straggler was evicted: generations {sorted(generations)}")
        outcome.codes.append(run.end())
        check_end(run, outcome)


def measure(options: argparse.Namespace, command: str) -> list[Outcome]:
    """All scenarios that were asked for; what there is is written after each."""
    ways: dict[str, Callable[[Outcome], None]] = {
        "averaging": lambda outcome: kills(options, outcome),
        "synchronous": lambda outcome: kills(options, outcome, synchronous=True),
        "returning": lambda outcome: returning(options, outcome),
        "reforming": lambda outcome: reforming(options, outcome),
        "stopped": lambda outcome: stopped(options, outcome),
        "straggler": lambda outcome: straggler(options, outcome),
    }
    notes = [
        machine(),
        f"repeat with `{command}`",
        f"{options.ranks} ranks, which die in turn until {FEWEST} are left; steps of 24 ms, a round every 10",
        "excess: from the kill to the next round that all survivors have committed, less the time between two rounds; "
        "pause: the longest between two steps of a survivor, gates left out; alike: the same bits in every round",
    ]
    outcomes: list[Outcome] = []
    for name in options.scenario:
        say(name)
        outcomes.append(outcome := Outcome(name=name, load=[load_average()]))
        try:
            ways[name](outcome)
        except RankFailed as error:
            outcome.errors.append(str(error))
            say(f"  {error}")
        outcome.load.append(load_average())
        write(options.out, notes, outcomes)
    return outcomes


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True, help="folder for the table, the numbers and the picture")
    parser.add_argument("--scenario", nargs="+", choices=SCENARIOS, default=SCENARIOS, help="default: all")
    parser.add_argument("--kills", type=int, default=8, help="of averaging, and of synchronous steps (default 8)")
    parser.add_argument("--ranks", type=int, default=6, help="at first (default 6)")
    parser.add_argument("--places", nargs="+", choices=PLACES, default=PLACES, help="default: all, in turn")
    parser.add_argument("--repeats", type=int, default=1, help="of the scenarios without kills in turn (default 1)")
    parser.add_argument("--num-workers", type=int, default=0, help="of each rank's loader (default 0)")
    parser.add_argument("--untold", action="store_true", help="of kills ranks hear nothing from the launcher")
    parser.add_argument("--apart", action="store_true", help="nor see each other's processes, as on other hosts")
    parser.add_argument("--straggler-steps", type=int, default=1000, help="of the fast ranks (default 1000)")
    parser.add_argument("--seed", type=int, help="of the victims")
    parser.add_argument("--strict", action="store_true", help="exit with status 1 where a target is missed")
    options = parser.parse_args(arguments)
    if options.ranks <= FEWEST:
        parser.error(f"argument --ranks: {options.ranks} must be above {FEWEST}: so many are left")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    random.seed(options.seed)
    command = shlex.join(["python", "-m", MODULE, *(sys.argv[1:] if arguments is None else arguments)])
    print(machine(), f"load average {load_average()}", f"repeat with `{command}`\n", sep="\n", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    with termination_as_exception():
        outcomes = measure(options, command)
    print((options.out / "elastic.md").read_text())
    failed = any(outcome.errors for outcome in outcomes)
    return int(failed or (options.strict and not all(target.held for target in targets_of(outcomes))))


if __name__ == "__main__":
    sys.exit(main())

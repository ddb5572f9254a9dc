"""Measure what deaths cost those that are left: ``python -m tests.benchmarks.elastic --out DIR``.

Real ranks under ``lightning-async launch``. One after the other dies of SIGKILL, at a place of its own: between steps,
in a header, in a collective, before a commit, in an optimizer's step, in a merge, at a gate, or wherever it is. Beside
that: a second death while the others form their groups anew, a rank that is stopped, and one that is slow.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.benchmarks.averaging import termination_as_exception
from tests.benchmarks.elastic_trace import Death, Life, Traces, alike, measure_death, percentile
from tests.benchmarks.ranks import RankFailed
from tests.benchmarks.report import Target, load_average, machine
from tests.benchmarks.scenarios import say

MODULE = "tests.benchmarks.elastic"
ROOT = Path(__file__).resolve().parents[2]
CONSOLE = str(ROOT / "lightning_async/commands/bin/lightning-async")
PLACES = ("anywhere", "step", "header", "payload", "commit", "optimizer", "merge", "gate")
NOT_IN_STEPS = ("merge",)  # what synchronous steps have not
SCENARIOS = ("averaging", "synchronous", "reforming", "stopped", "straggler")
FEWEST, SETTLED = 2, 3
START_S, DEATH_S = 180.0, 90.0
RECOVERY_S, PAUSE_S, DOUBLE_S = 1.0, 0.25, 3.0


class Run:
    """A training under the launcher.

    Args:
        folder: of its traces and logs.
        ranks: how many there are at first.
        max_restarts: of the launcher.
        job: of the ranks, beside the folder; see `elastic_rank.Job`.
    """

    def __init__(self, folder: Path, ranks: int, max_restarts: int = 0, **job: object) -> None:
        self.folder, self.ranks, self.traces = folder, ranks, Traces(folder)
        self._out = (folder / "launcher.out").open("wb")
        options = ["-n", str(ranks), "--log-dir", str(folder / "logs"), "--max-restarts", str(max_restarts)]
        program = ["-m", "tests.benchmarks.elastic_rank", json.dumps({"folder": str(folder), **job})]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, CONSOLE, "launch", *options, *program], cwd=ROOT, env=environment,
            stdin=subprocess.DEVNULL, stdout=self._out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def wait(self, what: str, done: Callable[[list[Life]], bool], timeout_s: float = DEATH_S) -> list[Life]:
        """Until that is so; all lives.

        Raises:
            RankFailed: it has not become so, or all have ended.
        """
        until = time.monotonic() + timeout_s
        while not done(all_ := self.traces.read()):
            ended = self.process.poll() is not None and not done(all_ := self.traces.read())
            if ended or time.monotonic() > until:
                raise RankFailed(f"{'ended' if ended else 'in vain'} while waiting {what}\n{self.said()}")
            time.sleep(0.02)
        return all_

    def living(self) -> dict[str, Life]:
        """Those that train, by name."""
        return {life.name: life for life in self.traces.read() if alive(life.process) and not life.ended}

    def settled(self, without: Sequence[Life] = ()) -> Callable[[list[Life]], bool]:
        """Whether all that live have committed some rounds together."""
        gone = {life.process for life in without}

        def done(all_: list[Life]) -> bool:
            here = [each for each in all_ if each.process not in gone and alive(each.process) and not each.ended]
            names = {life.name for life in here}
            return bool(here) and all(
                len(last := life.commits[-SETTLED:]) == SETTLED and all(set(c["members"]) == names for c in last)
                for life in here
            )

        return done

    def ended(self) -> bool:
        """Whether the launcher has ended."""
        return self.process.poll() is not None

    def said(self) -> str:
        self._out.flush()
        return (self.folder / "launcher.out").read_text(errors="replace")[-6000:]

    def order(self, life: Life, place: str) -> None:
        """Have a rank die there."""
        part = self.folder / f"order-{life.name}"
        part.write_text(place)
        part.rename(self.folder / f"die-{life.name}")

    def kill(self, life: Life, place: str) -> float:
        """Have it die there, or at once; when it did."""
        if place == "anywhere":
            at = time.monotonic()
            os.kill(life.process, signal.SIGKILL)
        else:
            self.order(life, place)
            self.wait(f"for rank {life.name} to die in {place}", lambda _: not alive(life.process))
            (self.folder / f"die-{life.name}").unlink(missing_ok=True)
            self.traces.read()
            at = next((event["t"] for event in life.of("die")), time.monotonic())
        return at

    def end(self) -> int:
        """All end in order; the launcher's exit code."""
        (self.folder / "stop").touch()
        try:
            code = self.process.wait(DEATH_S)
        except subprocess.TimeoutExpired:
            raise RankFailed(f"the launcher did not end\n{self.said()}") from None
        self.traces.read()
        return code

    def close(self) -> None:
        for life in self.traces.read():
            with contextlib.suppress(OSError):
                os.kill(life.process, signal.SIGCONT)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(15.0)
        if self.process.poll() is None:
            for life in self.traces.read():
                with contextlib.suppress(OSError):
                    os.killpg(life.process, signal.SIGKILL)
            self.process.kill()
            self.process.wait()
        self._out.close()


def alive(process: int) -> bool:
    """Whether it is there, and no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@contextlib.contextmanager
def training(out: Path, ranks: int, **job: object) -> Iterator[Run]:
    """A run in a folder of its own, in which all have begun to commit rounds; nothing of it stays."""
    with tempfile.TemporaryDirectory(prefix="elastic-", dir=out) as folder:
        run = Run(Path(folder), ranks, **job)  # pyright: ignore[reportArgumentType]
        try:
            run.wait("for all to begin", lambda all_: len(all_) >= ranks and run.settled()(all_), START_S)
            yield run
        finally:
            run.close()


@dataclass(kw_only=True)
class Outcome:
    """One scenario.

    Args:
        name: of it.
        deaths: that were measured.
        codes: exit codes of the launcher.
        facts: what else was seen, in words.
        errors: why there are no numbers.
        load: before and after.
    """

    name: str
    deaths: list[Death] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    load: list[str] = field(default_factory=list)


def kills(options: argparse.Namespace, outcome: Outcome, **job: object) -> None:
    """Ranks die in turn until two are left, launch after launch."""
    where = [place for place in options.places if not job.get("synchronous") or place not in NOT_IN_STEPS]
    places = itertools.cycle(where)
    left = options.kills
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
    others = [life for life in all_ if life not in victims]
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
            run.wait("for it to end", lambda _, process=victim.process: not alive(process))
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
        "reforming": lambda outcome: reforming(options, outcome),
        "stopped": lambda outcome: stopped(options, outcome),
        "straggler": lambda outcome: straggler(options, outcome),
    }
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
        write(options, command, outcomes)
    return outcomes


def targets_of(outcomes: Sequence[Outcome]) -> list[Target]:
    """The lines that must hold."""
    targets = []
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


def write(options: argparse.Namespace, command: str, outcomes: Sequence[Outcome]) -> None:
    """Write ``elastic.md``, ``elastic.json`` and ``elastic.png``."""
    notes = [
        machine(),
        f"repeat with `{command}`",
        f"{options.ranks} ranks, which die in turn until {FEWEST} are left; steps of 24 ms, a round every 10",
        "excess: from the kill to the next round that all survivors have committed, less the time between two rounds; "
        "pause: the longest between two steps of a survivor, gates left out; alike: the same bits in every round",
    ]
    (options.out / "elastic.md").write_text(markdown(outcomes, notes))
    numbers = {"command": command, "notes": notes, "outcomes": [asdict(outcome) for outcome in outcomes]}
    (options.out / "elastic.json").write_text(json.dumps(numbers, indent=1, default=str))
    if any(outcome.deaths for outcome in outcomes):
        draw(outcomes, options.out / "elastic.png")


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

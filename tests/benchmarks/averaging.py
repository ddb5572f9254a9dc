"""Measure asynchronous averaging against its peers: ``python -m tests.benchmarks.averaging --out DIR``.

Four scenarios: ``speed`` (a 100 Mbit/s link), ``loopback`` (the same peers where nothing limits the link),
``stragglers`` (four replicas of unequal speed) and ``gradients`` (synchronous training, bound by its gradients). Peers
over Horovod take part where it is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from tests.benchmarks import report as reports
from tests.benchmarks.link import Link, loopback, paced, shaped, shaping_problem
from tests.benchmarks.peers import PEERS
from tests.benchmarks.ranks import RankFailed, forking
from tests.benchmarks.report import Report
from tests.benchmarks.scenarios import (
    QUICK,
    RELATIVE_STEP_TIMES,
    Plan,
    measure_gradients,
    measure_speed,
    measure_stragglers,
    say,
)

MODULE = "tests.benchmarks.averaging"
SPEED_PEERS = (
    "single", "apart", "ddp", "ddp raw", "periodic", "blocking", "ours", "ours H=16", "ours DiLoCo",
    "ours DiLoCo H=8", "ours int8 H=8", "ours over Horovod",
)  # fmt: skip
LOOPBACK_PEERS = ("single", "apart", "ddp", "periodic", "ours", "ours DiLoCo")
STRAGGLER_PEERS = ("apart", "ddp", "ours synchronous", "ours timed")
GRADIENT_PEERS = ("wide ddp", "wide hvd raw", "wide hvd", "wide ours")
QUICK_PEERS = ("single", "ddp", "ours", "ours int8 H=8")
RATE_MBIT = 100.0


@contextlib.contextmanager
def termination_as_exception() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack, so that processes and namespaces go."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True, help="folder for the table, the numbers and the picture")
    scenarios = ("speed", "loopback", "stragglers", "gradients")
    parser.add_argument("--scenario", nargs="+", choices=scenarios, default=scenarios, help="default: all")
    parser.add_argument("--replicas", nargs="+", type=int, default=[2, 4], help="for speed and loopback")
    parser.add_argument("--repeats", type=int, help="how often each peer runs (default 3)")
    parser.add_argument("--peers", nargs="+", choices=[peer for peer in PEERS if "probe" not in peer])
    parser.add_argument("--rate-mbit", type=float, default=RATE_MBIT)
    parser.add_argument("--slot-ms", type=float, help="padded step time (default: measured, at least 50 or 80 ms)")
    parser.add_argument("--quick", action="store_true", help="a functional check: one short repeat, few peers")
    parser.add_argument("--strict", action="store_true", help="exit with status 1 where a target is missed")
    options = parser.parse_args(arguments)
    if min(options.replicas) < 2:
        parser.error(f"argument --replicas: {min(options.replicas)} must be at least 2")
    return options


def make_link(scenario: str, num_replicas: int, rate_mbit: float) -> contextlib.AbstractContextManager[Link]:
    """The link of a scenario; a paced one where namespaces cannot be had."""
    if scenario != "speed":
        return loopback(num_replicas)
    if problem := shaping_problem():
        say(f"  no link between namespaces ({problem}): pacing connections instead")
        return paced(num_replicas, rate_mbit)
    return shaped(num_replicas, rate_mbit)


def measure(options: argparse.Namespace, report: Report) -> None:
    """Run what was asked for; each section joins ``report`` as it is done."""
    plan = QUICK if options.quick else Plan()
    if options.repeats is not None:
        plan = dataclasses.replace(plan, repeats=options.repeats)
    if options.slot_ms is not None:
        plan = dataclasses.replace(plan, slot_s=options.slot_ms / 1e3)
    installed = importlib.util.find_spec("horovod") is not None
    defaults = {
        "speed": SPEED_PEERS,
        "loopback": LOOPBACK_PEERS,
        "stragglers": STRAGGLER_PEERS,
        "gradients": GRADIENT_PEERS,
    }
    for scenario in options.scenario:
        unequal = scenario == "stragglers"
        quick = options.quick and scenario in ("speed", "loopback")
        peers = options.peers or (QUICK_PEERS if quick else defaults[scenario])
        if options.peers is None and not installed:
            peers = [peer for peer in peers if not PEERS[peer].horovod]
        for num_replicas in [len(RELATIVE_STEP_TIMES)] if unequal else options.replicas:
            say(f"{scenario}, {num_replicas} replicas")
            with contextlib.ExitStack() as open_:
                link = open_.enter_context(make_link(scenario, num_replicas, options.rate_mbit))
                if options.quick and scenario == "loopback":
                    link = open_.enter_context(forking(link))
                if unequal:
                    section = measure_stragglers(link, peers, plan)
                elif scenario == "gradients":
                    section = measure_gradients(link, num_replicas, peers, plan)
                else:
                    section = measure_speed(link, num_replicas, peers, plan)
            report.sections.append(section)
            print(reports.section_markdown(section), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    command = shlex.join(["python", "-m", MODULE, *(sys.argv[1:] if arguments is None else arguments)])
    report = Report(command=command, machine=reports.machine())
    print(f"{report.machine}\nload average {reports.load_average()}\nrepeat with `{command}`\n", flush=True)
    with termination_as_exception():
        try:
            measure(options, report)
        except RankFailed as error:
            say(f"  {error}")
            return 1
        finally:
            if report.sections:
                for path in reports.write(report, options.out):
                    print(f"wrote {path}", flush=True)
    failed = any(row.error is not None for section in report.sections for row in section.rows)
    missed = any(not target.held for section in report.sections for target in section.targets)
    return int(failed or (options.strict and missed))


if __name__ == "__main__":
    sys.exit(main())

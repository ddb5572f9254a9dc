"""Starts the ranks of a training, and sees to their end: ``lightning-async launch -n 4 train.py``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_async.commands.first_process import allow
from lightning_async.launch.agent import Agent
from lightning_async.launch.environment import Job, available_cores, shown
from lightning_async.launch.meeting import Meeting
from lightning_async.launch.places import Wanted
from lightning_async.launch.rendezvous import address, first, secret_of, settings
from lightning_async.launch.standby import can_stand_by
from lightning_async.launch.state import CANNOT_START, Policy
from lightning_async.launch.supervise import Supervisor

__all__ = ["main"]

_MOST_RANKS = 128  # there are seven descriptors for each, and usually 1024 for a process
_EPILOG = """exit codes:
  0     all ranks have ended with 0, those aside without which training went on
  75    the ranks were told to end, have saved, and can be started again
  68    a node was lost, and training did not go on without it; or too few nodes have come
  69    the store, in which ranks meet, was lost, with the first node for instance
  72    this node was told to go (SIGTERM), and the others train on
  71    the system did not let a process start, or a file be written
  130   told to end by SIGINT (143: SIGTERM, 129: SIGHUP)
  128+N the rank that died first, of those without which training did not go on, was killed by signal N
  else  that of this rank
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job; its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    program = ["-m", *options.module] if options.module else options.program
    if not program:
        parser.error("which program? Give a script, or -m and a module.")
    if options.n > _MOST_RANKS:
        parser.error(f"-n {options.n}: at most {_MOST_RANKS} ranks on one host.")
    if not hasattr(os, "pidfd_open"):
        parser.error("this needs Linux 5.3 or newer (pidfd_open); elsewhere plain `python` starts the ranks.")
    try:
        policy = Policy(
            ranks=options.n, max_restarts=options.max_restarts, grace_s=options.grace,
            standbys=int(options.max_restarts > 0) if options.standby is None else options.standby,
            hang_after_s=options.hang_after, hang_after_start_s=options.hang_after_start,
        )  # fmt: skip
        wanted, place = _several(options)
        secret = None if place is None else secret_of(options.secret_file, os.environ)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    job = Job.of(program, options.n, options.max_restarts, os.environ, available_cores(), secret)
    if options.dry_run:
        print("\n".join(shown(job, os.environ, policy.standbys if can_stand_by(job) else 0)))
        if place is not None:
            print("# on one node only; with others ranks, sizes and MASTER_ADDR are given when all have come")
        return 0
    allow(options.grace)
    try:
        if place is None:
            return Supervisor(job, policy, options.log_dir).run()
        return _with_others(job, policy, options.log_dir, wanted, place)
    except (OSError, ValueError) as error:
        print(f"lightning-async launch: {error}", file=sys.stderr)
        return CANNOT_START


def _several(options: argparse.Namespace) -> tuple[Wanted, tuple[str, int] | None]:
    """How many nodes there are to be, and where they meet; nowhere, where there is only this one.

    Raises:
        ValueError: this is not said, or in part.
    """
    if options.rdzv is None:
        for name in ("nnodes", "secret_file", "last_call"):
            if getattr(options, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} needs --rdzv HOST:PORT, where the nodes meet.")
        return Wanted(least=1, most=1), None
    if options.nnodes is None:
        raise ValueError("--rdzv needs --nnodes: how many nodes, or MIN:MAX.")
    try:
        wanted = Wanted.parse(options.nnodes, 30.0 if options.last_call is None else options.last_call)
    except ValueError as error:
        raise ValueError(f"--nnodes {options.nnodes}, --last-call {options.last_call}: {error}") from error
    return wanted, address(options.rdzv)


def _with_others(job: Job, policy: Policy, logs: Path | None, wanted: Wanted, place: tuple[str, int]) -> int:
    """One of several nodes: the first, where the place is on this host, and no other launcher has it."""
    same = settings(wanted, job.max_restarts, job.program)
    listener = first(*place)
    if listener is None:
        return Agent(job, policy, logs, wanted, place, same).run()
    with listener:
        meeting = Meeting(listener, wanted, job.secret, job.name, same, job.place.ranks)
        return Supervisor(job.at(job.place, meeting.address), policy, logs, meeting).run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-async launch",
        description="Start the ranks of a training, on this host or on several, and see to their end.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-n", type=int, required=True, metavar="N", help="how many ranks on this host")
    parser.add_argument(
        "--max-restarts", type=int, default=0, metavar="N",
        help="how often all ranks, or one where the others go on, are started again after a death (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--standby", type=int, metavar="K",
        help="how many processes have imported what the program does, and are ready to be a rank that is started again "
        "(default: 1 with --max-restarts, else 0)",
    )  # fmt: skip
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="write what each rank writes to a file of its own")
    parser.add_argument(
        "--grace", type=float, default=30.0, metavar="S",
        help="seconds that ranks have to save when the job is told to end (default: 30)",
    )  # fmt: skip
    parser.add_argument(
        "--hang-after", type=float, metavar="S",
        help="seconds without a step of any rank after which all are killed, as if each had died; for "
        "this package's strategies, which tell of steps (default: never)",
    )  # fmt: skip
    parser.add_argument(
        "--hang-after-start", type=float, metavar="S",
        help="the same before the first step of a training: imports, compilation, the first batch "
        "(default: 1800, or as --hang-after, where that is more)",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print what would be started")
    parser.add_argument("--nnodes", metavar="MIN:MAX", help="how many hosts, each with a launcher of its own; or N")
    parser.add_argument("--rdzv", metavar="HOST:PORT", help="where they meet: an address of one of them")
    parser.add_argument(
        "--last-call", type=float, metavar="S", help="seconds that others have once MIN hosts are there (default: 30)"
    )
    parser.add_argument(
        "--secret-file", type=Path, metavar="FILE", help="their secret; default: LIGHTNING_ASYNC_SECRET"
    )
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="a module, not a script, and its arguments")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="script", help="and its arguments")
    return parser

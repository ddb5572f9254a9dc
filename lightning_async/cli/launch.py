"""Starts the ranks of a training, and sees to their end: ``lightning-async launch -n 4 train.py``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_async.cli.first_process import allow
from lightning_async.launch.environment import LaunchedJob, shown
from lightning_async.launch.state_machine import CANNOT_START, Policy
from lightning_async.launch.supervisor import Supervisor
from lightning_async.launch.warm_spare import can_stand_by

_MOST_RANKS = 128  # there are seven descriptors for each, and usually 1024 for a process
_EPILOG = """exit codes:
  0     all ranks have ended with 0, those aside without which training went on
  75    the ranks were told to end, have saved, and can be started again
  69    the store, in which ranks meet, was lost
  71    the system did not let a process start, or a file be written
  130   told to end by SIGINT (143: SIGTERM, 129: SIGHUP)
  128+N the rank that died first, of those without which training did not go on, was killed by signal N
  else  that of this rank
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    program = ["-m", *options.module] if options.module else options.program
    if not program:
        parser.error("which program? Give a script, or -m and a module.")
    if options.n > _MOST_RANKS:
        parser.error(f"-n {options.n}: at most {_MOST_RANKS} ranks.")
    if not hasattr(os, "pidfd_open"):
        parser.error("this needs Linux 5.3 or newer (pidfd_open); elsewhere plain `python` starts the ranks.")
    try:
        policy = Policy(
            ranks=options.n, max_restarts=options.max_restarts, grace_s=options.grace,
            standbys=int(options.max_restarts > 0) if options.standby is None else options.standby,
            hang_after_s=options.hang_after, hang_after_start_s=options.hang_after_start,
        )  # fmt: skip
    except ValueError as error:
        parser.error(str(error))
    job = LaunchedJob.of(program, options.n, options.max_restarts, os.environ, len(os.sched_getaffinity(0)))
    if options.dry_run:
        print("\n".join(shown(job, os.environ, policy.standbys if can_stand_by(job) else 0)))
        return 0
    allow(options.grace)
    try:
        return Supervisor(job, policy, options.log_dir).run()
    except (OSError, ValueError) as error:
        print(f"lightning-async launch: {error}", file=sys.stderr)
        return CANNOT_START


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-async launch",
        description="Start the ranks of a training on this host, and see to their end.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-n", type=int, required=True, metavar="N", help="how many ranks")
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
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="a module, not a script, and its arguments")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="script", help="and its arguments")
    return parser

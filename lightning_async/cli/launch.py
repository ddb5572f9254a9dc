"""The command that starts and supervises the ranks of a training: ``lightning-async launch -n 4 train.py``."""

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

_MOST_RANKS = 128  # each needs seven descriptors, and a process usually has 1024
_EPILOG = """exit codes:
  0     all ranks have ended with 0, except for those without which training went on
  75    the ranks were told to end, have saved, and can be started again
  69    the store, in which ranks meet, was lost
  71    the system did not let a process start, or a file be written
  130   told to end by SIGINT (143: SIGTERM, 129: SIGHUP)
  128+N the rank whose death ended training was killed by signal N
  else  exit code of the rank whose death ended training
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the launcher; return its exit code."""
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
            hang_after_s=options.hang_after, hang_after_start_s=options.hang_after_start,
        )  # fmt: skip
    except ValueError as error:
        parser.error(str(error))
    job = LaunchedJob.of(program, options.n, options.max_restarts, os.environ, len(os.sched_getaffinity(0)))
    if options.dry_run:
        print("\n".join(shown(job, os.environ)))
        return 0
    # If the launcher is killed, its ranks get this time to save, and PID 1 must not end before.
    allow(options.grace)
    try:
        return Supervisor(job, policy, options.log_dir).run()
    except (OSError, ValueError) as error:
        print(f"lightning-async launch: {error}", file=sys.stderr)
        return CANNOT_START


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-async launch",
        description="Start the ranks of a training on this host, and supervise them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-n", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument(
        "--max-restarts", type=int, default=0, metavar="N",
        help="number of restarts after deaths, of all ranks, or of one rank while the others go on (default: 0)",
    )  # fmt: skip
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="also write each rank's output to a file there")
    parser.add_argument(
        "--grace", type=float, default=30.0, metavar="S",
        help="seconds in which ranks save and end when the job is told to end (default: 30)",
    )  # fmt: skip
    parser.add_argument(
        "--hang-after", type=float, metavar="S",
        help="seconds without a step of any rank after which all are killed, as if each had died; for "
        "this package's strategies, which report steps (default: never)",
    )  # fmt: skip
    parser.add_argument(
        "--hang-after-start", type=float, metavar="S",
        help="the same before the first step of a training: imports, compilation, the first batch "
        "(default: 1800, or --hang-after if that is more)",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print what would be started, and start nothing")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="a module and its arguments")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="script", help="a script and its arguments")
    return parser

"""The console script: ``lightning-async doctor | build-horovod | launch | serve | checkpoint | status``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {
    "doctor": "report what is installed, and which backends run",
    "build-horovod": "build Horovod for the installed torch (--mpi, --nccl)",
    "launch": "start the ranks of a training on this host, and supervise them",
    "serve": "serve parameters to workers that are started elsewhere",
    "checkpoint": "list, verify, export or prune the checkpoints of a directory",
    "status": "show what the replicas of a job do while it runs",
}
"""The commands; each is a module with a function ``main`` that takes the other arguments."""
_MODULES = {"build-horovod": "lightning_async.horovod.build"}  # commands whose module is elsewhere


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code."""
    listed = "\n".join(f"  {name:<15} {what}" for name, what in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="lightning-async",
        description="Tools of lightning_async.",
        epilog=f"commands:\n{listed}\n\n`lightning-async <command> --help` shows the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="command")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the command")
    rest.required = False  # without a command, argparse would also ask for its arguments
    options = parser.parse_args(arguments)
    # Imported only now: some commands import torch, which takes seconds.
    module = import_module(_MODULES.get(options.command, f"lightning_async.cli.{options.command}"))
    return module.main(options.arguments)


if __name__ == "__main__":
    sys.exit(main())

"""The console script: ``lightning-async doctor | build-horovod | launch | serve | checkpoint | status``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {
    "doctor": "say what is installed, what runs, and why not something better",
    "build-horovod": "build Horovod for the installed torch (--mpi, --nccl)",
    "launch": "start the ranks of a training on this host, and see to their end",
    "serve": "serve parameters to workers that are started elsewhere",
    "checkpoint": "list, verify, export or prune the checkpoints of a directory",
    "status": "show what the replicas of a job do while it runs",
}
"""Each is a module of this package with a function ``main`` that takes the other arguments."""
_MODULES = {"build-horovod": "lightning_async.horovod.build"}  # the commands that are no module of this folder


def main(arguments: Sequence[str] | None = None) -> int:
    listed = "\n".join(f"  {name:<15} {what}" for name, what in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="lightning-async",
        description="Tools of lightning_async.",
        epilog=f"commands:\n{listed}\n\n`lightning-async <command> --help` tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="command")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the command")
    rest.required = False  # else argparse asks for some, where there is no command either
    options = parser.parse_args(arguments)
    module = import_module(_MODULES.get(options.command, f"lightning_async.cli.{options.command}"))
    return module.main(options.arguments)


if __name__ == "__main__":
    sys.exit(main())

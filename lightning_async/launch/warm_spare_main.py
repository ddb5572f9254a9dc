"""The program of a warm spare: it does slow imports, waits, and then becomes the rank that the launcher names.

It is started as a script, by its path, with the environment that all ranks share, and imports only the standard library
itself. On its channel it receives what makes it a rank: environment variables, and descriptors for stdout and stderr.
Ranks are not forked from one prepared process, because numpy starts threads when it is imported, and a lock that such a
thread holds at a fork stays locked in the child forever.

    python -u warm_spare_main.py VARIABLE-OF-THE-CHANNEL torch,lightning.pytorch train.py ARGUMENTS...
"""

from __future__ import annotations

import io
import json
import os
import runpy
import socket
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import SourceFileLoader
from types import ModuleType

_LONGEST = 1 << 16


def main() -> None:
    """Import the program's modules, wait until the launcher needs this spare, and run the program as a rank."""
    channel, imports, *program = sys.argv[1:]
    _be_started_as(program)
    problem = _import(imports.split(","))
    _wait_for_the_launcher(os.environ[channel], problem)
    if problem:  # start over as a plain rank: half-done imports go away, process, channel and output stay
        os.execv(sys.executable, sys.orig_argv)
    _take_rank()
    _run(program)


def _be_started_as(program: Sequence[str]) -> None:
    """Set arguments and module path as ``python -u PROGRAM`` does."""
    sys.orig_argv[:] = [sys.executable, "-u", *program]
    sys.argv[:] = program
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd() if program[0] == "-m" else os.path.dirname(os.path.realpath(program[0]))


def _import(names: Sequence[str]) -> str:
    """Import these modules; return the first problem, or an empty text."""
    for name in names:
        try:
            import_module(name)
        except BaseException as error:
            return f"cannot import {name}: {type(error).__name__}: {error}"
    return ""


def _wait_for_the_launcher(channel: str, problem: str) -> None:
    """Report to the launcher that the imports are done, or failed, and wait until it sends a rank's place.

    Then take the rank's environment variables and output streams. If the launcher ends meanwhile, the system ends this
    process, too.
    """
    with socket.socket(fileno=os.dup(int(channel.partition(":")[0]))) as launcher:
        launcher.send(json.dumps({"process": os.getpid(), "standby": problem[:1000]}).encode())
        told, descriptors, *_ = socket.recv_fds(launcher, _LONGEST, 2)
    for mine, given in zip((1, 2), descriptors, strict=True):
        os.dup2(given, mine)
        os.close(given)
    os.environ.update(json.loads(told))


def _take_rank() -> None:
    """Set the rank again in Lightning, which has read it at its import, and lets only rank 0 write messages."""
    if (module := sys.modules.get("lightning_utilities.core.rank_zero")) is not None:
        module.rank_zero_only.rank = int(os.environ["RANK"])


def _run(program: Sequence[str]) -> None:
    """Run the program as `python` does."""
    before = sys.modules["__main__"]
    path = program[0]
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main).update(
        {name: vars(before)[name] for name in ("__builtins__", "__annotations__") if name in vars(before)}
    )
    if path == "-m":
        sys.argv[:] = ["-m", *program[2:]]
        runpy._run_module_as_main(program[1])  # type: ignore[attr-defined]  # what `python -m` calls
        return
    name = os.path.join(os.getcwd(), path)
    vars(main).update(__file__=name, __cached__=None, __loader__=SourceFileLoader("__main__", name))
    with io.open_code(name) as file:
        code = compile(file.read(), name, "exec", dont_inherit=True)
    exec(code, vars(main))


if __name__ == "__main__":
    main()

"""Ranks by fork, out of a process that has imported torch and Lightning once: the import costs seconds, a fork none.

`ForkServer` starts such a process, ``python -m tests.forking``, and asks it for ranks. A rank is a process of its own
as any other: it leads a session, has its own files, environment and folder, imports the package and the test's module
itself, or runs a script, and ends as an interpreter ends. What a fork cannot give is a variable that is read while a
process starts, or while torch is imported; `can_fork` says when a rank needs an interpreter of its own.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from tests.nursery import Program, fork_from_here, is_isolated, open_nursery, run_as_main

__all__ = ["ForkServer", "ForkedRank", "can_fork"]

PRELOADED = ("torch", "torch.distributed", "lightning.pytorch")
"""What ranks find imported. ``lightning.pytorch`` decides on the namespace, as it does where a rank imports it."""

READ_LATE = (
    "RANK",
    "LOCAL_",
    "GROUP_",
    "WORLD_SIZE",
    "MASTER_",
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # Lightning sets it as it is imported
    "RANK_ANSWER",
    "HOROVOD_",
    "GLOO_",
    "NCCL_",
    "CUDA_VISIBLE_DEVICES",
    "LIGHTNING_ASYNC_",
    "NODE_RANK",
    "ROLE_",
    "SCENARIO_",
    "SLURM_",
    "TMPDIR",
    "TORCHELASTIC_",
    "TORCH_NCCL_",
)
"""How variables begin that are read when a rank asks for them, not when it starts."""


def can_fork(environment: Mapping[str, str], start: Mapping[str, str]) -> bool:
    """Whether a rank with this environment may come out of a process that was started with ``start``.

    Nothing that has a GPU may: CUDA does not survive a fork.
    """
    differing = {name for name in environment.keys() | start.keys() if environment.get(name) != start.get(name)}
    early = [name for name in differing if not name.startswith(READ_LATE)]
    return sys.platform == "linux" and not early and not Path("/dev/nvidiactl").exists()


class _Job(NamedTuple):
    """What a rank does: a script with its command line, or a function's name and its arguments as JSON.

    ``forks`` is whether the programs of Python that it starts are forked, too.
    """

    target: str
    arguments: list[str]
    is_script: bool
    cwd: str
    environment: dict[str, str]
    forks: bool


class ForkedRank:
    """One rank, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int, connection: socket.socket, command: Sequence[str]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._connection = connection
        self._command = command

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self._command, timeout or 0.0)
            answer = self._connection.recv(64)
            self._connection.close()
            self.returncode = int(answer) if answer else -signal.SIGKILL
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """A process that has imported what all ranks need; it ends with the process that has made it.

    Args:
        environment: of the process; what ranks may have beside it, see `can_fork`.
        root: where the tests are.
    """

    def __init__(self, environment: Mapping[str, str], root: Path) -> None:
        self.environment = dict(environment)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forking", str(theirs.fileno())],
                cwd=root,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def start(
        self,
        target: str | Path,
        arguments: Sequence[str],
        *,
        cwd: Path,
        environment: Mapping[str, str],
        out: IO[bytes],
        err: IO[bytes],
        forks: bool = False,
    ) -> ForkedRank:
        """A rank that runs ``target``: a script, or a function's name with arguments as JSON, see `tests.support`."""
        sys.audit("tests.start_rank", str(target))
        job = _Job(str(target), list(arguments), isinstance(target, Path), str(cwd), dict(environment), forks)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._control, [json.dumps(job).encode()], [theirs.fileno(), out.fileno(), err.fileno()])
        pid = ours.recv(64)
        if not pid:
            raise AssertionError(f"the process that forks ranks has ended with status {self._process.poll()}")
        return ForkedRank(int(pid), ours, [job.target, *job.arguments])

    def close(self) -> None:
        self._control.close()
        self._process.wait(10.0)


def _serve(control: socket.socket) -> _Job | None:
    """Fork a rank for each request. Returns in a rank, with what it shall do, or at the end, with None."""
    waiters: set[int] = set()
    while True:
        message, fds, *_ = socket.recv_fds(control, 1 << 20, 3)
        waiters -= {pid for pid in waiters if os.waitpid(pid, 0 if not message else os.WNOHANG)[0]}
        if not message:
            return None
        pid = os.fork()
        if pid == 0:
            control.close()
            return _wait_for_a_rank(_Job(*json.loads(message)), fds)
        waiters.add(pid)
        for fd in fds:
            os.close(fd)


def _wait_for_a_rank(job: _Job, fds: Sequence[int]) -> _Job:
    """Fork the rank, in which this returns; tell its number once it leads its session, and its exit status."""
    connection, out, err = fds
    leads, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        for fd, place in ((out, 1), (err, 2)):
            os.dup2(fd, place)
        for fd in (*fds, leads, tell):
            os.close(fd)
        return job
    for fd in (out, err, tell):
        os.close(fd)
    os.read(leads, 1)
    with socket.socket(fileno=connection) as asker, contextlib.suppress(BrokenPipeError):
        asker.send(str(pid).encode())
        asker.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    os._exit(0)


def _become(job: _Job | Program, by_imports: Mapping[str, str]) -> None:
    """What an interpreter that starts with this environment would have set, and its imports."""
    os.environ.clear()
    os.environ.update(job.environment)
    for name, value in by_imports.items():
        os.environ.setdefault(name, value)
    os.chdir(job.cwd)
    tempfile.tempdir = None  # TMPDIR is asked for again
    random.seed()
    for seeded in ("numpy.random", "torch"):
        by_chance: Any = importlib.import_module(seeded)
        by_chance.seed()
    rank_zero: Any = importlib.import_module("lightning.fabric.utilities.rank_zero")
    rank_zero.rank_zero_only.rank = rank_zero._get_rank() or 0


def _run(job: _Job) -> None:
    if job.is_script:
        run_as_main([job.target, *job.arguments])
        return
    sys.path[0] = job.cwd
    sys.argv[1:] = [job.target, *job.arguments]
    importlib.import_module("tests.support").answer(job.target, *job.arguments)


def _main(control: int) -> None:
    before = dict(os.environ)
    gc.disable()  # as in conftest.py
    for module in PRELOADED:
        importlib.import_module(module)
    gc.enable()
    gc.freeze()  # else the first collection of every rank copies all of it
    by_imports = {name: value for name, value in os.environ.items() if before.get(name) != value}
    with socket.socket(fileno=control) as requests:
        job = _serve(requests)
    if job is None:
        return
    _become(job, {} if job.forks else by_imports)
    program: Program | None = None
    while job.forks and (started := open_nursery(can_fork)) is not None:  # each may start further ones
        program = started
        _become(program, by_imports)
        if is_isolated(program.arguments):
            fork_from_here(can_fork, lambda program: _become(program, by_imports))
            break
    if program is not None:
        run_as_main(program.arguments)
    else:
        _run(job)


if __name__ == "__main__":
    _main(int(sys.argv[1]))

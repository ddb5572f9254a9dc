"""Real Python processes as ranks, for every test that needs more than one.

A test names a function of an importable module and gets what each rank returned::

    def whoami(greeting: str) -> str:                    # in tests/comm/workers.py
        return f"{greeting} from {os.environ['RANK']}"

    first, second = run_ranks("tests.comm.workers:whoami", 2, kwargs={"greeting": "hello"})
    assert first.value == "hello from 0"

`start_ranks` is the same, but gives the test the ranks while they run: to send signals, or to wait for a line.
A script may be a target, too; ``launched=False`` starts it as a user's shell does, without a rank.
Nothing outlives the test: each rank leads a process group of its own, which is killed at the end. Where that makes no
difference, ranks are forked from a process that has torch and Lightning already, see `tests.forking`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.forking import READ_LATE, ForkedRank, ForkServer, can_fork

ROOT = Path(__file__).resolve().parent.parent

Environment = Mapping[str, str] | Callable[[int], Mapping[str, str]]
Process = subprocess.Popen[bytes] | ForkedRank

__all__ = [
    "ROOT",
    "Environment",
    "Process",
    "RankGroup",
    "RankResult",
    "answer",
    "free_port",
    "rank_environment",
    "run_ranks",
    "shell_environment",
    "start_ranks",
    "start_script",
]


_reserved: deque[socket.socket] = deque()
atexit.register(lambda: [each.close() for each in _reserved])


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on now, nor will before whoever asked for it.

    The system gives none of these to a connection, and another test process none that is reserved: by the same port of
    UDP, which nobody needs, for as long as the next fifty are asked for.
    """
    for port in random.SystemRandom().sample(range(10_000, 30_000), 1_000):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            reservation = stack.enter_context(socket.socket(type=socket.SOCK_DGRAM))
            reservation.bind(("127.0.0.1", port))
            with socket.create_server(("127.0.0.1", port)):
                pass
            stack.pop_all()
            _reserved.append(reservation)
            if len(_reserved) > 50:
                _reserved.popleft().close()
            return port
    raise AssertionError("no port is free")


@dataclass(frozen=True)
class RankResult:
    """What became of one rank.

    Args:
        rank: its number.
        returncode: its exit status; negative for a signal.
        stdout, stderr: all it wrote.
        value: what the function returned, through JSON; None for a script, or where the rank ended before.
        timed_out: whether it had to be killed at the deadline. Its stderr then ends with the stacks of its threads.
    """

    rank: int
    returncode: int
    stdout: str
    stderr: str
    value: Any
    timed_out: bool

    def __str__(self) -> str:
        state = "killed at the deadline" if self.timed_out else f"exit status {self.returncode}"
        return f"--- rank {self.rank}: {state}\n{self.stdout[-2000:]}\n{self.stderr[-6000:]}"


class RankGroup:
    """The ranks of one test while they run; made by `start_ranks`."""

    def __init__(self, processes: Sequence[Process], folder: Path, deadline: float) -> None:
        self.processes = processes
        self._folder = folder
        self.deadline = deadline

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to one rank, and to it alone: SIGKILL, SIGSTOP, SIGCONT, SIGTERM."""
        os.kill(self.processes[rank].pid, number)

    def output(self, rank: int) -> str:
        """What a rank has written to stdout so far."""
        return (self._folder / f"{rank}.out").read_text(errors="replace")

    def wait_for(self, rank: int, text: str) -> None:
        """Wait until a rank has printed ``text`` (flushed)."""
        while text not in self.output(rank):
            if self.processes[rank].poll() is not None and text not in self.output(rank):
                raise AssertionError(f"rank {rank} ended without printing {text!r}\n{self._result(rank, False)}")
            if time.monotonic() > self.deadline:
                raise AssertionError(f"rank {rank} did not print {text!r} in time\n{self._result(rank, True)}")
            time.sleep(0.01)

    def join(self) -> list[RankResult]:
        """Wait for all ranks, until the deadline that `start_ranks` was given; stop those that are late."""
        late = set()
        for rank, process in enumerate(self.processes):
            try:
                process.wait(max(0.0, self.deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                late.add(rank)
        for rank in late:  # all get the signal that shows their stacks before the first is killed
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGCONT)
                os.kill(self.processes[rank].pid, signal.SIGABRT)
        for rank in late:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.processes[rank].wait(10.0)
        self.kill()
        return [self._result(rank, rank in late) for rank in range(len(self.processes))]

    def kill(self) -> None:
        """Kill what is left of every rank's process group."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _result(self, rank: int, timed_out: bool) -> RankResult:
        answer = self._folder / f"{rank}.json"
        return RankResult(
            rank=rank,
            returncode=self.processes[rank].poll() or 0,
            stdout=self.output(rank),
            stderr=(self._folder / f"{rank}.err").read_text(errors="replace"),
            value=json.loads(answer.read_text()) if answer.exists() else None,
            timed_out=timed_out,
        )


def rank_environment(rank: int, nprocs: int, port: int, env: Environment | None) -> dict[str, str]:
    """The variables that torchrun would set for this rank on one machine, and one thread of compute."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PL_", "COV_"))}
    path = [str(ROOT), *filter(lambda each: each not in ("", str(ROOT)), own.get("PYTHONPATH", "").split(os.pathsep))]
    own |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(nprocs),
        "LOCAL_WORLD_SIZE": str(nprocs),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return own | dict(env(rank) if callable(env) else env or {})


def shell_environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Of a user's shell: no launcher has set anything."""
    own = rank_environment(0, 1, 0, None)
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del own[name]
    return own | dict(env or {})


@functools.cache
def _fork_server(parity: int) -> ForkServer:
    """For even ranks or odd ones: strings have other hashes in each, as they have in ranks that start anew."""
    environment = {name: value for name, value in shell_environment().items() if not name.startswith(READ_LATE)}
    server = ForkServer(environment, ROOT)
    atexit.register(server.close)
    return server


def _start(
    rank: int,
    target: str | Path,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    cwd: Path,
    out: IO[bytes],
    err: IO[bytes],
    fresh: bool,
    forks: bool,
) -> Process:
    """One rank, from a script and its command line, or from a function's name and its arguments as JSON."""
    if not fresh:
        server = _fork_server(rank % 2)
        if can_fork(environment, server.environment):
            return server.start(target, arguments, cwd=cwd, environment=environment, out=out, err=err, forks=forks)
    module = [] if isinstance(target, Path) else ["-m", "tests.support"]
    return subprocess.Popen(
        [sys.executable, *module, str(target), *arguments],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        start_new_session=True,
    )


def start_script(
    command: Sequence[str], environment: Mapping[str, str], cwd: Path, out: IO[bytes], err: IO[bytes]
) -> Process:
    """``python COMMAND``, forked, as is what it starts, where that makes no difference; for who ends it himself."""
    script, *arguments = command
    return _start(0, Path(script), arguments, environment, cwd, out, err, fresh=False, forks=True)


@contextlib.contextmanager
def start_ranks(
    target: str | Path,
    nprocs: int = 2,
    *,
    kwargs: Mapping[str, Any] | None = None,
    args: Sequence[str] = (),
    timeout: float = 150.0,
    env: Environment | None = None,
    cwd: Path | None = None,
    fresh: bool = False,
    forks: bool = False,
    launched: bool = True,
) -> Iterator[RankGroup]:
    """Start ``nprocs`` Python processes, each knowing its rank, and kill what is left of them at the end.

    Args:
        target: ``"tests.strategies.workers:function"``, or the path of a script.
        nprocs: number of ranks.
        kwargs: the function's keyword arguments, as JSON.
        args: a script's command line.
        timeout: seconds that all ranks have together, from now.
        env: further environment variables, or each rank's; they win over those set here.
        cwd: where the ranks run; by default a folder of their own that vanishes.
        fresh: each rank is an interpreter that has imported nothing.
        forks: what a rank starts is forked, too, where that makes no difference: see `tests.nursery`.
        launched: whether the ranks find what a launcher sets; else a user's shell has started them.
    """
    port = free_port()
    if not fresh:
        for parity in range(min(nprocs, 2)):  # they import beside each other
            _fork_server(parity)
    with (
        tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as name,
        contextlib.ExitStack() as open_,
    ):
        folder = Path(name)
        (folder / "cwd").mkdir()
        group = RankGroup([], folder, time.monotonic() + timeout)
        processes: list[Process] = []
        try:
            for rank in range(nprocs):
                out, err = (open_.enter_context((folder / f"{rank}.{kind}").open("wb")) for kind in ("out", "err"))
                own = env(rank) if callable(env) else env
                environment = rank_environment(rank, nprocs, port, own) if launched else shell_environment(own)
                environment["RANK_ANSWER"] = str(folder / f"{rank}.json")
                arguments = args if isinstance(target, Path) else [json.dumps(dict(kwargs or {}))]
                place = cwd or folder / "cwd"
                processes.append(_start(rank, target, arguments, environment, place, out, err, fresh, forks))
                group.processes = processes
            yield group
        finally:
            group.kill()


def run_ranks(
    target: str | Path,
    nprocs: int = 2,
    *,
    kwargs: Mapping[str, Any] | None = None,
    args: Sequence[str] = (),
    timeout: float = 150.0,
    env: Environment | None = None,
    cwd: Path | None = None,
    fresh: bool = False,
    forks: bool = False,
    launched: bool = True,
    check: bool = True,
) -> list[RankResult]:
    """Run ``target`` on ``nprocs`` ranks and return what became of each; the arguments are those of `start_ranks`.

    Raises:
        AssertionError: with ``check``, a rank was late or its exit status is not zero. It shows what all ranks wrote.
    """
    with start_ranks(
        target, nprocs, kwargs=kwargs, args=args, timeout=timeout, env=env, cwd=cwd, fresh=fresh, forks=forks,
        launched=launched,
    ) as group:  # fmt: skip
        results = group.join()
    if check and any(result.timed_out or result.returncode for result in results):
        raise AssertionError(f"{target} failed on {nprocs} ranks\n" + "\n".join(map(str, results)))
    return results


def answer(target: str, kwargs: str) -> None:
    """In a rank: call the function, and leave what it returns for the test."""
    module, _, function = target.partition(":")
    value = getattr(importlib.import_module(module), function)(**json.loads(kwargs))
    partial = Path(os.environ["RANK_ANSWER"] + ".part")
    partial.write_text(json.dumps(value))
    partial.rename(os.environ["RANK_ANSWER"])


if __name__ == "__main__":
    answer(*sys.argv[1:])

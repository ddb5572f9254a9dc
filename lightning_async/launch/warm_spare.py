"""Warm spares: processes that have done slow imports in advance. When a rank must be restarted, one of them becomes it.

Until then a warm spare is no rank: it uses no port, store or file, no other process waits for it, and the end of the
launcher ends it. `warm_spare_main` is its program.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from lightning_async.launch.environment import LaunchedJob
from lightning_async.launch.process import Process
from lightning_async.membership.launcher_channel import CHANNEL, Program, problem_of

_CAP_SYS_NICE = 23
# Longest wait for a process to end after SIGKILL.
_KILLED_S = 1.0
_NICER = 5
"""Niceness of warm spares, with which a thread that trains gets three times the share of a core."""
_WARM_SPARE_MAIN = str(Path(__file__).with_name("warm_spare_main.py"))


def can_stand_by(job: LaunchedJob) -> bool:
    """Return whether a warm spare can run the program: a module or source file, but no archive or folder."""
    path = job.program[0]
    return path == "-m" or not (path.endswith((".pyc", ".pyz", ".zip")) or Path(path).is_dir())


class WarmSpares:
    """The warm spares of a job: processes that have imported its modules, and wait to replace a rank that dies.

    Args:
        job: The job, with the command line of its program.
        count: Largest number of warm spares.
        say: Function that writes a line to the launcher's output.
    """

    def __init__(self, job: LaunchedJob, count: int, say: Callable[[str], None]) -> None:
        self._job = job
        self._say = say
        self._count = count if can_stand_by(job) else 0
        self._program: Program | None = None
        self._waiting: list[Process] = []

    def learn(self, program: Program) -> None:
        """Record which modules the ranks' program has imported, so that spares import them.

        If the program itself sets environment variables that are read at imports, there are no spares: they would have
        imported without these variables.
        """
        if program.sets:
            self._stop(f"the program sets {', '.join(program.sets)} itself, which is read at imports")
            self.close()
        self._program = program

    def prepare(self, wanted: int) -> None:
        """Start warm spares until there are ``wanted``, or ``count`` if that is less."""
        if self._program is None or not self._program.imports:
            return  # without slow imports, a spare would save no time
        self._waiting = [process for process in self._waiting if self._lives(process)]
        while len(self._waiting) < min(self._count, wanted):
            imports = ",".join(self._program.imports)
            command = [sys.executable, "-u", _WARM_SPARE_MAIN, CHANNEL, imports, *self._job.program]
            nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            try:
                self._waiting.append(Process(command, self._job.base, nowhere, nowhere))
                _be_nice(self._waiting[-1], _NICER)
            except OSError as error:
                self._stop(str(error))
            finally:
                os.close(nowhere)

    def take(self, environment: Mapping[str, str], stdout: int, stderr: int) -> Process | None:
        """Turn a warm spare into a rank and return it, even if it still imports; return None if there is none."""
        added = {name: value for name, value in environment.items() if self._job.base.get(name) != value}
        while self._waiting:
            process = self._waiting.pop(0)
            _be_nice(process, 0)
            if self._lives(process):
                if process.become(added, stdout, stderr):
                    return process
                self._leave(process)
        return None

    def close(self) -> None:
        for process in self._waiting:
            process.signal(signal.SIGKILL)
        while self._waiting:
            self._leave(self._waiting.pop())

    def _leave(self, process: Process) -> None:
        """Kill a spare, and wait for its end; give up if it does not end in time, because a file system blocks it."""
        process.signal(signal.SIGKILL)
        if process.wait(_KILLED_S):
            process.end()

    def _lives(self, process: Process) -> bool:
        for message in process.messages():
            self.hear(message, process.pid)
        if not process.wait(0.0):
            return True
        self._stop(f"one has ended with {process.end()}")
        return False

    def hear(self, message: bytes, process: int) -> None:
        """Handle a message on a process's channel; if it says that a spare's imports failed, start no more spares."""
        if problem := problem_of(message, process):
            self._stop(problem)

    def _stop(self, why: str) -> None:
        if self._count:
            self._say(f"There is no warm spare any more: {why}. Ranks that are started again have to import first.")
        self._count = 0


@functools.cache
def _may_come_back() -> bool:
    """Return whether this process may raise the priority of a process again after it has lowered it."""
    capable = 0
    with contextlib.suppress(OSError, StopIteration), open("/proc/self/status") as status:
        capable = next(int(line.split()[1], 16) >> _CAP_SYS_NICE & 1 for line in status if line.startswith("CapEff:"))
    limit, _ = resource.getrlimit(resource.RLIMIT_NICE)
    return bool(capable) or limit >= 20 - os.getpriority(os.PRIO_PROCESS, 0)


def _be_nice(process: Process, nicer: int) -> None:
    """Set the niceness of each thread of a process, because every thread has a value of its own."""
    if not _may_come_back():
        return
    niceness = os.getpriority(os.PRIO_PROCESS, 0) + nicer
    threads: list[int] = []
    with contextlib.suppress(OSError):
        threads = sorted(map(int, os.listdir(f"/proc/{process.pid}/task")))
    for thread in threads:
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            os.setpriority(os.PRIO_PROCESS, thread, niceness)

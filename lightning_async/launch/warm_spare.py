"""Processes that stand by to be a rank that has died: they have imported what takes seconds, see `warm_spare_main`.

They are no ranks: they hold no port, no store and no file, nobody waits for them, and they end with the launcher.
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
_KILLED_S = 1.0
_NICER = 5
"""A thread that trains has three times the share of a core; where all cores are busy, imports take half a minute."""
_WARM_SPARE_MAIN = str(Path(__file__).with_name("warm_spare_main.py"))


def can_stand_by(job: LaunchedJob) -> bool:
    """Return whether the program is a module or the text of a script: a process cannot become what else there is."""
    path = job.program[0]
    return path == "-m" or not (path.endswith((".pyc", ".pyz", ".zip")) or Path(path).is_dir())


class WarmSpares:
    """Processes that stand by, ``count`` or fewer."""

    def __init__(self, job: LaunchedJob, count: int, say: Callable[[str], None]) -> None:
        self._job = job
        self._say = say
        self._count = count if can_stand_by(job) else 0
        self._program: Program | None = None
        self._waiting: list[Process] = []

    def learn(self, program: Program) -> None:
        if program.sets:
            self._stop(f"the program sets {', '.join(program.sets)} itself, which is read at imports")
            self.close()
        self._program = program

    def prepare(self, wanted: int) -> None:
        if self._program is None or not self._program.imports:
            return  # there is nothing to gain
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
        """Return a process that is a rank from now on, maybe one that still imports; None where there is none."""
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
        """Kill one that is of no use; leave it alone where the system cannot end it, as it waits for a file."""
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
        if problem := problem_of(message, process):
            self._stop(problem)

    def _stop(self, why: str) -> None:
        if self._count:
            self._say(f"No process stands by any more to be a rank that dies: {why}. Ranks are started anew.")
        self._count = 0


@functools.cache
def _may_come_back() -> bool:
    """Return whether a process that was made nicer may be made as any other again."""
    capable = 0
    with contextlib.suppress(OSError, StopIteration), open("/proc/self/status") as status:
        capable = next(int(line.split()[1], 16) >> _CAP_SYS_NICE & 1 for line in status if line.startswith("CapEff:"))
    limit, _ = resource.getrlimit(resource.RLIMIT_NICE)
    return bool(capable) or limit >= 20 - os.getpriority(os.PRIO_PROCESS, 0)


def _be_nice(process: Process, nicer: int) -> None:
    """Renice all of its threads: those that libraries have started are as the one that has imported them."""
    if not _may_come_back():
        return
    niceness = os.getpriority(os.PRIO_PROCESS, 0) + nicer
    threads: list[int] = []
    with contextlib.suppress(OSError):
        threads = sorted(map(int, os.listdir(f"/proc/{process.pid}/task")))
    for thread in threads:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            os.setpriority(os.PRIO_PROCESS, thread, niceness)

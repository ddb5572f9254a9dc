"""The ranks of a job: started, signalled and ended as the supervisor decides.

The end of a rank shows on a descriptor of its process, its messages on a socket, and its output on its pipes. `Ranks`
reports these events to the supervisor.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_async.launch.environment import LaunchedJob
from lightning_async.launch.event_loop import EventLoop
from lightning_async.launch.output import Outputs
from lightning_async.launch.process import Ending, ErrorFiles, Process
from lightning_async.launch.state_machine import Policy
from lightning_async.launch.store import LaunchStore
from lightning_async.membership.launcher_channel import Death, failure_of, heard

if TYPE_CHECKING:
    from lightning_async.launch.supervisor import Supervisor


# Longest wait for a process to end after SIGKILL.
_KILLED_S = 1.0
# A store process that ends within these seconds could not work here.
_SOON_S = 1.0


class Ranks:
    """The ranks of a job, with their pipes and their store.

    Args:
        job: The program.
        policy: Settings of the launcher.
        logs: Directory for one file for each rank, or None.
        loop: Loop of the launcher.
        supervisor: Receiver of events.
    """

    def __init__(
        self, job: LaunchedJob, policy: Policy, logs: Path | None, loop: EventLoop, supervisor: Supervisor
    ) -> None:
        self._job = job
        self._policy = policy
        self._logs = logs
        self._loop = loop
        self._supervisor = supervisor
        self._processes: dict[int, Process] = {}
        self._keeper: LaunchStore | None = None
        self._pipes: list[tuple[int, int]] = []
        self._errors = ErrorFiles(logs)
        try:
            for _ in range(2 * job.ranks):
                self._pipes.append(os.pipe())
            self.outputs = Outputs([reader for reader, _ in self._pipes], logs)
        except OSError:
            self.close()
            raise

    def open_store(self) -> int:
        """Open a new store; return its port."""
        return self._kept().open()

    def start(self, rank: int, port: int, attempt: int, rejoins: int = 0) -> None:
        """Start one rank.

        Args:
            rank: The rank.
            port: Port of the store.
            attempt: Number of restarts of all ranks so far.
            rejoins: Number of times that this rank was started alone. Default: 0.
        """
        keeper = self._kept()
        streams = self.outputs.streams[rank]
        pipes = self._pipes[2 * rank : 2 * rank + 2]
        for stream in streams:
            stream.tail.clear()
        environment = {**self._job.environment(rank, port, attempt, rejoins), **self._errors.begin(rank)}
        process = Process(self._job.command(), environment, pipes[0][1], pipes[1][1])
        self._processes[rank] = process
        keeper.started(process)
        self._loop.watch(process.pidfd, lambda: self._end(rank))
        self._loop.watch(process.channel.fileno(), lambda: self._listen(rank))
        start = f"start {attempt}" + f", alone {rejoins}" * bool(rejoins)
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        streams[0].note(f"[launch] {now} {start}, process {process.pid}")
        self._supervisor.started(rank, process.pid)

    def send(self, number: int, ranks: Collection[int]) -> None:
        """Send a signal to those of ``ranks`` that are alive."""
        for rank in self._processes.keys() & set(ranks):
            self._processes[rank].signal(number)

    def tell(self, death: Death, ranks: Collection[int]) -> None:
        """Report to those of ``ranks`` that are alive that another rank has died."""
        for rank in self._processes.keys() & set(ranks):
            self._processes[rank].tell(death)
            # Messages that were read meanwhile are handled later: a death is being handled now.
            self._loop.after(0.0, (self, "unread", rank), lambda rank=rank: self._listen(rank))

    def leave(self) -> None:
        """Kill all processes that still live, and write the rest of the output."""
        for rank, process in self._processes.items():
            process.signal(signal.SIGKILL)
            if not process.wait(_KILLED_S):
                self.outputs.say(f"rank {rank} (process {process.pid}) cannot be killed, and is left alone")
        self._errors.close()
        self.outputs.flush()
        self.outputs.close()
        if self._keeper is not None:
            self._keeper.close()

    def _kept(self) -> LaunchStore:
        if self._keeper is None:
            readers = [reader for reader, _ in self._pipes]
            policy = self._policy
            self._keeper = keeper = LaunchStore(readers, self._logs, policy.grace_s, policy.hang_limits)
            self._loop.watch(keeper.pidfd, lambda: self._lose(keeper))
            self._loop.watch(keeper.channel, lambda: self._hear(keeper))
            for process in self._processes.values():
                keeper.started(process)
        return self._keeper

    def _lose(self, keeper: LaunchStore) -> None:
        """Report that the store's process has ended, and start another store.

        If the launcher dies, the ranks need the store for their last save.
        """
        self._loop.forget(keeper.pidfd)
        self._loop.forget(keeper.channel)
        self._keeper = None
        how = keeper.died()
        if time.monotonic() - keeper.began > _SOON_S:  # else the next one would end at once, too, and so on
            with contextlib.suppress(OSError):
                self._kept()
        self._supervisor.unkept(how)

    def _hear(self, keeper: LaunchStore) -> None:
        if words := keeper.words():
            self._supervisor.hung(words)
        else:
            self._loop.forget(keeper.channel)  # the process has ended, as its other descriptor will show

    def _end(self, rank: int) -> None:
        # Messages first: the rank may have reported a generation just before it ended.
        self._listen(rank)
        process = self._processes.pop(rank)
        self._loop.forget(process.pidfd)
        self._loop.forget(process.channel.fileno())
        self._loop.cancel((self, "unread", rank))
        status = process.end()
        seconds = time.monotonic() - process.started
        if self._keeper is not None:
            self._keeper.ended(process)
        streams = self.outputs.streams[rank]
        for stream in streams:
            stream.drain()
        tail = tuple(streams[1].tail)
        error = self._errors.read(rank)
        self._supervisor.ended(
            Ending(rank, process.pid, status, seconds, tail=tail, error=error, failure=process.failure)
        )

    def _listen(self, rank: int) -> None:
        if (process := self._processes.get(rank)) is None:
            return
        for message in process.messages():
            if (failure := failure_of(message, process.pid)) is not None:
                process.failure = failure
            if (told := heard(message, process.pid)) is not None:
                self._supervisor.told(rank, *told)

    def close(self) -> None:
        """Close the launcher's ends of the pipes, as its last act.

        Ranks that still run, because `leave` was not called, then behave as if the launcher had been killed: they save
        and end.
        """
        for fd in (fd for pipe in self._pipes for fd in pipe):
            os.close(fd)
        self._pipes.clear()

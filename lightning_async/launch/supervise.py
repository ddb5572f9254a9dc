"""The launcher's loop: one thread waits for all that can happen, `decide` says what follows, and that is done.

A rank's end is heard by a descriptor of its process, what it tells by a socket, a signal by one of the launcher, and
what ranks write by their pipes: nothing is looked at again and again.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from lightning_async.comm.launched import Death, heard, program
from lightning_async.comm.membership.signing import SECRET
from lightning_async.launch.decide import begin, decide
from lightning_async.launch.environment import ADDRESS, Job
from lightning_async.launch.output import Outputs
from lightning_async.launch.process import Process
from lightning_async.launch.registry import Registry
from lightning_async.launch.standby import Standbys
from lightning_async.launch.state import (
    CANNOT_START,
    Action,
    Announce,
    Due,
    Ended,
    Event,
    Finish,
    Generation,
    Phase,
    Policy,
    Rejoin,
    Send,
    Signalled,
    Start,
    State,
    StoreLost,
    Told,
    Wait,
)
from lightning_async.launch.store import Keeper
from lightning_async.launch.summary import Ending, goes_on, how, report, signal_name

__all__ = ["Supervisor"]

_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
_KILLED_S = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Supervisor:
    """Starts the ranks of a job, and sees to their end.

    Args:
        job: what to run.
        policy: what is asked of the launcher.
        logs: a directory for a file for each rank; None for none.
    """

    def __init__(self, job: Job, policy: Policy, logs: Path | None = None) -> None:
        self._job, self._policy, self._logs = job, policy, logs
        self._state, self._first_actions = begin(policy)
        self._selector = selectors.PollSelector()
        self._processes: dict[int, Process] = {}
        self._told: dict[int, int] = {}
        self._endings: list[Ending] = []
        self._dues: dict[int | None, float] = {}
        """When what was waited for is due: by all, and by single ranks."""
        self._port = self._attempt = 0
        self._code: int | None = None
        self._keeper: Keeper | None = None
        self._registry = Registry(ADDRESS, job.base.get(SECRET, ""), tuple(job.program))

    def run(self) -> int:
        """Until all have ended; the exit code."""
        pipes = [os.pipe() for _ in range(2 * self._policy.ranks)]
        self._readers, self._writers = [pipe[0] for pipe in pipes], [pipe[1] for pipe in pipes]
        try:
            self._outputs = Outputs(self._readers, self._logs)
            self._standbys = Standbys(self._job, self._policy.standbys, self._outputs.say)
            with _signals_by_a_descriptor() as signals:
                self._selector.register(signals, selectors.EVENT_READ, lambda: self._hear(signals))
                try:
                    self._perform(self._first_actions)
                    while self._code is None:
                        self._step()
                except OSError as error:
                    self._outputs.say(f"{error}: all ranks end")
                    self._code = CANNOT_START
                self._leave()  # not after other errors: then all is as if the launcher were killed, and ranks save
            return self._code
        finally:
            self._registry.remove()
            self._selector.close()
            for fd in (*self._readers, *self._writers):
                os.close(fd)

    def _step(self) -> None:
        """Wait for the next thing to happen, and do what follows."""
        self._outputs.watch(self._selector)
        left = max(0.0, min(self._dues.values()) - time.monotonic()) if self._dues else None
        for key, _ in self._selector.select(left):
            if self._selector.get_map().get(key.fd) == key:  # what came before may have closed it
                key.data()
        for rank in [rank for rank, due in self._dues.items() if time.monotonic() >= due]:
            if self._dues.pop(rank, None) is not None:  # what came before may have ended the wait
                self._follow(Due(rank))

    def _follow(self, event: Event) -> None:
        before = self._state
        self._state, actions = decide(self._policy, before, event)
        if isinstance(event, Signalled):
            self._outputs.say(f"{signal_name(event.number)} has come.")
        if self._state.phase is Phase.RUNNING and before.trains:
            self._tell_of_the_lost(before, actions)
        if self._state.phase is not before.phase:
            self._tell(actions)
        self._perform(actions)
        if self._state.settled:
            self._standbys.prepare(self._policy.max_restarts - self._state.restarts)

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Start):
                self._start(action.ranks)
            elif isinstance(action, Send):
                for rank in action.ranks & self._processes.keys():
                    if action.number in _ENDS:
                        self._told[rank] = action.number
                    self._processes[rank].signal(action.number)
            elif isinstance(action, Announce):
                self._announce(action.dead, action.ranks)
            elif isinstance(action, Finish):
                self._code = action.code
            elif isinstance(action, Rejoin):
                self._start_again(action)
            else:
                self._dues[action.rank] = time.monotonic() + action.seconds

    def _announce(self, dead: int, ranks: frozenset[int]) -> None:
        ending = next(each for each in reversed(self._endings) if each.rank == dead)
        for rank in ranks & self._processes.keys():
            self._processes[rank].tell(Death(dead, ending.pid, f"died: its process {how(ending)}"))

    def _start(self, ranks: frozenset[int]) -> None:
        if self._keeper is None:
            self._keeper = keeper = Keeper(self._readers, self._logs, self._policy.grace_s)
            self._selector.register(keeper.pidfd, selectors.EVENT_READ, lambda: self._lose(keeper))
        self._port, self._attempt = self._keeper.open(), self._state.restarts
        self._registry.write(self._port)
        self._endings.clear()
        self._dues.clear()
        for rank in sorted(ranks):
            self._start_rank(self._keeper, rank)

    def _start_again(self, action: Rejoin) -> None:
        """One rank, beside those who train; what goes wrong with it ends none of them."""
        rank, keeper = action.rank, self._keeper
        try:
            if keeper is not None:
                self._start_rank(keeper, rank, action.count)
        except OSError as error:
            self._outputs.say(f"rank {rank} cannot be started again: {error}")
            self._follow(Ended(rank, CANNOT_START))

    def _start_rank(self, keeper: Keeper, rank: int, rejoins: int = 0) -> None:
        self._told.pop(rank, None)
        for stream in self._outputs.streams[rank]:
            stream.tail.clear()
        out, err = self._writers[2 * rank : 2 * rank + 2]
        environment = self._job.environment(rank, self._port, self._attempt, rejoins)
        stood_by = self._standbys.take(environment, out, err)
        process = self._processes[rank] = stood_by or Process(self._job.command(), environment, out, err)
        keeper.started(process)
        self._selector.register(process.pidfd, selectors.EVENT_READ, lambda: self._end(rank))
        self._selector.register(process.channel, selectors.EVENT_READ, lambda: self._listen(rank))
        start = (
            f"start {self._attempt}" + (f", alone {rejoins}" if rejoins else "") + (", stood by" if stood_by else "")
        )
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        self._outputs.streams[rank][0].note(f"[launch] {now} {start}, process {process.pid}")

    def _end(self, rank: int) -> None:
        """A rank has ended."""
        self._listen(rank)
        process = self._processes.pop(rank)
        self._selector.unregister(process.pidfd)
        self._selector.unregister(process.channel)
        status, seconds = process.end(), time.monotonic() - process.started
        if self._keeper is not None:
            self._keeper.ended(process)
        for stream in self._outputs.streams[rank]:
            stream.drain()
        tail = tuple(self._outputs.streams[rank][1].tail)
        self._endings.append(Ending(rank, process.pid, status, seconds, self._told.get(rank), tail))
        self._follow(Ended(rank, status))
        for other in tuple(self._processes):  # some may have been read while they were told of it
            self._listen(other)

    def _listen(self, rank: int) -> None:
        """A rank has told something."""
        process, numbers = self._processes[rank], {str(number): number for number in self._policy.all}
        for message in process.messages():
            self._standbys.hear(message, process.pid)
            if (has_imported := program(message, process.pid)) is not None:
                self._standbys.learn(has_imported)
            told = heard(message, process.pid)
            if told is not None and numbers.keys() >= set(told[1]):
                members = frozenset(numbers[name] for name in told[1])
                self._follow(Told(rank, Generation(told[0], members)))

    def _lose(self, keeper: Keeper) -> None:
        """The process that keeps the store has ended."""
        self._selector.unregister(keeper.pidfd)
        self._outputs.say(f"The process that keeps the store has ended ({keeper.died()}).")
        self._keeper = None
        self._follow(StoreLost())

    def _hear(self, signals: socket.socket) -> None:
        for number in signals.recv(1024):
            self._follow(Signalled(number, time.monotonic()))

    def _tell_of_the_lost(self, before: State, actions: list[Action]) -> None:
        state, say, ranks = self._state, self._outputs.say, self._policy.ranks
        left = len(state.agreed.members) if state.agreed is not None else 0
        last = {ending.rank: ending for ending in self._endings}
        if lost := state.lost - before.lost:
            say(goes_on([ending for rank, ending in last.items() if rank in lost], left, ranks))
        for rank in sorted(before.lost - state.lost):
            say(f"rank {rank} has joined the others: training goes on with {left} of {ranks} ranks.")
        for rank in sorted(before.lost & before.living - state.living):
            say(f"{report([last[rank]], None, None)}, before it had joined the others.")
        waits = [action for action in actions if isinstance(action, Wait) and action.rank is not None]
        for restart, action in enumerate(waits, start=before.restarts + len(before.pausing) + 1):
            number = f"restart {restart} of {self._policy.max_restarts}"
            say(f"Rank {action.rank} starts again in {action.seconds:g} s, to join the others ({number}).")

    def _tell(self, actions: list[Action]) -> None:
        """What has changed, in words."""
        state, say = self._state, self._outputs.say
        if state.phase is Phase.STOPPING and state.first is not None:
            first = [ending for ending in self._endings if ending.rank == state.first]
            say(f"{report(first, None, None)}: the others end too.")
        elif state.phase is Phase.STOPPING and state.living <= state.lost and not state.asked and not state.store_lost:
            say("All others are done: those that have not joined them end too.")
        elif state.phase is Phase.BACKING_OFF:
            say(report(self._endings, state.first, None, state.lost))
            pause = self._policy.pause_s(state.restarts)
            number = f"restart {state.restarts + 1} of {self._policy.max_restarts}"
            say(f"All ranks start again in {pause:g} s ({number}).")
        elif state.phase is Phase.FINISHED:
            code = next(action.code for action in actions if isinstance(action, Finish))
            if code or state.lost or state.rejoins:
                say(report(self._endings, state.first, code, state.lost))

    def _leave(self) -> None:
        """No process stays that can be killed."""
        self._standbys.close()
        for rank, process in self._processes.items():
            process.signal(signal.SIGKILL)
            if not process.wait(_KILLED_S):
                self._outputs.say(f"rank {rank} (process {process.pid}) cannot be killed, and is left alone")
        self._outputs.flush()
        self._outputs.close()
        if self._keeper is not None:
            self._keeper.close()


@contextlib.contextmanager
def _signals_by_a_descriptor() -> Iterator[socket.socket]:
    """A socket of which the numbers of signals can be read as they come; ignored ones (nohup) stay ignored."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    before: Mapping[int, Callable[..., object] | int | None] = {
        number: signal.getsignal(number) for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN
    }
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        for number in before:
            signal.signal(number, lambda number, frame: None)
        yield reader
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
        reader.close()
        writer.close()

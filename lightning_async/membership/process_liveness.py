"""The liveness of peers' processes, by which an end is seen and not concluded from silence.

`LocalProcessWatch` opens a pidfd of each peer's process on its own host, and sees by it when the process ends. For
silent peers on other hosts, `LivenessProbes` tries to connect to the peer's `LivenessPort`: the peer's operating system
accepts connections for as long as the process lives. A refusal counts only if an earlier connection was accepted.

    a silent rank                    its host                                    conclusion
    is busy, or stopped              accepts, because somebody listens           it lives
    has ended                        refuses, because nobody listens any more    it has ended
    its host is gone, or cut off     does not answer                             none: its silence decides
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from lightning_async._sockets import unshared
from lightning_async._subprocess import boot_id, status_of
from lightning_async.membership.failure_detector import UP, VISITING, Record
from lightning_async.membership.launcher_channel import CHANNEL

# Readings without a change of the record after which its rank is called.
_QUIET = 2
# Readings after which an unanswered call is repeated, because a packet may be lost.
_PATIENT = 5
# Calls after which a rank that never answered is not called any more.
_TRIES = 10
_ANSWERS_MS = 20
_BACKLOG = 1024


class LivenessPort:
    """A port that accepts TCP connections as long as this process lives; raises `OSError` if ``host`` is not local."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = unshared(socket.create_server((host, 0), family=family, backlog=_BACKLOG))
        self._socket.setblocking(False)
        self.place = f"{host} {self._socket.getsockname()[1]}"

    def hang_up(self) -> None:
        """Accept and close all pending connections.

        A peer that connects has learnt by the accept that this process lives.
        """
        # Accept until there are no more calls, which is reported as an error.
        with contextlib.suppress(OSError):
            while True:
                self._socket.accept()[0].close()

    def close(self) -> None:
        self._socket.close()


class _Callee:
    def __init__(self, record: Record) -> None:
        self.record = record
        self.quiet = 0
        self.reached = False
        self.tries = 0
        self.waited = 0
        self.call: socket.socket | None = None

    def end(self) -> None:
        if self.call is not None:
            self.call.close()
        self.call = None
        self.waited = 0


class LivenessProbes:
    """The attempts to connect to peers on other hosts; the heartbeat thread makes them after reading the records."""

    def __init__(self) -> None:
        self._callees: dict[str, _Callee] = {}

    def refused(self, records: Mapping[str, Record]) -> list[str]:
        """Return the peers whose hosts refuse a connection and have accepted one before.

        Calls peers that are silent or were never reached, and waits for the answers for some milliseconds at most.
        """
        # These ranks have left, or were found on this host.
        for name in self._callees.keys() - records.keys():
            self._callees.pop(name).end()
        gone = [name for name, record in records.items() if self._begin(name, record)]
        under_way = {each.call: name for name, each in self._callees.items() if each.call is not None}
        poll = select.poll()
        for call in under_way:
            poll.register(call, select.POLLOUT)
        ready = {descriptor for descriptor, _ in poll.poll(_ANSWERS_MS)} if under_way else set()
        for call, name in under_way.items():
            if call.fileno() in ready:
                gone += [name] * self._take(self._callees[name], call.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        return gone

    def close(self) -> None:
        while self._callees:
            self._callees.popitem()[1].end()

    def _begin(self, name: str, record: Record) -> bool:
        callee = self._callees.get(name)
        if callee is None or callee.record.life != record.life:
            if callee is not None:
                callee.end()
            callee = self._callees[name] = _Callee(record)
        callee.quiet = 0 if record != callee.record else callee.quiet + 1
        callee.record = record
        if callee.call is not None:
            callee.waited += 1
            if callee.waited >= _PATIENT:
                callee.end()
        due = callee.quiet >= _QUIET if callee.reached else callee.tries < _TRIES
        if callee.call is not None or not due or not record.line:
            return False
        callee.tries += 1
        host, _, port = record.line.rpartition(" ")
        callee.call = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        callee.call.setblocking(False)
        try:
            answer = callee.call.connect_ex((host, int(port)))
        # The record holds no valid address.
        except (OSError, ValueError, OverflowError):
            answer = errno.EINVAL
        return answer not in (0, errno.EINPROGRESS) and self._take(callee, answer)

    def _take(self, callee: _Callee, answer: int) -> bool:
        callee.end()
        refused = answer == errno.ECONNREFUSED and callee.reached and callee.quiet >= _QUIET
        callee.reached = callee.reached or answer == 0
        return refused


STARTER = "LIGHTNING_ASYNC_LAUNCHER"
"""The environment variable of ranks that another rank has started: its process id. It reports their ends."""
# Seconds to wait for the launcher's report of a death, which has the exit status.
_WORD_S = 2.0
# Index of the start time among the fields behind the name in /proc/PID/stat.
_BEGAN = 19


def place_of(process: int) -> str:
    """Return a text that identifies a process on all hosts; "" if the process is unknown.

    The text contains the host's boot id, the PID namespace, the process id, and the start time.
    """
    try:
        # In another namespace, /proc shows other process ids than ours.
        if os.readlink("/proc/self") != str(os.getpid()):
            return ""
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')} {process} {status_of(process)[_BEGAN]}"
    except (OSError, IndexError):
        return ""


class LocalProcessWatch:
    """A watch over the processes of peers on this host, used by the heartbeat thread.

    The end of a process is reported only after ``patience_s`` seconds, so that the launcher, which knows the exit
    status, can report it first. Default: two seconds if there is a launcher, else none.
    """

    def __init__(self, patience_s: float | None = None, now: Callable[[], float] = time.monotonic) -> None:
        told = any(name in os.environ for name in (CHANNEL, STARTER))
        self._patience_s = (_WORD_S if told else 0.0) if patience_s is None else patience_s
        self._now = now
        self._place = place_of(os.getpid())
        self._lives: dict[str, str] = {}
        self._calls = LivenessProbes()
        self._apart = False
        self._lifeline: LivenessPort | None = None
        # Pidfds: each refers to its process for good, even if the process id is reused.
        self._held: dict[str, int] = {}
        self._ended: dict[str, float] = {}

    def gone(self, records: Mapping[str, Record | None]) -> list[str]:
        """Return the names of peers whose processes have ended, while their records say that they run."""
        here = {name: each for name, each in records.items() if each is not None and each.state in (UP, VISITING)}
        for name, record in here.items():
            if self._lives.get(name) != record.life:
                self._look_for(name, record)
        if self._lifeline is not None:
            self._lifeline.hang_up()
        apart = {name: each for name, each in here.items() if name not in self._held and each.place != self._place}
        self._apart = self._apart or bool(apart)
        now = self._now()
        ended = [name for name, descriptor in self._held.items() if _has_ended(descriptor)]
        for name in (*ended, *self._calls.refused(apart)):
            self._ended.setdefault(name, now)
        return [name for name, at in self._ended.items() if name in here and now - at >= self._patience_s]

    def introduce(self, mine: Record, host: str | None) -> Record:
        """Return this rank's record with the place of its process and the address of its `LivenessPort`.

        The port is opened once a peer on another host is known.
        """
        if self._lifeline is None and self._apart and host is not None:
            with contextlib.suppress(OSError):
                self._lifeline = LivenessPort(host)
        return replace(mine, place=self._place, line="" if self._lifeline is None else self._lifeline.place)

    def close(self) -> None:
        while self._held:
            os.close(self._held.popitem()[1])
        self._calls.close()
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None
        self._lives.clear()
        self._ended.clear()

    def _look_for(self, name: str, record: Record) -> None:
        self._lives[name] = record.life
        self._ended.pop(name, None)
        if (before := self._held.pop(name, None)) is not None:
            os.close(before)
        if (found := _find(record.place)) is not None:
            self._held[name] = found


def _find(place: str) -> int | None:
    """Return a pidfd of the process that ``place`` identifies; None if it has ended, or is on another host.

    See `place_of`.
    """
    try:
        process = int(place.split()[-2])
        descriptor = os.pidfd_open(process)
    # The system has no pidfds, the process does not exist, or the place is empty.
    except (AttributeError, OSError, ValueError, IndexError):
        return None
    # Compare after opening: the id may belong to a later process by now, but not while the descriptor's process lives.
    if process != os.getpid() and place_of(process) == place and not _has_ended(descriptor):
        return descriptor
    os.close(descriptor)
    return None


def _has_ended(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))

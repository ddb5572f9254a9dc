"""The liveness of peers' processes: an end is seen, and not concluded from silence.

Who finds a rank's process on its own host holds on to it, and knows from then on whether it lives: `LocalProcessWatch`.
Peers on other hosts are called when they are silent, at their `LivenessPort`, where the system accepts for as long as
the process lives: `LivenessProbes`. A refusal is believed only where a call was accepted before.

    a rank that is quiet             its host                                    what is known
    is busy, or stopped              accepts, as somebody listens                it lives
    has ended                        refuses: nobody listens there any more      it has ended
    its host is gone, or cut off     does not answer                             nothing: its silence has to tell
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
from pathlib import Path

from lightning_async._sockets import unshared
from lightning_async.membership.failure_detector import UP, VISITING, Record
from lightning_async.membership.launcher_channel import CHANNEL

_QUIET = 2  # readings in which a record has not changed, after which its rank is called
_PATIENT = 5  # readings after which a call that is not answered is made anew: a packet may be lost
_TRIES = 10  # calls after which one that was never reached is called no more
_ANSWERS_MS = 20
_BACKLOG = 1024


class LivenessPort:
    """A port where this process is reached as long as it lives; `OSError` where ``host`` is none of this host's."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = unshared(socket.create_server((host, 0), family=family, backlog=_BACKLOG))
        self._socket.setblocking(False)
        self.place = f"{host} {self._socket.getsockname()[1]}"

    def hang_up(self) -> None:
        """Take all calls that have come, and end them: they have told what there is to tell."""
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
    """Calls to peers; used by one thread, that of the heartbeat, once for each reading of their records."""

    def __init__(self) -> None:
        self._callees: dict[str, _Callee] = {}

    def refused(self, records: Mapping[str, Record]) -> list[str]:
        """Return those whose hosts refuse for them, and have not before; wait for some milliseconds at most."""
        for name in self._callees.keys() - records.keys():  # they have left, or are found on this host
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
        except (OSError, ValueError, OverflowError):  # no address
            answer = errno.EINVAL
        return answer not in (0, errno.EINPROGRESS) and self._take(callee, answer)

    def _take(self, callee: _Callee, answer: int) -> bool:
        callee.end()
        refused = answer == errno.ECONNREFUSED and callee.reached and callee.quiet >= _QUIET
        callee.reached = callee.reached or answer == 0
        return refused


STARTER = "LIGHTNING_ASYNC_LAUNCHER"
"""The environment variable of ranks that another one has started: its process, which tells of their ends."""
_WORD_S = 2.0
_BEGAN = 19  # of the fields behind the name in /proc/PID/stat


def place_of(process: int) -> str:
    """Return a name of the process: boot and namespace of its host, its number, when it began. "" where that is
    unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        number, _, rest = Path(f"/proc/{process}/stat").read_text().partition(" (")
        if int(number) != process or os.readlink("/proc/self") != str(os.getpid()):  # of another namespace
            return ""
        namespace = os.readlink("/proc/self/ns/pid")
        began = rest.rpartition(")")[2].split()[_BEGAN]
    except (OSError, ValueError, IndexError):
        return ""
    return f"{boot} {namespace} {process} {began}"


class LocalProcessWatch:
    """A watch over the processes of peers; used by one thread, that of the heartbeat.

    ``patience_s`` is how long whoever has started a process may take to tell of its end, in better words. Default: a
    while where somebody does, no time elsewhere.
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
        self._held: dict[str, int] = {}  # a descriptor, which stands for this process for good
        self._ended: dict[str, float] = {}

    def gone(self, records: Mapping[str, Record | None]) -> list[str]:
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
        """Add to the own record where this process is found, and reached from other hosts, if there are some."""
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
    """Return a descriptor of the process, where it is one of this host and lives; else None: nothing is known then."""
    try:
        process = int(place.split()[-2])
        descriptor = os.pidfd_open(process)
    except (AttributeError, OSError, ValueError, IndexError):  # no such system, no such process, no place
        return None
    # In this order: the number may have gone to another process, which began later, but not while this one lives.
    if process != os.getpid() and place_of(process) == place and not _has_ended(descriptor):
        return descriptor
    os.close(descriptor)
    return None


def _has_ended(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))

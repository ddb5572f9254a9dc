"""The peers on other hosts: one that is silent is called, and whom its host refuses for it has ended.

    a rank that is quiet        its host                                     what is known
    is busy, or stopped         accepts, as somebody listens                 it lives
    has ended                   refuses: nobody listens there any more       it has ended
    its host is gone, or cut off       does not answer                       nothing: its silence has to tell

A rank listens, and says where, for as long as its process lives; the system accepts for it, whatever its threads do.
Nothing is said on these connections. Only who was reached there before is believed to be gone: else something between
the two may refuse for it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
from collections.abc import Mapping

from lightning_async.comm.membership.roster import Record
from lightning_async.comm.torch.forks import keep_from_forks

__all__ = ["Calls", "Lifeline"]

_QUIET = 2
"""Readings in which a record has not changed, after which its rank is called."""
_PATIENT = 5
"""Readings after which a call that is not answered is made anew: a packet may be lost."""
_TRIES = 10
"""Calls after which one that was never reached is called no more."""
_ANSWERS_MS = 20
_BACKLOG = 1024


class Lifeline:
    """Where this process is reached as long as it lives.

    Args:
        host: the address that others find it at.

    Raises:
        OSError: it is none of this host's.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self._socket.setblocking(False)
        keep_from_forks({self._socket.fileno(): os.fstat(self._socket.fileno()).st_ino})
        self.place = f"{host} {self._socket.getsockname()[1]}"

    def hang_up(self) -> None:
        """Take all calls that have come, and end them: they have told what there is to tell."""
        with contextlib.suppress(OSError):
            while True:
                self._socket.accept()[0].close()

    def close(self) -> None:
        self._socket.close()


class _Callee:
    """One peer, by what is known of it."""

    def __init__(self, record: Record) -> None:
        self.record, self.quiet, self.reached, self.tries, self.waited = record, 0, False, 0, 0
        self.call: socket.socket | None = None

    def end(self) -> None:
        if self.call is not None:
            self.call.close()
        self.call, self.waited = None, 0


class Calls:
    """Calls to peers; used by one thread, that of the heartbeat, once for each reading of their records."""

    def __init__(self) -> None:
        self._callees: dict[str, _Callee] = {}

    def refused(self, records: Mapping[str, Record]) -> list[str]:
        """Of these, those whose hosts refuse for them, and have not before; waits for some milliseconds at most."""
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
        """Call it, if that is due; whether it is refused at once."""
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
        """Whether the answer to a call is that nobody is there any more."""
        callee.end()
        refused = answer == errno.ECONNREFUSED and callee.reached and callee.quiet >= _QUIET
        callee.reached = callee.reached or answer == 0
        return refused

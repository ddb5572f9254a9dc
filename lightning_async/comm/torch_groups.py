"""Torch's process group objects: watching their work, breaking them off, and disposing of them.

What torch 2.13 cannot do for Gloo is to cancel: ``abort()`` leaves a pending
operation waiting, and destroying the group then blocks until its timeout. Shutting down the group's own
sockets does cancel, here and at the peers, within milliseconds; hence the bookkeeping of sockets. Only a message
that is half sent or half received is not told of its connection's end (Pair::signalException passes over it), and
waits for its timeout: the operation is failed by looking at the sockets, and its group kept until torch lets go.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import Tensor

from lightning_async._sockets import is_open, shut_down
from lightning_async.comm.collectives import Operation

_DISPOSE_S = 0.25
_EXIT_S = 10.0
_LOOK_S = 0.05
# Strong references: the destructor of a group joins the group's threads, so it must never run on one of them
# (a callback holding the last reference), nor during the interpreter's shutdown.
_open: set[TorchGroup] = set()
_undead: list[TorchGroup] = []


class TorchGroup:
    """A process group with the sockets it owns.

    Args:
        pg: torch's object.
        sockets: file descriptors with their inode; shut down to break the group off.
        waits: whether a thread may wait in torch for a work, with a deadline that ends nothing else (Gloo); else works
            are only looked at (NCCL, MPI).
        aborts: whether torch's object can cancel what is under way (NCCL).
    """

    def __init__(self, pg: Any, sockets: dict[int, int], waits: bool, aborts: bool = False) -> None:
        self.pg: Any = pg
        self.waits = waits
        self.aborts = aborts
        # By sequence number: what the transport may still read or write, and its works, once it has begun.
        self.in_flight: dict[int, tuple[object, tuple[Any, ...] | None]] = {}
        self.helpers: set[threading.Thread] = set()
        self._sockets = sockets
        self._broken = False
        self._lost_at: float | None = None
        self.lets_go_at = 0.0
        self._pid = os.getpid()
        _open.add(self)

    @property
    def inherited(self) -> bool:
        """Whether this is a fork of the process that made the group: its connections are the parent's."""
        return os.getpid() != self._pid

    @property
    def connected(self) -> bool:
        return all(is_open(fd, inode) for fd, inode in self._sockets.items())

    def watch(
        self, operation: Operation[Any], works: Any, ended: Callable[[Exception | None], None], backstop: timedelta
    ) -> None:
        """Have ``ended`` called, with the error or None, when torch has ended the work, or all of a tuple of works."""
        all_: tuple[Any, ...] = works if isinstance(works, tuple) else (works,)

        def let_go(error: Exception | None) -> None:
            ended(error)
            self.in_flight.pop(operation.seq, None)

        tensors, _ = self.in_flight[operation.seq]
        if not self.waits:
            self.in_flight[operation.seq] = tensors, all_
            operation.poll = lambda: _poll(all_, let_go)
            return
        self.lets_go_at = max(self.lets_go_at, time.monotonic() + backstop.total_seconds())
        operation.poll_s = _LOOK_S
        operation.told = True
        if isinstance(works, tuple):
            operation.poll = lambda: self._look(operation, ended)
            # Gloo's send and recv have no future, and are not complete before somebody waits.
            helper = threading.Thread(target=self._wait, args=(works, let_go, backstop), daemon=True)
            helper.name = f"lightning_async {operation.kind} #{operation.seq}"
            self.helpers.add(helper)
            helper.start()
        else:
            # Whoever waits does so in torch: a callback, on a thread of the group's, would wait for Python first.
            self.in_flight[operation.seq] = tensors, all_
            operation.poll = lambda: _poll(self._works(operation), let_go) or self._look(operation, ended)
            operation.sleep = lambda seconds: self._sleep(operation, seconds)

    def _wait(self, works: tuple[Any, ...], ended: Callable[[Exception | None], None], backstop: timedelta) -> None:
        first: Exception | None = None
        until = time.monotonic() + backstop.total_seconds()
        for work in works:
            left = timedelta(seconds=max(until - time.monotonic(), 0.001))  # zero would mean torch's own timeout
            if (error := _error(lambda work=work, left=left: work.wait(left))) is not None:
                first = first or error
                self.break_off()  # the other half would wait for its timeout otherwise
        ended(first)
        self.helpers.discard(threading.current_thread())

    def _works(self, operation: Operation[Any]) -> tuple[Any, ...] | None:
        """Return torch's works of it, kept here alone: who keeps an operation shall keep no group."""
        return self.in_flight.get(operation.seq, (None, None))[1]

    def _sleep(self, operation: Operation[Any], seconds: float) -> None:
        if (works := self._works(operation)) is None:
            operation.ended_in(seconds)
            return
        seconds = max(seconds, 0.001)  # zero would mean torch's own timeout
        _error(lambda: works[0].wait(timedelta(seconds=seconds)))

    def _look(self, operation: Operation[Any], ended: Callable[[Exception | None], None]) -> None:
        """Fail an operation that goes on waiting although a connection is gone."""
        if self.connected:
            return
        # It may just be completing: the last bytes and the end of the connection come together.
        now = time.monotonic()
        if self._lost_at is None:
            self._lost_at = now
        elif now - max(self._lost_at, operation.started) > 2 * _LOOK_S:
            ended(RuntimeError("the connection to a peer was lost"))

    def helped_by(self, helper: threading.Thread, backstop_s: float) -> None:
        """Count a thread that waits in torch, for so long at most, and discards itself from `helpers` then."""
        self.helpers.add(helper)
        self.lets_go_at = max(self.lets_go_at, time.monotonic() + backstop_s)

    def break_off(self) -> None:
        """Make everything pending fail soon, here and at the peers; any thread may call it.

        Never blocks, but for as long as NCCL takes to abort a communicator.
        """
        if self._broken or self.inherited:
            return
        self._broken = True
        shut_down(self._sockets)
        if self.aborts:
            self.pg.abort()

    def dispose(self) -> None:
        """Destroy the group, soon: what torch still waits in is kept until it lets go. Idempotent."""
        if self not in _open or self.inherited:
            return
        _open.discard(self)
        sweep()
        if self.busy() or self._broken or self.aborts:  # NCCL's orderly end would wait for its peers
            self.break_off()
            deadline = time.monotonic() + _DISPOSE_S
            while self.busy() and time.monotonic() < deadline:
                time.sleep(0.001)
        if self.busy():
            _undead.append(self)
        else:
            self.free()

    def busy(self) -> bool:
        works = [works for _, works in list(self.in_flight.values())]
        return self.waits and (bool(self.helpers) or any(each is None or not _completed(each) for each in works))

    def free(self) -> None:
        self.pg = None
        self.in_flight.clear()


def sweep() -> None:
    for group in [group for group in _undead if not group.busy() and not group.inherited]:
        _undead.remove(group)
        group.free()


def _error(do: Callable[[], object]) -> Exception | None:
    try:
        do()
    except RuntimeError as error:
        return error
    return None


def _completed(works: tuple[Any, ...]) -> bool:
    return all(work.is_completed() for work in works)


def _poll(works: tuple[Any, ...] | None, ended: Callable[[Exception | None], None]) -> bool:
    if works is None or not _completed(works):
        return False
    # Complete already, so this does not block: it orders the current CUDA stream behind the work, and raises what went
    # wrong.
    errors = [_error(work.wait) for work in works]
    ended(next((error for error in errors if error is not None), None))
    return True


def swap(pg: Any, rank: int, mine: dict[int, Tensor], theirs: dict[int, Tensor], tag: int) -> tuple[Any, ...]:
    """Send to peers and receive from them, all at once; copy what goes to ``rank`` itself."""
    theirs[rank].copy_(mine[rank])
    peers = [peer for peer in mine if peer != rank]
    # Receives first: Gloo then tells the peer that it may send, and behind our own data it would hear of that too late.
    receives = [pg.recv([theirs[peer]], peer, tag) for peer in peers]
    return (*receives, *[pg.send([mine[peer]], peer, tag) for peer in peers])


def keep_for_good(thing: object) -> None:
    """Let it never be destroyed, as that would wait: for hours, or for a thread that a fork does not have."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


@atexit.register
def _dispose_all() -> None:
    for group in list(_open):
        group.dispose()
    for group in [group for group in (*_open, *_undead) if group.inherited]:
        keep_for_good(group)
        _open.discard(group)
        _undead[:] = [each for each in _undead if each is not group]
    # A thread of torch's that comes back while the interpreter shuts down aborts the process.
    while any(group.busy() and group.lets_go_at - time.monotonic() < _EXIT_S for group in _undead):
        time.sleep(0.01)
    sweep()
    for group in _undead:
        keep_for_good(group)

"""torch's process group objects: watching their works, breaking them off, and disposing of them.

torch 2.13 cannot cancel operations of Gloo: ``abort()`` leaves a pending operation waiting, and destroying the group
then blocks until its timeout. Shutting down the group's own sockets does cancel, here and at the peers, within
milliseconds; this is why each group knows its sockets. The exception is a message that is half sent or half received:
torch does not report the connection's end to it (Pair::signalException skips it), so that it waits for its timeout.
Such an operation is failed once the group's sockets are found closed, and its group is kept until torch has ended it.
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

# Longest wait until torch has ended the operations of a group that was broken off.
_DISPOSE_S = 0.25
# Longest wait at the end of the process for threads that are still in torch.
_EXIT_S = 10.0
# Seconds between two looks at the sockets.
_LOOK_S = 0.05
# Strong references: the destructor of a group joins the group's threads. It must therefore not run on one of them
# (in a callback that holds the last reference), nor during the interpreter's shutdown.
_open: set[TorchGroup] = set()
_undead: list[TorchGroup] = []


class TorchGroup:
    """A process group with the sockets that it owns.

    Args:
        pg: torch's process group.
        sockets: File descriptors with their inodes. Shutting these sockets down aborts the group.
        waits: Whether a thread may wait for one of torch's `Work` objects with a timeout that ends only the wait, and
            not the group (Gloo). Otherwise `Work` objects are polled (NCCL, MPI).
        aborts: Whether torch's process group can cancel operations (NCCL). Default: False.
    """

    def __init__(self, pg: Any, sockets: dict[int, int], waits: bool, aborts: bool = False) -> None:
        self.pg: Any = pg
        self.waits = waits
        self.aborts = aborts
        # By sequence number: tensors that torch may still read or write, and its works, once it has begun.
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
        """Whether this process is a fork of the one that made the group, whose connections are the parent's."""
        return os.getpid() != self._pid

    @property
    def connected(self) -> bool:
        return all(is_open(fd, inode) for fd, inode in self._sockets.items())

    def watch(
        self, operation: Operation[Any], works: Any, ended: Callable[[Exception | None], None], backstop: timedelta
    ) -> None:
        """Call ``ended`` with an error or None when torch has ended a work, or all works of a tuple.

        Args:
            operation: The operation, which is polled from now on.
            works: Work of torch's, or a tuple of works.
            ended: Called once with an error, or with None.
            backstop: Longest wait in torch.
        """
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
            # Gloo's send and recv have no future, and only complete while a thread waits for them.
            helper = threading.Thread(target=self._wait, args=(works, let_go, backstop), daemon=True)
            helper.name = f"lightning_async {operation.kind} #{operation.seq}"
            self.helpers.add(helper)
            helper.start()
        else:
            # A thread that waits does so in torch: a callback on a thread of the group would wait for Python first.
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
                self.break_off()  # the other works would wait for their timeout otherwise
        ended(first)
        self.helpers.discard(threading.current_thread())

    def _works(self, operation: Operation[Any]) -> tuple[Any, ...] | None:
        """Return torch's `Work` objects of an operation, or None if it has ended.

        Only the group keeps them, so that operations keep no group alive.
        """
        return self.in_flight.get(operation.seq, (None, None))[1]

    def _sleep(self, operation: Operation[Any], seconds: float) -> None:
        if (works := self._works(operation)) is None:
            operation.ended_in(seconds)
            return
        seconds = max(seconds, 0.001)  # zero would mean torch's own timeout
        _error(lambda: works[0].wait(timedelta(seconds=seconds)))

    def _look(self, operation: Operation[Any], ended: Callable[[Exception | None], None]) -> None:
        """Fail an operation that is still pending a moment after a connection of the group was closed."""
        if self.connected:
            return
        # Not at once: the operation may be about to end, as last bytes and the connection's end come together.
        now = time.monotonic()
        if self._lost_at is None:
            self._lost_at = now
        elif now - max(self._lost_at, operation.started) > 2 * _LOOK_S:
            ended(RuntimeError("the connection to a peer was lost"))

    def helped_by(self, helper: threading.Thread, backstop_s: float) -> None:
        """Record in `helpers` that a thread may wait in torch, so that the group is not destroyed meanwhile.

        The thread waits for ``backstop_s`` seconds at most. It removes itself from `helpers` when its wait has ended.
        """
        self.helpers.add(helper)
        self.lets_go_at = max(self.lets_go_at, time.monotonic() + backstop_s)

    def break_off(self) -> None:
        """Let all pending operations fail soon, here and at the peers. Any thread may call this.

        Never blocks, except for the time that NCCL takes to abort a communicator.
        """
        if self._broken or self.inherited:
            return
        self._broken = True
        shut_down(self._sockets)
        if self.aborts:
            self.pg.abort()

    def dispose(self) -> None:
        """Destroy the group now, or, if torch still waits in it, in a later `sweep`. Idempotent."""
        # In a fork, destroying the group would close connections of the parent.
        if self not in _open or self.inherited:
            return
        _open.discard(self)
        sweep()
        if self.busy() or self._broken or self.aborts:  # NCCL's own way to end would wait for its peers
            self.break_off()
            deadline = time.monotonic() + _DISPOSE_S
            # A short wait usually suffices, because the sockets are shut down; else the group is kept.
            while self.busy() and time.monotonic() < deadline:
                time.sleep(0.001)
        if self.busy():
            _undead.append(self)
        else:
            self.free()

    def busy(self) -> bool:
        """Return whether torch still has operations of this group under way."""
        works = [works for _, works in list(self.in_flight.values())]
        return self.waits and (bool(self.helpers) or any(each is None or not _completed(each) for each in works))

    def free(self) -> None:
        """Drop torch's object, which destroys it."""
        self.pg = None
        self.in_flight.clear()


def sweep() -> None:
    """Destroy the disposed groups in which torch no longer waits.

    They were kept because an operation still waited in them.
    """
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
    # The works are complete, so this does not block: it orders the current CUDA stream after the work, and raises the
    # work's error.
    errors = [_error(work.wait) for work in works]
    ended(next((error for error in errors if error is not None), None))
    return True


def swap(pg: Any, rank: int, mine: dict[int, Tensor], theirs: dict[int, Tensor], tag: int) -> tuple[Any, ...]:
    """Send to all peers and receive from them at the same time; copy this rank's own part.

    Args:
        pg: torch's process group.
        rank: This rank.
        mine: Tensor to send to each rank.
        theirs: Tensor to receive from each rank.
        tag: Tag of the messages.

    Returns:
        torch's `Work` objects, to wait for.
    """
    theirs[rank].copy_(mine[rank])
    peers = [peer for peer in mine if peer != rank]
    # Receives first: Gloo then tells the peer that it may send, and after our own data this would come too late.
    receives = [pg.recv([theirs[peer]], peer, tag) for peer in peers]
    return (*receives, *[pg.send([mine[peer]], peer, tag) for peer in peers])


def keep_for_good(thing: object) -> None:
    """Keep an object alive for ever, because its destructor would block.

    It would block for hours, or, in a forked process, for ever, because it waits for a thread that the fork does not
    have.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


@atexit.register
def _dispose_all() -> None:
    for group in list(_open):
        group.dispose()
    for group in [group for group in (*_open, *_undead) if group.inherited]:
        keep_for_good(group)
        _open.discard(group)
        _undead[:] = [each for each in _undead if each is not group]
    # A thread of torch that returns to Python while the interpreter shuts down would abort the process.
    while any(group.busy() and group.lets_go_at - time.monotonic() < _EXIT_S for group in _undead):
        time.sleep(0.01)
    sweep()
    for group in _undead:
        keep_for_good(group)

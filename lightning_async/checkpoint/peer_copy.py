"""Copies of a rank's own state in another rank's memory: the training thread copies, and another thread sends.

    FREE --- a copy is due: the training thread fills the buffer ---> WRITER --- sent or given up ---> FREE

A rank has one buffer for these copies. While a copy is being sent, no other copy begins. The receiving rank keeps the
previous copy until the new one is complete. Therefore, once the first copy has arrived, another rank has a complete
copy at any moment.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from lightning_async.checkpoint.buffers import Buffer, BufferOwner, Growth, uncollected
from lightning_async.checkpoint.saver import Costs, Usual
from lightning_async.checkpoint.shards import CheckpointShard, own_of, shard
from lightning_async.comm.peer_storage import Address, PeerStoreConnection, deposit, fetch, forget
from lightning_async.errors import DamagedCheckpoint
from lightning_async.membership.signing import Seal

# Longest wait for the thread at the end.
_ENDS_S = 5.0


@dataclass(frozen=True)
class Sent:
    """The result of sending one copy of this rank's state.

    Args:
        to: Address of the rank to which the copy was sent.
        size: Number of bytes of the copy.
        seconds: Seconds that sending has taken.
        error: Reason why the copy did not arrive. Default: None, it arrived.
    """

    to: Address
    size: int
    seconds: float
    error: str | None = None


@dataclass(frozen=True)
class PeerCopy:
    """A copy of one rank's state, read back from the memory of another rank.

    Args:
        at: Address of the rank that stores the copy.
        label: Label of the copy, as it was passed to `PeerCopySender.send`.
        own: The copied state of the rank to which the copy belongs.
    """

    at: Address
    label: Mapping[str, Any]
    own: Any


class PeerCopySender:
    """A sender of copies of one rank's state to other ranks' memory.

    Args:
        owner: Name of the rank whose state is copied.
        seal: Signer of the job's messages.
        at: Address of the rank that stores an older copy of this state. The older copy is deleted once a newer one has
            arrived at another rank. Default: None, there is no older copy.
    """

    def __init__(self, owner: str, seal: Seal, at: Address | None = None) -> None:
        self.costs = Costs()
        self.size = 0
        self._owner = owner
        self._seal = seal
        self._at = at
        self._buffer = Buffer(f"own-{owner}")
        self._growth = Growth()
        self._usual = Usual(time.monotonic())
        self._jobs: queue.SimpleQueue[tuple[Address, Mapping[str, Any], int] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Sent] = queue.SimpleQueue()
        self._line: PeerStoreConnection | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def busy(self) -> bool:
        """Whether a copy is being sent, or memory for a copy is being allocated."""
        return self._buffer.owner is not BufferOwner.FREE or self._growth.active

    def step(self) -> None:
        """Count a training step.

        If a copy is being sent, add to `costs` by how much longer than usual the step took.
        """
        self.costs.slowed_s += self._usual.step(time.monotonic(), self.busy)

    def send(self, to: Address, label: Mapping[str, Any], own: Any) -> bool:
        """Copy a state, and start to send the copy in another thread; the state may change once this returns.

        Must not be called while `busy` is True. If another rank later finds several copies of one owner, the newest is
        the one with the greatest number ``"life"`` in its label. Among copies with an equal ``"life"``, it is the one
        with the greatest ``"at"``.

        Args:
            to: Address of the rank that is to store the copy.
            label: Label of the copy: plain values. ``"life"`` is the number of restarts of the owner, and ``"at"`` the
                time of the copy, in seconds.
            own: The state.

        Returns:
            Whether sending has started. False: memory for the copy is still being allocated in the background.

        Raises:
            TypeError: The state holds an object that cannot be copied; the message names the object.
            CheckpointError: There is not enough memory.
        """
        began = time.monotonic()
        with uncollected():
            part = shard({}, own, 0, [0])
            if part.size > self._buffer.size:
                # The memory comes in the background: training would wait longer for it than for the copy.
                self._growth.begin([self._buffer], part.size)
                if self._growth.active:
                    return False
            self._fill(part)
        self.size = part.size
        self.costs.saves += 1
        self._jobs.put((to, {**label, "text": part.size - len(part.text)}, part.size))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lightning_async courier", daemon=True)
            self._thread.start()
        self._usual.last = time.monotonic()
        self.costs.stalled_s += self._usual.last - began
        return True

    def _fill(self, part: CheckpointShard) -> None:
        self._buffer.owner = BufferOwner.FILLING
        try:
            self._buffer.fill(part.tensors, part.text)
        except BaseException:
            self._buffer.owner = BufferOwner.FREE
            raise
        self._buffer.owner = BufferOwner.WRITER

    def poll(self) -> list[Sent]:
        """Return the results of all copies that were completed or given up since the last call, without waiting."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._results.get_nowait())
                self.costs.committed += found[-1].error is None
                self.costs.failed += found[-1].error is not None
        return found

    def close(self) -> None:
        """Abort the copy that is being sent, and end the thread; wait a few seconds at most."""
        self._closed = True
        if self._thread is not None:
            self._jobs.put(None)
            if (line := self._line) is not None:
                line.break_off()
            self._thread.join(_ENDS_S)
        self._growth.wait(_ENDS_S)
        # A thread that has not ended may still read the memory.
        if self._thread is None or not self._thread.is_alive():
            self._buffer.release()
        self._thread = None

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            (to, label, size) = job
            began = time.monotonic()
            error = None
            try:
                self._bring(to, label, size)
            except OSError as failure:
                error = f"{type(failure).__name__}: {failure}"
            self._line = None
            self._buffer.owner = BufferOwner.FREE
            self._results.put(Sent(to, size, time.monotonic() - began, error))

    def _bring(self, to: Address, label: Mapping[str, Any], size: int) -> None:
        data = self._buffer.view(size)
        try:
            deposit(to, self._seal, self._owner, label, data, self._connected)
        finally:
            # The buffer may be filled again once nothing refers to its memory.
            data.release()
        before = self._at
        self._at = to
        # Only now: the owner has a whole copy somewhere at any moment.
        if before is not None and before != to:
            with contextlib.suppress(OSError):  # the other rank is gone, and the old copy with it
                forget(before, self._seal, self._owner)

    def _connected(self, line: PeerStoreConnection) -> None:
        self._line = line
        # `close` may have looked for a connection just before there was one.
        if self._closed:
            line.break_off()


def find(owner: str, seal: Seal, keepers: Mapping[str, Address]) -> tuple[PeerCopy | None, dict[str, str]]:
    """Return the newest undamaged copy of a rank's state that other ranks store; delete the other copies.

    All ranks are asked at the same time. A rank is given up after `SILENCE_S` without an answer. If all copies are
    damaged, none is deleted.

    Args:
        owner: Name of the rank whose state is wanted.
        seal: Signer of the job's messages.
        keepers: Address of each rank that may store a copy, by the rank's name.

    Returns:
        The copy, or None if there is no undamaged one; and, by rank, the reason why no copy came from it. A damaged
        copy has the key ``"that has a copy"``.
    """
    if not keepers:
        return None, {}
    copies: list[tuple[Address, dict[str, Any], bytearray]] = []
    silent: dict[str, str] = {}
    with ThreadPoolExecutor(len(keepers), "lightning_async asks") as pool:  # a host that is gone never answers
        asked = {name: pool.submit(fetch, address, seal, owner) for name, address in keepers.items()}
        for name, answer in asked.items():
            try:
                if (found := answer.result()) is not None:
                    copies.append((keepers[name], *found))
            except OSError as error:
                silent[name] = f"{type(error).__name__}: {error}"
    # Nothing is forgotten before a copy is known to be whole.
    for address, label, data in sorted(copies, key=lambda copy: _age(copy[1]), reverse=True):
        begins = label.get("text")
        whole = memoryview(data)
        try:
            if type(begins) is not int or not 0 <= begins <= len(whole):
                raise DamagedCheckpoint(f"its text cannot begin at byte {begins!r} of {len(whole)}")
            own = own_of(whole[:begins], bytes(whole[begins:]), f"the copy of rank {owner}'s state")
        except DamagedCheckpoint as error:
            silent["that has a copy"] = str(error)
            continue
        for other, _, _ in copies:
            if other != address:
                with contextlib.suppress(OSError):
                    forget(other, seal, owner)
        return PeerCopy(address, label, own), silent
    return None, silent


def _age(label: Mapping[str, Any]) -> tuple[float, float]:
    """Return the sort key of a copy's label: the number of restarts of its owner, then the time of the copy.

    Times before and after a restart cannot be compared, because the clocks may differ.
    """
    life = label.get("life")
    at = label.get("at")
    return (life if isinstance(life, int) else 0.0, at if isinstance(at, int | float) else 0.0)

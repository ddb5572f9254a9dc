"""The flat memory in which a replica's values travel: two buckets, their owner, and what they hold.

    FREE --- the training thread packs ---> TRAINING --- a message is ready ---> FREE
    FREE --- headers have decided on a payload ---> ENGINE --- committed: the result has arrived ---> FREE
    FREE --- the training thread takes what has arrived ---> TRAINING --- merged ---> FREE

No message becomes ready from the composing of a header until it is served (`announced`): what it said stays true.
`sent` holds the snapshot, from the first header on the message made of it, and after the round the snapshot again.
`received` holds the last target: an absent replica moves from there. While a training thread is late with taking a
result, further rounds land in a third, borrowed bucket.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_async.engine.replica import Replica
from lightning_async.engine.shared_state import Mark, SharedState
from lightning_async.flat import ROOM


@dataclass
class Message:
    """A message that is packed in the `sent` bucket and waits for a round."""

    priority: int  # of the kind of round that it is for
    step: int  # the replica's step count at the snapshot
    place: float = field(default=0.0, kw_only=True)  # the replica's place in its data at the snapshot

    @property
    def ready(self) -> bool:
        """Whether headers may announce it. Under the lock."""
        return True


class RoundType(ABC):
    """One kind of round. All calls come on the engine's thread."""

    takes_marks = True
    """Whether a checkpoint may belong to such a round: all replicas hold one model after it, or could."""

    @abstractmethod
    def begin(self, plan: Any, id: int, parts: Sequence[Any]) -> InFlightRound:
        """Return the record of exchange ``id``: what this rank sends, and where the payload lands.

        ``plan`` is what the component made of all headers, ``parts`` are its parts of them.
        """

    @abstractmethod
    def move(self, exchange: Any) -> None:
        """Move the payload. Should that fail, nothing is lost that a commit, or the message, needs."""

    @abstractmethod
    def commit(self, exchange: Any) -> None:
        """Change what all replicas share: all have the payload. Under `SharedState.committing`."""

    @abstractmethod
    def hand_over(self, exchange: Any) -> None:
        """Count the work off, and give the result to the training thread. Under `SharedState.changed`."""


@dataclass
class InFlightRound:
    """A payload on its way: one record, from the decision to the merge."""

    id: int  # of the exchange, the same on all ranks
    kind: RoundType  # of the round
    message: Message | None  # this rank's; None if it is absent
    target: Tensor  # the bucket that the payload lands in
    tally: float = 0.0  # this rank's; the commit makes it the sum over all ranks
    tally_is_whole: bool = False  # it is that sum; not on a rank that lost the answer
    doubt: bool = False  # this rank is not done; where any is not, all `settle` in place of the commit, and ask again
    settle: Callable[[], None] = lambda: None  # changes what has moved until all are done
    header_s: float = 0.0  # waiting for the slowest rank's header
    exchange_s: float = 0.0  # moving and committing the payload
    mark: Mark | None = None  # the checkpoint that belongs to it, if one does
    places: dict[str, float] = field(default_factory=dict)  # by name, the place in its data of each present rank
    at_once: bool = False  # each rank commits when it has the payload, see `UncommittedRound`. On all ranks, or on none
    void: bool = False  # nobody commits it, as all know


class BucketOwner(enum.Enum):
    """The side that may touch the buckets."""

    FREE = "free"
    TRAINING = "training"
    ENGINE = "engine"


class Buckets:
    """Two flat fp32 buckets of a replica, and the one message and the one result that they can hold."""

    def __init__(self, replica: Replica, shared_state: SharedState) -> None:
        self.replica = replica
        self._shared_state = shared_state
        self._changed = shared_state.changed
        self.owner = BucketOwner.FREE
        self.announced = False  # A header is under way
        self.message: Message | None = None
        self.offered: Message | None = None  # the message that the header under way speaks of
        self.arrived: Any = None  # a committed exchange whose result the training thread has yet to take
        self.at_target = True  # no step was taken since the parameters were the last target, to the bit
        self.to_engine = _Handover(replica.device)
        self.to_training = _Handover(replica.device)
        self.lay_out()

    def lay_out(self, registered: Callable[[Tensor], Tensor] = lambda bucket: bucket) -> None:
        """Make both anew, `received` with the parameters; ``registered`` puts a bucket where it moves best."""
        replica = self.replica
        self.sent = self.received = torch.empty(0)  # the old ones go first: there is not room for four
        pin = replica.device.type == "cpu" and any(p.is_cuda for p in replica.parameters)
        self.sent, self.received = (self._bucket(registered, pin) for _ in range(2))
        replica.pack_(self.received)

    def begin(self, registered: Callable[[Tensor], Tensor]) -> None:
        """Begin training with the parameters as they are now, before anything is sent; see `lay_out`."""
        if self.replica.device.type != "cpu":
            self.lay_out(registered)
            return
        # The host's memory is all alike to transports. All stand here where a rank joins, and the pages of new memory
        # take longer than what is written to them.
        self.replica.pack_(self.received)

    def _bucket(self, registered: Callable[[Tensor], Tensor] = lambda bucket: bucket, pin: bool = False) -> Tensor:
        numel = ROOM + self.replica.numel
        device = self.replica.device
        return registered(torch.zeros(numel, device=device, pin_memory=pin))[ROOM:]

    def release(self) -> None:
        """End the engine's header. Under the lock."""
        self.announced = False
        if self.owner is BucketOwner.ENGINE:
            self.owner = BucketOwner.FREE
        self._changed.notify_all()

    def can_pack(self) -> bool:
        """Return whether a message can become ready now. Under the lock."""
        return self.message is None and self.arrived is None and not self.announced

    def take(self) -> None:
        """Make the training thread their owner, which goes on with `used`. Under the lock."""
        assert self.owner is BucketOwner.FREE, self.owner
        self.owner = BucketOwner.TRAINING

    def take_when(self, condition: Callable[[], bool], see: Callable[[], None]) -> None:
        """Wait for ``condition``, then `take`; ``see`` raises if that is not to come."""
        with self._changed:
            self._shared_state.wait(condition, see)
            self.take()

    @contextmanager
    def alone(self, see: Callable[[], None]) -> Iterator[None]:
        """Let the training thread use them while no header is under way that may move them."""
        self.take_when(lambda: not self.announced, see)
        with self.used():
            yield

    @contextmanager
    def used(self, message: Message | None = None) -> Iterator[None]:
        """Let the training thread use what it took; at the end they hold ``message``."""
        try:
            yield
        except BaseException:
            message = None
            raise
        finally:
            self.to_engine.give()
            with self._changed:
                if message is not None:
                    message.place = self._shared_state.place
                self.message = message or self.message
                self.owner = BucketOwner.FREE
                self._changed.notify_all()

    def announce(self) -> Message | None:
        """Return the message for the header that is composed. Under the lock, after the training thread has let go."""
        assert self.owner is not BucketOwner.TRAINING, self.owner
        self.announced = True
        self.offered = self.message if self.arrived is None and self.has_message else None
        return self.offered

    @property
    def has_message(self) -> bool:
        """Whether there is one that headers may announce. Under the lock."""
        return self.message is not None and self.message.ready

    def claim(self) -> None:
        """Make the engine their owner, unless the training thread has yet to take a result."""
        with self._changed:
            self._changed.wait_for(lambda: self.owner is not BucketOwner.TRAINING or self.arrived is not None)
            if self.arrived is None:
                self.owner = BucketOwner.ENGINE
        self.to_engine.take()  # the training thread may have merged while the header waited

    def landing(self) -> Tensor:
        """Return where the result of a round lands that this rank has no message in."""
        with self._changed:
            sent_is_free = self.message is None and self.arrived is None
        # `received` holds the last target: this rank moves from there. If `sent` is taken too (by a message of another
        # kind, or a result that is not merged yet), a third bucket is borrowed until the training thread is back.
        return self.sent if sent_is_free else self._bucket()

    def turn(self, target: Tensor) -> Tensor:
        """Make ``target``, of a round without this rank, the last target; return the one before."""
        before = self.received
        self.received = target
        if target is self.sent:
            self.sent = before
        return before

    @contextmanager
    def handing_over(self) -> Iterator[None]:
        """Hold the lock while a result is handed over, once the training thread has let go."""
        self.to_training.give()
        with self._changed:
            self._changed.wait_for(lambda: self.owner is not BucketOwner.TRAINING)
            yield
            if self.owner is BucketOwner.ENGINE:
                self.owner = BucketOwner.FREE
            self._changed.notify_all()

    def hand_over(self, exchange: InFlightRound) -> None:
        """Give the training thread a result. Under the lock."""
        if exchange.message is not None:
            self.message = None
        self.arrived = exchange


class _Handover:
    """A way to pass buckets from the work on one thread's CUDA stream to another's; does nothing on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: Any = None

    def give(self) -> None:
        """Put what this thread's stream holds by now first."""
        if self._device.type == "cuda":
            self._event = torch.cuda.current_stream(self._device).record_event()

    def take(self, *tensors: Tensor) -> None:
        """Put this thread's further work after that; ``tensors`` live for as long as its stream uses them."""
        if self._event is None:
            return
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._event)
        for tensor in tensors:
            tensor.record_stream(stream)


def side_stream(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()

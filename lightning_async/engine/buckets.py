"""The two flat buckets in which a replica's values are sent and received, and which thread owns the buckets at present.

    FREE --- the training thread packs ---> TRAINING --- a message is ready ---> FREE
    FREE --- all ranks' headers decide that a payload is exchanged ---> ENGINE --- the result has arrived ---> FREE
    FREE --- the training thread takes what has arrived ---> TRAINING --- merged into the parameters ---> FREE

While the engine's thread exchanges a header (`announced`), no new message becomes ready: the header stays correct.

The bucket `sent` holds the snapshot of the parameters. During an exchange it holds the averaging rule's message, and
afterwards the snapshot again. The bucket `received` holds the target of the last round. A replica that was absent in a
round needs the last target: it adds the difference between the round's target and the last target to its parameters.
Until the training thread has taken a result, the results of further rounds are received in a third, borrowed bucket.
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

    priority: int  # priority of the round type that the message is for
    step: int  # the replica's step count at the snapshot
    place: float = field(default=0.0, kw_only=True)  # the replica's place in its data at the snapshot

    @property
    def ready(self) -> bool:
        """Whether the message is complete, so that the next header may announce it. The caller holds the lock."""
        return True


class RoundType(ABC):
    """A kind of round, which defines what data ranks exchange and which state they change with the result.

    All its methods but `merge` are called on the engine's thread.
    """

    takes_marks = True
    """Whether ranks may save a checkpoint of a round of this type; False if the round gives replicas no new model."""

    @abstractmethod
    def begin(self, plan: Any, id: int, parts: Sequence[Any]) -> InFlightRound:
        """Return the record of exchange ``id``, with this rank's message and the bucket that receives the result.

        Args:
            plan: The component's plan of the exchange.
            id: Number of the exchange.
            parts: The component's part of each rank's header.
        """

    @abstractmethod
    def move(self, exchange: Any) -> None:
        """Exchange the payload with the other ranks.

        If this fails, the message and the committed state stay as they were, so that the exchange can be repeated.
        """

    @abstractmethod
    def commit(self, exchange: Any) -> None:
        """Change the state that all replicas share, once all ranks have the payload.

        The caller holds `SharedState.committing`.
        """

    @abstractmethod
    def hand_over(self, exchange: Any) -> None:
        """Update the counts of this replica's work, and pass the result, if any, to the training thread.

        The caller holds `SharedState.changed`.
        """

    def merge(self, exchange: Any, step: int) -> None:
        """Merge the result of a `ModelRound` into the parameters; ``step`` is this replica's present number of steps.

        Called on the training thread, which owns the buckets.
        """
        raise NotImplementedError(f"{type(self).__name__} has no result to merge.")


@dataclass
class InFlightRound:
    """The record of one exchange, from the decision to make it until the training thread has merged its result."""

    id: int  # of the exchange, the same on all ranks
    kind: RoundType
    message: Message | None  # this rank's message; None if this rank is absent
    target: Tensor  # the bucket that the payload lands in
    tally: float = 0.0  # this rank's; the commit makes it the sum over all ranks
    tally_is_whole: bool = False  # whether the tally is that sum; not on a rank that lost the answer
    doubt: bool = False  # this rank has more to move: all ranks `settle` before they ask again whether to commit
    settle: Callable[[], None] = lambda: None  # moves what is still missing
    header_s: float = 0.0  # seconds of waiting for the slowest rank's header
    exchange_s: float = 0.0  # seconds of moving and committing the payload
    mark: Mark | None = None  # the checkpoint that belongs to this exchange, if any
    places: dict[str, float] = field(default_factory=dict)  # by name, the place in its data of each present rank
    at_once: bool = False  # each rank commits once it has the payload, see `UncommittedRound`; the same on all ranks
    void: bool = False  # no rank commits it; the same on all ranks


@dataclass(kw_only=True)
class ModelRound(InFlightRound):
    """The record of a round whose result the training thread merges into the parameters."""

    plan: Any  # the plan that follows from all headers
    share: float  # this rank's weight in the mean
    message_bytes: int  # size of this rank's message on the wire
    healed: bool = False  # this replica was not finite, and takes over the others' model


class BucketOwner(enum.Enum):
    """The thread that may read and write the buckets."""

    FREE = "free"
    TRAINING = "training"
    ENGINE = "engine"


class Buckets:
    """Two flat fp32 buckets of a replica, one for the message to be sent and one for the result that is received.

    At most one message waits for a round, and at most one result waits for the training thread.

    The buckets belong to the training thread or to the engine's thread, as `owner` says. A thread that changes `owner`
    holds the lock of the shared state.
    """

    def __init__(self, replica: Replica, shared_state: SharedState) -> None:
        self.replica = replica
        self._shared_state = shared_state
        self._changed = shared_state.changed
        self.owner = BucketOwner.FREE
        self.announced = False  # a header is being composed or served
        self.message: Message | None = None
        self.offered: Message | None = None  # the message that this header announces
        self.arrived: Any = None  # the committed exchange whose result waits for the training thread
        self.superseded: list[ModelRound] = []
        """Committed rounds that this replica did not merge, or not on their own, until the training thread counts them.
        """
        self.at_target = True  # the parameters are the last target, to the bit: no step was taken since
        self.to_engine = _Handover(replica.device)
        self.to_training = _Handover(replica.device)
        self.lay_out()

    def lay_out(self, registered: Callable[[Tensor], Tensor] = lambda bucket: bucket) -> None:
        """Allocate the buckets `sent` and `received` anew, and pack the parameters into `received`.

        ``registered`` returns a copy of a bucket in memory that the transport can use best, such as memory that is
        registered with NCCL.
        """
        replica = self.replica
        self.sent = self.received = torch.empty(0)  # frees the old ones first, as there may be no room for four buckets
        pin = replica.device.type == "cpu" and any(p.is_cuda for p in replica.parameters)
        self.sent, self.received = (self._bucket(registered, pin) for _ in range(2))
        replica.pack_(self.received)

    def begin(self, registered: Callable[[Tensor], Tensor]) -> None:
        """Prepare for the first round: pack the present parameters into `received`, in place of a last round's target.

        Buckets that are not on the CPU are allocated anew; for ``registered`` see `lay_out`.
        """
        if self.replica.device.type != "cpu":
            self.lay_out(registered)
            return
        # On the CPU the buckets stay: to a transport one part of the host's memory is as good as another. All ranks
        # wait here while a rank joins, and new memory costs more (page faults) than writing to the old one.
        self.replica.pack_(self.received)

    def _bucket(self, registered: Callable[[Tensor], Tensor] = lambda bucket: bucket, pin: bool = False) -> Tensor:
        numel = ROOM + self.replica.numel
        device = self.replica.device
        return registered(torch.zeros(numel, device=device, pin_memory=pin))[ROOM:]

    def release(self) -> None:
        """Free the buckets after the engine's thread has exchanged a header and its payload.

        The caller holds the lock.
        """
        self.announced = False
        if self.owner is BucketOwner.ENGINE:
            self.owner = BucketOwner.FREE
        self._changed.notify_all()

    def can_pack(self) -> bool:
        """Return whether the training thread may pack a message now. The caller holds the lock."""
        return self.message is None and self.arrived is None and not self.announced

    def take(self) -> None:
        """Make the training thread the owner of the buckets; it calls `used` next. The caller holds the lock."""
        assert self.owner is BucketOwner.FREE, self.owner
        self.owner = BucketOwner.TRAINING

    def take_when(self, condition: Callable[[], bool], see: Callable[[], None]) -> None:
        """Wait until ``condition`` is true, then give the buckets to the training thread.

        ``see`` is called repeatedly during the wait, and raises if the condition cannot become true.
        """
        with self._changed:
            self._shared_state.wait(condition, see)
            self.take()

    @contextmanager
    def alone(self, see: Callable[[], None]) -> Iterator[None]:
        """Wait until no header is being exchanged, then let the training thread use the buckets during the block.

        Without the wait, the payload that follows a header could overwrite the buckets. For ``see`` see `take_when`.
        """
        self.take_when(lambda: not self.announced, see)
        with self.used():
            yield

    @contextmanager
    def used(self, message: Message | None = None) -> Iterator[None]:
        """Let the training thread use the buckets that it has taken, during the block; then mark ``message`` as ready.

        After an error the message is not ready, and the buckets are free again.
        """
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
        """Record that a header is being exchanged; return the message that it announces, if any.

        The caller holds the lock. The buckets must not belong to the training thread.
        """
        assert self.owner is not BucketOwner.TRAINING, self.owner
        self.announced = True
        self.offered = self.message if self.arrived is None and self.has_message else None
        return self.offered

    @property
    def has_message(self) -> bool:
        """Whether a message is ready, so that this rank's next header can announce it. The caller holds the lock."""
        return self.message is not None and self.message.ready

    def claim(self) -> None:
        """Wait until the training thread does not use the buckets, then make the engine's thread their owner.

        If a result still waits for the training thread, this call does not wait, and changes no owner. The next payload
        is then received in a third bucket, see `landing`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.owner is not BucketOwner.TRAINING or self.arrived is not None)
            if self.arrived is None:
                self.owner = BucketOwner.ENGINE
        self.to_engine.take()  # the training thread may have merged while the header waited

    def landing(self) -> Tensor:
        """Return the bucket for the result of a round in which this rank is absent."""
        with self._changed:
            sent_is_free = self.message is None and self.arrived is None
        # `received` stays as it is: it holds the last target, from which this rank moves. If `sent` is in use as well
        # (by a message for another round type, or by a result that is not merged yet), a third bucket is borrowed until
        # the training thread has merged.
        return self.sent if sent_is_free else self._bucket()

    def turn(self, target: Tensor) -> Tensor:
        """Record ``target``, the result of a round in which this rank was absent, as the last target.

        Returns the target of the round before it.
        """
        before = self.received
        self.received = target
        if target is self.sent:
            self.sent = before
        return before

    @contextmanager
    def handing_over(self) -> Iterator[None]:
        """Wait until the training thread does not own the buckets, then hold the lock during the block.

        In the block, the engine's thread passes a result to the training thread with `hand_over`.
        """
        self.to_training.give()
        with self._changed:
            self._changed.wait_for(lambda: self.owner is not BucketOwner.TRAINING)
            yield
            if self.owner is BucketOwner.ENGINE:
                self.owner = BucketOwner.FREE
            self._changed.notify_all()

    def hand_over(self, exchange: InFlightRound) -> None:
        """Make ``exchange`` the result that the training thread takes next. The caller holds the lock.

        An earlier model that is not merged yet is superseded: the training thread merges both results at once.
        """
        if exchange.message is not None:
            self.message = None
        pending = self.arrived
        self.arrived = exchange
        if isinstance(pending, ModelRound) and isinstance(exchange, ModelRound):
            exchange.message = exchange.message or pending.message
            exchange.healed = exchange.healed or pending.healed
            self.superseded.append(pending)


class _Handover:
    """A CUDA event, by which the stream of the thread that gets the buckets waits for the other thread's stream.

    On the CPU it does nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: Any = None

    def give(self) -> None:
        """Record the work that this thread has put on its CUDA stream so far."""
        if self._device.type == "cuda":
            self._event = torch.cuda.current_stream(self._device).record_event()

    def take(self, *tensors: Tensor) -> None:
        """Make this thread's CUDA stream wait for the work that `give` has recorded on the other thread's stream.

        ``tensors`` were allocated on the other stream; their memory is kept until this stream has used them.
        """
        if self._event is None:
            return
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._event)
        for tensor in tensors:
            tensor.record_stream(stream)


def side_stream(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which the engine's thread uses a CUDA stream of its own, beside the training stream."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()

"""The flat memory in which a replica's values travel: two buckets, whose they are, and what they hold.

    FREE --- the training thread packs ---> TRAINING --- a message is ready ---> FREE
    FREE --- headers have decided on a payload ---> ENGINE --- committed: the result has arrived ---> FREE
    FREE --- the training thread takes what has arrived ---> TRAINING --- merged ---> FREE

From the moment in which a header is composed until it is served, no message may become ready: what the header said
must stay true (`announced`). A rank whose training thread is late with taking a result may meanwhile miss further
rounds. The engine leaves the two buckets alone then, and such a round lands in a third, borrowed one.

`sent` holds the snapshot, from the first header on the message made of it, and after the round the snapshot again.
`received` holds the last target: from there a replica moves that is absent from the next round.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_async.engine.replica import Replica
from lightning_async.engine.shared_state import Mark, SharedState
from lightning_async.flat import ROOM


@dataclass
class Message:
    """A message that is packed in the `sent` bucket and waits for a round.

    Args:
        priority: of the kind of round that it is for.
        step: the replica's step count at the snapshot.
        place: how far its data has gone into it.
    """

    priority: int
    step: int
    place: float = field(default=0.0, kw_only=True)

    @property
    def ready(self) -> bool:
        """Whether headers may speak of it. Under the lock."""
        return True


class RoundType(Protocol):
    """One kind of round. All calls come on the engine's thread."""

    @property
    def takes_marks(self) -> bool:
        """Whether all replicas hold one model, or could, after such a round: a checkpoint may belong to it."""
        ...

    def begin(self, plan: Any, id: int, parts: Sequence[Any]) -> InFlightRound:
        """The record of what is to be exchanged: what this rank sends, and where the payload lands.

        Args:
            plan: what the headers decided, as the kind's component says it.
            id: of the exchange.
            parts: the component's part of every rank's header.
        """
        ...

    def move(self, exchange: Any) -> None:
        """Move the payload. Should that fail, nothing is lost that a commit, or the message, needs."""
        ...

    def commit(self, exchange: Any) -> None:
        """Every rank has the payload: change what all replicas share. Under `SharedState.committing`."""
        ...

    def hand_over(self, exchange: Any) -> None:
        """Count the work off, and put the result where the training thread takes it. Under `SharedState.changed`."""
        ...


@dataclass
class InFlightRound:
    """A payload on its way: one record, from the decision to the merge.

    Args:
        id: of the exchange, the same on all ranks.
        kind: of the round.
        message: this rank's; None if it is absent.
        target: the bucket that the payload lands in.
        tally: a number of this rank's; the commit makes it the sum over all ranks, but for one that lost its answer.
        doubt: this rank is not done; where any is not, all `settle` it in place of the commit, and then say this again.
        settle: changes what has moved until all are done.
        header_s: waiting for the slowest rank's header.
        exchange_s: moving and committing the payload.
        mark: the checkpoint that belongs to it, if one does.
        places: by name, how far the data of each rank that takes part has gone into it.
        at_once: commits where the payload is, as the rule's part of ``target`` stays what it is until all have it, see
            `Held`. On all ranks, or on none.
        void: nobody commits it, as all have heard.
    """

    id: int
    kind: RoundType
    message: Message | None
    target: Tensor
    tally: float = 0.0
    doubt: bool = False
    settle: Callable[[], None] = lambda: None
    header_s: float = 0.0
    exchange_s: float = 0.0
    mark: Mark | None = None
    places: dict[str, float] = field(default_factory=dict)
    at_once: bool = False
    void: bool = False


class BucketOwner(enum.Enum):
    """Who may touch the buckets."""

    FREE = "free"
    TRAINING = "training"
    ENGINE = "engine"


class Buckets:
    """Two flat fp32 buckets of a replica, the one message and the one result that they can hold.

    Args:
        replica: says what there is to hold, and where.
        shared_state: its lock is theirs.
    """

    def __init__(self, replica: Replica, shared_state: SharedState) -> None:
        self.replica = replica
        self._shared_state = shared_state
        self._changed = shared_state.changed
        self.owner = BucketOwner.FREE
        self.announced = False
        """A header is under way."""
        self.message: Message | None = None
        self.offered: Message | None = None
        """The message that the header under way speaks of."""
        self.arrived: Any = None
        """A committed exchange whose result the training thread has yet to take."""
        self.at_target = True
        """No step was taken since the parameters were the last target, to the bit."""
        self.to_engine = _Handover(replica.device)
        self.to_training = _Handover(replica.device)
        self.lay_out()

    def lay_out(self, registered: Callable[[Tensor], Tensor] = lambda bucket: bucket) -> None:
        """Make both anew for what the replica holds now, `received` with the parameters as they are.

        Args:
            registered: puts a bucket where the transport moves it best.
        """
        replica = self.replica
        self.sent = self.received = torch.empty(0)  # the old ones go first: there is not room for four
        pin = replica.device.type == "cpu" and any(p.is_cuda for p in replica.parameters)
        self.sent, self.received = (self._bucket(registered, pin) for _ in range(2))
        replica.pack_(self.received)

    def begin(self, registered: Callable[[Tensor], Tensor]) -> None:
        """Training begins, with the parameters as they are now; before anything is sent.

        Args:
            registered: see `lay_out`.
        """
        if self.replica.device.type != "cpu":
            self.lay_out(registered)
            return
        # The host's memory is all alike to transports. All stand here where a rank joins, and the pages of new memory
        # take longer than what is written to them.
        self.replica.pack_(self.received)

    def _bucket(self, registered: Callable[[Tensor], Tensor] = lambda bucket: bucket, pin: bool = False) -> Tensor:
        """Zeros, with `ROOM` in front."""
        numel = ROOM + self.replica.numel
        device = self.replica.device
        return registered(torch.zeros(numel, device=device, pin_memory=pin))[ROOM:]

    def release(self) -> None:
        """The engine is done with its header. Under the lock."""
        self.announced = False
        if self.owner is BucketOwner.ENGINE:
            self.owner = BucketOwner.FREE
        self._changed.notify_all()

    # ---- the training thread ----

    def can_pack(self) -> bool:
        """Whether a message can become ready now. Under the lock."""
        return self.message is None and self.arrived is None and not self.announced

    def take(self) -> None:
        """They are the training thread's, which goes on to use them by `used`. Under the lock."""
        assert self.owner is BucketOwner.FREE, self.owner
        self.owner = BucketOwner.TRAINING

    def take_when(self, condition: Callable[[], bool], see: Callable[[], None]) -> None:
        """Wait for ``condition``, then `take`; ``see`` raises if that is not to come."""
        with self._changed:
            self._shared_state.wait(condition, see)
            self.take()

    @contextmanager
    def alone(self, see: Callable[[], None]) -> Iterator[None]:
        """The training thread uses them, while no header is under way that may move them."""
        self.take_when(lambda: not self.announced, see)
        with self.used():
            yield

    @contextmanager
    def used(self, message: Message | None = None) -> Iterator[None]:
        """The training thread uses what it took; with the end, ``message`` is what they hold."""
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

    # ---- the engine's thread ----

    def announce(self) -> Message | None:
        """A header is composed: the message that goes with it. Under the lock, when the training thread has let go."""
        assert self.owner is not BucketOwner.TRAINING, self.owner
        self.announced = True
        self.offered = self.message if self.arrived is None and self.has_message else None
        return self.offered

    @property
    def has_message(self) -> bool:
        """Whether there is one that headers may speak of. Under the lock."""
        return self.message is not None and self.message.ready

    def claim(self) -> None:
        """Payload is to move: they are the engine's, unless the training thread has yet to take a result."""
        with self._changed:
            self._changed.wait_for(lambda: self.owner is not BucketOwner.TRAINING or self.arrived is not None)
            if self.arrived is None:
                self.owner = BucketOwner.ENGINE
        self.to_engine.take()  # the training thread may have merged while the header waited

    def landing(self) -> Tensor:
        """Where the result of a round lands that this rank has no message in."""
        with self._changed:
            sent_is_free = self.message is None and self.arrived is None
        # `received` holds the last target: this rank moves from there. If `sent` is taken too (by a message of another
        # kind, or a result that is not merged yet), a third bucket is borrowed until the training thread is back.
        return self.sent if sent_is_free else self._bucket()

    def turn(self, target: Tensor) -> Tensor:
        """A round that this rank was absent from has landed: its target is the last one now. Returns the one before."""
        before = self.received
        self.received = target
        if target is self.sent:
            self.sent = before
        return before

    @contextmanager
    def handing_over(self) -> Iterator[None]:
        """Under the lock, and not while the training thread uses them: a result goes over to it."""
        self.to_training.give()
        with self._changed:
            self._changed.wait_for(lambda: self.owner is not BucketOwner.TRAINING)
            yield
            if self.owner is BucketOwner.ENGINE:
                self.owner = BucketOwner.FREE
            self._changed.notify_all()

    def hand_over(self, exchange: InFlightRound) -> None:
        """The training thread finds a result. Under the lock."""
        if exchange.message is not None:
            self.message = None
        self.arrived = exchange


class _Handover:
    """Passes buckets from the work queued on one thread's CUDA stream to another's, without stopping either.

    Args:
        device: of the buckets. On the CPU there is nothing to do.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: Any = None

    def give(self) -> None:
        """What this thread's stream holds by now comes first."""
        if self._device.type == "cuda":
            self._event = torch.cuda.current_stream(self._device).record_event()

    def take(self, *tensors: Tensor) -> None:
        """What this thread's stream does from now on comes after; ``tensors`` live for as long as it uses them."""
        if self._event is None:
            return
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._event)
        for tensor in tensors:
            tensor.record_stream(stream)


def side_stream(device: torch.device) -> AbstractContextManager[object]:
    """A stream beside the training's, for the engine's thread."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()

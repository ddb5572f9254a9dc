"""What the training thread and the engine's thread of one rank share, under one lock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from lightning_async.engine.averaging.ballot import Kind
from lightning_async.engine.header import Gate
from lightning_async.errors import CollectiveError
from lightning_async.rules.averaging.protocol import Round

__all__ = ["Arrived", "Mailbox", "Message", "Votes", "Work"]


@dataclass
class Work:
    """Work of one replica: counted when a step is done, counted off when a round that holds it commits."""

    samples: float = 0.0
    steps: float = 0.0

    def __sub__(self, other: Work) -> Work:
        return Work(self.samples - other.samples, self.steps - other.steps)

    def copy(self) -> Work:
        """This amount, to keep."""
        return Work(self.samples, self.steps)


@dataclass
class Message:
    """A message that is packed in the replica's `sent` bucket and waits for a round."""

    kind: Kind
    work: Work
    step: int
    """The replica's step count at the snapshot."""
    steps: float = 0.0
    """Steps in it that no round holds; more than in ``work``, where a gate came between."""
    due: bool = True
    """The schedule asked for it. Else it is what a replica had when it came to a gate, and is dropped with that."""
    lr: float = 0.0
    scalars: tuple[float, ...] = ()
    announced: bool = False
    """Whether a header has carried it: from then on the bucket holds the rule's message, not the snapshot."""
    healthy: bool = True
    """False if the snapshot, or the optimizers' state, is not finite: then it takes part with weight zero."""
    sound: bool = True
    """False if buffers in it are not finite; that counts where other replicas' are."""
    state_is_finite: Callable[[], bool] = lambda: True
    """Whether the optimizers' state is; waits for a GPU, so it is for the engine's thread to ask."""
    used: Tensor | None = None
    """Of gradients: which parameters have one."""


@dataclass
class Arrived:
    """A committed round whose result the training thread has yet to take."""

    kind: Kind
    round: Round
    """What the rule knows about it."""
    message: Message | None
    """This rank's message; None if it was absent."""
    target: Tensor
    base: Tensor | None
    """What the target is a displacement from; None where it must be copied."""
    share: float
    num_present: int
    has_source: bool
    """Whether rank 0 took part: broadcast buffers come from it."""
    header_s: float
    exchange_s: float
    spread: float
    message_bytes: int
    """What this rank's message took on the wire."""
    used: Tensor | None = None
    apart: dict[str, Tensor] = field(default_factory=dict)
    """Of a consensus: what moved beside the bucket, by name."""
    healed: bool = False
    """This replica was not healthy, and takes over the others' model."""


@dataclass
class Votes:
    """What this rank asks of all, or all have agreed on."""

    stop: bool = False
    end: bool = False
    validate: bool = False
    synchronise: bool = False


@dataclass
class Mailbox:
    """The shared state of one rank; every field is read and written under `changed`.

    The training thread puts a message and takes what arrived; the engine's thread takes the message and puts
    what arrived. While `claimed`, the buckets belong to the engine's thread.
    """

    changed: threading.Condition = field(default_factory=threading.Condition)
    message: Message | None = None
    arrived: Arrived | None = None
    claimed: bool = False
    in_use: bool = False
    """The training thread packs or merges: the buckets are its own."""
    composed: int = 0
    """Number of the last header composed: what changes now is heard of with the next one."""
    work: Work = field(default_factory=Work)
    """What no round holds, since replicas last agreed: its weight."""
    since_round: float = 0.0
    """Steps that no round holds: the clock of rounds, which goes on over gates."""
    reported: Work = field(default_factory=Work)
    """What the last committed message held; none after a consensus."""
    at_target: bool = True
    """No step was taken since the parameters were the last target, to the bit."""
    showing: bool = False
    """The parameters only show the model of a rendezvous, and are not this replica's own."""
    gate: Gate = Gate.NONE
    gate_index: int = 0
    opened: bool = False
    asked: Votes = field(default_factory=Votes)
    agreed_votes: Votes = field(default_factory=Votes)
    total: Work = field(default_factory=Work)
    """What this replica has done since training began."""
    samples_by_rank: tuple[float, ...] = ()
    """Samples that every replica had seen at the last header."""
    mean_steps: float = 0.0
    """The same, on average over all replicas, at the last header."""
    steps_then: float = 0.0
    """The same, of this replica, at the last header."""
    opened_gates: int = 0
    last_gate: Gate = Gate.NONE
    """The gate that opened last, on whichever ranks stood there."""
    last_clock: float = 0.0
    """Steps of all ranks when it did."""
    last_round: int = 1
    """The round that was to come next."""
    moved: bool = False
    """Whether the model had changed, on any rank, since the gate before."""
    fresh: bool = False
    """Synchronous steps were taken since the rule's state was begun."""
    synchronous: bool = False
    """The replica takes synchronous steps: nobody goes on without it, and it is not excused for being slow."""
    last_seen: float = 0.0
    """When the training thread was last heard of."""
    trouble: CollectiveError | None = None
    """A call of the training thread's has failed: the groups are to be formed anew."""
    closing: bool = False
    error: BaseException | None = None
    failed_rounds: int = 0
    last_commit: float = 0.0

    def agree(self) -> None:
        """All replicas hold one model: what this one did is in it. Under the lock."""
        self.work, self.reported = Work(), Work()

    def drop_left_over(self) -> None:
        """Take back a message that its schedule did not ask for; its work stays. Under the lock."""
        if self.message is not None and self.message.kind is Kind.ROUND and not self.message.due:
            self.message = None

    def open_gate(self, gate: Gate, now: float) -> None:
        """Let the training thread go, if that is where it stands. Under the lock."""
        if gate is Gate.SYNCHRONISE:
            self.agreed_votes.synchronise = False
            if self.gate is not gate:
                return
        if self.gate is Gate.VALIDATE:
            self.agreed_votes.validate = False
        self.drop_left_over()
        self.opened, self.gate = True, Gate.NONE
        self.last_seen = now
        self.changed.notify_all()

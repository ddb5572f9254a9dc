"""The records of averaging: what one rank says, sends, what all decide, and what then moves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from lightning_async.engine.averaging.agreed import Work
from lightning_async.engine.buckets import Exchange, Kind, Message
from lightning_async.engine.replica import Updates
from lightning_async.rules.averaging.protocol import Round

__all__ = ["NOT_COMPARED", "ROUND", "UNLIKE", "AveragingPlan", "LocalMessage", "Merge", "Part"]

ROUND = 1
"""The priority of averaging rounds: the lowest."""
NOT_COMPARED, UNLIKE = -1, -2
"""In place of a digest: this rank has not looked yet; its replica shows what no other one does."""


class Part(NamedTuple):
    """What one rank says of averaging in a header.

    Args:
        due: its schedule asked for the message; else it only sends along what it had when it came to a gate.
        work: work in its message that no agreement holds: its weight.
        steps: optimizer steps in its message that no round holds.
        unreported: its weight in a consensus: all its work since replicas last agreed.
        lr: its inner learning rate.
        healthy: its parameters and its optimizers' state are finite.
        sound: its buffers and frozen parameters are; looked at where some rank's are.
        fresh: it has taken synchronous steps since the rule's state was begun: that begins anew with the next round.
        digest: of the parameters that the rule applies to, see `engine.digest`; compared at gates.
        digest_rest: of all else that replicas share.
        fragment: which part of the parameters the message carries.
        scalars: the rule's.
    """

    due: bool = False
    work: float = 0.0
    steps: float = 0.0
    unreported: float = 0.0
    lr: float = 0.0
    healthy: bool = True
    sound: bool = True
    fresh: bool = False
    digest: int = NOT_COMPARED
    digest_rest: int = NOT_COMPARED
    fragment: int = 0
    scalars: tuple[float, ...] = ()


@dataclass
class LocalMessage(Message):
    """A snapshot of one replica, and what is behind it.

    Args:
        work: since replicas last agreed.
        steps: that no round holds; more than in ``work``, where a gate came between.
        due: the schedule asked for it. Else it is what a replica had when it came to a gate, and is dropped with that.
        lr: the inner learning rate.
        fragment: which part of the parameters it is.
        updates: how often buffers and the optimizers' state had been updated, see `Replica.updates`.
        state_is_finite: whether the optimizers' state is: one bool where that state is.
        scalars: the rule's.
        announced: a header has carried it: from then on the bucket holds the rule's message, not the snapshot.
        healthy: False if the snapshot, or the optimizers' state, is not finite: then it takes part with weight zero.
        sound: False if buffers in it are not finite; that counts where other replicas' are.
    """

    work: Work
    steps: float
    due: bool
    lr: float = 0.0
    fragment: int = 0
    updates: Updates = ((), ())
    state_is_finite: Tensor | None = None
    scalars: tuple[float, ...] = ()
    announced: bool = False
    healthy: bool = True
    sound: bool = True


class AveragingPlan(NamedTuple):
    """What an averaging round, or a consensus, is to do.

    Args:
        kind: of the round; None where nobody has anything to average: the messages are dropped.
        weights: every rank's share in the mean; they add up to 1, a rank that is absent has 0.
        source: the rank whose buffers are broadcast: the first that takes part; None where none does.
        fresh: some rank has taken synchronous steps since the rule's state was begun.
        alike: of a consensus, all hold the same parameters, to the bit, and only the rest differs.
        able: whether what a rank holds may be taken over by others, by rank.
        fragment: which part of the parameters the messages carry.
    """

    kind: Kind | None
    weights: tuple[float, ...] = ()
    able: tuple[bool, ...] = ()
    source: int | None = None
    fresh: bool = False
    alike: bool = False
    fragment: int = 0


@dataclass(kw_only=True)
class Merge(Exchange):
    """An averaging round, or a consensus: what it moves, and what its merge needs.

    Args:
        plan: what the headers decided.
        round: what the rule gets to know.
        share: this rank's weight.
        able: what this rank holds may be shared.
        message_bytes: what its message takes on the wire.
        is_consensus: all replicas become one model; else a round of the rule.
        base: what the target is a displacement from; None where it must be copied.
        apart: of a consensus, what moved beside the bucket, by name.
        owed: of compressed messages, see `CompressedMean.owed`.
        healed: this replica was not healthy, and takes over the others' model.
    """

    plan: AveragingPlan
    round: Round
    share: float
    able: bool
    message_bytes: int
    is_consensus: bool = False
    base: Tensor | None = None
    apart: dict[str, Tensor] = field(default_factory=dict)
    owed: Tensor | None = None
    healed: bool = False

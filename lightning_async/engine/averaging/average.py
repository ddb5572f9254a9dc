"""A round: the messages of all replicas become one mean, and the rule says what that means."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_async import ops
from lightning_async.engine.averaging.agreed import Agreed, Ledger
from lightning_async.engine.averaging.config import AveragerConfig
from lightning_async.engine.averaging.records import AveragingPlan, LocalMessage, Merge, Part
from lightning_async.engine.codes import CompressedMean
from lightning_async.engine.control import ControlPlane
from lightning_async.rules.averaging.protocol import Round

__all__ = ["Average"]


class Average:
    """See `Kind`.

    Args:
        control: the control plane.
        agreed: the rule and its state.
        ledger: this replica's work.
        config: whether messages are compressed.
    """

    takes_marks = True

    def __init__(self, control: ControlPlane, agreed: Agreed, ledger: Ledger, config: AveragerConfig) -> None:
        self._buckets, self._transfer = control.buckets, control.transfer
        self._replica, self._mailbox = control.buckets.replica, control.mailbox
        self._agreed, self._ledger, self._config = agreed, ledger, config
        self._compressed: CompressedMean | None = None
        self.follow_layout()

    def follow_layout(self) -> None:
        """Make room for messages of the replica's layout."""
        config, transfer = self._config, self._transfer
        if config.compression != "none":
            self._compressed = CompressedMean(
                transfer.large, transfer.result, config.compression, self._replica.layout.numel, transfer.part_bytes,
                self._replica.device,
            )  # fmt: skip

    def begin(self, plan: AveragingPlan, id: int, parts: Sequence[Part]) -> Merge:
        message = self._buckets.message
        mine = message if isinstance(message, LocalMessage) else None
        exchange = self.record(plan, id, parts)
        exchange.message = mine
        # An absent replica keeps the last target in `received`: it moves from there.
        exchange.target = self._buckets.landing() if mine is None else self._buckets.received
        return exchange

    def record(self, plan: AveragingPlan, id: int, parts: Sequence[Part]) -> Merge:
        """What is known of a round before anything moves; it lands in `received`."""
        rank, replica = self._transfer.rank, self._replica
        facts = Round(
            id=id,
            rank=rank,
            work=tuple(p.work for p in parts),
            steps=tuple(p.steps for p in parts),
            scalars=tuple(p.scalars for p in parts),
            lr=tuple(p.lr for p in parts),
            fragment=plan.fragment,
        )
        return Merge(
            id=id, kind=self, message=None, target=self._buckets.received, plan=plan, round=facts,
            share=plan.weights[rank], able=plan.able[rank], healed=not plan.able[rank], message_bytes=4 * replica.numel,
        )  # fmt: skip

    def move(self, exchange: Merge) -> None:
        replica, target, sent, share = self._replica, exchange.target, self._buckets.sent, exchange.share
        if self._compressed is not None and self._compressed.world_size != self._transfer.large.world_size:
            self.follow_layout()  # a generation of another size
        compressed, plan = self._compressed, exchange.plan
        if exchange.message is not None:
            is_source = exchange.round.rank == plan.source
            replica.scale_(target, sent, share, is_source, of_rule=compressed is None)
        else:
            target.zero_()
        if compressed is None:
            self._transfer.sum_(target)
        else:
            self._transfer.sum_(replica.beyond_rule(target))
            part, message = replica.of_rule(target), replica.of_rule(sent) if share > 0.0 else None
            exchange.owed = compressed.move_(part, message, plan.weights)
            exchange.message_bytes += compressed.message_bytes - 4 * part.numel()
        if share > 0.0:
            exchange.tally = share * ops.sq_distance(replica.of_rule(sent), replica.of_rule(target))

    def commit(self, exchange: Merge) -> None:
        """Averages that are averages of have moved themselves: what they owe is paid with the next."""
        takes_part = exchange.message is not None and exchange.able
        self._agreed.merge_(self._buckets.sent if takes_part else None, exchange.target, exchange.round)
        if self._compressed is not None and exchange.owed is not None:
            self._compressed.owed = exchange.owed

    def hand_over(self, exchange: Merge) -> None:
        message, follows = exchange.message, self._agreed.rule.absent_follow
        if isinstance(message, LocalMessage):
            self._ledger.round(message.work, message.steps)
            exchange.base = self._buckets.sent if exchange.able else None
        else:
            self._ledger.round(None)
            if not follows:
                return  # others have met; this replica stays where it is
            exchange.base = self._moved_from(exchange)
        self.deliver(exchange)

    def _moved_from(self, exchange: Merge) -> Tensor | None:
        """Absent: from the last target to the new one. With a round that is not merged yet, from where that began."""
        last, pending = self._buckets.turn(exchange.target), self._buckets.arrived
        if self._ledger.synchronous:  # there is no last target, and all that it did is in the others' models
            return None
        return pending.base if pending is not None else last

    def deliver(self, exchange: Merge) -> None:
        """Put the result, with one that the training thread has yet to take, where it takes both. Under the lock."""
        pending = self._buckets.arrived
        self._buckets.hand_over(exchange)
        if pending is not None:
            exchange.message, exchange.healed = exchange.message or pending.message, exchange.healed or pending.healed

    def abandon(self) -> None:
        """The message goes nowhere; its work stays for another one. Under the lock."""
        message, self._buckets.message = self._buckets.message, None
        if isinstance(message, LocalMessage) and message.announced and message.healthy:
            self._agreed.abandon_(self._buckets.sent, message.fragment)

    def forget_debts(self) -> None:
        """All replicas hold one model: nothing is owed."""
        if self._compressed is not None:
            self._compressed.owed.zero_()

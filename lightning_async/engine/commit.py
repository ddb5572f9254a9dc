"""Applying a committed round: the rule's state, the work, the buckets' roles, and what the training thread takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_async.engine.mailbox import Arrived, Mailbox, Work
from lightning_async.engine.payload import Exchange
from lightning_async.engine.replica import Replica
from lightning_async.engine.round import Kind
from lightning_async.rules.protocols import AveragingRule

__all__ = ["Commits"]


class Commits:
    """What all replicas have committed: equal on all of them between rounds.

    Args:
        replica: the tensors and buckets.
        rule: what a mean message means.
        mailbox: what is shared with the training thread.
        rank: this replica's.
        now: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        replica: Replica,
        rule: AveragingRule,
        mailbox: Mailbox,
        rank: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.next_round = 1
        """The round that comes next; equal on all ranks, but for one that lost the last answer."""
        self.rule_state: Any = None
        self._replica, self._rule, self._mailbox = replica, rule, mailbox
        self._rank, self._now = rank, now
        self.init_rule(replica.of_rule(replica.received))

    def init_rule(self, params: Tensor) -> None:
        """Begin the rule's state with parameters that are equal on all ranks."""
        self.rule_state = self._rule.init(params, self._replica.layout)

    def apply(self, exchange: Exchange) -> None:
        """Advance the rule's state and hand the result to the training thread."""
        replica, message, kind = self._replica, exchange.message, exchange.decision.kind
        target = replica.of_rule(exchange.landing)
        if kind is Kind.START:
            self.init_rule(target)
        elif kind is Kind.ROUND:
            sent = replica.of_rule(replica.sent) if message is not None and message.healthy else None
            self.rule_state = self._rule.merge_(sent, target, self.rule_state, exchange.round)
        elif kind is Kind.CONSENSUS:
            agreed = self._rule.agree(target, self.rule_state)
            if agreed is not target:
                target.copy_(agreed)
            if exchange.decision.fresh:
                self.init_rule(target)
        self.next_round += 1
        replica.to_training.give()
        with self._mailbox.changed:
            self._mailbox.changed.wait_for(lambda: not self._mailbox.in_use)
            self._hand_over(exchange, self._base(exchange))

    def _base(self, exchange: Exchange) -> Tensor | None:
        """What the target is a displacement from, and the buckets' new roles."""
        replica, message, pending = self._replica, exchange.message, self._mailbox.arrived
        if exchange.decision.kind is not Kind.ROUND:
            return None
        if message is not None:
            return replica.sent if message.healthy else None
        if not self._rule.absent_follow:
            return None
        # Absent: from the last target to the new one. With a round that is not merged yet, from where that began.
        last, replica.received = replica.received, exchange.landing
        if exchange.landing is replica.sent:
            replica.sent = last
        if self._mailbox.synchronous:  # there is no last target, and all that it did is in the others' models
            return None
        return pending.base if pending is not None else last

    def _hand_over(self, exchange: Exchange, base: Tensor | None) -> None:
        """Count the work off and put the result where the training thread takes it."""
        box, message, kind = self._mailbox, exchange.message, exchange.decision.kind
        pending = box.arrived
        if kind is Kind.START:
            box.fresh = False
            return
        box.last_commit = self._now()
        if kind is Kind.GRADIENTS:
            # Shared already: what is kept is only who has the newest model, should a rendezvous come next.
            box.work, box.reported = message.work.copy() if message is not None else Work(), Work()
            box.fresh = True
            if box.message is not None and box.message.announced and message is None:
                box.message = None  # made with a rule state that begins anew; its work stays for another one
            if message is None:
                return
        elif kind is Kind.CONSENSUS:
            box.message, box.fresh, box.reported = None, False, Work()
            if not self._rule.restores_local:
                box.work = Work()
        elif message is not None:
            box.work, box.reported = box.work - message.work, message.work
        elif not self._rule.absent_follow:
            return  # others have met; this replica stays where it is
        if message is not None:
            box.message = None
        box.arrived = Arrived(
            kind=kind,
            round=exchange.round,
            message=message or (pending.message if pending is not None else None),
            target=exchange.landing,
            base=base,
            share=exchange.decision.weights[self._rank],
            num_present=sum(w > 0.0 for w in exchange.decision.weights),
            has_source=exchange.has_source,
            header_s=exchange.header_s,
            exchange_s=exchange.exchange_s,
            spread=exchange.spread,
            message_bytes=exchange.message_bytes,
            used=exchange.used,
            counters=tuple(exchange.counters),
        )
        box.changed.notify_all()

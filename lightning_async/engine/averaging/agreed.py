"""Applying a committed round: the rule's state, the work, the buckets' roles, and what the training thread takes."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_async.engine.averaging.ballot import Kind
from lightning_async.engine.averaging.mailbox import Arrived, Mailbox, Work
from lightning_async.engine.averaging.payload import Exchange
from lightning_async.engine.replica import Replica
from lightning_async.flat import FlatLayout
from lightning_async.rules.averaging.protocol import AveragingRule

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
        self.rule_lock = threading.Lock()
        """Held while the rule's state changes, or is read whole."""
        self._replica, self._rule, self._mailbox = replica, rule, mailbox
        self._rank, self._now = rank, now
        self.init_rule(replica.of_rule(replica.received))

    def init_rule(self, params: Tensor) -> None:
        """Begin the rule's state with parameters that are equal on all ranks."""
        self.rule_state = self._rule.init(params, self._replica.layout)

    def state_dict(self) -> dict[str, Any]:
        """What is equal on all replicas, copied."""
        with self.rule_lock:
            round_id, state = self.next_round, self._copied(own=False)
        layout = self._replica.layout
        places = [[name, size] for name, size in zip(layout.names, layout.sizes, strict=True)]
        return {"round": round_id, "rule": type(self._rule).__qualname__, "rule_state": state, "parameters": places}

    def rule_state_dict(self, own: bool) -> dict[str, Any]:
        """Of the rule's state what is this replica's ``own``, or else what is equal on all; copied."""
        with self.rule_lock:
            return self._copied(own)

    def _copied(self, own: bool) -> dict[str, Any]:
        state = self._rule.state_dict(self.rule_state)
        return {k: copy.deepcopy(v) for k, v in state.items() if (k in self._rule.per_replica) == own}

    def load_state_dict(self, saved: dict[str, Any], own: dict[str, Any]) -> None:
        """Go on from `state_dict`; what ``own`` lacks of the rule's state begins anew.

        Raises:
            ValueError: the state is another rule's.
        """
        mine = type(self._rule).__qualname__
        if saved["rule"] != mine:
            raise ValueError(
                f"`rule={self._rule!r}` cannot go on from a checkpoint that `{saved['rule']}` wrote: pass that rule."
            )
        self.next_round = int(saved["round"])
        state = self._fitted(saved["rule_state"], saved.get("parameters"))
        whole = {**self.rule_state_dict(own=True), **state, **own}
        self.rule_state = self._rule.load_state_dict(self.rule_state, whole)

    def _fitted(self, state: dict[str, Any], places: Sequence[Any] | None) -> dict[str, Any]:
        """A saved state for this layout: parameters may have been frozen or unfrozen since; new ones begin anew."""
        layout = self._replica.layout
        if places is None or [name for name, _ in places] == list(layout.names):
            return state
        sizes, now = [size for _, size in places], self.rule_state_dict(own=False)
        fitted = dict(state)
        for field, old in state.items():
            new = now.get(field)
            if isinstance(old, Tensor) and isinstance(new, Tensor) and old.shape == (sum(sizes),):
                was = dict(zip((name for name, _ in places), old.split(sizes), strict=True))
                for name, part in zip(layout.names, new.split(layout.sizes), strict=True):
                    if name in was and was[name].shape == part.shape:
                        part.copy_(was[name])
                fitted[field] = new
        return fitted

    def follow_layout(self, before: FlatLayout) -> None:
        """Begin the rule's state anew for another layout, with what is known of the parameters that were there before.

        Args:
            before: the layout that the state was made for; the replica's `received` bucket holds the parameters now.
        """
        after = self._replica.layout
        old = _flat_tensors(self.rule_state, before.numel)
        self.init_rule(self._replica.of_rule(self._replica.received))
        for name, tensor in _flat_tensors(self.rule_state, after.numel).items():
            if name in old:
                was = dict(zip(before.names, before.views(old[name]), strict=True))
                for parameter, view in zip(after.names, after.views(tensor), strict=True):
                    if parameter in was:
                        view.copy_(was[parameter])

    def apply(self, exchange: Exchange) -> None:
        """Advance the rule's state and hand the result to the training thread."""
        replica, message, kind = self._replica, exchange.message, exchange.decision.kind
        target = replica.of_rule(exchange.landing)
        with self.rule_lock:
            if kind is Kind.START:
                self.init_rule(target)
            elif kind is Kind.ROUND:
                sent = replica.of_rule(replica.sent) if message is not None and exchange.healthy else None
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
            return replica.sent if exchange.healthy else None
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
        if kind is Kind.GRADIENTS:
            box.fresh, box.last_commit = True, self._now()
            if message is not None or box.synchronous:  # else it has gone on to local steps, which count
                # Shared already: what is kept is only who has the newest model, should a rendezvous come next.
                box.work, box.reported = message.work.copy() if message is not None else Work(), Work()
                box.since_round = 0.0
            if box.message is not None and box.message.announced and message is None:
                box.message = None  # made with a rule state that begins anew; its work stays for another one
            if message is None:
                return
        elif kind is Kind.CONSENSUS:
            # Replicas agree: nothing is left to weigh. What the rule has yet to learn stays owed; its clock goes on.
            if box.fresh:
                box.fresh, box.since_round, box.last_commit = False, 0.0, self._now()
            if not self._rule.restores_local:
                box.agree()
        else:
            box.last_commit = self._now()
            if message is not None:
                box.work, box.reported = box.work - message.work, message.work
                box.since_round -= message.steps
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
            apart=exchange.apart,
            healed=not exchange.healthy or (pending is not None and pending.healed),
        )
        box.changed.notify_all()


def _flat_tensors(state: Any, numel: int) -> dict[str, Tensor]:
    """The fields of a rule's state that hold one number per element of the parameters."""
    fields = state._asdict() if hasattr(state, "_asdict") else {}
    return {name: t for name, t in fields.items() if isinstance(t, Tensor) and t.shape == (numel,)}

"""How gradients move: the wing's one kind of round, on the engine's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lightning_async.engine.control import ControlPlane
from lightning_async.engine.gradients.feedback import Feedback
from lightning_async.engine.gradients.packing import divide_
from lightning_async.engine.gradients.parts import InParts, Outgoing
from lightning_async.engine.gradients.records import GradientMessage, GradientPlan, Part, Reduction, Told

__all__ = ["GradientRounds"]


class GradientRounds:
    """One kind of round, see `Kind`.

    Args:
        control: the control plane.
        on_step: see `SynchronousGradients`.
    """

    takes_marks = True

    def __init__(self, control: ControlPlane, on_step: Callable[[float | None], None]) -> None:
        self._buckets, self._transfer, self._box = control.buckets, control.transfer, control.mailbox
        self._replica, self._on_step = control.buckets.replica, on_step
        self.apart = False
        """Parameters' gradients are means over different samples, on any rank: of optimizers that step apart."""
        self.follows = False
        """A replica takes the steps that it has no gradients in, too: it stands at a gate meanwhile."""
        self.feedback: Feedback | None = None
        """Of compressed gradients; None: they travel as they are."""
        self.used = torch.empty(0)
        """1.0 for every parameter that any replica used in the step before."""

    @property
    def message_bytes(self) -> int:
        """Of one rank's gradients, as they travel."""
        plain = torch.float32.itemsize * self._replica.layout.numel
        return plain if self.feedback is None else self.feedback.message_bytes

    def begin(self, plan: GradientPlan, id: int, parts: Sequence[Part]) -> Reduction:
        buckets, message = self._buckets, self._buckets.offered
        mine = message if isinstance(message, GradientMessage) else None
        differ = len({p.mask for p in parts if p.mask or self.follows}) > 1
        return Reduction(
            id=id,
            kind=self,
            message=mine,
            target=buckets.landing() if mine is None else buckets.received,
            share=plan.weights[self._transfer.rank],
            used=torch.zeros(len(self._replica.layout)) if mine is None else mine.used.clone(),
            since=min((p.since for p in parts if p.weight > 0.0), default=0),
            masks_differ=differ,
            told=Told.by(parts),
            gates=self._box.num_opened,
            in_parts=any(p.in_parts for p in parts),
            at_once=not differ and all(p.in_parts and p.keeps for p in parts),
        )

    def move(self, exchange: Reduction) -> None:
        if exchange.in_parts:
            self._move_in_parts(exchange)
            return
        if exchange.masks_differ:
            self._transfer.largest_(exchange.used)
        target = self._replica.of_rule(exchange.target)
        self._replica.scaled_(target, self._replica.of_rule(self._buckets.sent), exchange.share)
        if self.feedback is None:
            self._transfer.sum_(target)
        else:
            exchange.residual = self.feedback.move_(target, exchange.share > 0.0, exchange.used)
        if self.apart:
            behind = getattr(exchange.message, "behind", None)
            divide_(self._replica.layout, target, behind, exchange.share, self._transfer)

    def _move_in_parts(self, exchange: Reduction) -> None:
        replica, message = self._replica, exchange.message
        out = None
        if isinstance(message, GradientMessage) and (out := message.out) is None:
            views = replica.of_rule(self._buckets.sent).split(replica.layout.sizes)
            out = Outgoing.whole(self._box.changed, views, message.used)
        sums = InParts(self._transfer, replica.layout, replica.of_rule(exchange.target), exchange.share, out)
        doubts = sums.sum_(exchange.used, exchange.at_once)
        exchange.doubt = doubts or exchange.masks_differ
        exchange.at_once &= not doubts
        exchange.settle = lambda: self._settle(exchange, sums)

    def _settle(self, exchange: Reduction, sums: InParts) -> None:
        exchange.doubt, used = False, sums.settle_()
        if used is not None:
            exchange.used = used
            return
        exchange.void, message = True, exchange.message
        out = message.out if isinstance(message, GradientMessage) else None
        with self._box.changed:
            if out is not None and out.withdrawn and self._buckets.message is message:
                self._buckets.message = None

    def commit(self, exchange: Reduction) -> None:
        """Of a step nothing is kept, but what its messages lacked."""
        if self.feedback is not None and exchange.residual is not None:
            self.feedback.commit(exchange.residual)

    def hand_over(self, exchange: Reduction) -> None:
        message, self.used = exchange.message, exchange.used
        self._on_step(message.samples if isinstance(message, GradientMessage) else None)
        if message is not None or self.follows:
            self._buckets.hand_over(exchange)

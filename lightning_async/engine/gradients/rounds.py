"""How gradients move: the wing's one kind of round, on the engine's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lightning_async import ops
from lightning_async.engine.control import ControlPlane
from lightning_async.engine.gradients.feedback import Feedback
from lightning_async.engine.gradients.packing import divide_
from lightning_async.engine.gradients.parts import InParts, Outgoing
from lightning_async.engine.gradients.records import GradientMessage, GradientPlan, Part, Reduction, Told

__all__ = ["GradientRounds"]


class GradientRounds:
    """One kind of round, see `Kind`.

    A mean that is not finite is never handed over. It has the same bits on all ranks, so that all see it at once and
    nobody commits it. Then each rank looks at what it has sent. Gradients that are not finite lose their weight, and
    the round is repeated without them. A step of finite gradients costs one look at its mean, on the engine's thread.

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
        self.drops = True
        """Means that are not finite are dropped; False where a gradient scaler is to see them, on all ranks."""
        self.dropped = 0
        """Messages of this replica that were dropped."""
        self.on_drop: Callable[[], None] = lambda: None
        """Called when one more was dropped."""

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
        exchange.doubt = self._is_polluted(exchange)
        exchange.settle = lambda: self._drop(exchange)

    def _move_in_parts(self, exchange: Reduction) -> None:
        replica, message = self._replica, exchange.message
        out = None
        if isinstance(message, GradientMessage) and (out := message.out) is None:
            views = replica.of_rule(self._buckets.sent).split(replica.layout.sizes)
            out = Outgoing.whole(self._box.changed, views, message.used)
        sums = InParts(self._transfer, replica.layout, replica.of_rule(exchange.target), exchange.share, out)
        doubts = sums.sum_(exchange.used, exchange.at_once)
        polluted = self._is_polluted(exchange)
        exchange.doubt = doubts or exchange.masks_differ or polluted
        exchange.at_once &= not (doubts or polluted)
        exchange.settle = lambda: self._settle(exchange, sums)

    def _settle(self, exchange: Reduction, sums: InParts) -> None:
        exchange.doubt, used = False, sums.settle_()
        if used is not None:
            exchange.used = used
            if self._is_polluted(exchange):  # behind what has changed late: that may have mended it, or not
                self._drop(exchange)
            return
        exchange.void, message = True, exchange.message
        out = message.out if isinstance(message, GradientMessage) else None
        with self._box.changed:
            if out is not None and out.withdrawn and self._buckets.message is message:
                self._buckets.message = None

    def _is_polluted(self, exchange: Reduction) -> bool:
        """Whether the mean is not finite; the same on all ranks."""
        return self.drops and not ops.all_finite(self._replica.of_rule(exchange.target))

    def _drop(self, exchange: Reduction) -> None:
        """The mean is not finite: the gradients that have made it so lose their weight. All ranks call this together.

        Where all gradients are finite their sum has overflowed: then all of them do.
        """
        exchange.void, message = True, exchange.message
        mine = message if isinstance(message, GradientMessage) and exchange.share > 0.0 else None
        sent = self._replica.of_rule(self._buckets.sent)
        is_bad = False
        if mine is not None:
            is_bad = not ops.all_finite(sent) if mine.out is None else not mine.out.all_finite()
        any_bad = torch.tensor([float(is_bad)])
        self._transfer.largest_(any_bad)
        if mine is None or not (is_bad or not any_bad.item()):
            return
        sent.zero_()  # checkpoints may hold what has left
        with self._box.changed:
            mine.dropped, mine.samples = True, 0.0
            mine.out, mine.used = None, torch.zeros_like(exchange.used)
            self.dropped += 1
        self.on_drop()

    def commit(self, exchange: Reduction) -> None:
        """Of a step nothing is kept, but what its messages lacked."""
        if self.feedback is not None and exchange.residual is not None:
            self.feedback.commit(exchange.residual)

    def hand_over(self, exchange: Reduction) -> None:
        message, self.used = exchange.message, exchange.used
        self._on_step(message.samples if isinstance(message, GradientMessage) else None)
        if message is not None or self.follows:
            self._buckets.hand_over(exchange)

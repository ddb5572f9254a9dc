"""Gradients through the engine, in step or in the background: averaged by weight, with late and empty replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_async.engine.buckets import Message
from lightning_async.engine.control import ControlPlane
from lightning_async.engine.gates import Gates
from lightning_async.engine.gradients.feedback import Feedback, GradientCompression
from lightning_async.engine.gradients.overlap import Overlap
from lightning_async.engine.gradients.packing import Plans, divide_, gradients_of, mask_of, pack_, unpack_, used_by
from lightning_async.engine.gradients.parts import InParts, Outgoing
from lightning_async.engine.gradients.records import GRADIENTS, GradientMessage, GradientPlan, Part, Reduction
from lightning_async.engine.header import Header
from lightning_async.engine.replica import Replica

__all__ = ["SynchronousGradients"]


class SynchronousGradients:
    """A wing, see `Wing`, and its one kind of round, see `Kind`.

    Args:
        control: the control plane; this registers with it.
        gates: by which the training thread waits.
        on_step: called under the lock where a step is committed, on all ranks, with this one's samples, or None where
            it was without gradients.
        weigh: the weight of gradients, of so many samples. Default: the samples.
    """

    blank = Part()
    takes_marks = True

    def __init__(
        self,
        control: ControlPlane,
        gates: Gates,
        on_step: Callable[[float | None], None],
        weigh: Callable[[float], float] = lambda samples: samples,
    ) -> None:
        self._buckets, self._transfer, self._box = control.buckets, control.transfer, control.mailbox
        self.replica: Replica = control.buckets.replica
        self._control, self._gates, self._on_step, self._weigh = control, gates, on_step, weigh
        self.apart = False
        """Parameters' gradients are means over different samples, on any rank: of optimizers that step apart."""
        self.follows = False
        """A replica takes the steps that it has no gradients in, too: it stands at a gate meanwhile."""
        self.feedback: Feedback | None = None
        """Of compressed gradients; None: they travel as they are."""
        self._overlap, self._used = Overlap(self.replica), torch.empty(0)  # parameters, in the step before
        self._there, self._back = Plans(), Plans()  # the engine's thread's; the training thread's
        self._taken = False  # what has arrived is with the optimizer: nobody looks at the parameters meanwhile
        control.register(self)

    def close(self) -> None:
        """Leave the parameters alone from now on."""
        self._overlap.close()

    def compress(self, compression: GradientCompression) -> None:
        """Let gradients travel like this, on all ranks; before the engine starts."""
        if compression != "none":
            self.feedback = Feedback(compression, self.replica, self._transfer)

    def owed(self) -> dict[str, Any] | None:
        """For a checkpoint: what compressed messages have lacked so far, copied; None where they are not compressed."""
        with self._box.committing:
            return None if self.feedback is None else self.feedback.state_dict()

    # ---- the training thread ----

    def begin_backward(self, samples: float, scale: float = 1.0) -> None:
        """A backward pass begins: let its gradients leave as it makes them, where that can be; `reduce_` follows.

        Args:
            samples, scale: as for `reduce_`.
        """
        if self._overlap.under_way or self.feedback is not None or not self._overlap.possible:
            return
        count, patience_s = len(self.replica.layout), self._control.deadlines.payload.total_seconds() / 2
        out = Outgoing(self._box.changed, patience_s, count, self._there, 1.0 / scale)
        expected = self._used if len(self._used) == count else torch.zeros(count)
        message = GradientMessage(GRADIENTS, self._step, samples, expected, self._step, out=out)
        self._buckets.take_when(self._buckets.can_pack, self._control.see)
        with self._buckets.used(message):
            self._overlap.begin(out)

    def withdraw(self) -> None:
        """The backward pass has failed: nobody waits for its gradients."""
        self._overlap.give_up()
        with self._box.changed:
            message = self._buckets.message
            if isinstance(message, GradientMessage) and message.out is not None:
                if self._buckets.announced:
                    message.out.withdraw()  # all hear of it
                else:
                    self._buckets.message = None

    def reduce_(self, samples: float, scale: float = 1.0) -> None:
        r"""Replace the gradients by their weighted mean over all replicas; stands still until it is there.

        .. math:: g \leftarrow s \sum_i \frac{n_i}{\sum_j n_j} \frac{g_i}{s_i}

        :math:`n_i` is the weight of replica :math:`i`: its samples, unless ``weigh`` says otherwise.

        Args:
            samples: samples behind the gradients of this replica.
            scale: this replica's loss scale (mixed precision); replicas may have different ones.
        """
        out = self._overlap.finish() if self._overlap.under_way else None
        if out is None:
            self._buckets.take_when(self._buckets.can_pack, self._control.see)
            trained = list(self.replica.tensors.trained.values())
            message = GradientMessage(GRADIENTS, self._step, samples, used_by(trained), self._step)
            self._post(lambda part: pack_(gradients_of(trained), part, 1.0 / scale), message)
        self.wait()
        self.take_(scale)
        if out is not None:
            out.gradients.clear()  # the next message lets go of this one, and forward passes need the memory
        self.stepped()

    def post(
        self, pack: Callable[[Tensor], None], samples: float, used: Tensor, since: int, behind: Tensor | None = None
    ) -> bool:
        """Have gradients averaged with all replicas', if the buckets are free; whether they are on their way.

        Args:
            pack: puts them into the parameters' part of a bucket.
            samples, used, since, behind: see `GradientMessage`.
        """
        with self._box.changed:
            self._control.see()
            if not self._buckets.can_pack():
                return False
            self._buckets.take()
        self._post(pack, GradientMessage(GRADIENTS, self._step, samples, used, since, behind))
        return True

    def _post(self, pack: Callable[[Tensor], None], message: GradientMessage) -> None:
        with self._buckets.used(message):
            pack(self.replica.of_rule(self._buckets.sent))

    @property
    def _step(self) -> int:
        return int(self._box.steps)

    def wait_until_free(self) -> None:
        """Stand still until gradients can be posted, or a mean has arrived that must be taken first."""
        self._gates.wait(lambda: self._buckets.can_pack() or self.arrived is not None)

    @property
    def free(self) -> bool:
        """Whether gradients can be posted, as things stand."""
        with self._box.changed:
            return self._buckets.can_pack()

    @property
    def in_flight(self) -> bool:
        """Gradients of this replica are on their way."""
        return isinstance(self._buckets.message, GradientMessage)

    @property
    def arrived(self) -> Reduction | None:
        """What `take_` finds: a mean, if one has arrived."""
        return arrived if isinstance(arrived := self._buckets.arrived, Reduction) and not self._taken else None

    def unstepped(self) -> tuple[GradientMessage, Tensor] | None:
        """Gradients of this replica that have left, with no step taken with them, and what they are."""
        with self._box.changed:
            message = self._buckets.arrived.message if self.arrived else self._buckets.message
        return (message, self.replica.of_rule(self._buckets.sent)) if isinstance(message, GradientMessage) else None

    def wait(self) -> None:
        """Stand still until nothing is in flight."""
        self._gates.wait(lambda: self._buckets.message is None)

    def take_(self, scale: float = 1.0, change: Callable[[Tensor, Reduction], None] | None = None) -> None:
        """The mean that has arrived, if one has, becomes the gradients; `stepped` follows.

        Args:
            scale: they are multiplied by it.
            change: called with the flat mean first, and with how it came about.
        """
        buckets = self._buckets
        if isinstance(arrived := buckets.arrived, Reduction):  # else no replica had a weight
            buckets.to_training.take()
            if change is not None:
                change(self.replica.of_rule(arrived.target), arrived)
            unpack_(self.replica, arrived.target, arrived.used, scale, self._back)
        self._taken = True

    def stepped(self) -> None:
        """What was taken is in the parameters: where this replica stands at a gate, that may open from now on."""
        with self._box.changed:
            self._buckets.arrived, self._taken = None, False
            self._box.changed.notify_all()

    # ---- headers ----

    def is_indispensable(self) -> bool:
        return False

    def compose(self) -> Part:
        return self.blank

    def complete(self, part: Part, message: Message | None, compare: bool) -> Part:
        if not isinstance(message, GradientMessage):
            return part
        return Part(self._weigh(message.samples), mask_of(message.used), message.since, int(message.out is not None))

    def is_due(self, parts: Sequence[Part]) -> bool:
        return any(p.weight > 0.0 for p in parts)

    def plan(self, priority: int, headers: Sequence[Header], parts: Sequence[Part]) -> GradientPlan | None:
        if priority != GRADIENTS:
            return None
        total = sum(p.weight for p in parts)
        return GradientPlan(self, tuple(p.weight / total for p in parts)) if total > 0.0 else GradientPlan(None)

    def settle(self, headers: Sequence[Header], parts: Sequence[Part]) -> tuple[bool, None]:
        return True, None

    def opened(self, here: bool) -> None:
        """Nothing is left over: a rank with gradients waits for them."""

    def drop(self) -> None:
        """No replica has a weight."""
        if isinstance(self._buckets.message, GradientMessage):
            self._buckets.message = None

    # ---- the round ----

    def begin(self, plan: GradientPlan, id: int, parts: Sequence[Part]) -> Reduction:
        buckets, message = self._buckets, self._buckets.offered
        mine = message if isinstance(message, GradientMessage) else None
        return Reduction(
            id=id,
            kind=self,
            message=mine,
            target=buckets.landing() if mine is None else buckets.received,
            share=plan.weights[self._transfer.rank],
            used=torch.zeros(len(self.replica.layout)) if mine is None else mine.used.clone(),
            since=min((p.since for p in parts if p.weight > 0.0), default=0),
            masks_differ=len({p.mask for p in parts if p.mask or self.follows}) > 1,
            weight=sum(p.weight for p in parts),
            gates=self._box.num_opened,
            in_parts=any(p.in_parts for p in parts),
        )

    def move(self, exchange: Reduction) -> None:
        if exchange.in_parts:
            self._move_in_parts(exchange)
            return
        if exchange.masks_differ:
            self._transfer.largest_(exchange.used)
        target = self.replica.of_rule(exchange.target)
        self.replica.scaled_(target, self.replica.of_rule(self._buckets.sent), exchange.share)
        if self.feedback is None:
            self._transfer.sum_(target)
        else:
            exchange.residual = self.feedback.move_(target, exchange.share > 0.0, exchange.used)
        if self.apart:
            behind = getattr(exchange.message, "behind", None)
            divide_(self.replica.layout, target, behind, exchange.share, self._transfer)

    def _move_in_parts(self, exchange: Reduction) -> None:
        replica, message = self.replica, exchange.message
        out = None
        if isinstance(message, GradientMessage):
            views = replica.of_rule(self._buckets.sent).split(replica.layout.sizes)
            out = message.out or Outgoing.whole(self._box.changed, views, message.used)
        sums = InParts(self._transfer, replica.layout, replica.of_rule(exchange.target), exchange.share, out)
        exchange.doubt = sums.sum_(exchange.used) or exchange.masks_differ
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
        message, self._used = exchange.message, exchange.used
        self._on_step(message.samples if isinstance(message, GradientMessage) else None)
        if message is not None or self.follows:
            self._buckets.hand_over(exchange)

"""Gradients averaged by the engine, in synchronous steps or in the background of training.

`SynchronousGradients` is the component. On the training thread, its methods post gradients and take the mean. On the
engine's thread, its methods write the numbers about gradients into this rank's header, the row of numbers that each
rank sends to all others before an exchange. `GradientRounds` is its only round type, on the engine's thread. A mean may
be without the gradients of some replicas, such as a replica without data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_async import ops
from lightning_async.engine.buckets import InFlightRound, Message, RoundType
from lightning_async.engine.control_plane import ControlPlane
from lightning_async.engine.decision import ComponentPlan, EngineComponent
from lightning_async.engine.gradients import overlap
from lightning_async.engine.gradients.compression import GradientCompression, GradientResiduals
from lightning_async.engine.replica import Replica
from lightning_async.engine.shared_state import Header
from lightning_async.engine.sync_points import SyncPoints

GRADIENTS = 2
"""The priority of gradient rounds. It is the highest, as ranks with a message for averaging take part in them, too."""


class GradientPart(NamedTuple):
    """The numbers about its gradients that one rank sends in its header, before a reduction."""

    weight: float = 0.0  # weight of this rank's gradients in the mean
    mask: int = 0  # hash of the set of parameters that have a gradient
    since: int = 0  # number of steps taken when the first gradient was computed
    in_parts: int = 0  # 1 where gradients are sent while others are computed, so that the mask is a guess
    samples: float = 0.0  # number of samples from which the gradients were computed
    base: float = 0.0  # this rank's wish for `GradientsMean.base`; 0 for none
    size: float = 0.0  # this rank's wish for `GradientsMean.size`; 0 for none
    keeps: int = 0  # 1 where the mean stays in its bucket unchanged after the hand-over
    there: int = 0  # 1 where there is a message, even if its weight is 0


class GradientsMean(NamedTuple):
    """The facts about a mean of gradients, without the mean; equal on all ranks that take a step with that mean."""

    weight: float = 0.0  # weight of all replicas' gradients
    samples: float = 0.0  # number of samples from which they were computed
    ranks: int = 0  # number of replicas, with those without gradients
    base: float = 0.0  # samples per replica for which the learning rate is set: mean of all wishes
    size: float = 0.0  # size of the next window of gradients: the wish of the first replica with gradients

    @classmethod
    def by(cls, parts: Sequence[GradientPart]) -> GradientsMean:
        if not (having := [p for p in parts if p.weight > 0.0]):
            return cls()
        weight, samples, base = (sum(getattr(p, name) for p in having) for name in ("weight", "samples", "base"))
        return cls(weight, samples, len(parts), base / len(having), having[0].size)


@dataclass
class GradientMessage(Message):
    """A message of gradients, which are in the `sent` bucket; or in `out`, if they are sent during a backward pass."""

    samples: float  # number of samples from which they were computed
    used: Tensor  # 1.0 for every parameter that has a gradient, or is expected to have one
    since: int  # number of steps taken when the first gradient was computed
    behind: Tensor | None = None  # by parameter, the part of the samples in its gradient; None: all. See `Window`
    out: overlap.Outgoing | None = None  # the gradients so far, where they are sent while others are computed
    keeps: bool = False  # their mean stays in its bucket unchanged until the next gradients
    dropped: bool = False  # they are not finite and have no weight, see `GradientRounds`
    asks: tuple[float, float] = (0.0, 0.0)  # this replica's wishes for `base` and `size` of `GradientsMean`

    @property
    def ready(self) -> bool:
        return self.out is None or self.out.ready


class EarlierPasses(NamedTuple):
    """The gradients of a message's backward passes before the last one."""

    pack: Callable[[Tensor], None] | None  # packs their gradients into the parameters' part of a bucket, if any
    used: Tensor  # 1.0 for every parameter that has a gradient from them
    since: int  # number of steps taken when the first gradient was computed


@dataclass(kw_only=True)
class Reduction(InFlightRound):
    """The record of one exchange that averages gradients, from the ranks' decision to the optimizer's step."""

    share: float  # this rank's share in the mean
    used: Tensor  # 1.0 for every parameter that any replica used
    since: int  # the smallest of all replicas' `GradientPart.since`
    masks_differ: bool  # replicas used different parameters, or one without gradients must learn which
    told: GradientsMean  # the facts of the mean
    residual: Tensor | None = None  # the compression residual to commit; None: it stays
    in_parts: bool = False  # some replica sends gradients while it computes others


class SynchronousGradients(EngineComponent):
    """A component of the engine that averages gradients; it registers itself with the control plane.

    After every committed mean, the engine's thread of each rank calls ``on_step`` with this rank's number of samples in
    the mean, or with None if this rank had no gradients. The thread holds `SharedState.changed` during the call.
    ``weigh`` returns the weight of gradients for a given number of samples. Default: that number.
    """

    blank = GradientPart()
    priority = GRADIENTS

    def __init__(
        self,
        control: ControlPlane,
        sync_points: SyncPoints,
        on_step: Callable[[float | None], None],
        weigh: Callable[[float], float] = lambda samples: samples,
    ) -> None:
        self._buckets = control.buckets
        self._transfer = control.transfer
        self._box = control.shared_state
        self.replica: Replica = control.buckets.replica
        self._control = control
        self._sync_points = sync_points
        self._weigh = weigh
        self.rounds = GradientRounds(control, on_step)
        self._overlap = overlap.Overlap(self.replica)
        self.asks = (0.0, 0.0)  # of the next message, see `GradientMessage`
        self.told: GradientsMean | None = None  # the facts of the mean that was taken last
        self._there = overlap.Plans()
        self._back = overlap.Plans()  # for the engine's thread, and for the training thread
        self._taken = False  # the optimizer is stepping with the mean: no sync point may read the parameters
        control.register(self)

    def close(self) -> None:
        self._overlap.close()

    def compress(self, compression: GradientCompression) -> None:
        """Set the compression of gradients; all ranks set the same one, before the engine starts."""
        if compression != "none":
            self.rounds.feedback = GradientResiduals(compression, self.replica, self._transfer)

    def carried_residual(self) -> dict[str, Any] | None:
        """Copy the residual of compressed gradients for a checkpoint; return None without compression."""
        with self._box.committing:
            return None if self.rounds.feedback is None else self.rounds.feedback.state_dict()

    def begin_backward(self, samples: float, scale: float = 1.0) -> None:
        """Start to send gradients during the backward pass that begins now, if that is possible.

        The caller calls `reduce_` after the pass, or `withdraw` if the pass fails. ``samples`` and ``scale`` are as in
        `reduce_`. This waits until the buckets are free.
        """
        if not self._overlap.under_way and self._can_overlap:
            self._check_precision()
            self._buckets.take_when(self._buckets.can_pack, self._control.see)
            message = GradientMessage(GRADIENTS, self._step, samples, self._expected, self._step, keeps=True)
            self._begin(message, 1.0 / scale)

    def begin_last(self, before: EarlierPasses, samples: float, weight: float) -> bool:
        """Start to send gradients during the last of several backward passes; return whether this was possible.

        If it was, the caller calls `finish_last` after the pass, or `withdraw` if the pass fails. It is not possible on
        GPUs, with compression, or while the buckets are in use.

        Args:
            before: Gradients of the earlier passes, which are added to those of the last pass.
            samples: Number of samples in all passes together.
            weight: Factor of the last pass's gradients.
        """
        if not self._can_overlap or not self._take_free():
            return False
        self._begin(GradientMessage(GRADIENTS, self._step, samples, self._expected, before.since), weight, before)
        return True

    def finish_last(self) -> None:
        """Send the last pass's remaining gradients; parameters keep their gradients until the mean replaces these."""
        self._overlap.finish()

    @property
    def _can_overlap(self) -> bool:
        return self.rounds.feedback is None and self._overlap.possible

    @property
    def _expected(self) -> Tensor:
        count = len(self.replica.layout)
        return self.rounds.used if len(self.rounds.used) == count else torch.zeros(count)

    def _begin(self, message: GradientMessage, weight: float, before: EarlierPasses | None = None) -> None:
        """Create the message of a backward pass that begins now; its gradients are sent during the pass.

        The training thread must own the buckets.
        """
        patience_s = self._control.timeouts.payload.total_seconds() / 2
        base = None if before is None or before.pack is None else self.replica.of_rule(self._buckets.sent)
        count = len(self.replica.layout)
        message.out = out = overlap.Outgoing(self._box.changed, patience_s, count, self._there, weight)
        message.asks = self.asks
        if before is not None:
            out.base = base
            out.used = before.used
        with self._buckets.used(message):
            if before is not None and before.pack is not None and base is not None:
                before.pack(base)
            self._overlap.begin(out)

    def withdraw(self) -> None:
        """Withdraw the gradients of a backward pass that has failed, so that no rank waits for them."""
        self._overlap.give_up()
        with self._box.changed:
            message = self._buckets.message
            if isinstance(message, GradientMessage) and message.out is not None:
                if self._buckets.announced:
                    message.out.withdraw()  # a header has announced it: all ranks learn of this in the round
                else:
                    self._buckets.message = None

    def reduce_(self, samples: float, scale: float = 1.0) -> None:
        r"""Replace the gradients by their weighted mean over all replicas, after waiting until the mean has arrived.

        .. math:: g \leftarrow s \sum_i \frac{n_i}{\sum_j n_j} \frac{g_i}{s_i}

        :math:`n_i` is the weight of replica :math:`i`: its number of ``samples``, unless ``weigh`` gives another
        weight. :math:`s_i` is the loss ``scale`` of replica :math:`i` (mixed precision), and :math:`s` this replica's.
        """
        out = self._overlap.finish() if self._overlap.under_way else None
        if out is None:
            self._check_precision()
            self._buckets.take_when(self._buckets.can_pack, self._control.see)
            trained = list(self.replica.tensors.trained.values())
            message = GradientMessage(GRADIENTS, self._step, samples, overlap.used_by(trained), self._step)
            self._post(lambda part: overlap.pack_(overlap.gradients_of(trained), part, 1.0 / scale), message)
        self.wait()
        self.take_(scale)
        if out is not None:
            out.gradients.clear()  # frees their memory for forward passes: this message stays until the next one
        self.stepped()

    def post(
        self, pack: Callable[[Tensor], None], samples: float, used: Tensor, since: int, behind: Tensor | None = None
    ) -> bool:
        """Post gradients to be averaged, if the buckets are free; return whether the gradients were posted.

        ``pack`` is called with the parameters' part of a bucket, and writes the gradients into it. For the other
        arguments see `GradientMessage`.
        """
        if not self._take_free():
            return False
        self._post(pack, GradientMessage(GRADIENTS, self._step, samples, used, since, behind))
        return True

    def _check_precision(self) -> None:
        """Raise ValueError for trained parameters of 64 bits: the fp32 bucket would round their gradients."""
        layout = self.replica.layout
        if torch.float64 in layout.dtypes:
            wide = [name for name, dtype in zip(layout.names, layout.dtypes, strict=True) if dtype is torch.float64]
            raise ValueError(
                f"{wide[:3]} ({len(wide)} parameters) have 64 bits, and gradients travel in fp32, which would round "
                "them in every step. Train in 32 bits, or use averaging rounds, such as `AsyncAveragingStrategy()`: "
                "replicas then step in 64 bits, and sync points take the mean in 64 bits. With "
                "`Warmup(warmup_sync_every=)` a warm-up takes rounds, too."
            )

    def _take_free(self) -> bool:
        self._check_precision()
        with self._box.changed:
            self._control.see()
            if not self._buckets.can_pack():
                return False
            self._buckets.take()
        return True

    def _post(self, pack: Callable[[Tensor], None], message: GradientMessage) -> None:
        message.asks = self.asks
        with self._buckets.used(message):
            pack(self.replica.of_rule(self._buckets.sent))

    @property
    def _step(self) -> int:
        return int(self._box.steps)

    def wait_until_free(self) -> None:
        """Wait until gradients can be posted, or until a mean has arrived that must be taken first."""
        self._sync_points.wait(lambda: self._buckets.can_pack() or self.arrived is not None)

    @property
    def free(self) -> bool:
        with self._box.changed:
            return self._buckets.can_pack()

    @property
    def in_flight(self) -> bool:
        return isinstance(self._buckets.message, GradientMessage)

    @property
    def arrived(self) -> Reduction | None:
        """The record of a mean that has arrived and that `take_` has not copied yet; None if there is none."""
        return arrived if isinstance(arrived := self._buckets.arrived, Reduction) and not self._taken else None

    def unstepped(self) -> tuple[GradientMessage, Tensor] | None:
        """Return the message that was sent but not used in a step yet, and its gradients as one flat tensor.

        Return None if there is no such message, or if its backward pass is not complete.
        """
        with self._box.changed:
            message = self._buckets.arrived.message if self.arrived else self._buckets.message
        if not isinstance(message, GradientMessage):
            return None
        if (out := message.out) is None:
            return message, self.replica.of_rule(self._buckets.sent)
        return None if out.flags is None else (replace(message, used=out.has(), out=None), out.all())

    def wait(self) -> None:
        """Wait until this rank's message is averaged or dropped, or until a mean without this message arrives.

        Return at once if this rank has no message.
        """
        buckets = self._buckets
        self._sync_points.wait(lambda: buckets.message is None or buckets.arrived is not None)
        message = buckets.message
        if isinstance(message, GradientMessage) and message.out is not None and message.out.flags is not None:
            # The step of the others comes first and needs the memory of the gradients. So the gradients of the message
            # move into the bucket; no header announces the message before that step is taken.
            self.replica.of_rule(buckets.sent).copy_(message.out.all())
            message.used = message.out.has()
            message.out = None

    def take_(self, scale: float = 1.0, change: Callable[[Tensor, Reduction], None] | None = None) -> None:
        """Copy the mean that has arrived, times ``scale``, into the parameters' gradients.

        If there is no mean, because no replica had gradients, set the gradients to None. ``change`` is called before
        the copy, with the flat mean and the record of its reduction, and may change the mean in place. The caller calls
        `stepped` after the optimizer's step.
        """
        buckets = self._buckets
        self.told = GradientsMean()
        if isinstance(arrived := buckets.arrived, Reduction):  # None: no replica had any weight
            buckets.to_training.take()
            self.told = arrived.told
            mean = self.replica.of_rule(arrived.target)
            changes = scale != 1.0 or change is not None
            mean = mean.clone() if changes and arrived.at_once else mean  # others may need it unchanged
            if change is not None:
                change(mean, arrived)
            overlap.unpack_(self.replica, mean, arrived.used, scale, self._back)
        elif buckets.arrived is None:  # this replica's gradients were dropped, or are of no samples
            for p in self.replica.tensors.trained.values():
                p.grad = None
        self._taken = True

    def stepped(self) -> None:
        """Record that the optimizer's step with the mean of gradients was taken.

        From now on, new messages may be packed, and a sync point may open for this replica.
        """
        with self._box.changed:
            self._buckets.arrived = None
            self._taken = False
            self._box.changed.notify_all()

    def announce(self, part: GradientPart, message: GradientMessage) -> GradientPart:
        out = int(message.out is not None)
        weight = self._weigh(message.samples)
        used = overlap.mask_of(message.used)
        since = message.since
        samples = message.samples
        return GradientPart(weight, used, since, out, samples, *message.asks, int(message.keeps), there=1)

    def is_due(self, parts: Sequence[GradientPart]) -> bool:
        return any(p.there for p in parts)

    def plan(self, headers: Sequence[Header], parts: Sequence[GradientPart]) -> ComponentPlan:
        total = sum(p.weight for p in parts)
        if total <= 0.0:
            return ComponentPlan(None)
        return ComponentPlan(self.rounds, tuple(p.weight / total for p in parts))

    def drop(self) -> None:
        if isinstance(self._buckets.message, GradientMessage):
            self._buckets.message = None


class GradientRounds(RoundType):
    """A round type that averages gradients.

    A mean that is not finite is never passed to the training thread, unless `drops` is False. The mean has the same
    bits on all ranks, so no rank commits it. Each rank then checks the gradients that it has sent. Gradients that are
    not finite get the weight zero, and the round is repeated without them.
    """

    def __init__(self, control: ControlPlane, on_step: Callable[[float | None], None]) -> None:
        self._buckets = control.buckets
        self._transfer = control.transfer
        self._box = control.shared_state
        self._replica = control.buckets.replica
        self._on_step = on_step
        self.apart = False
        """Whether optimizers step apart, so that parameters' gradients are means over different samples on some rank.

        All ranks set the same value.
        """
        self.follows = False
        """Whether a replica without gradients also takes each step with the mean, while it waits at a sync point."""
        self.feedback: GradientResiduals | None = None  # of compressed gradients; None without compression
        self.used = torch.empty(0)  # 1.0 for every parameter that any replica used in the last step
        self.drops = True
        """Whether means that are not finite are dropped; False on all ranks where a gradient scaler must see them."""
        self.dropped = 0  # number of dropped messages of this replica
        self.on_drop: Callable[[], None] = lambda: None  # called after each of them

    @property
    def message_bytes(self) -> int:
        plain = torch.float32.itemsize * self._replica.layout.numel
        return plain if self.feedback is None else self.feedback.message_bytes

    def begin(self, plan: ComponentPlan, id: int, parts: Sequence[GradientPart]) -> Reduction:
        buckets = self._buckets
        message = self._buckets.offered
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
            told=GradientsMean.by(parts),
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
            overlap.divide_(self._replica.layout, target, behind, exchange.share, self._transfer)
        exchange.doubt = self._is_polluted(exchange)
        exchange.settle = lambda: self._drop(exchange)

    def _move_in_parts(self, exchange: Reduction) -> None:
        replica = self._replica
        message = exchange.message
        out = None
        if isinstance(message, GradientMessage) and (out := message.out) is None:
            views = replica.of_rule(self._buckets.sent).split(replica.layout.sizes)
            out = overlap.Outgoing.whole(self._box.changed, views, message.used)
        sums = overlap.InParts(self._transfer, replica.layout, replica.of_rule(exchange.target), exchange.share, out)
        doubts = sums.sum_(exchange.used, exchange.at_once)
        polluted = self._is_polluted(exchange)
        exchange.doubt = doubts or exchange.masks_differ or polluted
        exchange.at_once &= not (doubts or polluted)
        exchange.settle = lambda: self._settle(exchange, sums)

    def _settle(self, exchange: Reduction, sums: overlap.InParts) -> None:
        exchange.doubt = False
        used = sums.settle_()
        if used is not None:
            exchange.used = used
            if self._is_polluted(exchange):  # the late sums may have replaced the bad values, or not
                self._drop(exchange)
            return
        exchange.void = True
        message = exchange.message
        out = message.out if isinstance(message, GradientMessage) else None
        with self._box.changed:
            if out is not None and out.withdrawn and self._buckets.message is message:
                self._buckets.message = None

    def _is_polluted(self, exchange: Reduction) -> bool:
        """Return whether the mean is not finite and must be dropped; the result is the same on all ranks."""
        return self.drops and not ops.all_finite(self._replica.of_rule(exchange.target))

    def _drop(self, exchange: Reduction) -> None:
        """Cancel an exchange whose mean is not finite, and give the gradients that caused this the weight zero.

        All ranks call this together. A rank's gradients get the weight zero if they are not finite. If the gradients of
        all ranks are finite, their sum has overflowed; then the gradients of all ranks get the weight zero.
        """
        exchange.void = True
        message = exchange.message
        mine = message if isinstance(message, GradientMessage) and exchange.share > 0.0 else None
        sent = self._replica.of_rule(self._buckets.sent)
        is_bad = False
        if mine is not None:
            is_bad = not ops.all_finite(sent) if mine.out is None else not mine.out.all_finite()
        any_bad = torch.tensor([float(is_bad)])
        self._transfer.largest_(any_bad)
        if mine is None or not (is_bad or not any_bad.item()):
            return
        sent.zero_()  # checkpoints may hold what was sent
        with self._box.changed:
            mine.dropped = True
            mine.samples = 0.0
            mine.out = None
            mine.used = torch.zeros_like(exchange.used)
            self.dropped += 1
        self.on_drop()

    def commit(self, exchange: Reduction) -> None:
        if self.feedback is not None and exchange.residual is not None:
            self.feedback.commit(exchange.residual)

    def hand_over(self, exchange: Reduction) -> None:
        message = exchange.message
        self.used = exchange.used
        self._on_step(message.samples if isinstance(message, GradientMessage) else None)
        if message is not None or self.follows:
            self._buckets.hand_over(exchange)

"""Gradients through the engine, in step or in the background: averaged by weight, with late and empty replicas.

`SynchronousGradients` is the component, on the training thread and in headers; `GradientRounds` is its one round type,
on the engine's thread.
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
"""The priority of synchronous steps: others have messages too while one rank is at such a step, and go with it."""


class GradientPart(NamedTuple):
    """One rank's part of a header."""

    weight: float = 0.0  # of its gradients in the mean
    mask: int = 0  # a hash of which parameters have one
    since: int = 0  # steps that had been taken when the first of them was computed
    in_parts: int = 0  # 1 where they leave while they are computed, so that the mask is an expected one
    samples: float = 0.0  # behind them
    base: float = 0.0  # see `GradientsMean`, as this rank would have it; 0 where it does not ask
    size: float = 0.0  # see `GradientsMean`, as this rank would have it; 0 where it does not ask
    keeps: int = 0  # 1 where their mean stays in its bucket as it is
    there: int = 0  # 1 where there is a message, be its weight 0


class GradientsMean(NamedTuple):
    """Facts of gradients that become one, the same on all who step with these."""

    weight: float = 0.0  # of all replicas' gradients
    samples: float = 0.0  # behind them
    ranks: int = 0  # number of replicas, those without gradients too
    base: float = 0.0  # samples that learning rates are for, of one replica: the mean over those with gradients
    size: float = 0.0  # of the window of gradients that comes, as the first replica with gradients would have it

    @classmethod
    def by(cls, parts: Sequence[GradientPart]) -> GradientsMean:
        if not (having := [p for p in parts if p.weight > 0.0]):
            return cls()
        weight, samples, base = (sum(getattr(p, name) for p in having) for name in ("weight", "samples", "base"))
        return cls(weight, samples, len(parts), base / len(having), having[0].size)


@dataclass
class GradientMessage(Message):
    """Gradients in the `sent` bucket."""

    samples: float  # behind them
    used: Tensor  # 1.0 for every parameter that has one, or is expected to have one
    since: int  # steps that had been taken when the first of them was computed
    behind: Tensor | None = None  # part of these samples for each parameter's gradient; None: all. See `Window`
    out: overlap.Outgoing | None = None  # their progress, where they leave while they are computed
    keeps: bool = False  # their mean stays in its bucket as it is, until other gradients are there
    dropped: bool = False  # they are not finite, and have no weight; see `GradientRounds`
    asks: tuple[float, float] = (0.0, 0.0)  # `base` and `size` of `GradientsMean`, as this replica would have them

    @property
    def ready(self) -> bool:
        return self.out is None or self.out.ready


class EarlierPasses(NamedTuple):
    """The backward passes before the last one of a message."""

    pack: Callable[[Tensor], None] | None  # puts their gradients into the rule's part of a bucket; None: none
    used: Tensor  # 1.0 for every parameter that has a gradient of theirs
    since: int  # steps that had been taken when the first gradient was computed


@dataclass(kw_only=True)
class Reduction(InFlightRound):
    """Gradients on their way."""

    share: float  # this rank's share in the mean
    used: Tensor  # 1.0 for every parameter that any replica used
    since: int  # the smallest of all replicas', see `GradientPart`
    masks_differ: bool  # replicas used different ones, or one that follows has none to know them by
    told: GradientsMean  # the facts of all ranks' gradients
    residual: Tensor | None = None  # of compression, once this is committed; None: as before
    in_parts: bool = False  # some replica's leave while they are computed


class SynchronousGradients(EngineComponent):
    """The component that averages gradients; it registers with the control plane.

    ``on_step`` is called under the lock where a step is committed, on all ranks, with this one's samples, or None if it
    had no gradients. ``weigh`` gives the weight of gradients of so many samples. Default: the samples.
    """

    blank = GradientPart()

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
        self.asks = (0.0, 0.0)  # of the next gradients that leave, see `GradientMessage`
        self.told: GradientsMean | None = None  # the facts of the mean that was taken last
        self._there = overlap.Plans()
        self._back = overlap.Plans()  # the engine's thread's; the training thread's
        self._taken = False  # what has arrived is with the optimizer: nobody looks at the parameters meanwhile
        control.register(self)

    def close(self) -> None:
        self._overlap.close()

    def compress(self, compression: GradientCompression) -> None:
        """Compress gradients like this, on all ranks; before the engine starts."""
        if compression != "none":
            self.rounds.feedback = GradientResiduals(compression, self.replica, self._transfer)

    def carried_residual(self) -> dict[str, Any] | None:
        """Copy the residual of compressed gradients for a checkpoint; None where they are not."""
        with self._box.committing:
            return None if self.rounds.feedback is None else self.rounds.feedback.state_dict()

    def begin_backward(self, samples: float, scale: float = 1.0) -> None:
        """Begin a backward pass whose gradients leave as it makes them, where they can; `reduce_` follows."""
        if not self._overlap.under_way and self._can_overlap:
            self._buckets.take_when(self._buckets.can_pack, self._control.see)
            message = GradientMessage(GRADIENTS, self._step, samples, self._expected, self._step, keeps=True)
            self._begin(message, 1.0 / scale)

    def begin_last(self, before: EarlierPasses, samples: float, weight: float) -> bool:
        """Begin the last of several passes; return whether its gradients leave as it makes them.

        They are multiplied by ``weight``, and those of the passes ``before`` go with them, ``samples`` in all;
        `finish_last` follows, or `withdraw`.
        """
        if not self._can_overlap or not self._take_free():
            return False
        self._begin(GradientMessage(GRADIENTS, self._step, samples, self._expected, before.since), weight, before)
        return True

    def finish_last(self) -> None:
        """End the last pass. Gradients stay with the parameters until their mean replaces them."""
        self._overlap.finish()

    @property
    def _can_overlap(self) -> bool:
        return self.rounds.feedback is None and self._overlap.possible

    @property
    def _expected(self) -> Tensor:
        count = len(self.replica.layout)
        return self.rounds.used if len(self.rounds.used) == count else torch.zeros(count)

    def _begin(self, message: GradientMessage, weight: float, before: EarlierPasses | None = None) -> None:
        """Make the message of a backward pass that begins; the buckets were taken."""
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
        """End a backward pass that has failed: nobody waits for its gradients."""
        self._overlap.give_up()
        with self._box.changed:
            message = self._buckets.message
            if isinstance(message, GradientMessage) and message.out is not None:
                if self._buckets.announced:
                    message.out.withdraw()  # all hear of it
                else:
                    self._buckets.message = None

    def reduce_(self, samples: float, scale: float = 1.0) -> None:
        r"""Replace the gradients by their weighted mean over all replicas; wait until it is there.

        .. math:: g \leftarrow s \sum_i \frac{n_i}{\sum_j n_j} \frac{g_i}{s_i}

        :math:`n_i` is the weight of replica :math:`i`: its ``samples``, unless ``weigh`` says otherwise; :math:`s_i`
        its loss ``scale`` (mixed precision).
        """
        out = self._overlap.finish() if self._overlap.under_way else None
        if out is None:
            self._buckets.take_when(self._buckets.can_pack, self._control.see)
            trained = list(self.replica.tensors.trained.values())
            message = GradientMessage(GRADIENTS, self._step, samples, overlap.used_by(trained), self._step)
            self._post(lambda part: overlap.pack_(overlap.gradients_of(trained), part, 1.0 / scale), message)
        self.wait()
        self.take_(scale)
        if out is not None:
            out.gradients.clear()  # the next message lets go of this one, and forward passes need the memory
        self.stepped()

    def post(
        self, pack: Callable[[Tensor], None], samples: float, used: Tensor, since: int, behind: Tensor | None = None
    ) -> bool:
        """Have gradients averaged, if the buckets are free; return whether they are on their way.

        ``pack`` puts them into the parameters' part of a bucket; for the rest see `GradientMessage`.
        """
        if not self._take_free():
            return False
        self._post(pack, GradientMessage(GRADIENTS, self._step, samples, used, since, behind))
        return True

    def _take_free(self) -> bool:
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
        """Wait until gradients can be posted, or a mean has arrived that must be taken first."""
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
        """The mean that `take_` finds, if one has arrived."""
        return arrived if isinstance(arrived := self._buckets.arrived, Reduction) and not self._taken else None

    def unstepped(self) -> tuple[GradientMessage, Tensor] | None:
        """Return the message and the gradients that have left, with no step taken with them."""
        with self._box.changed:
            message = self._buckets.arrived.message if self.arrived else self._buckets.message
        if not isinstance(message, GradientMessage):
            return None
        if (out := message.out) is None:
            return message, self.replica.of_rule(self._buckets.sent)
        return None if out.flags is None else (replace(message, used=out.has(), out=None), out.all())

    def wait(self) -> None:
        """Wait until nothing is in flight, or others' step, that this replica was late for, comes first."""
        buckets = self._buckets
        self._sync_points.wait(lambda: buckets.message is None or buckets.arrived is not None)
        message = buckets.message
        if isinstance(message, GradientMessage) and message.out is not None and message.out.flags is not None:
            # No header speaks of it before that step is taken, which needs the gradients' place.
            self.replica.of_rule(buckets.sent).copy_(message.out.all())
            message.used = message.out.has()
            message.out = None

    def take_(self, scale: float = 1.0, change: Callable[[Tensor, Reduction], None] | None = None) -> None:
        """Make the mean that has arrived, if any, times ``scale``, the gradients; `stepped` follows.

        ``change`` is called with the flat mean first, and with its reduction.
        """
        buckets = self._buckets
        self.told = GradientsMean()
        if isinstance(arrived := buckets.arrived, Reduction):  # else no replica had a weight
            buckets.to_training.take()
            self.told = arrived.told
            mean = self.replica.of_rule(arrived.target)
            changes = scale != 1.0 or change is not None
            mean = mean.clone() if changes and arrived.at_once else mean  # others may need it as it is
            if change is not None:
                change(mean, arrived)
            overlap.unpack_(self.replica, mean, arrived.used, scale, self._back)
        elif buckets.arrived is None:  # what is left here was dropped, or is of no samples
            for p in self.replica.tensors.trained.values():
                p.grad = None
        self._taken = True

    def stepped(self) -> None:
        """Note that the step was taken: a sync point may open for this replica from now on."""
        with self._box.changed:
            self._buckets.arrived = None
            self._taken = False
            self._box.changed.notify_all()

    def complete(self, part: GradientPart, message: Message | None, compare: bool) -> GradientPart:
        if not isinstance(message, GradientMessage):
            return part
        out = int(message.out is not None)
        weight = self._weigh(message.samples)
        used = overlap.mask_of(message.used)
        since = message.since
        samples = message.samples
        return GradientPart(weight, used, since, out, samples, *message.asks, int(message.keeps), there=1)

    def is_due(self, parts: Sequence[GradientPart]) -> bool:
        return any(p.there for p in parts)

    def plan(self, priority: int, headers: Sequence[Header], parts: Sequence[GradientPart]) -> ComponentPlan | None:
        if priority != GRADIENTS:
            return None
        total = sum(p.weight for p in parts)
        if total <= 0.0:
            return ComponentPlan(None)
        return ComponentPlan(self.rounds, tuple(p.weight / total for p in parts))

    def drop(self) -> None:
        if isinstance(self._buckets.message, GradientMessage):
            self._buckets.message = None


class GradientRounds(RoundType):
    """The round type of gradients.

    A mean that is not finite is never handed over. It has the same bits on all ranks, so that nobody commits it. Then
    each rank looks at what it has sent: gradients that are not finite lose their weight, and the round is repeated
    without them.
    """

    def __init__(self, control: ControlPlane, on_step: Callable[[float | None], None]) -> None:
        self._buckets = control.buckets
        self._transfer = control.transfer
        self._box = control.shared_state
        self._replica = control.buckets.replica
        self._on_step = on_step
        self.apart = False
        """Parameters' gradients are means over different samples, on any rank: of optimizers that step apart."""
        self.follows = False
        """A replica takes the steps that it has no gradients in, too: it stands at a sync point meanwhile."""
        self.feedback: GradientResiduals | None = None  # of compressed gradients; None: they travel as they are
        self.used = torch.empty(0)  # 1.0 for every parameter that any replica used in the step before
        self.drops = True
        """Means that are not finite are dropped; False where a gradient scaler is to see them, on all ranks."""
        self.dropped = 0  # messages of this replica that were dropped
        self.on_drop: Callable[[], None] = lambda: None  # called when one more was dropped

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
            if self._is_polluted(exchange):  # behind what has changed late: that may have mended it, or not
                self._drop(exchange)
            return
        exchange.void = True
        message = exchange.message
        out = message.out if isinstance(message, GradientMessage) else None
        with self._box.changed:
            if out is not None and out.withdrawn and self._buckets.message is message:
                self._buckets.message = None

    def _is_polluted(self, exchange: Reduction) -> bool:
        """Return whether the mean is not finite; the same on all ranks."""
        return self.drops and not ops.all_finite(self._replica.of_rule(exchange.target))

    def _drop(self, exchange: Reduction) -> None:
        """Take the weight from gradients that make the mean not finite. All ranks call this together.

        Where all gradients are finite their sum has overflowed: then all of them lose it.
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
        sent.zero_()  # checkpoints may hold what has left
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

"""Gradients through the engine, in step or in the background: averaged by weight, with late and empty replicas.

`SynchronousGradients` is the component, on the training thread and in headers; `GradientRounds` is its one round type,
on the engine's thread. The records before them are what is said of gradients in headers, and what is known of them on
their way.
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
from lightning_async.engine.gradients.compression import GradientCompression, GradientResiduals
from lightning_async.engine.gradients.overlap import (
    InParts,
    Outgoing,
    Overlap,
    Plans,
    divide_,
    gradients_of,
    mask_of,
    pack_,
    unpack_,
    used_by,
)
from lightning_async.engine.replica import Replica
from lightning_async.engine.shared_state import Header
from lightning_async.engine.sync_points import SyncPoints

GRADIENTS = 2
"""The priority of synchronous steps: others have messages too while one rank is at such a step, and go with it."""


class GradientPart(NamedTuple):
    """What one rank says of its gradients in a header.

    Args:
        weight: what they count in the mean.
        mask: a hash of which parameters have one.
        since: steps that had been taken when the first of them was computed.
        in_parts: 1 where they leave while they are computed, so that the mask is what is expected.
        samples: behind them.
        base, size: see `GradientsMean`, as this rank would have it; 0 where it does not ask.
        keeps: 1 where their mean stays in its bucket as it is.
        there: 1 where there is a message, be its weight 0.
    """

    weight: float = 0.0
    mask: int = 0
    since: int = 0
    in_parts: int = 0
    samples: float = 0.0
    base: float = 0.0
    size: float = 0.0
    keeps: int = 0
    there: int = 0


class GradientsMean(NamedTuple):
    """What ranks have told with gradients that become one: alike on all who step with these.

    Args:
        weight: of all replicas' gradients.
        samples: behind them.
        ranks: how many replicas there are, those without gradients too.
        base: samples that learning rates are for, of one replica: the mean over those with gradients.
        size: of the window of gradients that comes, as the first replica with gradients would have it.
    """

    weight: float = 0.0
    samples: float = 0.0
    ranks: int = 0
    base: float = 0.0
    size: float = 0.0

    @classmethod
    def by(cls, parts: Sequence[GradientPart]) -> GradientsMean:
        """What all have told."""
        if not (having := [p for p in parts if p.weight > 0.0]):
            return cls()
        weight, samples, base = (sum(getattr(p, name) for p in having) for name in ("weight", "samples", "base"))
        return cls(weight, samples, len(parts), base / len(having), having[0].size)


@dataclass
class GradientMessage(Message):
    """Gradients in the `sent` bucket.

    Args:
        samples: behind them.
        used: 1.0 for every parameter that has one, or is expected to have one.
        since: steps that had been taken when the first of them was computed.
        behind: of these samples, the part that each parameter's gradient is of; None: all. See `Window`.
        out: how far they are there, where they leave while they are computed.
        keeps: their mean stays in its bucket as it is, until other gradients are there.
        dropped: they are not finite, and have no weight; see `GradientRounds`.
        asks: `GradientsMean.base` and `GradientsMean.size`, as this replica would have them.
    """

    samples: float
    used: Tensor
    since: int
    behind: Tensor | None = None
    out: Outgoing | None = None
    keeps: bool = False
    dropped: bool = False
    asks: tuple[float, float] = (0.0, 0.0)

    @property
    def ready(self) -> bool:
        return self.out is None or self.out.ready


class EarlierPasses(NamedTuple):
    """What backward passes before the last one of a message have made.

    Args:
        pack: puts their part of the message into the parameters' part of a bucket; None: there is none.
        used: 1.0 for every parameter that has a gradient of theirs.
        since: steps that had been taken when the first gradient was computed.
    """

    pack: Callable[[Tensor], None] | None
    used: Tensor
    since: int


class GradientPlan(NamedTuple):
    """Args:
    kind: of the round; None where no replica has a weight.
    weights: every rank's share in the mean.
    """

    kind: RoundType | None
    weights: tuple[float, ...] = ()


@dataclass(kw_only=True)
class Reduction(InFlightRound):
    """Gradients on their way.

    Args:
        share: this rank's share in the mean.
        used: which parameters any replica used.
        since: the smallest of all replicas', see `GradientPart`.
        masks_differ: replicas used different ones, or one that follows has none to know them by.
        told: what all ranks have told with them.
        residual: what compression has yet to deliver once this is committed; None for what it had before.
        in_parts: some replica's leave while they are computed.
    """

    share: float
    used: Tensor
    since: int
    masks_differ: bool
    told: GradientsMean
    residual: Tensor | None = None
    in_parts: bool = False


class SynchronousGradients:
    """The component that averages gradients; what it moves is a round, see `GradientRounds`.

    Args:
        control: the control plane; this registers with it.
        sync_points: by which the training thread waits.
        on_step: called under the lock where a step is committed, on all ranks, with this one's samples, or None where
            it was without gradients.
        weigh: the weight of gradients, of so many samples. Default: the samples.
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
        self._overlap = Overlap(self.replica)
        self.asks = (0.0, 0.0)
        """Of the next gradients that leave, see `GradientMessage`."""
        self.told: GradientsMean | None = None
        """What all have told with the mean that was taken last, until steps are others again."""
        self._there = Plans()
        self._back = Plans()  # the engine's thread's; the training thread's
        self._taken = False  # what has arrived is with the optimizer: nobody looks at the parameters meanwhile
        control.register(self)

    def close(self) -> None:
        """Leave the parameters alone from now on."""
        self._overlap.close()

    def compress(self, compression: GradientCompression) -> None:
        """Let gradients travel like this, on all ranks; before the engine starts."""
        if compression != "none":
            self.rounds.feedback = GradientResiduals(compression, self.replica, self._transfer)

    def carried_residual(self) -> dict[str, Any] | None:
        """For a checkpoint: what compressed messages have lacked so far, copied; None where they are not compressed."""
        with self._box.committing:
            return None if self.rounds.feedback is None else self.rounds.feedback.state_dict()

    # ---- the training thread ----

    def begin_backward(self, samples: float, scale: float = 1.0) -> None:
        """A backward pass begins: let its gradients leave as it makes them, where that can be; `reduce_` follows.

        Args:
            samples, scale: as for `reduce_`.
        """
        if not self._overlap.under_way and self._can_overlap:
            self._buckets.take_when(self._buckets.can_pack, self._control.see)
            message = GradientMessage(GRADIENTS, self._step, samples, self._expected, self._step, keeps=True)
            self._begin(message, 1.0 / scale)

    def begin_last(self, before: EarlierPasses, samples: float, weight: float) -> bool:
        """The last of several backward passes begins: its gradients leave as it makes them, and with them what those
        before have made; `finish_last` follows, or `withdraw`. Whether that can be, and the buckets are free.

        Args:
            before: what was gathered.
            samples: behind all of it.
            weight: what the gradients of this pass are multiplied by.
        """
        if not self._can_overlap or not self._take_free():
            return False
        self._begin(GradientMessage(GRADIENTS, self._step, samples, self._expected, before.since), weight, before)
        return True

    def finish_last(self) -> None:
        """The last backward pass is over. Gradients stay with the parameters until their mean replaces them."""
        self._overlap.finish()

    @property
    def _can_overlap(self) -> bool:
        return self.rounds.feedback is None and self._overlap.possible

    @property
    def _expected(self) -> Tensor:
        count = len(self.replica.layout)
        return self.rounds.used if len(self.rounds.used) == count else torch.zeros(count)

    def _begin(self, message: GradientMessage, weight: float, before: EarlierPasses | None = None) -> None:
        """The buckets were taken: the message is that of a backward pass that begins."""
        patience_s = self._control.timeouts.payload.total_seconds() / 2
        base = None if before is None or before.pack is None else self.replica.of_rule(self._buckets.sent)
        message.out = out = Outgoing(self._box.changed, patience_s, len(self.replica.layout), self._there, weight)
        message.asks = self.asks
        if before is not None:
            out.base = base
            out.used = before.used
        with self._buckets.used(message):
            if before is not None and before.pack is not None and base is not None:
                before.pack(base)
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
        if not self._take_free():
            return False
        self._post(pack, GradientMessage(GRADIENTS, self._step, samples, used, since, behind))
        return True

    def _take_free(self) -> bool:
        """Take the buckets, if they are free."""
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
        """Stand still until gradients can be posted, or a mean has arrived that must be taken first."""
        self._sync_points.wait(lambda: self._buckets.can_pack() or self.arrived is not None)

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
        if not isinstance(message, GradientMessage):
            return None
        if (out := message.out) is None:
            return message, self.replica.of_rule(self._buckets.sent)
        return None if out.flags is None else (replace(message, used=out.has(), out=None), out.all())

    def wait(self) -> None:
        """Stand still until nothing is in flight, or others' step, that this replica was late for, comes first."""
        buckets = self._buckets
        self._sync_points.wait(lambda: buckets.message is None or buckets.arrived is not None)
        message = buckets.message
        if isinstance(message, GradientMessage) and message.out is not None and message.out.flags is not None:
            # No header speaks of it before that step is taken, which needs the gradients' place.
            self.replica.of_rule(buckets.sent).copy_(message.out.all())
            message.used = message.out.has()
            message.out = None

    def take_(self, scale: float = 1.0, change: Callable[[Tensor, Reduction], None] | None = None) -> None:
        """The mean that has arrived, if one has, becomes the gradients; `stepped` follows.

        Args:
            scale: they are multiplied by it.
            change: called with the flat mean first, and with how it came about.
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
            unpack_(self.replica, mean, arrived.used, scale, self._back)
        elif buckets.arrived is None:  # what is left here was dropped, or is of no samples
            for p in self.replica.tensors.trained.values():
                p.grad = None
        self._taken = True

    def stepped(self) -> None:
        """What was taken is in the parameters: where this replica stands at a sync point, that may open from now on."""
        with self._box.changed:
            self._buckets.arrived = None
            self._taken = False
            self._box.changed.notify_all()

    # ---- headers ----

    def is_indispensable(self) -> bool:
        return False

    def compose(self) -> GradientPart:
        return self.blank

    def complete(self, part: GradientPart, message: Message | None, compare: bool) -> GradientPart:
        if not isinstance(message, GradientMessage):
            return part
        out = int(message.out is not None)
        weight = self._weigh(message.samples)
        used = mask_of(message.used)
        since = message.since
        samples = message.samples
        return GradientPart(weight, used, since, out, samples, *message.asks, int(message.keeps), there=1)

    def is_due(self, parts: Sequence[GradientPart]) -> bool:
        return any(p.there for p in parts)

    def plan(self, priority: int, headers: Sequence[Header], parts: Sequence[GradientPart]) -> GradientPlan | None:
        if priority != GRADIENTS:
            return None
        total = sum(p.weight for p in parts)
        return GradientPlan(self.rounds, tuple(p.weight / total for p in parts)) if total > 0.0 else GradientPlan(None)

    def settle(self, headers: Sequence[Header], parts: Sequence[GradientPart]) -> tuple[bool, None]:
        return True, None

    def opened(self, here: bool) -> None:
        """Nothing is left over: a rank with gradients waits for them."""

    def drop(self) -> None:
        """No replica has a weight."""
        if isinstance(self._buckets.message, GradientMessage):
            self._buckets.message = None


class GradientRounds:
    """The round type of gradients.

    A mean that is not finite is never handed over. It has the same bits on all ranks, so that all see it at once and
    nobody commits it. Then each rank looks at what it has sent. Gradients that are not finite lose their weight, and
    the round is repeated without them. A step of finite gradients costs one look at its mean, on the engine's thread.

    Args:
        control: the control plane.
        on_step: see `SynchronousGradients`.
    """

    takes_marks = True

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
        self.feedback: GradientResiduals | None = None
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

    def begin(self, plan: GradientPlan, id: int, parts: Sequence[GradientPart]) -> Reduction:
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
            divide_(self._replica.layout, target, behind, exchange.share, self._transfer)
        exchange.doubt = self._is_polluted(exchange)
        exchange.settle = lambda: self._drop(exchange)

    def _move_in_parts(self, exchange: Reduction) -> None:
        replica = self._replica
        message = exchange.message
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
        """Whether the mean is not finite; the same on all ranks."""
        return self.drops and not ops.all_finite(self._replica.of_rule(exchange.target))

    def _drop(self, exchange: Reduction) -> None:
        """The mean is not finite: the gradients that have made it so lose their weight. All ranks call this together.

        Where all gradients are finite their sum has overflowed: then all of them do.
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
        """Of a step nothing is kept, but what its messages lacked."""
        if self.feedback is not None and exchange.residual is not None:
            self.feedback.commit(exchange.residual)

    def hand_over(self, exchange: Reduction) -> None:
        message = exchange.message
        self.used = exchange.used
        self._on_step(message.samples if isinstance(message, GradientMessage) else None)
        if message is not None or self.follows:
            self._buckets.hand_over(exchange)

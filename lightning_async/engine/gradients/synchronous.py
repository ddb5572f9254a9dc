"""Gradients through the engine, in step or in the background: averaged by weight, with late and empty replicas."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_async import ops
from lightning_async.engine.buckets import Exchange, Kind, Message
from lightning_async.engine.control import ControlPlane
from lightning_async.engine.digest import real
from lightning_async.engine.gates import Gates
from lightning_async.engine.header import Header
from lightning_async.engine.replica import Replica

__all__ = ["SynchronousGradients"]

GRADIENTS = 2
"""The priority of synchronous steps: others have messages too while one rank is at such a step, and go with it."""


class Part(NamedTuple):
    """What one rank says of its gradients in a header.

    Args:
        weight: what they count in the mean.
        mask: a hash of which parameters have one.
        since: steps that had been taken when the first of them was computed.
    """

    weight: float = 0.0
    mask: int = 0
    since: int = 0


@dataclass
class GradientMessage(Message):
    """Gradients in the `sent` bucket.

    Args:
        samples: behind them.
        used: 1.0 for every parameter that has one.
        since: steps that had been taken when the first of them was computed.
    """

    samples: float
    used: Tensor
    since: int


class GradientPlan(NamedTuple):
    """Args:
    kind: of the round; None where no replica has a weight.
    weights: every rank's share in the mean.
    """

    kind: Kind | None
    weights: tuple[float, ...] = ()


@dataclass(kw_only=True)
class Reduction(Exchange):
    """Gradients on their way.

    Args:
        share: this rank's share in the mean.
        used: which parameters any replica used.
        since: the smallest of all replicas', see `Part`.
        masks_differ: replicas used different ones, or one that follows has none to know them by.
    """

    share: float
    used: Tensor
    since: int
    masks_differ: bool


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
        self.follows = False
        """A replica takes the steps that it has no gradients in, too: it stands at a gate meanwhile."""
        control.register(self)

    # ---- the training thread ----

    def reduce_(self, samples: float, scale: float = 1.0) -> None:
        r"""Replace the gradients by their weighted mean over all replicas; stands still until it is there.

        .. math:: g \leftarrow s \sum_i \frac{n_i}{\sum_j n_j} \frac{g_i}{s_i}

        :math:`n_i` is the weight of replica :math:`i`: its samples, unless ``weigh`` says otherwise.

        Args:
            samples: samples behind the gradients of this replica.
            scale: this replica's loss scale (mixed precision); replicas may have different ones.
        """
        replica = self.replica
        self._buckets.take_when(self._buckets.can_pack, self._control.see)
        self._post(lambda bucket: _pack_(replica, bucket, 1.0 / scale), samples, _used(replica), int(self._box.steps))
        self.wait()
        self.take_(scale)

    def post(self, pack: Callable[[Tensor], None], samples: float, used: Tensor, since: int) -> bool:
        """Have gradients averaged with all replicas', if the buckets are free; whether they are on their way.

        Args:
            pack: puts them into a bucket.
            samples: behind them.
            used: 1.0 for every parameter that has one.
            since: steps that had been taken when the first of them was computed.
        """
        with self._box.changed:
            self._control.see()
            if not self._buckets.can_pack():
                return False
            self._buckets.take()
        self._post(pack, samples, used, since)
        return True

    def _post(self, pack: Callable[[Tensor], None], samples: float, used: Tensor, since: int) -> None:
        with self._buckets.used(GradientMessage(GRADIENTS, int(self._box.steps), samples, used, since)):
            pack(self._buckets.sent)

    def wait_until_free(self) -> None:
        """Stand still until gradients can be posted, or a mean has arrived that must be taken first."""
        self._gates.wait(lambda: self._buckets.can_pack() or self.arrived)

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
    def arrived(self) -> bool:
        """`take_` finds a mean."""
        return isinstance(self._buckets.arrived, Reduction)

    def wait(self) -> None:
        """Stand still until nothing is in flight."""
        self._gates.wait(lambda: self._buckets.message is None)

    def take_(self, scale: float = 1.0, change: Callable[[Tensor, int], None] | None = None) -> None:
        """The mean that has arrived, if one has, becomes the gradients.

        Args:
            scale: they are multiplied by it.
            change: called with the flat mean first, and with the steps that had been taken when it was begun.
        """
        buckets = self._buckets
        if isinstance(arrived := buckets.arrived, Reduction):  # else no replica had a weight
            buckets.to_training.take()
            if change is not None:
                change(self.replica.of_rule(arrived.target), arrived.since)
            _unpack_(self.replica, arrived.target, arrived.used, scale)
        with self._box.changed:
            buckets.arrived = None
            self._box.changed.notify_all()

    # ---- headers ----

    def is_indispensable(self) -> bool:
        return False

    def compose(self) -> Part:
        return self.blank

    def complete(self, part: Part, message: Message | None, compare: bool) -> Part:
        if not isinstance(message, GradientMessage):
            return part
        return Part(self._weigh(message.samples), _mask(message.used), message.since)

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
        buckets, message = self._buckets, self._buckets.message
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
        )

    def move(self, exchange: Reduction) -> None:
        if exchange.masks_differ:
            self._transfer.largest_(exchange.used)
        target = self.replica.of_rule(exchange.target)
        self.replica.scaled_(target, self.replica.of_rule(self._buckets.sent), exchange.share)
        self._transfer.sum_(target)

    def commit(self, exchange: Reduction) -> None:
        """Nothing is kept of a step."""

    def hand_over(self, exchange: Reduction) -> None:
        message = exchange.message
        self._on_step(message.samples if isinstance(message, GradientMessage) else None)
        if message is not None or self.follows:
            self._buckets.hand_over(exchange)


def _mask(used: Tensor) -> int:
    """A hash of which parameters have a gradient that a float64 holds exactly."""
    return int.from_bytes(hashlib.sha256(bytes(used.to(torch.uint8).tolist())).digest()[:6], "big")


def _used(replica: Replica) -> Tensor:
    """1.0 for every parameter that has a gradient."""
    return torch.tensor([float(p.grad is not None) for p in replica.tensors.trained.values()])


@torch.no_grad()
def _pack_(replica: Replica, bucket: Tensor, scale: float) -> None:
    """Gradients times ``scale`` into ``bucket``; a parameter without one counts as zero."""
    trained = replica.tensors.trained.values()
    gradients = [real(torch.zeros_like(p) if p.grad is None else p.grad) for p in trained]
    ops.Plan(replica.layout, gradients).pack_(replica.of_rule(bucket), weight=scale)


@torch.no_grad()
def _unpack_(replica: Replica, bucket: Tensor, used: Tensor, scale: float) -> None:
    """Gradients from ``bucket`` times ``scale``; those that no replica used stay None."""
    part, trained = replica.of_rule(bucket), replica.tensors.trained.values()
    if scale != 1.0:
        part.mul_(scale)
    gradients: list[Any] = [torch.empty_like(p) if p.grad is None else p.grad for p in trained]
    ops.Plan(replica.layout, [real(g) for g in gradients]).apply_(part)
    for p, gradient, any_used in zip(trained, gradients, used.tolist(), strict=True):
        if p.grad is None and any_used:
            p.grad = gradient

"""Parameters' gradients into a flat bucket, and back."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_async import ops
from lightning_async.engine.digest import real, strided
from lightning_async.engine.replica import Replica
from lightning_async.engine.transfer import Transfer
from lightning_async.flat import FlatLayout

__all__ = ["Plans", "divide_", "gradients_of", "mask_of", "pack_", "unpack_", "used_by"]


def used_by(params: Sequence[Any]) -> Tensor:
    """1.0 for every parameter that has a gradient."""
    return torch.tensor([float(p.grad is not None) for p in params])


def mask_of(used: Tensor) -> int:
    """A hash of which parameters are used, that a float64 holds exactly."""
    return int.from_bytes(hashlib.sha256(bytes(used.to(torch.uint8).tolist())).digest()[:6], "big")


@torch.no_grad()
def gradients_of(params: Sequence[Any]) -> list[Tensor]:
    """Their gradients as real numbers; zeros where there is none."""
    return [real(torch.zeros_like(p) if p.grad is None else strided(p.grad)) for p in params]


class Plans:
    """Ways between gradients, which are other tensors at each step, mostly of the same kinds, and a bucket."""

    def __init__(self) -> None:
        self._known: dict[object, ops.Plan] = {}

    @contextmanager
    def of(self, gradients: Sequence[Tensor], key: object = None) -> Iterator[ops.Plan]:
        """That of these; a ``key`` for each list of which there are others again."""
        plan = self._known.get(key)
        if plan is None or not plan.follow(gradients):
            plan = self._known[key] = ops.Plan(FlatLayout(gradients), gradients)
        try:
            yield plan
        finally:
            plan.release()


def pack_(gradients: Sequence[Tensor], part: Tensor, scale: float) -> None:
    """Gradients times ``scale``, one behind the other."""
    ops.Plan(FlatLayout(gradients), gradients).pack_(part, weight=scale)


@torch.no_grad()
def unpack_(replica: Replica, part: Tensor, used: Tensor, scale: float, plans: Plans) -> None:
    """Gradients from the parameters' part of a bucket times ``scale``, which it is multiplied by; those that no replica
    used stay None, sparse ones become dense."""
    trained = replica.tensors.trained.values()
    if scale != 1.0:
        part.mul_(scale)
    gradients = _places(trained)
    with plans.of([real(g) for g in gradients]) as plan:
        plan.apply_(part)
    for p, gradient, any_used in zip(trained, gradients, used.tolist(), strict=True):
        if not any_used or p.grad is not gradient:
            p.grad = gradient if any_used else None


def divide_(layout: FlatLayout, mean: Tensor, behind: Tensor | None, share: float, transfer: Transfer) -> None:
    """Make a mean over all samples one over those that each parameter's gradient is of. All ranks call this together.

    Args:
        layout: of the parameters.
        mean: flat, of all ranks; changed.
        behind: of this rank's samples, the part that each parameter's gradient is of; None: it brings nothing.
        share: of this rank's samples in all ranks'.
        transfer: adds up what all ranks have.
    """
    total = mean.new_zeros(len(layout))
    if behind is not None:
        total.add_(behind.to(total), alpha=share)
    transfer.sum_(total)
    for view, part in zip(layout.views(mean), total.tolist(), strict=True):
        if part > 0.0:
            view.div_(part)


def _places(trained: Iterable[Any]) -> list[Tensor]:
    """Memory for a gradient of each parameter: that of the one it has, unless it shares that, as autograd may give
    several the same one (those of a stack that is summed)."""
    places: list[Tensor] = []
    taken: set[int] = set()
    for p in trained:
        place: Any = p.grad
        if place is None or strided(place) is not place or place.data_ptr() in taken:
            place = torch.empty_like(p)
        places.append(place)
        taken.add(place.data_ptr())
    return places

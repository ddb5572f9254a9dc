"""Parameters' gradients into a flat bucket, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_async import ops
from lightning_async.engine.digest import real
from lightning_async.engine.replica import Replica
from lightning_async.engine.transfer import Transfer
from lightning_async.flat import FlatLayout

__all__ = ["divide_", "pack_", "unpack_", "used_by"]


def used_by(params: Sequence[Any]) -> Tensor:
    """1.0 for every parameter that has a gradient."""
    return torch.tensor([float(p.grad is not None) for p in params])


@torch.no_grad()
def pack_(params: Sequence[Any], part: Tensor, scale: float) -> None:
    """Gradients times ``scale``, one behind the other; a parameter without one counts as zero."""
    gradients = [real(torch.zeros_like(p) if p.grad is None else _strided(p.grad)) for p in params]
    ops.Plan(FlatLayout(gradients), gradients).pack_(part, weight=scale)


@torch.no_grad()
def unpack_(replica: Replica, bucket: Tensor, used: Tensor, scale: float) -> None:
    """Gradients from ``bucket`` times ``scale``; those that no replica used stay None, sparse ones become dense."""
    part, trained = replica.of_rule(bucket), replica.tensors.trained.values()
    if scale != 1.0:
        part.mul_(scale)
    gradients: list[Any] = [
        torch.empty_like(p) if p.grad is None or _strided(p.grad) is not p.grad else p.grad for p in trained
    ]
    ops.Plan(replica.layout, [real(g) for g in gradients]).apply_(part)
    for p, gradient, any_used in zip(trained, gradients, used.tolist(), strict=True):
        if p.grad is not gradient and any_used:
            p.grad = gradient


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


def _strided(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()

"""Weighted sums in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["accumulate_"]


@torch.no_grad()
def accumulate_(total: Tensor, source: Tensor, weight: float) -> None:
    r"""Add a weighted tensor, :math:`t \leftarrow t + w\,\mathrm{fp32}(x)`.

    Args:
        total: :math:`t`, fp32; updated in place.
        source: :math:`x`, fp32, bf16 or fp16, of the same shape.
        weight: :math:`w`.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes or devices differ, tensors are not contiguous or overlap, or ``total`` requires grad in
            grad mode.

    >>> total = torch.tensor([1.0])
    >>> accumulate_(total, torch.tensor([2.0]), 0.5)
    >>> total
    tensor([2.])
    """
    total.add_(source.float() * weight)


def weighted_sum_(out: Tensor, terms: list[Tensor], weights: Tensor) -> None:
    """The sum in the order of the terms; the first one is not added to zero, which would lose a negative zero."""
    for k, term in enumerate(terms):
        if k == 0:
            torch.mul(term, weights[k], out=out)
        else:
            out.add_(term * weights[k])

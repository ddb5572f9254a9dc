"""Averages and their displacements, in plain torch. Parameters may be fp32, bf16 or fp16; all else is fp32."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["accumulate_", "delta_merge_", "delta_merge_norm_", "elastic_", "lerp_norm_", "mean_and_spread_"]


def squares(*tensors: Tensor) -> Tensor:
    """Sums of squares, float64."""
    return torch.stack([t.double().square().sum() for t in tensors])


@torch.no_grad()
def delta_merge_norm_(params: Tensor, mean: Tensor, snapshot: Tensor, renew: bool = False) -> Tensor:
    r"""`delta_merge_` that returns the sums of squares of :math:`d` and of :math:`v`, in the same pass.

    Either is finite exactly if all elements are.

    >>> delta_merge_norm_(torch.tensor([1.0]), torch.tensor([4.0]), torch.tensor([2.0])).tolist()
    [4.0, 9.0]
    """
    difference = mean - snapshot
    value = params.float() + difference
    params.copy_(value)
    if renew:
        snapshot.copy_(value)
    return squares(difference, value)


@torch.no_grad()
def delta_merge_(params: Tensor, mean: Tensor, snapshot: Tensor, renew: bool = False) -> None:
    r"""Move the parameters by the displacement from the snapshot to the mean.

    .. math::
        d &= \bar s - s, & v &= \mathrm{fp32}(x) + d, & x &\leftarrow \mathrm{cast}(v), &
        s &\leftarrow v \text{ with renew}

    Args:
        params: :math:`x`, fp32, bf16 or fp16; updated in place.
        mean: :math:`\bar s`, fp32, of the same shape.
        snapshot: :math:`s`, fp32, of the same shape.
        renew: write the new values into ``snapshot``. Default: False.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes or devices differ, tensors are not contiguous or overlap, or ``params`` requires grad in
            grad mode.

    Source: the delta rule of delayed averaging, as in hivemind, https://github.com/learning-at-home/hivemind

    >>> x = torch.tensor([1.5])
    >>> delta_merge_(x, mean=torch.tensor([2.0]), snapshot=torch.tensor([1.0]))
    >>> x
    tensor([2.5000])
    """
    delta_merge_norm_(params, mean, snapshot, renew)


@torch.no_grad()
def lerp_norm_(params: Tensor, target: Tensor, weight: float) -> Tensor:
    r"""Move towards a target, and return the squared distance that there was, in one pass.

    .. math:: d = y - x, \qquad x \leftarrow \mathrm{cast}(x + w d), \qquad \text{return } \sum_j d_j^2

    Args:
        params: :math:`x`, fp32, bf16 or fp16; updated in place.
        target: :math:`y`, fp32, of the same shape.
        weight: :math:`w`.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: as of `delta_merge_`.

    >>> x = torch.tensor([0.0, 4.0])
    >>> lerp_norm_(x, torch.tensor([2.0, 4.0]), 0.5).item(), x.tolist()
    (4.0, [1.0, 4.0])
    """
    wide = params.float()
    difference = target - wide
    params.copy_(wide + difference * weight)
    return squares(difference)[0].clone()


@torch.no_grad()
def accumulate_(total: Tensor, source: Tensor, weight: float) -> None:
    r"""Add a weighted tensor, :math:`t \leftarrow t + w\,\mathrm{fp32}(x)`.

    Args:
        total: :math:`t`, fp32; updated in place.
        source: :math:`x`, fp32, bf16 or fp16, of the same shape.
        weight: :math:`w`.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: as of `delta_merge_`.

    >>> total = torch.tensor([1.0])
    >>> accumulate_(total, torch.tensor([2.0]), 0.5)
    >>> total
    tensor([2.])
    """
    total.add_(source.float() * weight)


@torch.no_grad()
def elastic_(params: Tensor, center: Tensor, alpha: float) -> None:
    r"""Elastic averaging: parameters and centre pull each other, and their sum stays.

    .. math:: d = x - c, \qquad x \leftarrow \mathrm{cast}(x - \alpha d), \qquad c \leftarrow c + \alpha d

    Args:
        params: :math:`x`, fp32, bf16 or fp16; updated in place.
        center: :math:`c`, fp32, of the same shape; updated in place.
        alpha: :math:`\alpha`, the strength of the spring.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: as of `delta_merge_`.

    Source: Zhang, Choromanska, LeCun, "Deep learning with Elastic Averaging SGD", 2015,
    https://arxiv.org/abs/1412.6651

    >>> x, c = torch.tensor([1.0]), torch.tensor([0.0])
    >>> elastic_(x, c, 0.25)
    >>> x, c
    (tensor([0.7500]), tensor([0.2500]))
    """
    wide = params.float()
    step = (wide - center) * alpha
    params.copy_(wide - step)
    center.add_(step)


@torch.no_grad()
def mean_and_spread_(out: Tensor, replicas: Tensor, weights: Tensor) -> Tensor:
    r"""The weighted mean of replicas and their weighted squared distance from it, in one pass over memory.

    .. math:: o = \sum_k w_k x_k, \qquad \text{return } \sum_k w_k \lVert x_k - o \rVert^2

    Args:
        out: :math:`o`, fp32, shape (n,); overwritten.
        replicas: :math:`x`, fp32, shape (K, n).
        weights: :math:`w`, fp32, shape (K,); they should sum to one.

    Raises:
        TypeError: a tensor is not fp32.
        ValueError: as of `delta_merge_`.

    >>> out = torch.zeros(1)
    >>> mean_and_spread_(out, torch.tensor([[1.0], [3.0]]), torch.tensor([0.5, 0.5])).item(), out.item()
    (1.0, 2.0)
    """
    weighted_sum_(out, list(replicas), weights)
    distances = torch.stack([(row.double() - out.double()).square().sum() for row in replicas])
    return torch.dot(weights.double(), distances)


def weighted_sum_(out: Tensor, terms: list[Tensor], weights: Tensor) -> None:
    """The sum in the order of the terms; the first one is not added to zero, which would lose a negative zero."""
    for k, term in enumerate(terms):
        if k == 0:
            torch.mul(term, weights[k], out=out)
        else:
            out.add_(term * weights[k])

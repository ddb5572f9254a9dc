"""The optimizer steps of a parameter server, in plain torch: from one bank of memory, which stays intact, to another.

Gradients may be fp32, bf16 or fp16, and everything else is fp32. The new weights, the new state and the reply to the
worker are written to other memory than the old ones.

The argument ``whole`` has no effect here. It tells the native library the size of the larger arrays of which the arrays
are pieces. Above the size of the CPU's caches, the library writes with instructions that bypass the caches. The results
are equal.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_async.ops.reference.buckets import momentum_step_


@torch.no_grad()
def server_add_(
    params: Tensor,
    reply: Tensor | None,
    old_params: Tensor,
    gradient: Tensor,
    weight: float,
    decay: float = 0.0,
    whole: int = 0,
) -> None:
    r"""Add a weighted tensor, :math:`x' = x + (w g - d x)`: SGD without momentum, :math:`w = -\eta, d = \eta\lambda`.

    Args:
        params: :math:`x'`, fp32; overwritten.
        reply: Reply to the worker, overwritten with :math:`x'`, too; None if nobody pulls.
        old_params: :math:`x`, fp32.
        gradient: :math:`g`, fp32, bf16 or fp16.
        weight: :math:`w`.
        decay: :math:`d`. Default: no decay.
        whole: Number of elements of the larger arrays, if these arrays are pieces of them. Default: 0, no pieces.

    Raises as `accumulate_` does.

    >>> new, reply = torch.empty(1), torch.empty(1)
    >>> server_add_(new, reply, torch.tensor([1.0]), torch.tensor([2.0]), -0.25)
    >>> new, reply
    (tensor([0.5000]), tensor([0.5000]))
    """
    torch.add(old_params, _decayed(gradient.float() * weight, old_params, -decay), out=params)
    _answer(reply, params)


@torch.no_grad()
def server_sgd_(
    params: Tensor,
    momentum: Tensor,
    reply: Tensor | None,
    old_params: Tensor,
    old_momentum: Tensor,
    gradient: Tensor,
    lr: float,
    mu: float,
    nesterov: bool,
    scale: float = 1.0,
    weight_decay: float = 0.0,
    whole: int = 0,
) -> None:
    r"""Take a step of SGD with momentum on a server, with a gradient that may be stale.

    .. math::
        g' &= \sigma\, g + \lambda x, \qquad m' = \mu m + g' \\
        x' &= x - \eta\, (g' + \mu m') \text{ with nesterov, else } x - \eta\, m'

    Args:
        params: :math:`x'`, fp32; overwritten.
        momentum: :math:`m'`, fp32; overwritten.
        reply: Reply to the worker, overwritten with :math:`x'`, too; None if nobody pulls.
        old_params: :math:`x`, fp32.
        old_momentum: :math:`m`, fp32.
        gradient: :math:`g`, fp32, bf16 or fp16.
        lr: :math:`\eta`.
        mu: :math:`\mu`.
        nesterov: Whether to look ahead along the new momentum.
        scale: :math:`\sigma`, the factor for the gradient's staleness. Default: 1.
        weight_decay: :math:`\lambda`, L2. Default: 0.
        whole: Size of the larger arrays, if the arrays are pieces, as in `server_add_`.

    Raises as `accumulate_` does.

    >>> x, m, reply, old, zero, g = (torch.tensor([v]) for v in (0.0, 0.0, 0.0, 1.0, 0.0, 4.0))
    >>> server_sgd_(x, m, reply, old, zero, g, lr=0.25, mu=0.5, nesterov=False, scale=0.5)
    >>> x, m, reply
    (tensor([0.5000]), tensor([2.]), tensor([0.5000]))
    """
    params.copy_(old_params)
    momentum.copy_(old_momentum)
    momentum_step_(params, momentum, _decayed(gradient.float() * scale, old_params, weight_decay), lr, mu, nesterov)
    _answer(reply, params)


@torch.no_grad()
def server_dana_(
    params: Tensor,
    momentum: Tensor,
    total: Tensor,
    ahead: Tensor,
    reply: Tensor | None,
    old_params: Tensor,
    old_momentum: Tensor,
    old_total: Tensor,
    gradient: Tensor,
    lr: float,
    mu: float,
    scale: float = 1.0,
    whole: int = 0,
) -> None:
    r"""Take a step of DANA: a momentum for each worker, and a reply that looks ahead along the momenta of all workers.

    .. math::
        m_i' &= \mu m_i + \sigma g, \qquad v' = v + (m_i' - m_i), \qquad x' = x - \eta\, m_i' \\
        o &= x' - (\eta\mu)\, v'

    Args:
        params: :math:`x'`, fp32; overwritten.
        momentum: :math:`m_i'`, fp32, of the worker that pushes; overwritten.
        total: :math:`v'`, fp32, the sum of all workers' momenta; overwritten.
        ahead: :math:`o`, fp32, for workers to pull; overwritten.
        reply: Reply to the worker, overwritten with :math:`o`, too; None if nobody pulls.
        old_params: :math:`x`, fp32.
        old_momentum: :math:`m_i`, fp32.
        old_total: :math:`v`, fp32.
        gradient: :math:`g`, fp32, bf16 or fp16.
        lr: :math:`\eta`.
        mu: :math:`\mu`.
        scale: :math:`\sigma`, as in `server_sgd_`. Default: 1.
        whole: Size of the larger arrays, if the arrays are pieces, as in `server_add_`.

    Raises as `accumulate_` does.

    Source: Hakimi et al., "Taming Momentum in a Distributed Asynchronous Environment", 2019,
    https://arxiv.org/abs/1907.11612

    >>> x, m, v, o, old, zero, g = (torch.tensor([t]) for t in (0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0))
    >>> server_dana_(x, m, v, o, None, old, zero, zero.clone(), g, lr=0.5, mu=0.5)
    >>> x, o
    (tensor([0.5000]), tensor([0.2500]))
    """
    torch.add(old_momentum * mu, gradient.float() * scale, out=momentum)
    torch.add(old_total, momentum - old_momentum, out=total)
    torch.sub(old_params, momentum * lr, out=params)
    torch.sub(params, total * (lr * mu), out=ahead)
    _answer(reply, ahead)


@torch.no_grad()
def server_adam_(
    params: Tensor,
    first: Tensor,
    second: Tensor,
    reply: Tensor | None,
    old_params: Tensor,
    old_first: Tensor,
    old_second: Tensor,
    gradient: Tensor,
    step: int,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    scale: float = 1.0,
    weight_decay: float = 0.0,
    decoupled: bool = False,
    whole: int = 0,
) -> None:
    r"""Take a step of Adam on a server, with a gradient that may be stale; of AdamW, if decay is decoupled.

    .. math::
        g' &= \sigma\, g + \lambda x, \\
        m' &= \beta_1 m + (1 - \beta_1) g', \qquad v' = \beta_2 v + (1 - \beta_2) g'^2 \\
        x' &= x - \frac{\eta}{1 - \beta_1^t} \cdot \frac{m'}{\sqrt{v'} / \sqrt{1 - \beta_2^t} + \epsilon}

    If decoupled, :math:`g' = \sigma\, g`, and :math:`x' = (1 - \eta\lambda)\, x - \dots`.

    Args:
        params: :math:`x'`, fp32; overwritten.
        first: :math:`m'`, fp32; overwritten.
        second: :math:`v'`, fp32; overwritten.
        reply: Reply to the worker, overwritten with :math:`x'`, too; None if nobody pulls.
        old_params: :math:`x`, fp32.
        old_first: :math:`m`, fp32.
        old_second: :math:`v`, fp32.
        gradient: :math:`g`, fp32, bf16 or fp16.
        step: :math:`t`, 1 at the first update.
        lr: :math:`\eta`.
        beta1: :math:`\beta_1`. Default: 0.9.
        beta2: :math:`\beta_2`. Default: 0.999.
        eps: :math:`\epsilon`. Default: 1e-8.
        scale: :math:`\sigma`, as in `server_sgd_`. Default: 1.
        weight_decay: :math:`\lambda`. Default: 0.
        decoupled: Whether decay is decoupled from the gradient. Default: False, decay is L2, a part of the gradient.
        whole: Size of the larger arrays, if the arrays are pieces, as in `server_add_`.

    Raises:
        TypeError: As in `accumulate_`.
        ValueError: As in `accumulate_`, or ``step`` is below 1.

    Source: Kingma and Ba, "Adam", 2015, https://arxiv.org/abs/1412.6980; Loshchilov and Hutter, "Decoupled Weight Decay
    Regularization", 2019, https://arxiv.org/abs/1711.05101.

    >>> x, m, v, old, zero, g = (torch.tensor([t]) for t in (0.0, 0.0, 0.0, 1.0, 0.0, 4.0))
    >>> server_adam_(x, m, v, None, old, zero, zero.clone(), g, step=1, lr=0.5)
    >>> x
    tensor([0.5000])
    """
    size, _, _, root = adam_scalars(step, lr, beta1, beta2)
    decay, kept = decay_scalars(lr, weight_decay, decoupled)
    stale = _decayed(gradient.float() * scale, old_params, decay)
    torch.add(old_first * beta1, stale * (1 - beta1), out=first)
    torch.add(old_second * beta2, (stale * stale) * (1 - beta2), out=second)
    # The root is computed in float64, because torch's fp32 root on CPUs is not the nearest number. The divisor is a
    # tensor, because with a number some devices multiply by its rounded inverse.
    root_mean = second.double().sqrt().float() / second.new_full((), root).expand_as(second) + eps
    torch.sub(old_params * kept, (first / root_mean) * size, out=params)
    _answer(reply, params)


def adam_scalars(step: int, lr: float, beta1: float, beta2: float) -> tuple[float, float, float, float]:
    """Return the step size, ``1 - beta1``, ``1 - beta2``, and the root of the second bias correction."""
    return lr / (1 - beta1**step), 1 - beta1, 1 - beta2, math.sqrt(1 - beta2**step)


def decay_scalars(lr: float, weight_decay: float, decoupled: bool) -> tuple[float, float]:
    """Return the two factors of the weights by which a step applies weight decay.

    The weights times the first factor are added to the gradient; the step multiplies the weights by the second.
    """
    return (0.0, 1 - lr * weight_decay) if decoupled else (weight_decay, 1.0)


def _decayed(gradient: Tensor, params: Tensor, decay: float) -> Tensor:
    return gradient + params * decay if decay else gradient


def _answer(reply: Tensor | None, weights: Tensor) -> None:
    if reply is not None:
        reply.copy_(weights)

"""A parameter server's optimizer steps, in plain torch. Gradients may be fp32, bf16 or fp16; all else is fp32."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_async.ops.reference.outer import momentum_step_

__all__ = ["server_adam_", "server_dana_", "server_sgd_"]


def corrected(gradient: Tensor, params: Tensor, backup: Tensor | None, scale: float, delay: float) -> Tensor:
    r"""What a stale gradient becomes: :math:`\sigma (g + \lambda\, g \odot g \odot (x - b))`."""
    wide = gradient.float()
    if backup is not None:
        wide = wide + (wide * wide) * (params - backup) * delay
    return wide * scale


@torch.no_grad()
def server_sgd_(
    params: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    backup: Tensor | None,
    lr: float,
    mu: float,
    nesterov: bool,
    scale: float = 1.0,
    delay: float = 0.0,
) -> None:
    r"""SGD with momentum on a server, with a gradient that may be stale.

    .. math::
        g' &= \sigma\, (g + \lambda\, g \odot g \odot (x - b)), \qquad m \leftarrow \mu m + g' \\
        x &\leftarrow x - \eta\, (g' + \mu m) \text{ with nesterov, else } x - \eta\, m

    Args:
        params: :math:`x`, fp32; updated in place.
        momentum: :math:`m`, fp32; updated in place.
        gradient: :math:`g`, fp32, bf16 or fp16, computed at :math:`b`.
        backup: :math:`b`, fp32, the parameters that the worker had pulled. None: no delay compensation.
        lr: :math:`\eta`.
        mu: :math:`\mu`.
        nesterov: look ahead along the new momentum.
        scale: :math:`\sigma`, what the gradient's staleness leaves of it. Default: 1.
        delay: :math:`\lambda` of the delay compensation. Default: 0.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: as of `accumulate_`.

    Source: Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", 2017,
    https://arxiv.org/abs/1609.08326

    >>> x, m, g, b = (torch.tensor([v]) for v in (1.0, 0.0, 2.0, 0.5))
    >>> server_sgd_(x, m, g, b, lr=0.25, mu=0.5, nesterov=False, scale=0.5, delay=1.0)
    >>> x, m
    (tensor([0.5000]), tensor([2.]))
    """
    momentum_step_(params, momentum, corrected(gradient, params, backup, scale, delay), lr, mu, nesterov)


@torch.no_grad()
def server_dana_(
    params: Tensor,
    momentum: Tensor,
    total: Tensor,
    ahead: Tensor,
    gradient: Tensor,
    backup: Tensor | None,
    lr: float,
    mu: float,
    scale: float = 1.0,
    delay: float = 0.0,
) -> None:
    r"""DANA: momentum per worker, and a reply that looks ahead along all workers' momenta.

    .. math::
        m_i' &= \mu m_i + g', \qquad v \leftarrow v + (m_i' - m_i), \qquad x \leftarrow x - \eta\, m_i' \\
        o &= x - (\eta\mu)\, v

    Args:
        params: :math:`x`, fp32; updated in place.
        momentum: :math:`m_i`, fp32, of the worker that pushes; updated in place.
        total: :math:`v`, fp32, the sum of all workers' momenta; updated in place.
        ahead: :math:`o`, fp32, what the worker pulls; overwritten.
        gradient: fp32, bf16 or fp16; :math:`g'` is as of `server_sgd_`.
        backup: as of `server_sgd_`.
        lr: :math:`\eta`.
        mu: :math:`\mu`.
        scale: as of `server_sgd_`. Default: 1.
        delay: as of `server_sgd_`. Default: 0.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: as of `accumulate_`.

    Source: Hakimi et al., "Taming Momentum in a Distributed Asynchronous Environment", 2019,
    https://arxiv.org/abs/1907.11612

    >>> x, m, v, o, g = (torch.tensor([t]) for t in (1.0, 0.0, 0.0, 0.0, 1.0))
    >>> server_dana_(x, m, v, o, g, None, lr=0.5, mu=0.5)
    >>> x, o
    (tensor([0.5000]), tensor([0.2500]))
    """
    new = momentum * mu + corrected(gradient, params, backup, scale, delay)
    total.add_(new - momentum)
    momentum.copy_(new)
    params.sub_(new * lr)
    torch.sub(params, total * (lr * mu), out=ahead)


@torch.no_grad()
def server_adam_(
    params: Tensor,
    first: Tensor,
    second: Tensor,
    gradient: Tensor,
    backup: Tensor | None,
    step: int,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    scale: float = 1.0,
    delay: float = 0.0,
) -> None:
    r"""Adam on a server, with a gradient that may be stale.

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) g', \qquad v \leftarrow \beta_2 v + (1 - \beta_2) g'^2 \\
        x &\leftarrow x - \frac{\eta}{1 - \beta_1^t} \cdot \frac{m}{\sqrt{v} / \sqrt{1 - \beta_2^t} + \epsilon}

    Args:
        params: :math:`x`, fp32; updated in place.
        first: :math:`m`, fp32; updated in place.
        second: :math:`v`, fp32; updated in place.
        gradient: fp32, bf16 or fp16; :math:`g'` is as of `server_sgd_`.
        backup: as of `server_sgd_`.
        step: :math:`t`, 1 at the first update.
        lr: :math:`\eta`.
        beta1: :math:`\beta_1`. Default: 0.9.
        beta2: :math:`\beta_2`. Default: 0.999.
        eps: :math:`\epsilon`. Default: 1e-8.
        scale: as of `server_sgd_`. Default: 1.
        delay: as of `server_sgd_`. Default: 0.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: as of `accumulate_`, or ``step`` is below 1.

    Source: Kingma and Ba, "Adam", 2015, https://arxiv.org/abs/1412.6980; for :math:`g'` see `server_sgd_`.

    >>> x, m, v, g = (torch.tensor([t]) for t in (1.0, 0.0, 0.0, 4.0))
    >>> server_adam_(x, m, v, g, None, step=1, lr=0.5)
    >>> x
    tensor([0.5000])
    """
    size, _, _, root = adam_scalars(step, lr, beta1, beta2)
    stale = corrected(gradient, params, backup, scale, delay)
    first.mul_(beta1).add_(stale * (1 - beta1))
    second.mul_(beta2).add_((stale * stale) * (1 - beta2))
    # In float64, since torch's fp32 root on CPUs is not the nearest number. A tensor as divisor: with a number, some
    # devices multiply by its rounded inverse.
    root_mean = second.double().sqrt().float() / second.new_full((), root).expand_as(second) + eps
    params.sub_((first / root_mean) * size)


def adam_scalars(step: int, lr: float, beta1: float, beta2: float) -> tuple[float, float, float, float]:
    """Step size, ``1 - beta1``, ``1 - beta2``, and the root of the second bias correction."""
    return lr / (1 - beta1**step), 1 - beta1, 1 - beta2, math.sqrt(1 - beta2**step)

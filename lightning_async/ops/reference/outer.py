"""Outer optimizers in plain torch: momentum on the last agreed parameters, the anchor."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["nesterov_merge_", "outer_merge_", "outer_nesterov_", "slowmo_merge_"]


def momentum_step_(
    anchor: Tensor, momentum: Tensor, gradient: Tensor, lr: float, mu: float, nesterov: bool, scale: float = 1.0
) -> None:
    """``m = mu m + scale g``, then ``a -= lr (scale g + mu m)`` with nesterov, else ``a -= lr m``."""
    scaled = gradient * scale
    momentum.mul_(mu).add_(scaled)
    anchor.sub_((scaled + momentum * mu if nesterov else momentum) * lr)


@torch.no_grad()
def outer_nesterov_(
    anchor: Tensor, momentum: Tensor, pseudo_gradient: Tensor, lr: float, mu: float, nesterov: bool
) -> None:
    r"""One step of SGD with (Nesterov) momentum, as `torch.optim.SGD` takes it.

    .. math::
        m &\leftarrow \mu m + g \\
        a &\leftarrow a - \eta\, (g + \mu m) \text{ with nesterov, else } a - \eta\, m

    Every product and every sum is rounded, on every device. `torch.optim.SGD` rounds some of them together where the
    processor has a fused multiply-add, so the two agree within a few units in the last place and not to the bit.

    Args:
        anchor: flat fp32 :math:`a`; updated in place.
        momentum: flat fp32 :math:`m`, zeros at first; updated in place.
        pseudo_gradient: flat fp32 :math:`g`.
        lr: :math:`\eta`.
        mu: :math:`\mu`.
        nesterov: look ahead along the new momentum.

    Raises:
        TypeError: a tensor is not fp32.
        ValueError: shapes or devices differ, or tensors are not contiguous or overlap.

    >>> anchor, momentum = torch.tensor([1.0]), torch.tensor([0.0])
    >>> outer_nesterov_(anchor, momentum, torch.tensor([0.5]), lr=0.5, mu=0.5, nesterov=True)
    >>> anchor, momentum
    (tensor([0.6250]), tensor([0.5000]))
    """
    momentum_step_(anchor, momentum, pseudo_gradient, lr, mu, nesterov)


@torch.no_grad()
def outer_merge_(
    anchor: Tensor, momentum: Tensor, received: Tensor, sent: Tensor | None, lr: float, mu: float, nesterov: bool
) -> None:
    r"""`outer_nesterov_` on the buckets of a round: the target comes out in ``received``, the snapshot in ``sent``.

    .. math:: s \leftarrow a - s, \qquad (a, m) \leftarrow \mathrm{step}(a, m, g = r), \qquad r \leftarrow a

    Args:
        anchor: flat fp32 :math:`a`; updated in place.
        momentum: flat fp32 :math:`m`; updated in place.
        received: flat fp32 :math:`r`, the mean pseudo-gradient; becomes the new anchor.
        sent: flat fp32 :math:`s`, this replica's pseudo-gradient; becomes its snapshot, up to rounding. Or None.
        lr: as of `outer_nesterov_`.
        mu: as of `outer_nesterov_`.
        nesterov: as of `outer_nesterov_`.

    Raises:
        TypeError: a tensor is not fp32.
        ValueError: as of `outer_nesterov_`.

    >>> anchor, momentum, received, sent = (torch.tensor([v]) for v in (1.0, 0.0, 0.5, 0.25))
    >>> outer_merge_(anchor, momentum, received, sent, lr=0.5, mu=0.5, nesterov=True)
    >>> received, sent
    (tensor([0.6250]), tensor([0.7500]))
    """
    if sent is not None:
        torch.sub(anchor, sent, out=sent)
    momentum_step_(anchor, momentum, received, lr, mu, nesterov)
    received.copy_(anchor)


@torch.no_grad()
def nesterov_merge_(
    params: Tensor,
    mean: Tensor,
    anchor: Tensor,
    momentum: Tensor,
    snapshot: Tensor | None,
    lr: float,
    mu: float,
    nesterov: bool = True,
) -> None:
    r"""DiLoCo's whole merge in one pass: pseudo-gradient, outer step, parameters.

    .. math::
        g &= a - \bar x, \qquad (a, m) \leftarrow \mathrm{step}(a, m, g) \\
        x &\leftarrow \mathrm{cast}(a) \quad\text{or, overlapped,}\quad x \leftarrow \mathrm{cast}(x + (a - s))

    Args:
        params: :math:`x`, fp32, bf16 or fp16; updated in place.
        mean: :math:`\bar x`, fp32, the replicas' mean.
        anchor: :math:`a`, fp32; updated in place.
        momentum: :math:`m`, fp32, zeros at first; updated in place.
        snapshot: :math:`s`, fp32, what this replica sent, while it trained on; None: it stood still.
        lr: :math:`\eta` of `outer_nesterov_`.
        mu: :math:`\mu`.
        nesterov: look ahead along the new momentum. Default: True.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: as of `delta_merge_`.

    Source: Douillard et al., "DiLoCo", 2023, https://arxiv.org/abs/2311.08105

    >>> x, anchor, momentum = torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([0.0])
    >>> nesterov_merge_(x, torch.tensor([0.5]), anchor, momentum, None, lr=0.5, mu=0.5)
    >>> x
    tensor([0.6250])
    """
    _merge(params, mean, anchor, momentum, snapshot, lr, mu, nesterov, 1.0)


@torch.no_grad()
def slowmo_merge_(
    params: Tensor,
    mean: Tensor,
    anchor: Tensor,
    momentum: Tensor,
    snapshot: Tensor | None,
    inner_lr: float,
    outer_lr: float,
    beta: float,
) -> None:
    r"""SlowMo's whole merge in one pass: slow momentum in units of the inner learning rate, step, parameters.

    .. math::
        m &\leftarrow \beta m + \tfrac{1}{\gamma} (a - \bar x), \qquad a \leftarrow a - \alpha\gamma\, m \\
        x &\leftarrow \mathrm{cast}(a) \quad\text{or, overlapped,}\quad x \leftarrow \mathrm{cast}(x + (a - s))

    Args:
        params: :math:`x`, fp32, bf16 or fp16; updated in place.
        mean: :math:`\bar x`, fp32, the replicas' mean.
        anchor: :math:`a`, fp32; updated in place.
        momentum: :math:`m`, fp32, zeros at first; updated in place.
        snapshot: :math:`s`, fp32, as of `nesterov_merge_`.
        inner_lr: :math:`\gamma`, the inner optimizer's learning rate now; not zero.
        outer_lr: :math:`\alpha`.
        beta: :math:`\beta`.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: as of `delta_merge_`, or ``inner_lr`` is not positive.

    Source: Wang et al., "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum", 2020,
    https://arxiv.org/abs/1910.00643

    >>> x, anchor, momentum = torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([0.0])
    >>> slowmo_merge_(x, torch.tensor([0.5]), anchor, momentum, None, inner_lr=0.5, outer_lr=1.0, beta=0.5)
    >>> x, momentum
    (tensor([0.5000]), tensor([1.]))
    """
    _merge(params, mean, anchor, momentum, snapshot, outer_lr * inner_lr, beta, False, 1.0 / inner_lr)


def _merge(
    params: Tensor,
    mean: Tensor,
    anchor: Tensor,
    momentum: Tensor,
    snapshot: Tensor | None,
    lr: float,
    mu: float,
    nesterov: bool,
    scale: float,
) -> None:
    momentum_step_(anchor, momentum, anchor - mean, lr, mu, nesterov, scale)
    params.copy_(anchor if snapshot is None else params.float() + (anchor - snapshot))

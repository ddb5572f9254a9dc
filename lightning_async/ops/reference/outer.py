"""Outer optimizers in plain torch: momentum on the last agreed parameters, the anchor."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["outer_merge_"]


def momentum_step_(anchor: Tensor, momentum: Tensor, gradient: Tensor, lr: float, mu: float, nesterov: bool) -> None:
    """``m = mu m + g``, then ``a -= lr (g + mu m)`` with nesterov, else ``a -= lr m``."""
    momentum.mul_(mu).add_(gradient)
    anchor.sub_((gradient + momentum * mu if nesterov else momentum) * lr)


@torch.no_grad()
def outer_merge_(
    anchor: Tensor, momentum: Tensor, received: Tensor, sent: Tensor | None, lr: float, mu: float, nesterov: bool
) -> None:
    r"""One step of SGD with (Nesterov) momentum on the buckets of a round: the target comes out in ``received``, the
    snapshot in ``sent``.

    .. math::
        s &\leftarrow a - s, \qquad m \leftarrow \mu m + r \\
        a &\leftarrow a - \eta\, (r + \mu m) \text{ with nesterov, else } a - \eta\, m, \qquad r \leftarrow a

    Every product and every sum is rounded, on every device. `torch.optim.SGD` rounds some of them together where the
    processor has a fused multiply-add, so the two agree within a few units in the last place and not to the bit.

    Args:
        anchor: flat fp32 :math:`a`; updated in place.
        momentum: flat fp32 :math:`m`; updated in place.
        received: flat fp32 :math:`r`, the mean pseudo-gradient; becomes the new anchor.
        sent: flat fp32 :math:`s`, this replica's pseudo-gradient; becomes its snapshot, up to rounding. Or None.
        lr: :math:`\eta`.
        mu: :math:`\mu`.
        nesterov: look ahead along the new momentum.

    Raises:
        TypeError: a tensor is not fp32.
        ValueError: shapes or devices differ, or tensors are not contiguous or overlap.

    Source: Douillard et al., "DiLoCo", 2023, https://arxiv.org/abs/2311.08105

    >>> anchor, momentum, received, sent = (torch.tensor([v]) for v in (1.0, 0.0, 0.5, 0.25))
    >>> outer_merge_(anchor, momentum, received, sent, lr=0.5, mu=0.5, nesterov=True)
    >>> received, sent
    (tensor([0.6250]), tensor([0.7500]))
    """
    if sent is not None:
        torch.sub(anchor, sent, out=sent)
    momentum_step_(anchor, momentum, received, lr, mu, nesterov)
    received.copy_(anchor)

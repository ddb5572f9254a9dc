"""What a late gradient would be at the parameters of now, to first order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_async.arguments import check_real
from lightning_async.rules.delays import GradientCorrection
from lightning_async.rules.staleness.protocol import StalenessPolicy

__all__ = ["AdaptiveDelayCompensation", "DelayCompensation"]


@dataclass(frozen=True)
class DelayCompensation(StalenessPolicy, GradientCorrection):
    r"""A Taylor expansion to the parameters of now, with the gradient's square in place of the Hessian.

    .. math:: g \leftarrow g + \lambda\, g \odot g \odot (x_{\text{now}} - x_{\text{then}})

    Args:
        strength: :math:`\lambda`. Default 0.04, the paper's for a constant one.

    Raises:
        TypeError: ``strength`` is not a number.
        ValueError: ``strength`` is negative, or not finite.

    Source: DC-ASGD (Zheng et al., ICML 2017), https://arxiv.org/abs/1609.08326

    >>> gradient = torch.tensor([2.0, -1.0])
    >>> DelayCompensation(0.5).correct_(gradient, torch.tensor([1.0, 3.0]))
    >>> gradient
    tensor([4.0000, 0.5000])
    """

    strength: float = 0.04

    adjusts = True

    def __post_init__(self) -> None:
        check_real(self, "strength", at_least=0)

    @torch.no_grad()
    def correct_(self, gradient: Tensor, moved: Tensor) -> None:
        """See `GradientCorrection`."""
        gradient.add_(moved.mul_(gradient).mul_(gradient), alpha=self.strength)

    def adjust_(self, gradient: Tensor, moved: Tensor, state: Mapping[str, Tensor]) -> None:
        """See `StalenessPolicy`."""
        self.correct_(gradient, moved)


@dataclass(frozen=True)
class AdaptiveDelayCompensation(StalenessPolicy):
    r"""`DelayCompensation` whose strength is each element's own: the smaller, the larger its gradients are.

    .. math::
        s &\leftarrow m\, s + (1 - m)\, g \odot g, \qquad \lambda = \lambda_0 / \sqrt{s + \epsilon} \\
        g &\leftarrow g + \lambda \odot g \odot g \odot (x_{\text{now}} - x_{\text{then}})

    Args:
        strength: :math:`\lambda_0`. Default 2.0, the paper's.
        decay_square: :math:`m`. Default 0.95.
        eps: :math:`\epsilon`. Default 1e-7.

    Raises:
        TypeError: an argument is not a number.
        ValueError: an argument is negative or not finite, ``decay_square`` not below 1, or ``eps`` 0.

    Source: DC-ASGD-a (Zheng et al., ICML 2017), https://arxiv.org/abs/1609.08326

    >>> gradient, state = torch.tensor([2.0]), {"mean_square": torch.zeros(1)}
    >>> AdaptiveDelayCompensation(1.0, decay_square=0.0).adjust_(gradient, torch.tensor([0.5]), state)
    >>> gradient
    tensor([3.])
    """

    strength: float = 2.0
    decay_square: float = 0.95
    eps: float = 1e-7

    adjusts = True
    fields = ("mean_square",)

    def __post_init__(self) -> None:
        check_real(self, "strength", at_least=0)
        check_real(self, "decay_square", at_least=0, below=1)
        check_real(self, "eps", above=0)

    @torch.no_grad()
    def adjust_(self, gradient: Tensor, moved: Tensor, state: Mapping[str, Tensor]) -> None:
        """See `StalenessPolicy`."""
        square = state["mean_square"]
        square.mul_(self.decay_square).addcmul_(gradient, gradient, value=1 - self.decay_square)
        moved.mul_(gradient).mul_(gradient).div_((square + self.eps).sqrt_())
        gradient.add_(moved, alpha=self.strength)

"""What becomes of a gradient that arrives late: the parameters have moved since it was computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightning_async.arguments import check_real

__all__ = ["DelayCompensation", "DelayCorrection"]


class DelayCorrection(Protocol):
    """Changes a late gradient, alike on all replicas: of what these share, and of nothing else."""

    def correct_(self, gradient: Tensor, moved: Tensor) -> None:
        """Correct a gradient in place.

        Args:
            gradient: the mean of all replicas, flat, fp32.
            moved: the parameters now, less those that it was computed at; may be used up.
        """
        ...


@dataclass(frozen=True)
class DelayCompensation:
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

    def __post_init__(self) -> None:
        check_real(self, "strength", at_least=0)

    @torch.no_grad()
    def correct_(self, gradient: Tensor, moved: Tensor) -> None:
        """See `DelayCorrection`."""
        gradient.add_(moved.mul_(gradient).mul_(gradient), alpha=self.strength)

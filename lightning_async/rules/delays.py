"""What is done about steps that are one window late: the parameters have moved since their gradients were computed.

A correction says one of three things: what becomes of the late gradient, where gradients are computed instead, or what
a step is made of. Whatever it says depends on what all replicas share, and on nothing else. `DelayCompensation` and
`WeightPrediction` are policies of parameter servers, too: see `rules.staleness`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

__all__ = [
    "DelayCorrection",
    "EstimateCommit",
    "Estimation",
    "GradientCorrection",
    "Prediction",
]


@runtime_checkable
class GradientCorrection(Protocol):
    """Changes a late gradient."""

    def correct_(self, gradient: Tensor, moved: Tensor) -> None:
        """Correct a gradient in place.

        Args:
            gradient: the mean of all replicas, flat, fp32.
            moved: the parameters now, less those that it was computed at; may be used up.
        """
        ...


@runtime_checkable
class Prediction(Protocol):
    """Computes gradients where the parameters are likely to be when they are stepped with."""

    def predict_(self, before: Tensor, now: Tensor) -> None:
        """Put the prediction in place of ``before``.

        Args:
            before: one parameter ahead of the last step, in its own precision.
            now: the same after it.
        """
        ...


@runtime_checkable
class Estimation(Protocol):
    """Steps with a first mean alone, and takes that step again with the next one, too."""

    def combine_(self, gradient: Tensor, weight: float, first: Tensor, first_weight: float) -> None:
        """Put what the step is taken again with in place of ``gradient``.

        Args:
            gradient: the second mean of all replicas, flat, fp32.
            weight: samples behind it.
            first: the one before, with which the step was estimated.
            first_weight: samples behind that.
        """
        ...


DelayCorrection: TypeAlias = GradientCorrection | Prediction | Estimation


@dataclass(frozen=True)
class EstimateCommit(Estimation):
    r"""A step has two windows: it is estimated with the first one, and taken again, from its start, with both.

    .. math::
        \tilde x_{t+1} &= \mathrm{Opt}(x_t,\; \tilde g_t) \\
        x_{t+1} &= \mathrm{Opt}\Big(x_t,\; \frac{\tilde n_t\, \tilde g_t + n_t\, g_t}{\tilde n_t + n_t}\Big)

    :math:`\tilde g_t` was computed at :math:`\tilde x_t`, while :math:`g_{t-1}` travelled, and :math:`g_t` at
    :math:`x_t`, while :math:`\tilde g_t` did; :math:`\tilde n_t` and :math:`n_t` samples are behind them. So half of
    the gradients are not late at all, and the rest are computed where half of the step leads.

    Source: ACCO (Nabli et al., 2024), https://arxiv.org/abs/2406.02613

    >>> second = torch.tensor([4.0])
    >>> EstimateCommit().combine_(second, 1.0, torch.tensor([1.0]), 2.0)
    >>> second
    tensor([2.])
    """

    @torch.no_grad()
    def combine_(self, gradient: Tensor, weight: float, first: Tensor, first_weight: float) -> None:
        """See `Estimation`."""
        gradient.lerp_(first, first_weight / (weight + first_weight))

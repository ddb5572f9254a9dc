"""What is done about steps that are one window late: the parameters have moved since their gradients were computed.

A correction says one of two things: what becomes of the late gradient, or where gradients are computed instead. What it
says depends on what all replicas share, and on nothing else. `DelayCompensation` and `WeightPrediction` are policies of
parameter servers, too: see `rules.staleness`.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias, runtime_checkable

from torch import Tensor

__all__ = [
    "DelayCorrection",
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


DelayCorrection: TypeAlias = GradientCorrection | Prediction

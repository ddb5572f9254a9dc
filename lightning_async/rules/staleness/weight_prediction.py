"""Gradients are computed where the parameters are likely to be when they are stepped with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_async.arguments import check_real
from lightning_async.rules.delays import Prediction
from lightning_async.rules.staleness.protocol import StalenessPolicy

__all__ = ["WeightPrediction"]


@dataclass(frozen=True)
class WeightPrediction(StalenessPolicy, Prediction):
    r"""Gradients that will be late are computed where the last step, taken again, would lead.

    .. math:: \hat x = x_t + s\,\tau\,(x_t - x_{t-1})

    The last step is the optimizer's own: :math:`-\eta v` with momentum, as in SpecTrain, and
    :math:`-\eta\, \hat m / (\sqrt{\hat v} + \epsilon)` with Adam, as in XPipe, its weight decay included. :math:`\tau`
    is how many steps a gradient is late: 1 where windows of gradients are, on a parameter server the running mean of
        the lag.

    Args:
        steps: :math:`s`, steps ahead for each that a gradient is late. Default 1.0.

    Raises:
        TypeError: ``steps`` is not a number.
        ValueError: ``steps`` is negative, or not finite.

    Source: SpecTrain (Chen et al., 2018), https://arxiv.org/abs/1809.02839, and XPipe (Guan et al., 2019),
    https://arxiv.org/abs/1911.04610

    >>> there = torch.tensor([1.0, 2.0])
    >>> WeightPrediction(2.0).predict_(there, torch.tensor([1.5, 1.0]))
    >>> there
    tensor([ 2.5000, -1.0000])
    """

    steps: float = 1.0

    predicts = True

    def __post_init__(self) -> None:
        check_real(self, "steps", at_least=0)

    def predict_(self, before: Tensor, now: Tensor) -> None:
        """See `Prediction`."""
        self.look_ahead_(before, now, 1.0)

    @torch.no_grad()
    def look_ahead_(self, before: Tensor, now: Tensor, late: float) -> None:
        """See `StalenessPolicy`."""
        torch.sub(now, before, out=before)
        torch.add(now, before, alpha=self.steps * late, out=before)

"""What counts is not how many updates have come between, but how far they led."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lightning_async.arguments import check_choice, check_real
from lightning_async.rules.staleness.protocol import Late, StalenessPolicy, Weight

__all__ = ["GapAware"]

Scales = Literal["rate", "gradient"]


@dataclass(frozen=True)
class GapAware(StalenessPolicy):
    r"""A push counts the less, the more steps the weights have gone since its worker pulled them.

    .. math::
        w = \frac{1}{1 + \lVert x_t - x_{t-\tau} \rVert / C}, \qquad
        C \leftarrow d\, C + (1 - d) \lVert x_{t+1} - x_t \rVert

    Args:
        scales: what :math:`w` is a factor of. ``"rate"``: the learning rate of the update. ``"gradient"``: the
            gradient, as in the paper; of use with optimizers that are linear in it only: Adam's steps are as long for a
            small one.
            Default: ``"rate"``.
        decay: :math:`d`. Default: 0.99.

    Raises:
        TypeError: ``decay`` is not a number.
        ValueError: ``decay`` is not in [0, 1), or ``scales`` is none of the two.

    Source: Barkai et al., "Gap-Aware Mitigation of Gradient Staleness", 2020, https://arxiv.org/abs/1909.10802

    >>> GapAware().weigh(Late(lag=5, moved=0.75, typical=0.25))
    Weight(rate=0.25, gradient=1.0)
    """

    scales: Scales = "rate"
    decay: float = 0.99

    measures = frozenset({"moved"})

    def __post_init__(self) -> None:
        check_choice("GapAware", "scales", self.scales, get_args(Scales))
        check_real(self, "decay", at_least=0, below=1)

    def weigh(self, late: Late) -> Weight:
        """See `StalenessPolicy`."""
        near = late.lag == 0 or late.moved == 0 or late.typical == 0
        weight = 1.0 if near else 1 / (1 + late.moved / late.typical)
        return Weight(rate=weight) if self.scales == "rate" else Weight(gradient=weight)

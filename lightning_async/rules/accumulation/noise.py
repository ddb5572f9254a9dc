"""The noise scale of gradients: how large a batch may be before more samples add little."""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["Noise", "estimate"]


def estimate(small: float, big: float, small_size: float, big_size: float) -> tuple[float, float]:
    r"""Unbiased estimates of the gradient's squared length and of its noise, from two sizes of batches.

    .. math::
        |G|^2 &= \frac{B_b |G_b|^2 - B_s |G_s|^2}{B_b - B_s} \\
        S &= \frac{|G_s|^2 - |G_b|^2}{1 / B_s - 1 / B_b}

    Args:
        small: :math:`|G_s|^2`, the squared norm of a gradient over :math:`B_s` samples (a mean over several such).
        big: :math:`|G_b|^2`, the same over :math:`B_b` samples.
        small_size: :math:`B_s`.
        big_size: :math:`B_b`, larger.

    Returns:
        :math:`|G|^2` and :math:`S`, the trace of the covariance of one sample's gradient. Either may be negative.

    Raises:
        ValueError: the sizes are not in this order.

    Source: McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, appendix A.1,
    https://arxiv.org/abs/1812.06162

    >>> estimate(small=1.0 + 8.0 / 2, big=1.0 + 8.0 / 8, small_size=2, big_size=8)
    (1.0, 8.0)
    """
    if not 0 < small_size < big_size:
        raise ValueError(
            f"`estimate(small_size={small_size!r}, big_size={big_size!r})` must be positive and ascending."
        )
    square = (big_size * big - small_size * small) / (big_size - small_size)
    return square, (small - big) / (1 / small_size - 1 / big_size)


class Noise(NamedTuple):
    r"""The noise scale, of estimates that are smoothed each by itself.

    .. math:: B_\text{simple} = \frac{\bar S}{\overline{|G|^2}}

    The mean of a ratio is biased, the ratio of means much less: so :math:`S` and :math:`|G|^2` are averaged, both with
    the same weights.

    Args:
        square: the mean of :math:`|G|^2`.
        trace: the mean of :math:`S`.
        weight: of the values in these means, 0 where there are none.

    Source: as of `estimate`.

    >>> Noise().add(estimate(5.0, 2.0, 2, 8), decay=0.9).scale
    8.0
    """

    square: float = 0.0
    trace: float = 0.0
    weight: float = 0.0

    def add(self, estimated: tuple[float, float], decay: float) -> Noise:
        """With one more estimate, see `estimate`; one that is not finite changes nothing."""
        if not all(map(math.isfinite, estimated)):
            return self
        weight = decay * self.weight + 1 - decay
        share = (1 - decay) / weight
        square, trace = estimated
        return Noise(self.square + share * (square - self.square), self.trace + share * (trace - self.trace), weight)

    @property
    def scale(self) -> float:
        """In samples: 0 where no noise is to be seen, infinite where nothing else is; NaN while unknown."""
        if self.weight == 0 or (self.square <= 0 and self.trace <= 0):
            return math.nan
        if self.trace <= 0:
            return 0.0
        return self.trace / self.square if self.square > 0 else math.inf

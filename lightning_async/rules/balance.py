"""How much work each replica does, so that all are done together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_async.arguments import check_int

__all__ = ["BalancedWindows"]


@dataclass(frozen=True)
class BalancedWindows:
    r"""Windows of gradients in proportion to speed: a slow replica has fewer batches in each.

    .. math:: n_i = \operatorname{clip}\Big(\Big[\, N n\, \frac{v_i}{\sum_j v_j} \Big],\; n_{\min},\; n_{\max}\Big)

    :math:`v_i` are the batches per second of each of :math:`N` replicas, as measured of late. So all fill their windows
    at once, and a step has about as many batches as with equal ones; each sample counts the same in its mean.

    Args:
        batches: :math:`n`, in a window on average. Default 4.
        minimum: :math:`n_{\min}`, of batches in a window. Default 1.
        maximum: :math:`n_{\max}`. Default 64.

    Raises:
        TypeError: an argument is not an int.
        ValueError: a number is less than 1, or the bounds leave no room for ``batches``.

    Source: dynamic local updates of Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024,
    https://arxiv.org/abs/2401.09135, for windows of gradients

    >>> BalancedWindows(4).size([3.0, 3.0, 3.0, 1.0], 0), BalancedWindows(4).size([3.0, 3.0, 3.0, 1.0], 3)
    (5, 2)
    """

    batches: int = 4
    minimum: int = 1
    maximum: int = 64

    def __post_init__(self) -> None:
        check_int(self, "minimum", at_least=1)
        check_int(self, "batches", at_least=self.minimum)
        check_int(self, "maximum", at_least=self.batches)

    def size(self, speeds: Sequence[float], me: int) -> int:
        """Batches in the next window of the replica at place ``me``; ``batches``, while a speed is not known (0.0)."""
        if not all(speed > 0.0 for speed in speeds):
            return self.batches
        wanted = round(len(speeds) * self.batches * speeds[me] / sum(speeds))
        return min(max(wanted, self.minimum), self.maximum)

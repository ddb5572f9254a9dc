"""How much work each replica does, so that all are done together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from lightning_async.arguments import check_int

__all__ = ["BalancedWindows", "batch_sizes"]


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


def batch_sizes(total: int, speeds: Sequence[float], minimum: int, most: Sequence[int]) -> list[int]:
    r"""How many samples each replica takes of a step, so that all take equally long.

    .. math:: n_i = \operatorname{clip}(\lambda v_i,\; n_{\min},\; m_i), \qquad \sum_i n_i = n

    Rounded to whole samples, of which the sum is exact, so that the last replica is done as soon as can be. Where the
    bounds leave no room for it, the sum is as near to ``total`` as they allow.

    Args:
        total: :math:`n`, samples of a step.
        speeds: :math:`v_i`, samples per second; 0.0 where one is not known: as fast as the others are on average.
        minimum: :math:`n_{\min}`.
        most: :math:`m_i`, at least ``minimum``.

    >>> batch_sizes(128, [3.0, 3.0, 3.0, 1.0], 1, [128] * 4), batch_sizes(128, [3.0, 3.0, 3.0, 1.0], 1, [36] * 4)
    ([39, 39, 38, 12], [36, 36, 36, 20])
    """
    known = [speed for speed in speeds if speed > 0.0]
    usual = sum(known) / len(known) if known else 1.0
    weights = [Fraction(speed if speed > 0.0 else usual) for speed in speeds]
    total = min(max(total, minimum * len(most)), sum(most))
    fixed: dict[int, int] = {}
    while len(fixed) < len(most):
        free = [i for i in range(len(most)) if i not in fixed]
        share = (total - sum(fixed.values())) / sum(weights[i] for i in free)
        over = {i: most[i] for i in free if share * weights[i] > most[i]}
        under = {i: minimum for i in free if share * weights[i] < minimum}
        if not over and not under:
            break
        too_much = sum(share * weights[i] - bound for i, bound in over.items())
        too_little = sum(bound - share * weights[i] for i, bound in under.items())
        fixed |= over if too_much >= too_little else under
    free = [i for i in range(len(most)) if i not in fixed]
    rest = total - sum(fixed.values())
    quotas = {i: rest * weights[i] / sum(weights[j] for j in free) for i in free}
    whole = {i: int(quota) for i, quota in quotas.items()}
    for _ in range(rest - sum(whole.values())):
        soonest = min((i for i in free if whole[i] < most[i]), key=lambda i: ((whole[i] + 1) / weights[i], i))
        whole[soonest] += 1
    return [fixed[i] if i in fixed else whole[i] for i in range(len(most))]

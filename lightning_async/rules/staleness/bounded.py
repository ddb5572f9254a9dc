"""What is too late is left out."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_async.arguments import check_int
from lightning_async.rules.staleness.protocol import Late, StalenessPolicy, Weight

__all__ = ["Bounded"]


@dataclass(frozen=True)
class Bounded(StalenessPolicy):
    r"""A push whose lag reaches a bound is dropped; its worker goes on from the newest weights.

    .. math:: x_{t+1} = \begin{cases} \mathrm{Opt}(x_t,\; g) & \tau < R \\ x_t & \text{else} \end{cases}

    To have workers wait in place of dropping what they did, take ``mode="ssp"``. About a push of each worker comes
    between two of one's own, so a bound below the number of workers drops much.

    Args:
        max_staleness: :math:`R`, updates.

    Raises:
        TypeError: ``max_staleness`` is not an int.
        ValueError: it is below 1: nothing would ever be applied.

    Source: Maranjyan et al., "Ringmaster ASGD", 2025, https://arxiv.org/abs/2501.16168

    >>> Bounded(2).weigh(Late(lag=1)), Bounded(2).weigh(Late(lag=2))
    (Weight(rate=1.0, gradient=1.0), None)
    """

    max_staleness: int

    def __post_init__(self) -> None:
        check_int(self, "max_staleness", at_least=1)

    def weigh(self, late: Late) -> Weight | None:
        """See `StalenessPolicy`."""
        return Weight() if late.lag < self.max_staleness else None

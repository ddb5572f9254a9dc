"""Updates that are the mean of some pushes."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_async.arguments import check_int
from lightning_async.rules.staleness.protocol import UNCORRECTED, StalenessPolicy, Wrapper

__all__ = ["Buffered"]


@dataclass(frozen=True)
class Buffered(Wrapper):
    r"""An update is the mean of so many pushes, whoever they are of.

    .. math:: x_{t+1} = \mathrm{Opt}\Big(x_t,\; \frac{1}{K} \sum_{k=1}^{K} w_k\, g_k\Big)

    ``Buffered(K, AdaptiveLr(form="sqrt"))`` is FedBuff, ``Buffered(K, Bounded(1))`` Rennala SGD, which takes gradients
    of the newest weights only. A lag counts updates, and so is :math:`K` times shorter.

    Args:
        buffer_size: :math:`K`. Default: 10.
        policy: that says how much each counts, :math:`w`. Default: all of it.

    Raises:
        TypeError: ``buffer_size`` is not an int, or ``policy`` no policy.
        ValueError: ``buffer_size`` is below 1, or ``policy`` gathers pushes itself, gives each worker a momentum, or
            has a state of its own.

    Source: Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", 2022,
    https://arxiv.org/abs/2106.06639; Tyurin and Richtárik, "Optimal Time Complexities of Parallel Stochastic
    Optimization Methods", 2023, https://arxiv.org/abs/2305.12387

    >>> Buffered(4).buffer_size
    4
    """

    buffer_size: int = 10  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
    policy: StalenessPolicy = UNCORRECTED

    def __post_init__(self) -> None:
        check_int(self, "buffer_size", at_least=1)
        if not isinstance(self.policy, StalenessPolicy):
            raise TypeError(f"`Buffered(policy={self.policy!r})` must be a staleness policy.")
        if self.policy.buffer_size > 1 or self.policy.momentum_by_worker or self.policy.fields:
            raise ValueError(
                f"`Buffered(policy={self.policy!r})` must be a policy that neither gathers pushes itself, nor gives "
                "each worker a momentum, nor has a state of its own."
            )

"""No push is longer than a bound."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_async.arguments import check_real
from lightning_async.rules.staleness.protocol import UNCORRECTED, Late, StalenessPolicy, Weight, Wrapper

__all__ = ["Clipping"]


@dataclass(frozen=True)
class Clipping(Wrapper):
    r"""A gradient is scaled down to a norm, so that what is late and large does not lead far astray.

    .. math:: w = w_{\text{policy}} \cdot \min(1,\; c / \lVert g \rVert)

    The norm is that of a shard: of a server's part of the parameters.

    Args:
        max_norm: :math:`c`. Default: 1.
        policy: that says how much a push counts besides. Default: all of it.

    Raises:
        TypeError: ``max_norm`` is not a number, or ``policy`` no policy.
        ValueError: ``max_norm`` is not above 0.

    Source: Pascanu et al., "On the Difficulty of Training Recurrent Neural Networks", 2013,
    https://arxiv.org/abs/1211.5063

    >>> Clipping(0.5).weigh(Late(lag=0, norm=2.0))
    Weight(rate=1.0, gradient=0.25)
    """

    max_norm: float = 1.0
    policy: StalenessPolicy = UNCORRECTED

    def __post_init__(self) -> None:
        check_real(self, "max_norm", above=0)
        if not isinstance(self.policy, StalenessPolicy):
            raise TypeError(f"`Clipping(policy={self.policy!r})` must be a staleness policy.")

    @property
    def measures(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.policy.measures | {"norm"}

    def weigh(self, late: Late) -> Weight | None:
        """See `StalenessPolicy`."""
        weight = self.policy.weigh(late)
        if weight is None or late.norm <= self.max_norm:
            return weight
        return weight._replace(gradient=weight.gradient * self.max_norm / late.norm)

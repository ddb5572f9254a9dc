"""What a server does about a push that is late: how much it counts, what it is corrected by, what is pulled in place of
the weights.

A policy is a frozen dataclass that extends `StalenessPolicy` and changes what differs. A server asks it once for each
push, with what it has measured for it; a policy keeps nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

__all__ = ["UNCORRECTED", "Late", "StalenessPolicy", "Uncorrected", "Weight", "Wrapper"]


class Late(NamedTuple):
    """What a server knows of a push before it applies it; each shard by itself.

    Args:
        lag: updates since the worker pulled the weights that its gradient was computed at.
        moved: the norm of how far the weights have gone since. 0 where ``lag`` is.
        typical: the running mean of the norm of one update. 0 where there was none.
        norm: of the gradient.
    """

    lag: int
    moved: float = 0.0
    typical: float = 0.0
    norm: float = 0.0


class Weight(NamedTuple):
    """How much a push counts.

    Args:
        rate: factor of the learning rate, of the update that the push is applied with.
        gradient: factor of the gradient, before the optimizer sees it.
    """

    rate: float = 1.0
    gradient: float = 1.0


class StalenessPolicy:
    """What a server does about staleness: here, nothing.

    A policy of your own extends this in a module that the server's process can import, as a frozen dataclass whose
    fields JSON can hold (or are policies), and changes `weigh`.
    """

    measures: frozenset[str] = frozenset()
    """Of `Late`, what is to be measured: ``"moved"`` (with ``"typical"``) and ``"norm"``. The first makes the server
    keep the weights that each worker has pulled."""
    decay: float = 0.99
    """Of the running mean ``typical``."""
    adjusts: bool = False
    """Whether `adjust_` does anything; the server then keeps the weights that each worker has pulled."""
    fields: tuple[str, ...] = ()
    """Names of the state of `adjust_`: zeros at first, of the parameters' size."""
    predicts: bool = False
    """Whether `look_ahead_` says what is pulled."""
    momentum_by_worker: bool = False
    """Whether each worker has a momentum of its own, and pulls where all of them lead."""
    buffer_size: int = 1
    """Pushes that an update is the mean of."""

    def weigh(self, late: Late) -> Weight | None:
        """How much a push counts; None: it is left out."""
        return Weight()

    def adjust_(self, gradient: Tensor, moved: Tensor, state: Mapping[str, Tensor]) -> None:
        """Correct a gradient in place, by elements: a server may ask for one piece after another.

        Args:
            gradient: flat, fp32.
            moved: the parameters now, less those that it was computed at; may be used up.
            state: of the `fields`, updated in place.
        """

    def look_ahead_(self, before: Tensor, now: Tensor, late: float) -> None:
        """Put what workers are to pull in place of ``before``.

        Args:
            before: the parameters ahead of the last update.
            now: after it.
            late: the running mean of the lag.
        """


@dataclass(frozen=True)
class Uncorrected(StalenessPolicy):
    r"""Every push counts, as it comes.

    .. math:: x_{t+1} = \mathrm{Opt}(x_t,\; g(x_{t-\tau}))

    Source: Dean et al., "Large Scale Distributed Deep Networks", 2012; Recht et al., "Hogwild!", 2011,
    https://arxiv.org/abs/1106.5730

    >>> Uncorrected().weigh(Late(lag=100))
    Weight(rate=1.0, gradient=1.0)
    """


UNCORRECTED = Uncorrected()


class Wrapper(StalenessPolicy):
    """A policy around another one, ``policy``: all that it does not change is that one's."""

    policy: StalenessPolicy

    @property
    def measures(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.policy.measures

    @property
    def decay(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.policy.decay

    @property
    def adjusts(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.policy.adjusts

    @property
    def fields(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.policy.fields

    @property
    def predicts(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.policy.predicts

    @property
    def momentum_by_worker(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.policy.momentum_by_worker

    @property
    def buffer_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.policy.buffer_size

    def weigh(self, late: Late) -> Weight | None:
        return self.policy.weigh(late)

    def adjust_(self, gradient: Tensor, moved: Tensor, state: Mapping[str, Tensor]) -> None:
        self.policy.adjust_(gradient, moved, state)

    def look_ahead_(self, before: Tensor, now: Tensor, late: float) -> None:
        self.policy.look_ahead_(before, now, late)

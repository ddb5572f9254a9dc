"""How far a schedule of learning rates is that all workers have in common: it follows the servers' version."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

__all__ = ["Progress"]


class Progress:
    r"""Steps of each worker, on average, in the weights that it has: whoever has the same weights, slow or fast, is at
    the same place.

    .. math:: p = p_0 + w + \frac{K\, (v - w)}{N}

    with the version :math:`v`, of which :math:`w` are made of a push of each worker, :math:`K` pushes in each of the
    others, and :math:`N` workers; where these come and go, as many as there are while versions come.

    Args:
        steps: of each worker, that training goes on from.
        in_step: versions at first that are made of a push of each worker. Default: 0.
        pushes: in each of the others. Default: 1.

    >>> progress = Progress([10, 14], in_step=2)
    >>> progress.see(2, num_workers=2), progress.see(7, num_workers=2), progress.see(9, num_workers=1)
    (14, 16, 18)
    """

    def __init__(self, steps: Sequence[int] = (0,), in_step: int = 0, pushes: int = 1) -> None:
        self.first = self._mean = Fraction(sum(steps), len(steps))
        self._in_step, self._pushes, self._version = in_step, pushes, 0

    def begin(self, version: int) -> None:
        """Servers have weights of this version, before the first step."""
        self._version = version

    def see(self, version: int, num_workers: int) -> int:
        """Weights of this version have come, which so many workers make; steps."""
        if (new := version - self._version) > 0:
            together = max(0, min(version, self._in_step) - self._version)
            self._mean += together + Fraction((new - together) * self._pushes, num_workers)
            self._version = version
        return int(self._mean)

    @property
    def steps(self) -> tuple[int, int]:
        """Where it began, and where it is."""
        return int(self.first), int(self._mean)

    def plain(self) -> dict[str, Any]:
        """For one that comes to a training of others, see `take`."""
        return {"mean": self._mean.as_integer_ratio(), "version": self._version, "rest": [self._in_step, self._pushes]}

    def take(self, told: dict[str, Any]) -> None:
        """Be where another one was."""
        self.first = self._mean = Fraction(*told["mean"])
        self._version, (self._in_step, self._pushes) = told["version"], told["rest"]

"""Rounds that all replicas are ready for at the same time, however fast each is."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_async.arguments import check_int
from lightning_async.rules.schedules.protocol import Action, Clock, Schedule, Step

__all__ = ["DyLU"]


@dataclass(frozen=True)
class DyLU(Schedule):
    r"""Dynamic local updates: steps per round in proportion to speed.

    .. math:: \text{round} \iff h + 1 \ge \max\big(n_{\min}, [\, n\, v / v_{\max} ]\big)

    :math:`h` counts the completed steps that no round holds yet, :math:`v` is this replica's speed, as measured of
    late, and :math:`v_{\max}` that of the fastest. So a slow replica takes fewer steps, and no snapshot waits for long.

    Args:
        n: local steps per round of the fastest replica.
        minimum: :math:`n_{\min}`, of the slowest. Default 1.

    Raises:
        TypeError: an argument is not an int.
        ValueError: a number is less than 1, or ``n`` less than ``minimum``.

    Source: Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024, https://arxiv.org/abs/2401.09135

    >>> clock = Clock(step=9, epoch=0, steps_since_round=9, seconds_since_round=0.0)
    >>> DyLU(32).next(clock).action, DyLU(32).next(clock._replace(speed=0.3)).action
    (<Action.LOCAL: 'local'>, <Action.ROUND: 'round'>)
    """

    n: int
    minimum: int = 1

    def __post_init__(self) -> None:
        check_int(self, "minimum", at_least=1)
        check_int(self, "n", at_least=self.minimum)

    def next(self, clock: Clock) -> Step:
        """A round if the coming step is the last one of this replica's share."""
        share = max(self.minimum, round(self.n * clock.speed))
        return Step(Action.ROUND if clock.steps_since_round + 1 >= share else Action.LOCAL)

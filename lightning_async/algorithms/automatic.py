"""Averaging that sets itself: a period by what a round takes, and an outer optimizer by its steps.

`MatchCommunication` is the schedule, `AdaptiveDiLoCo` the rule. Both follow from what is measured in every round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_async._checks import check_int, check_real
from lightning_async.algorithms.averaging import Round
from lightning_async.algorithms.outer_optimizers import DiLoCoBase
from lightning_async.algorithms.schedules import Action, ReplicaClock, Schedule


@dataclass(frozen=True)
class MatchCommunication(Schedule):
    r"""A period that follows from how long a round takes.

    .. math:: n = \min\Big(n_{\max}, \max\big(n_{\min} \frac{v}{v_{\max}}, c\, \frac{t_{round}}{t_{step}}\big)\Big)

    :math:`t_{round}` is the time of a round (the shorter of the last two), :math:`t_{step}` that of a step of this
    replica, :math:`v` its speed and :math:`v_{\max}` that of the fastest. The period follows the link as it changes. A
    slow replica takes fewer steps in a period, so that all are ready together.

    Args:
        minimum: :math:`n_{\min}`. Default 16: more frequent rounds gain nothing with an outer optimizer.
        maximum: :math:`n_{\max}`. Default 512.
        factor: :math:`c`, periods in times of a round. Default 2.5: shorter ones make momentum overshoot.

    Raises:
        TypeError, ValueError: a number of steps is no int of at least 1, ``maximum`` less than ``minimum``, or
            ``factor`` is less than 1.

    Source: the period that hides a round, as in overlapped local SGD: Wang et al., "Overlap Local-SGD", 2020,
    https://arxiv.org/abs/2002.09539

    >>> clock = ReplicaClock(step=39, epoch=0, steps_since_round=39, seconds_since_round=0.0, step_s=0.1, round_s=1.6)
    >>> MatchCommunication().next(clock).name, MatchCommunication(factor=3.0).next(clock).name
    ('ROUND', 'LOCAL')
    """

    minimum: int = 16
    maximum: int = 512
    factor: float = 2.5

    def __post_init__(self) -> None:
        check_int(self, "minimum", at_least=1)
        check_int(self, "maximum", at_least=self.minimum)
        check_real(self, "factor", at_least=1)

    def next(self, clock: ReplicaClock) -> Action:
        return Action.ROUND if clock.steps_since_round + 1 >= self.period(clock) else Action.LOCAL

    def period(self, clock: ReplicaClock) -> int:
        """Return the number of steps from one round to the next, by ``clock``."""
        matched = self.factor * clock.round_s / clock.step_s if clock.step_s > 0.0 else 0.0
        return max(1, math.ceil(min(self.maximum, max(self.minimum * clock.speed, matched))))


@dataclass(frozen=True)
class AdaptiveDiLoCo(DiLoCoBase):
    r"""DiLoCo whose outer learning rate and momentum follow from the steps of each round.

    .. math::
        \eta &= 0.5 + 0.2\, x, \qquad x = \min\big(1, \max(0, \tfrac{h - 8}{8})\big) \\
        \mu &= (0.7 - 0.1\, x) \min\big(1, \tfrac{k h}{64}\big)

    :math:`h` is the mean number of local steps in the messages, which headers say, so that all replicas choose alike,
    and :math:`k` the number of rounds before this one: momentum grows over the first 64 steps of training, in which the
    direction changes most. The rest is `DiLoCo`, with Nesterov's momentum.

    Source: Douillard et al., "DiLoCo", 2023, https://arxiv.org/abs/2311.08105

    >>> first = Round(id=0, rank=0, work=(8.0, 8.0), steps=(12.0, 20.0))
    >>> later = first._replace(id=9, past=9)
    >>> AdaptiveDiLoCo().chosen(first)["outer_momentum"], AdaptiveDiLoCo().chosen(later)["outer_momentum"]
    (0.0, 0.6)
    """

    saved_as = "DiLoCo"

    def outer_settings(self, round: Round) -> tuple[float, float]:
        """Return the outer learning rate and the outer momentum of a round.

        Found by simulation on a language model with AdamW. Delay and number of replicas made no difference beside the
        steps; a larger learning rate with less momentum has the same gain and more noise.
        """
        steps = [taken for taken, work in zip(round.steps, round.work, strict=False) if work > 0.0]
        mean = sum(steps) / len(steps) if steps else 0.0
        share = min(1.0, max(0.0, (mean - 8.0) / 8.0))
        return 0.5 + 0.2 * share, (0.7 - 0.1 * share) * min(1.0, round.past * mean / 64.0)

    def chosen(self, round: Round) -> dict[str, float]:
        lr, momentum = self.outer_settings(round)
        return {"outer_lr": lr, "outer_momentum": momentum}

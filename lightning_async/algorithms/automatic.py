"""Averaging with automatic settings: periods and outer optimizers that follow from measurements in each round.

`MatchCommunication` and `AdaptivePeriod` are schedules whose period follows from the time of a round or from the
disagreement of replicas. `AdaptiveDiLoCo` is a rule whose outer optimizer follows from the number of local steps.
`Trend` keeps a measured number: its mean in the first rounds, and in recent ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from lightning_async._checks import check_choice, check_int, check_real
from lightning_async.algorithms.averaging import Round
from lightning_async.algorithms.outer_optimizers import DiLoCoBase
from lightning_async.algorithms.schedules import PeriodicSchedule, ReplicaClock


@dataclass(frozen=True)
class MatchCommunication(PeriodicSchedule):
    r"""A schedule whose period follows from the time that a round takes.

    .. math:: n = \min\Big(n_{\max}, \max\big(n_{\min} \frac{v}{v_{\max}}, c\, \frac{t_{round}}{t_{step}}\big)\Big)

    :math:`t_{round}` is the time of a round (the shorter of the last two), :math:`t_{step}` is the time of a step of
    this replica, :math:`v` is its speed, and :math:`v_{\max}` is the speed of the fastest replica. When the speed of
    the network changes, the period changes with it. A slow replica takes fewer steps in a period, so all replicas are
    ready for the round at about the same time.

    Args:
        minimum: :math:`n_{\min}`, smallest period in steps. Default 8: more frequent rounds gain little with an outer
            optimizer.
        maximum: :math:`n_{\max}`, largest period in steps. Default 512.
        factor: :math:`c`, length of a period as a multiple of a round's time. Default 2.5: with shorter periods, the
            outer momentum overshoots.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``minimum`` is less than 1, ``maximum`` less than ``minimum``, or ``factor`` less than 1.

    Source: the period that hides a round, as in overlapped local SGD: Wang et al., "Overlap Local-SGD", 2020,
    https://arxiv.org/abs/2002.09539

    >>> clock = ReplicaClock(step=39, epoch=0, steps_since_round=39, seconds_since_round=0.0, step_s=0.1, round_s=1.6)
    >>> MatchCommunication().next(clock).name, MatchCommunication(factor=3.0).next(clock).name
    ('ROUND', 'LOCAL')
    """

    minimum: int = 8
    maximum: int = 512
    factor: float = 2.5

    def __post_init__(self) -> None:
        check_int(self, "minimum", at_least=1)
        check_int(self, "maximum", at_least=self.minimum)
        check_real(self, "factor", at_least=1)

    def period(self, clock: ReplicaClock) -> int:
        matched = self.factor * clock.round_s / clock.step_s if clock.step_s > 0.0 else 0.0
        return max(1, math.ceil(min(self.maximum, max(self.minimum * clock.speed, matched))))


Disagreement = Literal["replica_spread", "loss_variance"]


@dataclass(frozen=True)
class AdaptivePeriod(PeriodicSchedule):
    r"""A schedule whose period is short while replicas diverge fast, and grows as they diverge more slowly.

    .. math:: n = \min\Big(n_{\max}, \max\big(n_{\min}, n_{\min}\, m_0 / m\big)\Big)

    :math:`m` is the metric in recent rounds, and :math:`m_0` is the metric in the first four rounds, which begin every
    :math:`n_{\min}` steps. The metric "replica_spread" is the squared distance between replicas, divided by the number
    of steps since they had equal parameters. With it, a round begins when replicas are as far apart as in the first
    rounds. The period then grows as the learning rate :math:`\eta` falls: as :math:`1 / \eta^2` if replicas diverge
    because of gradient noise, and as :math:`1 / \eta` if they diverge because their data differs. With the metric
    "loss_variance", :math:`m` is the root of the variance over replicas of their mean training loss. Both metrics have
    the same value on all replicas.

    While the learning rate warms up, replicas hardly diverge. Use `Warmup(AdaptivePeriod(), steps=...)`: then
    :math:`m_0` is measured in the first rounds after the warm-up. Strategies refuse `Warmup` with
    ``warmup_sync_every`` here, because :math:`m_0` would be measured in the rounds of the warm-up.

    Args:
        minimum: :math:`n_{\min}`, smallest period in steps. Default 50.
        maximum: :math:`n_{\max}`, largest period in steps. Default 500.
        metric: Name of the metric, "replica_spread" or "loss_variance". Default "replica_spread".

    Raises:
        TypeError: If a number of steps is no int.
        ValueError: If ``minimum`` is less than 1, ``maximum`` less than ``minimum``, or ``metric`` is unknown.

    Source: rounds by the divergence of models as in Kamp et al., "Efficient Decentralized Deep Learning by Dynamic
    Model Averaging", 2018, https://arxiv.org/abs/1807.03210, relative to the beginning as in Wang & Joshi, "Adaptive
    Communication Strategies", 2018, https://arxiv.org/abs/1810.08313; the inverse square of the learning rate is the
    rule of Gu et al., "A Quadratic Synchronization Rule", 2023, https://arxiv.org/abs/2310.14423

    >>> clock = ReplicaClock(step=999, epoch=0, steps_since_round=99, seconds_since_round=0.0, relative_spread=0.5)
    >>> AdaptivePeriod().period(clock), AdaptivePeriod().next(clock).name
    (100, 'ROUND')
    """

    minimum: int = 50
    maximum: int = 500
    metric: Disagreement = "replica_spread"

    def __post_init__(self) -> None:
        check_int(self, "minimum", at_least=1)
        check_int(self, "maximum", at_least=self.minimum)
        check_choice(type(self).__name__, "metric", self.metric, get_args(Disagreement))

    def period(self, clock: ReplicaClock) -> int:
        by_spread = self.metric == "replica_spread"
        relative = clock.relative_spread if by_spread else math.sqrt(clock.relative_loss_variance)
        return max(self.minimum, round(self.minimum / max(relative, self.minimum / self.maximum)))


class Trend(NamedTuple):
    r"""The trend of a measured number: its mean in the first rounds, and its mean in recent rounds.

    .. math:: m_k = m_{k-1} + \frac{x_k - m_{k-1}}{\min(k, w)}, \qquad m_0 = m_w

    One large measurement raises the recent mean at once; it takes many small ones to lower the mean again.

    >>> trend = Trend()
    >>> for measured in (2.0, 4.0, 9.0):
    ...     trend = trend.add(measured, window=2)
    >>> trend, trend.relative
    (Trend(number=3, first=3.0, recent=6.0), 2.0)
    """

    number: int = 0
    first: float = 0.0
    recent: float = 0.0

    def add(self, measured: float, window: int) -> Trend:
        """Return the trend with one more measurement, which is ignored if it is not finite.

        ``window`` is :math:`w` in the equation: the number of first rounds, and about the number of recent rounds, that
        are averaged.
        """
        if not math.isfinite(measured):
            return self
        number = self.number + 1
        recent = self.recent + (measured - self.recent) / min(number, window)
        return Trend(number, recent if number <= window else self.first, recent)

    @property
    def relative(self) -> float:
        """The mean in recent rounds divided by the mean in the first rounds; 1.0 during the first rounds."""
        if self.recent == self.first:
            return 1.0
        return self.recent / self.first if self.first > 0.0 else math.inf


@dataclass(frozen=True)
class AdaptiveDiLoCo(DiLoCoBase):
    r"""A `DiLoCo` whose outer learning rate and momentum follow from the number of local steps in each round.

    .. math::
        \eta &= 0.3 + 0.025 \min(h, 16) \\
        \mu &= (0.7 - 0.1\, x) \min\big(1, \tfrac{k h}{64}\big),
            \qquad x = \min\big(1, \max(0, \tfrac{h - 8}{8})\big)

    :math:`h` is the mean number of local steps in the round's messages. All replicas know these numbers from the
    headers, so they choose the same values. :math:`k` is the number of rounds before this one: momentum grows over the
    first 64 steps of training, in which the direction changes most. The other equations are those of `DiLoCo` with
    Nesterov's momentum.

    Source: Douillard et al., "DiLoCo", 2023, https://arxiv.org/abs/2311.08105

    >>> first = Round(id=0, rank=0, work=(8.0, 8.0), steps=(12.0, 20.0))
    >>> later = first._replace(id=9, past=9)
    >>> AdaptiveDiLoCo().chosen(first)["outer_momentum"], AdaptiveDiLoCo().chosen(later)["outer_momentum"]
    (0.0, 0.6)
    """

    saved_as = "DiLoCo"

    def outer_settings(self, round: Round) -> tuple[float, float]:
        """Return the outer learning rate and the outer momentum of a round.

        The constants were found by simulations on a language model with AdamW. The delay and the number of replicas
        made no further difference. A larger learning rate with less momentum trains equally fast, but with more noise.
        """
        steps = [taken for taken, work in zip(round.steps, round.work, strict=False) if work > 0.0]
        mean = sum(steps) / len(steps) if steps else 0.0
        share = min(1.0, max(0.0, (mean - 8.0) / 8.0))
        return 0.3 + 0.025 * min(mean, 16.0), (0.7 - 0.1 * share) * min(1.0, round.past * mean / 64.0)

    def chosen(self, round: Round) -> dict[str, float]:
        lr, momentum = self.outer_settings(round)
        return {"outer_lr": lr, "outer_momentum": momentum}

"""Averaging that sets itself: which settings follow from which measurements."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lightning_async.algorithms import (
    AdaptiveDiLoCo,
    AdaptivePeriod,
    DiLoCo,
    MatchCommunication,
    ReplicaClock,
    Round,
)
from lightning_async.algorithms.automatic import Trend
from lightning_async.algorithms.schedules import Denser
from lightning_async.flat import FlatLayout

CLOCK = ReplicaClock(step=100, epoch=0, steps_since_round=0, seconds_since_round=0.0, step_s=0.1)


@pytest.mark.parametrize(
    ("facts", "period"),
    [
        ({"round_s": 0.0}, 16),  # nothing is known yet
        ({"round_s": 0.2}, 16),  # two steps
        ({"round_s": 1.0}, 25),  # ten steps
        ({"round_s": 6.01}, 151),
        ({"round_s": 900.0}, 512),
        ({"round_s": 0.1, "speed": 0.25}, 4),  # this replica takes a quarter of the others' steps
        ({"round_s": 1.0, "step_s": 0.4, "speed": 0.25}, 7),
        ({"round_s": 1.0, "step_s": 0.0}, 16),
    ],
)
def test_the_period_follows_the_time_of_a_round(facts: Any, period: int) -> None:
    clock = CLOCK._replace(**facts)
    schedule = MatchCommunication(minimum=16, maximum=512, factor=2.5)
    assert schedule.period(clock) == period
    actions = [schedule.next(clock._replace(steps_since_round=n)).name for n in (period - 2, period - 1)]
    assert actions == ["LOCAL", "ROUND"]


@pytest.mark.parametrize(
    ("relative", "period"),
    [
        (1.0, 50),  # nothing is known yet, or replicas part as in the first rounds
        (4.0, 50),
        (math.inf, 50),
        (0.9999, 50),
        (0.5, 100),
        (0.3, 167),
        (0.1, 500),
        (1e-9, 500),
        (0.0, 500),
    ],
)
def test_the_period_grows_as_replicas_agree(relative: float, period: int) -> None:
    by_spread = AdaptivePeriod(50, 500)
    by_loss = AdaptivePeriod(50, 500, metric="loss_variance")
    assert by_spread.period(CLOCK._replace(relative_spread=relative)) == period
    assert by_loss.period(CLOCK._replace(relative_loss_variance=relative**2)) == period
    assert by_loss.period(CLOCK._replace(relative_spread=relative)) == 50
    clock = CLOCK._replace(relative_spread=relative)
    actions = [by_spread.next(clock._replace(steps_since_round=n)).name for n in (period - 2, period - 1)]
    assert actions == ["LOCAL", "ROUND"]


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize(
    ("schedule", "facts"),
    [
        (MatchCommunication(), {"round_s": 0.0}),
        (MatchCommunication(), {"round_s": 1.0}),
        (MatchCommunication(factor=1.3), {"round_s": 6.01}),
        (MatchCommunication(), {"round_s": 900.0}),
        (AdaptivePeriod(), {}),
        (AdaptivePeriod(), {"relative_spread": 0.3}),
        (AdaptivePeriod(metric="loss_variance"), {"relative_loss_variance": 0.0}),
    ],
)
def test_denser_divides_a_period_that_follows_from_what_is_measured(schedule: Any, facts: Any, times: int) -> None:
    """Whatever it is, and also below its minimum."""
    clock = CLOCK._replace(**facts)
    period = math.ceil(schedule.period(clock) / times)
    denser = Denser(schedule, times)
    actions = [denser.next(clock._replace(steps_since_round=n)).name for n in (period - 2, period - 1)]
    assert actions == ["LOCAL", "ROUND"]


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: AdaptivePeriod(0), ValueError, r"`AdaptivePeriod\(minimum=0\)` must be >= 1\."),
        (lambda: AdaptivePeriod(50, 49), ValueError, r"`AdaptivePeriod\(maximum=49\)` must be >= 50\."),
        (lambda: AdaptivePeriod(50.0), TypeError, "must be an int, got float"),  # pyright: ignore[reportArgumentType]
        (lambda: AdaptivePeriod(metric="loss"), ValueError, r"metric='loss'\)` must be one of \('replica_spread', "),  # pyright: ignore[reportArgumentType]
    ],
)
def test_arguments_that_cannot_mean_anything_are_refused(build: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()


@pytest.mark.parametrize(
    ("measured", "relative"),
    [
        ([], 1.0),
        ([3.0, 5.0, 1.0, 3.0], 1.0),
        ([4.0] * 4 + [8.0], 1.25),
        ([4.0] * 4 + [8.0, math.nan, math.inf], 1.25),
        ([4.0] * 4 + [0.0] * 2, 0.5625),
        ([0.0] * 9, 1.0),
        ([0.0] * 4 + [1.0], math.inf),
    ],
)
def test_a_trend_is_relative_to_the_first_numbers(measured: list[float], relative: float) -> None:
    trend = Trend()
    for number in measured:
        trend = trend.add(number, window=4)
    assert trend.relative == relative


@pytest.mark.parametrize(
    ("number", "steps", "lr", "momentum"),
    [
        (0, 16.0, 0.7, 0.0),
        (1, 16.0, 0.7, 0.15),
        (4, 16.0, 0.7, 0.6),
        (64, 1.0, 0.325, 0.7),
        (99, 12.0, 0.6, 0.65),
        (1, 500.0, 0.7, 0.6),
    ],
)
def test_a_round_is_merged_with_the_settings_that_follow_from_its_steps(
    number: int, steps: float, lr: float, momentum: float
) -> None:
    """As `DiLoCo` with the same numbers, whoever merges; those who were absent do not count."""
    facts = Round(7, 0, (8.0, 0.0, 24.0), steps=(0.5 * steps, 999.0, 1.5 * steps), past=number)
    params = torch.tensor([1.0, -2.0, 3.0])
    sent = torch.tensor([0.5, -1.0, 2.0])
    found = []
    for rule in (AdaptiveDiLoCo(), DiLoCo(lr, momentum)):
        state = rule.init(params, FlatLayout([params]))
        received = params
        for _ in range(2):  # the second time with momentum
            mine = sent.clone()
            rule.message_(mine, state)
            received = mine.clone()
            state = rule.merge_(mine, received, state, facts)
        found.append(torch.cat([received, state.anchor, state.momentum]))
    assert torch.allclose(*found, atol=0.0, rtol=1e-6)
    for rank in range(3):
        assert AdaptiveDiLoCo().chosen(facts._replace(rank=rank)) == pytest.approx(
            {"outer_lr": lr, "outer_momentum": momentum}
        )

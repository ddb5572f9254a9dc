"""Statistics and decisions about signals, by table."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Collection
from typing import Any

import pytest

from lightning_async.algorithms.divergence import (  # fmt: skip
    Absolute,
    Escalation,
    History,
    Relative,
    Remedy,
    SignalAlarm,
    Threshold,
    Track,
    climb,
)

SPIKE = SignalAlarm("loss", 9.0, 5.0)
IN_TIME = SignalAlarm("loss", math.nan, math.inf, Remedy.SKIP)
BROKEN = SignalAlarm("parameters", math.nan, math.inf, Remedy.RESET)
ALL = frozenset(set(Remedy) - {Remedy.NONE})


def test_a_track_knows_median_and_deviation_of_its_window():
    track, values = Track(History(window=30, warmup=5)), [random.Random(1).gauss(3.0, 2.0) for _ in range(100)]
    for i, value in enumerate(values):
        track.add(value, Relative())
        recent = values[max(0, i - 29) : i + 1]
        median, deviation = track.median_and_deviation()
        if i < 4:
            assert math.isnan(median)
            continue
        assert median == pytest.approx(statistics.median(recent))
        assert deviation == pytest.approx(1.4826 * statistics.median(abs(x - median) for x in recent))


def test_what_is_not_finite_is_no_part_of_the_history():
    track = Track(History(window=4, warmup=2))
    for value in (1.0, math.nan, math.inf, 3.0):
        track.add(value, Relative())
    assert track.median_and_deviation() == (2.0, pytest.approx(1.4826))


def test_a_level_that_lasts_becomes_usual():
    track, spikes = Track(History(window=20, warmup=5)), 0
    for value in [1.0] * 20 + [100.0] * 40:
        spikes += value > track.add(value, Relative())
    assert spikes == 10  # half of the window


def test_relative_and_absolute_thresholds():
    assert Absolute(2.0).limit(1.0, 1.0) == 2.0
    assert Relative(times=3.0, floor=0.5).limit(-2.0, 0.1) == 1.0
    assert Relative().limit(math.nan, 0.0) == math.inf
    assert all(isinstance(threshold, Threshold) for threshold in (Absolute(1.0), Relative()))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Absolute(math.nan), ValueError, "Absolute(value=nan)"),
        (lambda: Relative(times=0.0), ValueError, "Relative(times=0.0)` must be > 0"),
        (lambda: Relative(floor=-1.0), ValueError, "floor"),
        (lambda: History(window=1), ValueError, "window"),
        (lambda: History(window=5, warmup=6), ValueError, "must be <= window=5"),
        (lambda: History(cooldown=1.5), TypeError, "cooldown"),  # type: ignore[arg-type]
    ],
)
def test_arguments_are_checked(make: Any, error: type[Exception], text: str):
    with pytest.raises(error) as raised:
        make()
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("start", "used", "tries", "remedy"),
    [
        (Remedy.LOG, {}, {Remedy.LOG: 1, Remedy.STOP: 1}, Remedy.LOG),
        (Remedy.LOG, {Remedy.LOG: 1}, {Remedy.LOG: 1, Remedy.STOP: 1}, Remedy.STOP),
        (Remedy.RESET, {}, {Remedy.LOG: 1, Remedy.SKIP: 1, Remedy.STOP: 1}, Remedy.STOP),
        (Remedy.ROLL_BACK, {Remedy.ROLL_BACK: 2}, {Remedy.LOG: 1, Remedy.ROLL_BACK: 3}, Remedy.ROLL_BACK),
        (Remedy.ROLL_BACK, {Remedy.ROLL_BACK: 3}, {Remedy.LOG: 1, Remedy.ROLL_BACK: 3}, Remedy.LOG),
        (Remedy.ROLL_BACK, {Remedy.ROLL_BACK: 3}, {Remedy.ROLL_BACK: 3, Remedy.STOP: 1}, Remedy.STOP),
        (Remedy.LOG, {}, {}, Remedy.NONE),
    ],
)
def test_the_mildest_remedy_that_is_left(start: Remedy, used: Any, tries: Any, remedy: Remedy):
    assert climb(start, used, tries) is remedy


def asked(
    findings: Collection[SignalAlarm], steps: int, remedies: Collection[Remedy] = ALL, **options: Any
) -> list[str]:
    """What is asked for, and done, where every step finds the same."""
    history = History(window=50, warmup=2, cooldown=options.pop("cooldown", 0))
    escalation = Escalation(remedies, history, options.pop("max_rollbacks", 2), **options)
    names = []
    for _ in range(steps):
        remedy = escalation.next(findings)
        names.append(remedy.name)
        if remedy is not Remedy.NONE:
            escalation.note(remedy)
    return names


def test_what_comes_back_asks_for_something_severer():
    everything = ["LOG", "ALERT", "SYNC_MORE", "SYNC", "CUT_LR", "SKIP", "SKIP", "SKIP", "RESET", "ROLL_BACK"]
    assert asked([SPIKE], 12) == [*everything, "ROLL_BACK", "STOP"]
    assert asked([SPIKE, IN_TIME], 5) == ["SKIP", "SKIP", "SKIP", "RESET", "ROLL_BACK"]
    assert asked([BROKEN], 4) == ["RESET", "ROLL_BACK", "ROLL_BACK", "STOP"]


def test_a_remedy_gets_time_to_help_unless_something_is_broken():
    assert asked([SPIKE], 7, cooldown=2) == ["LOG", "NONE", "NONE", "ALERT", "NONE", "NONE", "SYNC_MORE"]
    assert asked([BROKEN], 3, cooldown=5) == ["RESET", "ROLL_BACK", "ROLL_BACK"]


def test_rollbacks_are_limited_and_what_cannot_help_is_not_repeated_at_every_step():
    assert asked([BROKEN], 4, {Remedy.LOG, Remedy.ROLL_BACK}, max_rollbacks=2, cooldown=3) == [
        "ROLL_BACK", "ROLL_BACK", "LOG", "NONE",
    ]  # fmt: skip


def test_when_all_is_calm_it_begins_anew_but_for_rollbacks():
    escalation = Escalation({Remedy.LOG, Remedy.CUT_LR, Remedy.ROLL_BACK}, History(window=5, warmup=2, cooldown=0), 1)
    for remedy in (Remedy.LOG, Remedy.CUT_LR, Remedy.ROLL_BACK):
        assert escalation.next([SPIKE]) is remedy
        escalation.note(remedy)
        assert escalation.clean_steps == 0
    for _ in range(5):
        assert escalation.next([]) is Remedy.NONE
    assert escalation.calm
    assert escalation.clean_steps == 5
    assert escalation.used == {Remedy.ROLL_BACK: 1}
    assert escalation.next([SPIKE]) is Remedy.LOG

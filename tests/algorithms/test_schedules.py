"""Schedules are pure functions of the clock: what they say along whole sequences of steps."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_async.algorithms import (
    Action,
    EveryNSteps,
    EverySeconds,
    ReplicaClock,
    Schedule,
    Synchronous,
    Warmup,
)
from tests.algorithms.catalogue import SCHEDULES, ScheduleRow

CLOCKS = st.builds(
    ReplicaClock,
    step=st.integers(0, 1000),
    epoch=st.integers(0, 10),
    steps_since_round=st.integers(0, 1000),
    seconds_since_round=st.floats(0, 1000),
    step_s=st.floats(0, 10),
    round_s=st.floats(0, 10),
    speed=st.floats(0, 1),
    relative_spread=st.floats(0, 10),
    relative_loss_variance=st.floats(0, 10),
)


def play(schedule: Schedule, steps: int, step_s: float = 1.0, steps_per_epoch: int = 10, delay: int = 0) -> str:
    """One letter per step: L, G or R. A round's snapshot is taken at once and commits ``delay`` steps later."""
    letters, since, committed, pending = "", 0, 0.0, []
    for step in range(steps):
        now = step * step_s
        if pending and step >= pending[0]:
            committed, pending = now, pending[1:]
        action = schedule.next(ReplicaClock(step, step // steps_per_epoch, since, now - committed))
        letters += action.name[0]
        since += 1
        if action is Action.ROUND and not pending:
            since, pending = 0, [step + 1 + delay]
        elif action is Action.GRADIENTS:
            since = 0
    return letters


@pytest.mark.parametrize("row", SCHEDULES, ids=lambda row: row.name)
@given(clock=CLOCKS)
def test_answer_is_pure(row: ScheduleRow, clock: ReplicaClock) -> None:
    schedule = row.make()
    first = schedule.next(clock)
    schedule.next(clock._replace(step=clock.step + 1, steps_since_round=0))
    assert schedule.next(clock) == first
    assert row.make().next(clock) == first


@given(n=st.integers(1, 12), steps=st.integers(1, 60))
def test_every_n_steps_puts_a_round_after_each_nth_step(n: int, steps: int) -> None:
    assert play(EveryNSteps(n), steps) == "".join("R" if (i + 1) % n == 0 else "L" for i in range(steps))


def test_every_n_steps_asks_again_while_a_round_is_late() -> None:
    assert play(EveryNSteps(2), 7, delay=3) == "LRLRRRL"


def test_every_seconds_counts_from_the_last_commit() -> None:
    assert play(EverySeconds(2.5), 10) == "LLLRLLLRLL"
    assert play(EverySeconds(2.5), 10, step_s=5.0) == "LRLRLRLRLR"
    assert play(EverySeconds(2.5), 8, step_s=0.5) == "LLLLLRLL"


@given(clock=CLOCKS, seconds=st.floats(0.001, 1000))
def test_every_seconds_looks_at_the_time_alone(clock: ReplicaClock, seconds: float) -> None:
    expected = Action.ROUND if clock.seconds_since_round >= seconds else Action.LOCAL
    assert EverySeconds(seconds).next(clock) == expected
    assert EverySeconds(seconds).next(clock._replace(steps_since_round=0, step=0)) == expected


@given(clock=CLOCKS)
def test_synchronous_always_averages_gradients(clock: ReplicaClock) -> None:
    assert Synchronous().next(clock) == Action.GRADIENTS


def test_warmup_by_steps() -> None:
    assert play(Warmup(EveryNSteps(3), steps=4), 11) == "GGGGLLRLLRL"


def test_warmup_by_epochs() -> None:
    assert play(Warmup(EveryNSteps(2), epochs=2), 9, steps_per_epoch=3) == "GGGGGGLRL"


def test_warmup_by_frequent_rounds() -> None:
    assert play(Warmup(EveryNSteps(4), steps=4, warmup_sync_every=2), 12) == "LRLRLLLRLLLR"
    assert play(Warmup(EveryNSteps(4), steps=3, warmup_sync_every=1), 8) == "RRRLLLRL"


def test_warmups_nest_on_the_same_clock() -> None:
    nested = Warmup(Warmup(EveryNSteps(2), steps=5, warmup_sync_every=1), steps=2)
    assert play(nested, 9) == "GGRRRLRLR"


@given(clock=CLOCKS, steps=st.integers(1, 1000))
def test_after_the_warmup_the_schedule_decides_alone(clock: ReplicaClock, steps: int) -> None:
    inner = EverySeconds(10)
    expected = inner.next(clock) if clock.step >= steps else Action.GRADIENTS
    assert Warmup(inner, steps=steps).next(clock) == expected


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: EveryNSteps(0), ValueError, r"`EveryNSteps\(n=0\)` must be >= 1\."),
        (lambda: EveryNSteps(2.0), TypeError, r"`EveryNSteps\(n=2\.0\)` must be an int, got float\."),  # pyright: ignore[reportArgumentType]
        (lambda: EveryNSteps(True), TypeError, "must be an int, got bool"),
        (lambda: EverySeconds(0), ValueError, r"`EverySeconds\(seconds=0\)` must be > 0\."),
        (lambda: EverySeconds(math.inf), ValueError, "must be finite"),
        (lambda: EverySeconds("1"), TypeError, "must be a number, got str"),  # pyright: ignore[reportArgumentType]
        (lambda: Warmup(EveryNSteps(1)), ValueError, "exactly one of the two"),
        (lambda: Warmup(EveryNSteps(1), steps=1, epochs=1), ValueError, r"steps=1, epochs=1.*exactly one of the two"),
        (lambda: Warmup(EveryNSteps(1), steps=0), ValueError, r"`Warmup\(steps=0\)` must be >= 1\."),
        (lambda: Warmup(EveryNSteps(1), epochs=1.5), TypeError, "must be an int"),  # pyright: ignore[reportArgumentType]
        (lambda: Warmup(EveryNSteps(1), steps=1, warmup_sync_every=0), ValueError, r"warmup_sync_every=0.*>= 1"),
        (lambda: Warmup(8, steps=1), TypeError, "must be a schedule"),  # pyright: ignore[reportArgumentType]
        (lambda: Warmup(Synchronous, steps=1), TypeError, "must be a schedule"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_arguments_that_cannot_mean_anything_are_refused(build, error, message) -> None:
    with pytest.raises(error, match=message):
        build()

"""Policies of checkpoints: when to save, along whole runs; what to keep, by law."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_async.algorithms import (
    Adaptive,
    AnySave,
    AtEpochEnd,
    Best,
    EveryInterval,
    EveryNth,
    EveryNTrainSteps,
    KeepAny,
    KeepPolicy,
    LastGood,
    Latest,
    Saved,
    SavePolicy,
    SaveProgress,
)
from lightning_async.checkpoint.retention import doomed
from lightning_async.checkpoint.store import CheckpointEntry, Manifest


def play(policy: SavePolicy, steps: list[int], step_s: float = 1.0, costs: list[float] | None = None) -> list[int]:
    """The steps at which a run saves that comes by these steps; each save costs what is next in the list."""
    saved, saved_step, cost, since = [], 0, None, 0.0
    queue = list(costs or [0.0])
    for step in steps:
        since += step_s
        if policy.due(SaveProgress(step, saved_step, since, cost, epoch_end=step % 10 == 0)):
            saved.append(step)
            cost = queue.pop(0) if len(queue) > 1 else queue[0]
            saved_step, since = step, cost  # the time of the save itself counts
    return saved


def test_every_n_steps_is_at_multiples_or_as_soon_as_they_are_passed():
    assert play(EveryNTrainSteps(4), list(range(1, 14))) == [4, 8, 12]
    assert play(EveryNTrainSteps(4), [3, 6, 7, 9, 17, 19, 20]) == [6, 9, 17, 20]
    assert play(EveryNTrainSteps(1), [1, 2, 3]) == [1, 2, 3]
    assert not EveryNTrainSteps(4).due(SaveProgress(3, saved_step=0))
    assert EveryNTrainSteps(4).due(SaveProgress(9, saved_step=7)), "it was not possible at step 8"
    assert not EveryNTrainSteps(4).due(SaveProgress(5, saved_step=5)), "after a rollback from 9 to 5"


def test_every_interval_and_epoch_ends():
    assert play(EveryInterval(timedelta(seconds=5)), list(range(1, 17))) == [5, 10, 15]
    assert play(AtEpochEnd(), list(range(1, 25))) == [10, 20]
    assert play(AnySave(AtEpochEnd(), EveryNTrainSteps(4)), list(range(1, 21))) == [4, 8, 10, 12, 16, 20]


@settings(max_examples=30)
@given(
    st.floats(0.01, 0.5),
    st.floats(0.01, 2.0),
    st.lists(st.floats(0.0, 5.0), min_size=2, max_size=20),
)
def test_the_adaptive_interval_keeps_its_share(share: float, step_s: float, costs: list[float]):
    """But for the first save, which measures; the cost of the next is foretold by that of the one before."""
    steps = list(range(1, 1000))
    saved = play(Adaptive(share), steps, step_s, costs)
    assert saved[0] == 1
    known = [*costs, *[costs[-1]] * len(saved)]
    for before, after, cost in zip(saved, saved[1:], known, strict=False):
        between = (after - before) * step_s + cost
        assert cost <= share * between * (1 + 1e-6)
        assert cost > share * (between - step_s) * (1 - 1e-6) or after == before + 1, "no later than it must be"


def test_the_adaptive_interval_follows_the_cost():
    assert play(Adaptive(0.05), list(range(1, 100)), costs=[1.0, 1.0, 0.1]) == [1, 20, 39, 41, 43, *range(45, 100, 2)]


SAVED = st.lists(
    st.builds(
        Saved,
        number=st.integers(1, 40),
        step=st.integers(0, 100),
        metrics=st.dictionaries(st.sampled_from(["a", "b"]), st.floats(width=16)),
        good=st.booleans(),
    ),
    unique_by=lambda each: each.number,
    max_size=12,
)
KEEPS = st.one_of(
    st.builds(Latest, st.integers(1, 5)),
    st.builds(Best, st.sampled_from(["a", "b"]), st.integers(1, 4), st.sampled_from(["min", "max"])),
    st.builds(EveryNth, st.integers(1, 7)),
    st.just(LastGood()),
)


class Nothing:
    """A user's policy that would delete everything."""

    def keep(self, saved: Any) -> set[int]:
        return set()


class Others:
    """A user's policy that names what is not there."""

    def keep(self, saved: Any) -> set[int]:
        return {999}


@given(SAVED, KEEPS, KEEPS)
def test_a_union_keeps_the_union_and_every_policy_only_what_there_is(saved: list[Saved], a: KeepPolicy, b: KeepPolicy):
    assert KeepAny(a, b).keep(saved) == a.keep(saved) | b.keep(saved)
    assert a.keep(saved) <= {each.number for each in saved}
    assert a.keep(saved) == a.keep(saved[::-1]), "order is by number"


@given(SAVED, KEEPS | st.sampled_from([Nothing(), Others()]), st.none() | st.integers(1, 40))
def test_the_newest_the_last_good_and_the_one_resumed_from_are_never_deleted(
    saved: list[Saved], policy: KeepPolicy, resumed: int | None
):
    entries = [
        CheckpointEntry(str(s.number), "", s.number, s.step, Manifest(s.number, s.step, metrics=s.metrics), s.good)
        for s in sorted(saved, key=lambda each: -each.number)
    ]
    unreadable = CheckpointEntry("0", "", 50, 0)
    gone = {entry.number for entry in doomed([unreadable, *entries], policy, resumed)}
    numbers = {each.number for each in saved}
    assert gone <= numbers
    assert resumed not in gone
    if saved:
        assert max(numbers) not in gone
    if good := {each.number for each in saved if each.good}:
        assert max(good) not in gone
    assert gone == numbers - policy.keep(saved) - {resumed, max(numbers, default=0), max(good, default=0)}


def test_the_best_are_finite_and_the_newer_of_equals():
    saved = [Saved(n, n, {"loss": x}) for n, x in enumerate([0.3, math.nan, 0.2, 0.2, -math.inf, 0.9], start=1)]
    assert Best("loss").keep(saved) == {4}
    assert Best("loss", 3).keep(saved) == {4, 3, 1}
    assert Best("loss", 1, "max").keep(saved) == {6}
    assert [each.number for each in Best("loss").ranked(saved)] == [4, 3, 1, 6]
    assert Best("other").keep(saved) == set()


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: EveryNTrainSteps(0), ValueError, r"`EveryNTrainSteps\(n=0\)` must be >= 1"),
        (lambda: EveryNTrainSteps(1.5), TypeError, r"`EveryNTrainSteps\(n=1.5\)` must be an int"),  # type: ignore[arg-type]
        (lambda: EveryInterval(5), TypeError, r"`EveryInterval\(interval=5\)` must be a timedelta"),  # type: ignore[arg-type]
        (lambda: EveryInterval(timedelta(0)), ValueError, r"must be > 0"),
        (lambda: Adaptive(0.0), ValueError, r"`Adaptive\(share=0.0\)` must be > 0"),
        (lambda: Adaptive(1.0), ValueError, r"`Adaptive\(share=1.0\)` must be < 1"),
        (lambda: AnySave(), ValueError, r"`AnySave\(\)` needs at least one"),
        (lambda: AnySave(AtEpochEnd), TypeError, r"`AnySave\(policies=<class .*AtEpochEnd'>\)` must be a policy"),  # type: ignore[arg-type]
        (lambda: AnySave(Latest(1)), TypeError, r"`AnySave\(policies=Latest\(n=1\)\)`"),  # type: ignore[arg-type]
        (lambda: KeepAny(AtEpochEnd()), TypeError, r"`KeepAny\(policies=AtEpochEnd\(\)\)`"),  # type: ignore[arg-type]
        (lambda: KeepAny(), ValueError, r"`KeepAny\(\)` needs at least one"),
        (lambda: Latest(0), ValueError, r"`Latest\(n=0\)`"),
        (lambda: EveryNth(0), ValueError, r"`EveryNth\(n=0\)`"),
        (lambda: Best(""), ValueError, r"`Best\(monitor=''\)`"),
        (lambda: Best(1), TypeError, r"`Best\(monitor=1\)`"),  # type: ignore[arg-type]
        (lambda: Best("a", mode="low"), ValueError, r"`Best\(mode='low'\)` must be one of"),
    ],
)
def test_arguments_are_checked(make: Any, error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        make()


def test_policies_say_what_they_are():
    assert repr(AnySave(AtEpochEnd(), EveryNTrainSteps(4))) == "AnySave(AtEpochEnd(), EveryNTrainSteps(n=4))"
    assert repr(KeepAny(Latest(2), LastGood())) == "KeepAny(Latest(n=2), LastGood())"
    assert isinstance(Nothing(), KeepPolicy) and not isinstance(Nothing(), SavePolicy)

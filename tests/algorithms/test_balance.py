"""Who is slow, why, and how much work each replica has, by table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_async.algorithms import BalancedWindows, DyLU, ReplicaClock
from lightning_async.algorithms.schedules import Action, Pace, straggler

USUAL = Pace(0.01, 0.1, 0.005, 4.0)


@pytest.mark.parametrize(
    ("paces", "expected"),
    [
        ([], None),
        ([USUAL], None),
        ([USUAL, Pace()], None),
        ([USUAL, USUAL], None),
        ([USUAL, Pace(0.01, 0.15, 0.005, 4.0)], None),
        ([USUAL, Pace(0.01, 0.3, 0.005, 4.0)], ("1", "compute")),
        ([Pace(0.3, 0.1, 0.005, 4.0), USUAL, USUAL], ("0", "data")),
        ([USUAL, USUAL, Pace(0.01, 0.12, 0.1, 4.0)], ("2", "communication")),
        ([USUAL, Pace(0.02, 0.2, 0.01, 8.0)], None),
        ([USUAL, Pace(0.01, 0.1, 0.005, 2.0)], ("1", "compute")),
        ([Pace(0.01, 0.3, 0.005, 4.0), Pace(0.01, 0.9, 0.005, 4.0), Pace(0.01, 0.2, 0.0, 4.0)], ("1", "compute")),
    ],
)
def test_who_is_slow_and_why(paces, expected) -> None:
    found = straggler({str(name): pace for name, pace in enumerate(paces)})
    assert (found and (found.name, found.reason)) == expected


def test_how_slow_it_is() -> None:
    found = straggler({"a": USUAL, "b": Pace(0.21, 0.25, 0.005, 4.0)})
    assert found is not None
    assert found.slower == pytest.approx(0.465 / 0.115)
    assert found.reason == "data" and found.share == pytest.approx(0.2 / 0.35)


@pytest.mark.parametrize(
    ("speeds", "sizes"),
    [
        ([1.0, 1.0], [4, 4]),
        ([3.0, 3.0, 3.0, 1.0], [5, 5, 5, 2]),
        ([1.0, 0.0], [4, 4]),
        ([100.0, 1.0], [8, 1]),
        ([1.0], [4]),
        ([64.0, 1e-3] + [1e-3] * 30, [64, *[1] * 31]),
    ],
)
def test_windows_by_speed(speeds, sizes) -> None:
    assert [BalancedWindows(4).size(speeds, me) for me in range(len(speeds))] == sizes


@given(speeds=st.lists(st.floats(0.01, 100), min_size=1, max_size=8), batches=st.integers(1, 64))
def test_windows_keep_their_bounds_and_about_their_sum(speeds, batches) -> None:
    rule = BalancedWindows(batches, minimum=1, maximum=10_000)
    sizes = [rule.size(speeds, me) for me in range(len(speeds))]
    assert min(sizes) >= 1
    assert abs(sum(sizes) - len(speeds) * batches) <= len(speeds)


@given(speed=st.floats(0.01, 1.0), n=st.integers(1, 500))
def test_local_steps_by_speed(speed, n) -> None:
    clock = ReplicaClock(step=0, epoch=0, steps_since_round=0, seconds_since_round=0.0, speed=speed)
    taken = next(h for h in range(n) if DyLU(n).next(clock._replace(steps_since_round=h)) is Action.ROUND) + 1
    assert taken == max(1, round(n * speed))
    assert DyLU(n, minimum=n).next(clock._replace(steps_since_round=n - 1)) is Action.ROUND
    assert n == 1 or DyLU(n, minimum=n).next(clock._replace(steps_since_round=n - 2)) is Action.LOCAL


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda: BalancedWindows(0), ValueError, r"batches=0.*>= 1"),
        (lambda: BalancedWindows(4, minimum=5), ValueError, r"batches=4.*>= 5"),
        (lambda: BalancedWindows(4, maximum=3), ValueError, r"maximum=3.*>= 4"),
        (lambda: BalancedWindows(4.0), TypeError, r"batches=4.0"),  # pyright: ignore[reportArgumentType]
        (lambda: DyLU(2, minimum=3), ValueError, r"n=2.*>= 3"),
        (lambda: DyLU("8"), TypeError, r"n='8'"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_arguments_that_cannot_be(build, error, words) -> None:
    with pytest.raises(error, match=words):
        build()

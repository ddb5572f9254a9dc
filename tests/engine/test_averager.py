"""The engine on in-process ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

from lightning_async.algorithms import EASGD, DeltaMean, DiLoCo, EveryNSteps, Mean, Synchronous, Warmup
from lightning_async.engine.shared_state import Arrival, SyncPointKind
from lightning_async.engine.timeouts import Timeouts
from tests.engine.fault_ranks import FaultyRank, Turnstile, outcomes, values
from tests.engine.ranks import Rank, run


def test_blocking_period_one_is_synchronous_sgd() -> None:
    def body(rank):
        rank.train(10)
        return rank.x.clone()

    for rule in (Mean(), DeltaMean()):
        left, right = run(2, body, rule=rule, schedule=EveryNSteps(1), config={"overlap": False})
        x = torch.ones(1, 8, dtype=torch.float64)
        for _ in range(10):
            x = x - 0.1 * (x - 0.5)
        assert torch.equal(left, right)
        torch.testing.assert_close(left.double(), x, atol=1e-6, rtol=0)


def test_a_sync_point_makes_one_model_and_twice_changes_no_bit() -> None:
    def body(rank):
        rank.train(7, samples=1.0 + 2.0 * rank.averager.summary.rank)
        assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
        first = rank.x.clone()
        assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
        return first, rank.x.clone()

    (a, a2), (b, b2) = run(2, body, schedule=EveryNSteps(1000))
    assert torch.equal(a, b)
    assert torch.equal(a, a2) and torch.equal(b, b2)
    x = [1.0, 1.0]
    for _ in range(7):
        x = [x[0] - 0.1 * x[0], x[1] - 0.1 * (x[1] - 1.0)]
    torch.testing.assert_close(a, torch.full((1, 8), 0.25 * x[0] + 0.75 * x[1]))


@pytest.mark.parametrize(("weighting", "share"), [("samples", 0.75), ("steps", 0.5), ("equal", 0.5)])
def test_gradients_are_weighted_as_rounds_are(weighting, share) -> None:
    def body(rank):
        rank.train(5, samples=1.0 + 2.0 * rank.averager.summary.rank)
        rank.meet()
        return rank.x.clone()

    left, right = run(2, body, schedule=Synchronous(), config={"weighting": weighting})
    x = 1.0
    for _ in range(5):
        x -= 0.1 * ((1 - share) * x + share * (x - 1.0))
    assert torch.equal(left, right)
    torch.testing.assert_close(left, torch.full((1, 8), x))


def test_unequal_numbers_of_steps_neither_hang_nor_lose_work() -> None:
    def body(rank):
        steps = 10 if rank.averager.summary.rank == 0 else 45
        rank.train(steps)
        assert rank.meet() is Arrival.OPEN
        return rank.x.clone(), rank.averager.summary

    for rule in (DeltaMean(), DiLoCo()):
        (a, left), (b, right) = run(2, body, rule=rule, schedule=EveryNSteps(4))
        assert torch.equal(a, b)
        assert (left.steps, right.steps) == (10, 45)
        assert left.rounds == right.rounds


@pytest.mark.parametrize("rule", [EASGD(), DiLoCo()])
def test_all_ranks_count_all_rounds_however_few_of_them_they_merge(rule: Any) -> None:
    """Rank 1 is absent from two: under EASGD it stays where it is, else it takes over both in one."""
    turn = Turnstile()
    timeouts = Timeouts(grace=timedelta(seconds=1), reform=timedelta(seconds=60))

    def body(rank: FaultyRank) -> Any:
        if rank.number == 1:
            rank.train(1)
            turn.wait("two rounds")
        else:
            rank.train(8)
            turn.set("two rounds")
        assert rank.meet() is Arrival.OPEN
        summary = rank.averager.summary
        return summary.rounds, summary.absent_rounds, summary.metrics()["averaging/rounds"]

    assert values(2, body, rule=rule, schedule=EveryNSteps(4), timeouts=timeouts) == [(2, 0, 2.0), (2, 2, 2.0)]


def test_a_save_between_sync_points_counts_the_rounds_that_its_rank_stayed_out_of() -> None:
    turn = Turnstile()
    timeouts = Timeouts(grace=timedelta(seconds=1), reform=timedelta(seconds=60))

    def body(rank: FaultyRank) -> Any:
        averager = rank.averager
        if rank.number == 1:
            rank.train(1)
            turn.wait("two rounds")
            averager.sync_points.wait(
                lambda: averager.agreed.num_rounds == 2 and not averager.control.buckets.announced
            )
        else:
            rank.train(8)
            turn.set("two rounds")
        saved = averager.clocks()["summary"]
        assert rank.meet() is Arrival.OPEN
        return saved["rounds"], saved["absent_rounds"]

    assert values(2, body, rule=EASGD(), schedule=EveryNSteps(4), timeouts=timeouts) == [(2, 0), (2, 2)]


def test_warm_up_ends_in_rounds() -> None:
    def body(rank):
        rank.train(20)
        rank.meet()
        return rank.x.clone(), rank.averager.summary

    for rule in (DeltaMean(), DiLoCo()):
        (a, left), (b, _) = run(2, body, rule=rule, schedule=Warmup(EveryNSteps(3), steps=8), config={"overlap": False})
        assert torch.equal(a, b)
        assert left.synchronous_steps == 8
        assert left.rounds == 4


def test_a_schedule_hears_what_rounds_take_and_not_the_exchange_of_a_sync_point() -> None:
    def body(rank):
        seen = []

        class Recording(EveryNSteps):
            def next(self, clock):
                seen.append(clock.round_s)
                return super().next(clock)

        rank.averager.schedule = Recording(3)
        rank.train(7)
        assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
        rank.averager.sync_points.resume()
        rank.train(1)
        assert (rank.averager.summary.rounds, rank.averager.summary.consensuses) == (2, 1)
        return seen

    for seen in run(2, body, rule=DiLoCo(), config={"overlap": False}):
        assert seen[:6] == [0.0] * 6  # the first round is cold
        assert seen[6] == seen[7] > 0.0


def test_a_schedule_that_says_something_else_is_named() -> None:
    class Says:
        def next(self, clock):
            return "round"

    (outcome,) = outcomes(1, lambda rank: rank.train(1), schedule=Says())
    assert isinstance(outcome.error, TypeError)
    assert "said 'round'; `next` must return an `Action`" in str(outcome.error)


def test_what_was_left_over_at_a_sync_point_is_no_period() -> None:
    """The last round has the two steps that rank 0 took since the one that its schedule asked for."""

    def body(rank: Rank):
        rank.train(8 if rank.averager.summary.rank else 6)
        assert rank.meet() is Arrival.OPEN
        summary = rank.averager.summary
        return summary.rounds, summary.absent_rounds, summary.settings["period_steps"]

    assert run(2, body, schedule=EveryNSteps(4), config={"overlap": False}) == [(2, 0, 4.0), (2, 0, 4.0)]

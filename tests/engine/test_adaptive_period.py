"""A period that follows from how far replicas are apart: what rounds measure, and what comes of it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from lightning_async.algorithms import AdaptivePeriod, DiLoCo, Schedule, Warmup
from lightning_async.algorithms.schedules import Denser
from lightning_async.engine.averaging.rounds import AveragingPart, disagreement
from lightning_async.engine.averaging.rule_state import RoundTrends
from lightning_async.engine.shared_state import Arrival, SyncPointKind
from lightning_async.trainer.loops.loop_state import without_own
from tests.comm.faulty import Fail, Fault
from tests.engine.fault_ranks import HEADER, FaultyRank, values
from tests.engine.ranks import Rank, bits, run

OPTIONS: Any = {"rule": DiLoCo(outer_lr=1.0, outer_momentum=0.0), "numel": 64, "config": {"overlap": False}}
"""Training stands still for rounds."""


def apart(rank: Rank, distance: float, steps: int, wave: float = 0.0) -> list[int]:
    """Train, and part by so much in another parameter with each step; return the periods of the rounds.

    So the squared distance grows with the steps, as by noise. Losses differ by it; with ``wave``, not always alike.
    """
    summary = rank.averager.summary
    periods = []
    for _ in range(steps):
        before = summary.rounds
        step = rank.averager.step
        goal: Any = rank.x.clone()
        goal[0, step % 64] += distance * summary.rank
        rank.goal = goal
        rank.averager.see_loss(torch.tensor(2.0 + distance**2 * summary.rank * (1.0 + wave * (step % 3))))
        rank.train(1)
        if summary.rounds > before:
            periods.append(int(summary.settings["period_steps"]))
    return periods


@pytest.mark.parametrize("metric", ["replica_spread", "loss_variance"])
def test_the_period_grows_while_replicas_agree_and_falls_when_they_part(metric: Any) -> None:
    """It is inverse to the square of the distance by which they part in a step."""

    def body(rank: Rank) -> list[list[int]]:
        return [apart(rank, 1.0, 16), apart(rank, 0.5, 300), apart(rank, 1.0, 80), apart(rank, 0.0, 900)]

    first, second = run(2, body, schedule=AdaptivePeriod(4, 48, metric=metric), **OPTIONS)
    assert first == second
    begun, agreed, parted, equal = first
    assert begun == [4, 4, 4, 4]
    assert agreed[0] == 4 and agreed == sorted(agreed)
    assert agreed[-4:] == [16] * 4
    assert parted[0] > 8 and parted == sorted(parted, reverse=True)
    assert parted[-4:] == [4] * 4
    assert equal == sorted(equal) and equal[-1] == 48


@pytest.mark.parametrize("metric", ["replica_spread", "loss_variance"])
def test_denser_makes_rounds_twice_as_often_and_lets_go_again(metric: Any) -> None:
    def body(rank: Rank) -> tuple[list[int], list[int], list[int]]:
        schedule: Schedule = rank.averager.schedule
        apart(rank, 1.0, 16)
        usual = apart(rank, 0.5, 400)
        rank.averager.schedule = Denser(schedule)
        dense = apart(rank, 0.5, 200)
        rank.averager.schedule = schedule
        return usual, dense, apart(rank, 0.5, 200)

    for usual, dense, again in run(2, body, schedule=AdaptivePeriod(4, 48, metric=metric), **OPTIONS):
        assert usual[-3:] == [16] * 3
        assert dense[-3:] == [8] * 3
        assert again[-3:] == [16] * 3


def test_steps_before_a_sync_point_make_no_distance() -> None:
    """Replicas agree there: how far they are apart in the next round is made by the steps since, half of its period."""

    def body(rank: Rank) -> list[int]:
        periods = apart(rank, 1.0, 32)
        for _ in range(20):
            periods += apart(rank, 1.0, 4)
            assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
            rank.averager.sync_points.resume()
            periods += apart(rank, 1.0, 4)
        return periods

    assert run(2, body, schedule=AdaptivePeriod(8, 80), **OPTIONS) == [[8] * 24] * 2


def test_losses_of_synchronous_steps_are_in_no_round() -> None:
    """The first round after them measures its own steps, as the next one does. Losses differ from there on."""

    def body(rank: Rank) -> list[float]:
        averager = rank.averager
        measured = []
        for step in range(28):
            averager.see_loss(torch.tensor(2.0 + averager.summary.rank * (step >= 20)))
            rank.train(1)
            measured.append(averager.trends.loss_variance.recent)
        return measured[23::4]

    schedule = Warmup(AdaptivePeriod(4, 48, metric="loss_variance"), steps=20)
    assert run(2, body, schedule=schedule, **OPTIONS) == [[0.5, 0.5]] * 2


@pytest.mark.parametrize("metric", ["replica_spread", "loss_variance"])
def test_a_period_goes_on_from_a_checkpoint_as_if_it_had_not_been_interrupted(metric: Any) -> None:
    schedule = AdaptivePeriod(4, 48, metric=metric)

    def whole(rank: Rank) -> Any:
        averager = rank.averager
        apart(rank, 1.0, 16, wave=0.5)
        apart(rank, 0.6, 37, wave=0.5)
        assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
        saved = rank.x.clone(), averager.state_dict(), averager.clocks()
        averager.sync_points.resume()
        return saved, apart(rank, 0.6, 100, wave=0.5), bits(rank.x), averager.clocks()["trends"]

    told = run(2, whole, schedule=schedule, **OPTIONS)
    loaded = threading.Barrier(2, timeout=60)  # no header goes to a rank that has yet to load

    def resumed(rank: Rank) -> Any:
        averager = rank.averager
        model, shared, clocks = told[averager.summary.rank][0]
        rank.x.copy_(model)
        averager.load_state_dict(shared, clocks)
        loaded.wait()
        assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
        averager.sync_points.resume()
        return apart(rank, 0.6, 100, wave=0.5), bits(rank.x), averager.clocks()["trends"]

    again = run(2, resumed, schedule=schedule, **OPTIONS)
    for (_, periods, x, trends), (same, its_x, its_trends) in zip(told, again, strict=True):
        assert 4 < periods[0] < 9 <= periods[-1] <= 13
        assert periods == same
        assert torch.equal(x, its_x)
        assert trends == its_trends


def test_a_rank_that_goes_on_from_anothers_clocks_tells_no_losses_of_that_one() -> None:
    """Three ranks of unequal losses go on from a checkpoint of two, which was saved amid a period."""
    loaded = threading.Barrier(3, timeout=60)

    def train(rank: Rank, steps: int) -> None:
        for _ in range(steps):
            rank.averager.see_loss(torch.tensor(2.0 + 10.0 * rank.averager.summary.rank))
            rank.train(1)

    def save(rank: Rank) -> Any:
        train(rank, 3)
        assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
        return rank.x.clone(), rank.averager.state_dict(), rank.averager.clocks()

    schedule = AdaptivePeriod(4, 48, metric="loss_variance")
    model, shared, clocks = run(2, save, schedule=schedule, **OPTIONS)[0]

    def resume(rank: Rank) -> float:
        rank.x.copy_(model)
        rank.averager.load_state_dict(shared, without_own(clocks))
        loaded.wait()
        assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
        rank.averager.sync_points.resume()
        train(rank, 4)
        return rank.averager.trends.loss_variance.first

    assert run(3, resume, schedule=schedule, **OPTIONS) == [100.0] * 3


def test_fragments_of_unlike_parts_are_measured_as_one() -> None:
    """Also where training goes on with another number of them."""

    def measure(trends: RoundTrends, spreads: tuple[float, ...], rounds: int) -> float:
        for _ in range(rounds):
            for spread in spreads:
                trends.compare(spread, 1.0)
        return trends.spread.relative

    halves = RoundTrends(num_fragments=2)
    assert measure(halves, (1.0, 9.0), 4) == 1.0
    assert halves.spread.first == pytest.approx(10.0)
    assert measure(halves, (1.0, 9.0), 20) == pytest.approx(1.0, abs=0.15)
    assert measure(halves, (0.25, 2.25), 20) == pytest.approx(0.25, rel=0.15)
    whole = RoundTrends()
    whole.load_state_dict(halves.state_dict())
    assert whole.spread == halves.spread._replace(number=44)
    assert measure(whole, (2.5,), 20) == pytest.approx(0.25, rel=1e-2)
    again = RoundTrends(num_fragments=2)
    again.load_state_dict(whole.state_dict())
    assert again.spread == whole.spread._replace(number=128)


def test_the_first_rounds_stay_the_measure_where_training_goes_on_with_more_fragments() -> None:
    """Six rounds of all parameters are as many of each fragment: more than those that make the measure."""
    whole = RoundTrends()
    for spread in (8.0, 8.0, 8.0, 8.0, 2.0, 2.0):
        whole.compare(spread, spread)
    quarters = RoundTrends(num_fragments=4)
    quarters.load_state_dict(whole.state_dict())
    for _ in range(80):
        quarters.compare(0.5, 2.0)
    for trend in (quarters.spread, quarters.loss_variance):
        assert trend.first == 8.0
        assert trend.relative == pytest.approx(0.25, rel=1e-2)


@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.25, 0.75), (0.5, 0.25, 0.25), (0.5, 0.0, 0.5)])
def test_what_is_measured_does_not_depend_on_how_many_replicas_take_part_and_with_which_weights(weights: Any) -> None:
    """Of replicas at equal distances from each other."""
    distance, steps = 3.0, 6.0
    parts = [AveragingPart(steps_apart=steps, loss=1.0) for _ in weights]
    replicas = distance * torch.eye(len(weights), dtype=torch.float64)
    share = torch.tensor(weights, dtype=torch.float64)
    tally = float(share @ (replicas - share @ replicas).square().sum(dim=1))
    per_tally, loss_variance = disagreement(weights, parts)
    assert per_tally * tally == pytest.approx(distance**2 / steps)
    assert loss_variance == 0.0


def test_a_rank_that_loses_the_last_answer_measures_replicas_by_the_other_rounds() -> None:
    """Of that round it knows its own distance from the mean only."""

    def body(rank: FaultyRank) -> Any:
        measured = []
        for _ in range(4):
            rank.train(4)
            measured.append(rank.averager.trends.spread)
        return measured

    script = [Fault(op="all_gather", nth=4, action=Fail(after=True), name=HEADER)]  # the second round's commit
    first, culprit, other = values(3, body, rule=DiLoCo(), scripts={1: script})
    assert first == other
    assert [trend.number for trend in first] == [1, 2, 3, 4]
    assert [trend.number for trend in culprit] == [1, 1, 2, 3]
    known = [4 * first[3].first - 3 * first[2].first, 3 * first[2].first - 2 * first[1].first, first[0].first]
    assert culprit[3].first == pytest.approx(sum(known) / 3)

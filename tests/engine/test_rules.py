"""The engine under rules that keep a state, or a model, of each replica's own."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lightning_async.algorithms import (
    EASGD,
    DiLoCo,
    EveryNSteps,
    PseudoGradientPenalty,
    SlowMo,
    SparseLoCo,
    Synchronous,
    Warmup,
)
from lightning_async.engine.shared_state import Arrival, SyncPointKind
from tests.algorithms.coming import Eager
from tests.engine.ranks import Rank, bits, run


def test_elastic_averaging_is_its_equations() -> None:
    def body(rank: Rank):
        rank.train(10)
        return rank.x.clone()

    found = run(2, body, rule=EASGD(beta=0.5), schedule=EveryNSteps(1), config={"overlap": False})
    x, center = torch.tensor([1.0, 1.0], dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    goals = torch.tensor([0.0, 1.0], dtype=torch.float64)
    for _ in range(10):
        x = x - 0.1 * (x - goals)
        x, center = x - 0.25 * (x - center), center + 0.5 * (x.mean() - center)
    for mine, expected in zip(found, x, strict=True):
        torch.testing.assert_close(mine.double(), expected.expand(1, 8), atol=1e-6, rtol=0)


@pytest.mark.parametrize("samples", [(1.0, 1.0), (1.0, 3.0)], ids=["equal", "unequal"])
@pytest.mark.parametrize("steps", [2, 12, 13])
def test_elastic_replicas_and_their_center_are_one_mean_at_a_sync_point(steps: int, samples: Any) -> None:
    """After 2 steps no round has come yet, and the 13th step is in none: both count."""

    def body(rank: Rank):
        number = rank.averager.summary.rank
        rank.train(steps, samples=samples[number])
        before = rank.x.clone()
        assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
        shown = rank.x.clone()
        center = rank.averager.state_dict()["rule_state"]["center"]
        assert rank.meet(SyncPointKind.EPOCH_END) is Arrival.OPEN
        again = rank.x.clone()
        rank.averager.sync_points.resume()
        rank.train(1, samples=samples[number])
        return before, shown, center, again, rank.x.clone()

    found = run(2, body, rule=EASGD(), schedule=EveryNSteps(3), config={"overlap": False})
    weights = [each / sum(samples) for each in samples]
    mean = sum(weight * before.double() for weight, (before, *_) in zip(weights, found, strict=True))
    assert not torch.equal(found[0][0], found[1][0])
    for number, (_, shown, center, again, stepped) in enumerate(found):
        torch.testing.assert_close(shown.double(), mean, rtol=0, atol=1e-6)
        assert torch.equal(bits(shown), bits(found[0][1])) and torch.equal(bits(shown), bits(again))
        assert torch.equal(bits(center), bits(shown).flatten()), "no spring is tight"
        if steps != 2:  # else this step ends in a round
            torch.testing.assert_close(stepped, shown - 0.1 * (shown - number), rtol=0, atol=1e-6)


def test_the_center_of_one_replica_alone_is_its_model_at_a_sync_point() -> None:
    def body(rank: Rank):
        rank.train(5)
        assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
        return rank.x.flatten().clone(), rank.averager.state_dict()["rule_state"]["center"]

    ((model, center),) = run(1, body, rule=EASGD(), schedule=EveryNSteps(3), config={"overlap": False})
    assert torch.equal(bits(model), bits(center))


def test_elastic_averaging_goes_on_from_a_checkpoint_as_if_it_had_not_been_interrupted() -> None:
    def whole(rank: Rank):
        averager = rank.averager
        rank.train(13, samples=1.0 + averager.summary.rank)
        assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
        saved = rank.x.clone(), averager.state_dict(), averager.clocks()
        averager.sync_points.resume()
        rank.train(8, samples=1.0 + averager.summary.rank)
        return saved, rank.x.clone(), averager.state_dict()["rule_state"]["center"]

    options: Any = {"rule": EASGD(), "schedule": EveryNSteps(4), "config": {"overlap": False}}
    told = run(2, whole, **options)

    def second(rank: Rank):
        averager = rank.averager
        (shown, shared, clocks), _, _ = told[averager.summary.rank]
        rank.x.copy_(shown)
        averager.load_state_dict(shared, clocks)
        assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
        assert torch.equal(bits(rank.x), bits(shown))
        averager.sync_points.resume()
        rank.train(8, samples=1.0 + averager.summary.rank)
        return rank.x.clone(), averager.state_dict()["rule_state"]["center"]

    for (_, mine, center), (resumed, its_center) in zip(told, run(2, second, **options), strict=True):
        assert torch.equal(bits(mine), bits(resumed))
        assert torch.equal(bits(center), bits(its_center))


@pytest.mark.parametrize("compression", ["none", "int8"])
def test_a_message_that_is_anomalous_weighs_nothing(compression: str) -> None:
    def body(rank: Rank):
        for _ in range(12):
            rank.train(1)
        before = rank.x.clone()
        if rank.averager.summary.rank == 1:
            rank.goal = 50.0
        rank.train(1)
        return before, rank.x.clone(), rank.averager.state_dict()["rule_state"].keys(), rank.averager.clocks()

    rule = PseudoGradientPenalty(DiLoCo(outer_lr=1.0, outer_momentum=0.0))
    config = {"overlap": False, "compression": compression}
    for before, after, shared, clocks in run(2, body, rule=rule, schedule=EveryNSteps(1), config=config):
        torch.testing.assert_close(after, 0.9 * before, atol=2e-3, rtol=0)
        assert shared == {"anchor", "momentum"}
        assert clocks["rule_state"]["norms"][0] == 13


def test_slow_momentum_hears_the_inner_learning_rate() -> None:
    def body(rank: Rank):
        rank.train(12)
        return rank.x.clone()

    rule = SlowMo(beta=0.5, alpha=0.75)
    left, right = run(2, body, rule=rule, schedule=EveryNSteps(3), config={"overlap": False}, lr=0.2)
    x, u = 1.0, 0.0
    for _ in range(4):
        replicas = [x, x]
        for _ in range(3):
            replicas = [each - 0.2 * (each - goal) for each, goal in zip(replicas, (0.0, 1.0), strict=True)]
        u = 0.5 * u + (x - sum(replicas) / 2) / 0.2
        x -= 0.75 * 0.2 * u
    assert torch.equal(left, right)
    torch.testing.assert_close(left, torch.full((1, 8), x))


def test_an_absent_replica_with_a_model_of_its_own_stays_until_a_sync_point() -> None:
    models: dict[int, torch.Tensor] = {}

    def body(rank: Rank):
        models[rank.averager.summary.rank] = rank.x
        stayed = None
        if rank.averager.summary.rank == 0:
            rank.train(20)
            stayed = models[1].clone()
        before = rank.x.clone()
        rank.averager.sync_points.rendezvous(SyncPointKind.TRAIN_END)
        return stayed, before, rank.x.clone(), rank.averager.summary.rounds

    busy, absent = run(2, body, rule=EASGD(), schedule=EveryNSteps(4), config={"overlap": False})
    stayed, trained, busy_end, rounds = busy
    assert torch.equal(stayed, torch.ones(1, 8)) and rounds == 5
    assert torch.equal(bits(busy_end), bits(trained)), "all of the work is its own"
    assert torch.equal(bits(busy_end), bits(absent[2]))


def test_with_nothing_kept_of_progress_in_flight_all_stand_at_the_target() -> None:
    seen: tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]] = ({}, {})  # of each rank, by round
    stale, deadline = [0, 0], time.monotonic() + 60

    def common() -> set[int]:
        return set(seen[0]) & set(seen[1])

    def body(rank: Rank) -> None:
        number = rank.averager.summary.rank
        while (len(common()) < 3 or not any(stale)) and time.monotonic() < deadline:
            action = rank.averager.plan()
            with torch.no_grad():
                rank.x.sub_(0.1 * (rank.x - rank.goal) + 1e-3)
            report = rank.averager.tick(action, 1.0)
            if report is not None and report.num_present == 2:
                seen[number][report.id] = bits(rank.x)
                stale[number] += report.staleness_steps > 0
        rank.meet()

    run(2, body, rule=DiLoCo(outer_lr=1.0, outer_momentum=0.0, mixing=0.0), schedule=EveryNSteps(4))
    assert any(stale) and common()
    assert all(torch.equal(seen[0][id], seen[1][id]) for id in common())


def test_where_nothing_is_in_flight_mixing_leaves_to_the_next_message_what_one_lacked() -> None:
    goals = [torch.linspace(0.0, 1.0, 300), torch.linspace(1.0, 2.0, 300)]

    def body(rank: Rank) -> torch.Tensor:
        rank.train(200)
        rank.meet()
        return rank.x[0].clone()

    rule = DiLoCo(outer_lr=1.0, outer_momentum=0.0, mixing=0.5)
    config = {"overlap": False, "compression": "int8"}
    for x in run(2, body, rule=rule, schedule=EveryNSteps(4), goals=goals, numel=300, config=config):
        torch.testing.assert_close(x, (goals[0] + goals[1]) / 2, rtol=0, atol=1e-5)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("rule", [EASGD(), Eager(), SparseLoCo(outer_lr=0.5)], ids=repr)
@pytest.mark.parametrize(
    "schedule", [EveryNSteps(3), Warmup(EveryNSteps(3), steps=5), Synchronous()], ids=lambda each: type(each).__name__
)
def test_rules_with_a_state_of_each_replicas_own_reach_one_model(schedule, rule, overlap) -> None:
    def body(rank: Rank):
        rank.train(90)
        assert rank.meet() is Arrival.OPEN
        return rank.x.clone()

    left, right = run(2, body, rule=rule, schedule=schedule, config={"overlap": overlap})
    assert torch.equal(bits(left), bits(right))
    assert 0.0 < left.min() < 1.0  # between the start and the goals' own models
    if not overlap:
        torch.testing.assert_close(left, torch.full((1, 8), 0.5), atol=0.02, rtol=0)


def test_a_checkpoint_holds_what_is_common_once_and_the_rest_for_each_replica() -> None:
    def body(rank: Rank):
        averager = rank.averager
        rank.train(12)
        rank.meet()
        return averager.state_dict(), averager.clocks()

    rule = PseudoGradientPenalty(DiLoCo())
    (shared, own), (others, theirs) = run(2, body, rule=rule, schedule=EveryNSteps(3), config={"overlap": False})
    assert set(shared["rule_state"]) == {"anchor", "momentum"}
    assert set(own["rule_state"]) == {"norms"}
    assert torch.equal(shared["rule_state"]["anchor"], others["rule_state"]["anchor"])
    assert not torch.equal(own["rule_state"]["norms"], theirs["rule_state"]["norms"])

    def resumed(clocks):
        def body(rank: Rank):
            rank.averager.load_state_dict(shared, clocks[rank.averager.summary.rank])
            return rank.averager.state_dict(), rank.averager.clocks()

        return run(2, body, rule=rule, schedule=EveryNSteps(3))

    for (found, clocks), expected in zip(resumed([own, theirs]), (own, theirs), strict=True):
        assert torch.equal(found["rule_state"]["momentum"], shared["rule_state"]["momentum"])
        assert torch.equal(clocks["rule_state"]["norms"], expected["rule_state"]["norms"])
    without = {**own, "rule_state": {}}  # from a run with another number of replicas
    for _, clocks in resumed([without, without]):
        assert torch.equal(clocks["rule_state"]["norms"], torch.zeros(3, dtype=torch.float64))


@dataclass(frozen=True)
class SlowlyMerged(DiLoCo):
    """Half of the anchor has moved while the other half waits."""

    def merge_(self, sent, received, state, round):
        state.anchor[:4] += 1.0
        if threading.current_thread().name == "lightning_async-rounds-0":
            entered.set()  # not where the other rank merges first: the state that is looked at is rank 0's
        assert go_on.wait(60)
        state.anchor[4:] += 1.0
        received.copy_(state.anchor)
        return state


entered, go_on = threading.Event(), threading.Event()


def test_a_checkpoint_between_sync_points_holds_a_state_that_was_there() -> None:
    entered.clear()
    go_on.clear()

    def body(rank: Rank):
        if rank.averager.summary.rank == 0:
            rank.train(4)
            assert entered.wait(60)
            threading.Timer(0.3, go_on.set).start()
            anchor = rank.averager.state_dict()["rule_state"]["anchor"]
            seen = anchor.clone()
            rank.meet()
            return seen.tolist(), torch.equal(anchor, seen)
        rank.train(4)
        assert entered.wait(60)  # at a sync point it would ring, and while a header is served rank 0 packs nothing
        rank.meet()
        return None

    (seen, unchanged), _ = run(2, body, rule=SlowlyMerged(), schedule=EveryNSteps(4))
    assert seen == [2.0] * 8
    assert unchanged, "a copy: what comes after the checkpoint is not in it"

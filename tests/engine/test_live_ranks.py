"""Ranks die at every place of a round, and those that are left go on: numbers, not only that they end."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch

from lightning_async.algorithms import DeltaMean, DiLoCo, EveryNSteps, Synchronous
from lightning_async.engine.shared_state import Arrival, SyncPointKind
from lightning_async.errors import Evicted, LinkLost, PeerLost
from lightning_async.membership.generation import Generation
from tests.comm.faulty import Fail, Fault, FaultyCollectives, Kill
from tests.engine.fault_ranks import HEADER, NEVER, PAYLOAD, FaultyRank, Turnstile, outcomes

STEPS, EVERY, LR = 12, 4, 0.1
SOON = timedelta(seconds=0.5)


class Crash(RuntimeError):
    """What the training thread of a rank raises."""


def local(x: float, goal: float, steps: int) -> float:
    for _ in range(steps):
        x -= LR * (x - goal)
    return x


def means(living: Sequence[Sequence[int]]) -> float:
    """Where all stand after rounds of 4 steps, by those who live in each, each rank's goal its number."""
    x = 1.0
    for ranks in living:
        x = sum(local(x, float(rank), EVERY) for rank in ranks) / len(ranks)
    return x


def train_and_meet(rank: FaultyRank) -> dict[str, Any]:
    rank.train(STEPS)
    assert rank.meet() is Arrival.OPEN
    return {"x": rank.x.clone(), "state": rank.rule_state, "summary": rank.averager.summary}


def survivors_of(all_: Sequence[Any], dead: Sequence[int]) -> list[dict[str, Any]]:
    for number, outcome in enumerate(all_):
        if number in dead:
            assert outcome.error is not None
        elif outcome.error is not None:
            raise outcome.error
    return [outcome.value for number, outcome in enumerate(all_) if number not in dead]


PLACES = {
    # When the last answer is lost with its rank, what it has committed was committed by all, or by nobody.
    "header": Fault(op="all_gather", nth=3, action=Kill(), name=HEADER),
    "payload": Fault(op="all_reduce", nth=2, action=Kill(), name=PAYLOAD),
    "commit": Fault(op="all_gather", nth=4, action=Kill(), name=HEADER),
}


@pytest.mark.parametrize("dead", [0, 1, 2])
@pytest.mark.parametrize("place", ["header", "payload", "commit"])
def test_a_round_that_a_rank_dies_in_is_repeated_by_those_that_are_left_with_exact_weights(dead, place) -> None:
    all_ = outcomes(
        3,
        train_and_meet,
        scripts={dead: [PLACES[place]]},
        dead_after=SOON,
        min_replicas=1,
        schedule=EveryNSteps(EVERY),
    )
    left = survivors_of(all_, [dead])
    others = [rank for rank in range(3) if rank != dead]
    expected = means([range(3), others, others])
    for each in left:
        assert torch.equal(each["x"], left[0]["x"])
        torch.testing.assert_close(each["x"], torch.full_like(each["x"], expected), rtol=1e-5, atol=1e-6)
        assert (each["summary"].rounds, each["summary"].failed_rounds) == (3, 1)


def test_fewer_than_the_minimum_do_not_go_on() -> None:
    all_ = outcomes(3, train_and_meet, scripts={1: [PLACES["header"]]}, dead_after=SOON, min_replicas=3)
    for number in (0, 2):
        assert isinstance(all_[number].error, PeerLost)
        assert "rank 1 was last seen" in str(all_[number].error)


@pytest.mark.parametrize("rule", [DeltaMean(), DiLoCo()], ids=lambda rule: type(rule).__name__)
def test_two_die_in_turn_and_one_is_left(rule) -> None:
    scripts: dict[int, Sequence[Fault]] = {
        0: [Fault(op="all_reduce", nth=1, action=Kill(), name=PAYLOAD)],
        2: [Fault(op="all_reduce", nth=3, action=Kill(), name=PAYLOAD)],
    }
    (left,) = survivors_of(
        outcomes(3, train_and_meet, scripts=scripts, dead_after=SOON, min_replicas=1, rule=rule), [0, 2]
    )
    assert left["summary"].rounds == 3
    if isinstance(rule, DeltaMean):
        expected = means([[1, 2], [1], [1]])
        torch.testing.assert_close(left["x"], torch.full_like(left["x"], expected), rtol=1e-5, atol=1e-6)


def test_a_training_thread_that_raises_is_lost_at_once_and_its_reason_is_told(caplog) -> None:
    def body(rank: FaultyRank) -> Any:
        rank.train(6)
        if rank.number == 1:
            raise Crash("the data ran dry")
        rank.train(6)
        assert rank.meet() is Arrival.OPEN
        return {"x": rank.x.clone(), "summary": rank.averager.summary}

    caplog.set_level("INFO", "lightning_async")
    first, second = survivors_of(outcomes(3, body, min_replicas=2), [1])
    assert torch.equal(first["x"], second["x"])
    assert "the data ran dry" in caplog.text


def test_one_that_is_lost_at_a_sync_point_is_not_waited_for_and_all_hear_that_the_model_has_changed() -> None:
    turn = Turnstile()

    def body(rank: FaultyRank) -> Any:
        rank.train(3)
        assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
        if rank.number == 2:
            turn.wait("0 stands")
            raise Crash
        rank.train(3)
        if rank.number == 0:
            turn.set("0 stands")
        assert rank.meet(SyncPointKind.VALIDATE) is Arrival.OPEN
        return {"x": rank.x.clone(), "moved": rank.averager.sync_points.moved_at_sync_point}

    first, second = survivors_of(outcomes(3, body, min_replicas=1, schedule=NEVER), [2])
    assert first["moved"] and second["moved"]
    start = sum(local(1.0, goal, 3) for goal in (0.0, 1.0, 2.0)) / 3
    expected = (local(start, 0.0, 3) + local(start, 1.0, 3)) / 2
    for each in (first, second):
        torch.testing.assert_close(each["x"], torch.full_like(each["x"], expected), rtol=1e-5, atol=1e-6)


def test_synchronous_steps_go_on_with_those_that_are_left() -> None:
    def body(rank: FaultyRank) -> Any:
        rank.train(3)
        if rank.number == 1:
            raise Crash
        rank.train(3)
        assert rank.meet() is Arrival.OPEN
        return {"x": rank.x.clone()}

    first, second = survivors_of(outcomes(3, body, min_replicas=1, schedule=Synchronous()), [1])
    x = 1.0
    for goals in ([0.0, 1.0, 2.0],) * 3 + ([0.0, 2.0],) * 3:
        x -= LR * (x - sum(goals) / len(goals))
    for each in (first, second):
        torch.testing.assert_close(each["x"], torch.full_like(each["x"], x), rtol=1e-5, atol=1e-6)


def test_a_rank_behind_a_broken_link_leaves_and_others_go_on(monkeypatch: pytest.MonkeyPatch):
    reconfigure = FaultyCollectives.reconfigure

    def fail_once(self: FaultyCollectives, generation: Generation) -> None:
        if generation.number == 1:
            raise LinkLost("no connection between rank 1 and rank 2", (2,))
        reconfigure(self, generation)

    monkeypatch.setattr(FaultyCollectives, "reconfigure", fail_once)
    broken = Fault(op="all_reduce", nth=2, action=Fail(), name=PAYLOAD)
    ended = outcomes(3, train_and_meet, scripts={1: [broken]}, dead_after=timedelta(seconds=20), min_replicas=2)
    assert isinstance(ended[2].error, Evicted) and "between rank 1 and rank 2" in str(ended[2].error)
    for value in survivors_of(ended, [2]):
        assert value["x"].flatten()[0].item() == pytest.approx(means([[0, 1, 2], [0, 1], [0, 1]]), abs=1e-6)

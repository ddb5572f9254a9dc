"""Ranks die at every place of a round, and those that are left go on: numbers, not only that they end."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch

from lightning_async.comm.simulated.faulty import Fail, Fault, Kill
from lightning_async.engine.header import Arrival
from lightning_async.rules import EveryNSteps
from tests.engine.fault_ranks import HEADER, PAYLOAD, FaultyRank, outcomes

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
    "header": (Fault(op="all_gather", nth=3, action=Kill(), name=HEADER), 1),
    "payload": (Fault(op="all_reduce", nth=2, action=Kill(), name=PAYLOAD), 1),
    "payload, moved": (Fault(op="all_reduce", nth=2, action=Fail(after=True, text="the end"), name=PAYLOAD), 2),
    "commit": (Fault(op="all_gather", nth=4, action=Kill(), name=HEADER), 1),
}


@pytest.mark.parametrize("dead", [0, 1, 2])
@pytest.mark.parametrize("place", ["header", "payload", "commit"])
def test_a_round_that_a_rank_dies_in_is_repeated_by_those_that_are_left_with_exact_weights(dead, place) -> None:
    all_ = outcomes(
        3,
        train_and_meet,
        scripts={dead: [PLACES[place][0]]},
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

"""The penalty on pseudo-gradients against numbers: weights by norms, anomalous norms, and the mean's clip."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_async.algorithms import (
    EASGD,
    AdaptiveDiLoCo,
    DeltaMean,
    DiLoCo,
    PseudoGradientPenalty,
    Round,
    SparseLoCo,
)
from tests.algorithms.replicas import Replicas, fill

PLAIN = DiLoCo(outer_lr=1.0, outer_momentum=0.0)
UNIT = torch.tensor([0.6, 0.0, 0.8])  # of norm 1


def play(world: Replicas, norms: list[float]) -> None:
    """One round in which each replica's message has this norm."""
    for replica, norm in zip(world.all, norms, strict=True):
        replica.learn(-norm * UNIT, 1.0)
    world.send()
    world.receive()


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    work=st.lists(st.floats(0.5, 40), min_size=1, max_size=4),
    scale=st.sampled_from([0.1, 1.0, 10.0]),
    clip=st.sampled_from([0.5, 10.0]),
)
def test_weights_fall_with_norms_and_the_mean_is_clipped(seed, work, scale, clip) -> None:
    world = Replicas(PseudoGradientPenalty(PLAIN, clip=clip), [fill(7, seed)], len(work))
    start = fill(7, seed).double()
    messages = [-fill(7, seed + rank, scale) for rank in range(len(work))]
    for replica, message, amount in zip(world.all, messages, work, strict=True):
        replica.learn(-message, amount)
    world.send()
    world.receive()
    norms = [message.double().norm().item() for message in messages]
    weights = [amount * math.exp(min(norms) - norm) for amount, norm in zip(work, norms, strict=True)]
    mean = torch.tensor(weights, dtype=torch.float64) @ torch.stack(messages).double() / sum(weights)
    mean = mean * min(1.0, clip / mean.norm().item())
    for replica in world.all:
        torch.testing.assert_close(replica.flat().double(), start - mean, rtol=1e-4, atol=1e-4)


@settings(max_examples=30, deadline=None)
@given(norms=st.lists(st.floats(0.5, 2.0), min_size=11, max_size=30))
def test_how_unusual_a_norm_is_is_measured_by_those_before_it(norms) -> None:
    rule = PseudoGradientPenalty(PLAIN, threshold=1e6)
    world = Replicas(rule, [torch.zeros(3)], 1)
    (replica,) = world.all
    for number, norm in enumerate(norms):
        play(world, [norm])
        before = norms[:number]
        deviation = statistics.pstdev(before) if number >= 10 else 0.0
        expected = (norm - statistics.fmean(before)) / deviation if deviation > 1e-3 else 0.0
        if deviation > 1e-3 or number < 10:
            assert replica.scalars[0] == pytest.approx(norm, rel=1e-3)
            assert replica.scalars[1] == pytest.approx(expected, rel=1e-2, abs=1e-2)


def test_an_anomalous_message_weighs_nothing_and_its_replica_takes_over_the_others() -> None:
    world = Replicas(PseudoGradientPenalty(PLAIN), [torch.zeros(3)], 2)
    for number in range(10):
        play(world, [1.0 + 0.1 * (number % 2)] * 2)
    before = world.all[0].flat()
    play(world, [1.0, 5.0])
    for replica in world.all:
        torch.testing.assert_close(replica.flat(), before - UNIT, rtol=1e-5, atol=1e-5)


def test_where_all_are_anomalous_nothing_moves_and_what_stays_becomes_usual() -> None:
    world = Replicas(PseudoGradientPenalty(PLAIN), [torch.zeros(3)], 2)
    for number in range(10):
        play(world, [1.0 + 0.1 * (number % 2)] * 2)
    before = world.all[0].flat()
    play(world, [5.0, 6.0])
    for replica in world.all:
        torch.testing.assert_close(replica.flat(), before, rtol=0, atol=1e-6)
    rounds = 0
    while torch.dist(world.all[0].flat(), before) < 1.0:
        play(world, [5.0, 6.0])
        rounds += 1
        assert rounds < 40
    assert rounds > 1


def test_absent_replicas_have_neither_weight_nor_statistics() -> None:
    rule = PseudoGradientPenalty(PLAIN)
    assert rule.weights(Round(0, 0, (0.0, 2.0, 0.0), scalars=((0.0, 0.0), (3.0, 0.0), (0.0, 0.0)))) == (0.0, 1.0, 0.0)
    world = Replicas(rule, [torch.zeros(3)], 2)
    world.all[0].learn(UNIT, 1.0)
    world.send()
    world.receive()
    assert [replica.state.norms[0].item() for replica in world.all] == [1.0, 0.0]


def test_what_the_rule_chooses_follows_from_messages_with_a_weight() -> None:
    rule = PseudoGradientPenalty(AdaptiveDiLoCo())
    round = Round(0, 0, (1.0, 1.0), (112.0, 8.0), scalars=((1.0, 9.0), (1.0, 0.0)), past=8)
    assert rule.chosen(round) == {"outer_lr": 0.5, "outer_momentum": 0.7}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rule": DeltaMean()}, ValueError, r"`PseudoGradientPenalty\(rule=DeltaMean\(\)\)` must send differences"),
        ({"rule": EASGD()}, ValueError, "make replicas one model"),
        ({"rule": PseudoGradientPenalty(PLAIN)}, ValueError, "no scalars"),
        ({"rule": SparseLoCo()}, ValueError, "no residual of compression: where all messages are anomalous it would"),
        ({"rule": DiLoCo}, TypeError, "must be an averaging rule"),
        ({"threshold": 0.0}, ValueError, r"threshold=0\.0\)` must be > 0"),
        ({"clip": -1}, ValueError, r"clip=-1\)` must be > 0"),
        ({"decay": 1.0}, ValueError, r"decay=1\.0\)` must be < 1"),
        ({"decay": "1"}, TypeError, "must be a number, got str"),
    ],
)
def test_arguments_that_cannot_mean_anything_are_refused(arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        PseudoGradientPenalty(**{"rule": PLAIN, **arguments})

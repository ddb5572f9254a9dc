"""Elastic averaging against float64, and what its springs conserve."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_async.algorithms import EASGD
from tests.algorithms.replicas import Replicas, fill

LAW = settings(max_examples=20, deadline=None)
WORK = st.lists(st.floats(0.5, 40), min_size=1, max_size=3)


def close(actual, expected) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-5, atol=2e-5)


@LAW
@given(seed=st.integers(0, 2**31), beta=st.floats(0.1, 0.95), rounds=st.integers(1, 4), work=WORK)
def test_history_equals_a_float64_reference_and_the_absent_stay(seed, beta, rounds, work) -> None:
    size = len(work) + 1  # the last one is absent
    world = Replicas(EASGD(beta), [fill(7, seed)], size)
    x = [fill(7, seed).double() for _ in work]
    center = x[0].clone()
    for number in range(rounds):
        for rank, amount in enumerate(work):
            progress = fill(7, seed + 10 * number + rank)
            world.all[rank].learn(progress, amount)
            x[rank] = x[rank] + progress.double()
        world.send()
        world.receive()
        alphas = [beta * len(work) / size * amount / sum(work) for amount in work]
        pulls = [alpha * (mine - center) for alpha, mine in zip(alphas, x, strict=True)]
        x = [mine - pull for mine, pull in zip(x, pulls, strict=True)]
        center = center + sum(pulls)
    for replica, expected in zip(world.all, x, strict=False):
        close(replica.flat(), expected)
    assert torch.equal(world.all[-1].flat(), fill(7, seed))
    for replica in world.all:
        close(replica.state.center, center)
    world.sync_point([*work, 0.0])
    mean = sum(amount / sum(work) * mine for amount, mine in zip(work, x, strict=True))
    for replica in world.all:
        assert torch.equal(replica.flat(), replica.state.center)
        close(replica.flat(), mean)


@LAW
@given(seed=st.integers(0, 2**31), beta=st.floats(0.1, 0.95), work=WORK)
def test_what_the_center_gains_the_replicas_lose(seed, beta, work) -> None:
    world = Replicas(EASGD(beta), [fill(7, seed)], len(work))

    def total() -> torch.Tensor:
        return sum((replica.flat().double() for replica in world.all), world.all[0].state.center.double())

    for number in range(3):
        for rank, (replica, amount) in enumerate(zip(world.all, work, strict=True)):
            replica.learn(fill(7, seed + 10 * number + rank), amount)
        world.send()
        for rank, replica in enumerate(world.all):
            replica.learn(fill(7, seed + 20 * number + rank))  # while the round travels
        before = total()
        world.receive()
        close(total(), before)


def test_without_progress_replicas_and_center_meet() -> None:
    world = Replicas(EASGD(beta=0.5), [torch.zeros(1)], 2)
    for replica, mine in zip(world.all, (1.0, 3.0), strict=True):
        replica.learn(torch.tensor([mine]), 1.0)
    for _ in range(80):
        for replica in world.all:
            replica.work = 1.0
        world.send()
        world.receive()
    for replica in world.all:
        assert replica.flat().item() == pytest.approx(4 / 3, abs=1e-4), "a third of what two replicas had"
        assert replica.state.center.item() == pytest.approx(4 / 3, abs=1e-4)


@pytest.mark.parametrize(
    ("beta", "error", "message"),
    [
        (1.0, ValueError, r"`EASGD\(beta=1\.0\)` must be < 1\."),
        (0, ValueError, r"`EASGD\(beta=0\)` must be > 0\."),
        (None, TypeError, "must be a number, got NoneType"),
    ],
)
def test_a_spring_that_cannot_be_is_refused(beta, error, message) -> None:
    with pytest.raises(error, match=message):
        EASGD(beta)

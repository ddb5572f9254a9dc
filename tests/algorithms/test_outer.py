"""Outer optimizers against float64 and against torch's, and what their constructors refuse."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_async.algorithms import AveragingRule, DiLoCo, Round, SlowMo
from lightning_async.flat import FlatLayout
from tests.algorithms.catalogue import adam, momentum_sgd
from tests.algorithms.replicas import Replicas, fill


def history(
    rule: AveragingRule, start: list[torch.Tensor], work: list[list[float]], seed: int
) -> list[list[torch.Tensor]]:
    """Flat parameters of every replica after every round."""
    world = Replicas(rule, start, len(work[0]))
    rows = []
    for number, amounts in enumerate(work):
        for rank, (replica, amount) in enumerate(zip(world.all, amounts, strict=True)):
            if amount:
                replica.learn(fill(replica.layout.numel, seed + 10 * number + rank, 0.1), amount)
        world.send()
        world.receive()
        rows.append([replica.flat() for replica in world.all])
    return rows


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    work=st.lists(st.lists(st.floats(0.5, 40), min_size=3, max_size=3), min_size=1, max_size=12),
    lr=st.floats(0.1, 1.0),
    mu=st.floats(0.0, 0.95),
    nesterov=st.booleans(),
)
def test_history_with_unequal_work_equals_a_float64_reference(seed, work, lr, mu, nesterov) -> None:
    start = fill(23, seed)
    rule = DiLoCo(outer_lr=lr, outer_momentum=mu, nesterov=nesterov)
    rows = history(rule, [start], work, seed)
    anchor, momentum = start.double(), torch.zeros(23, dtype=torch.float64)
    for number, amounts in enumerate(work):
        gradient = torch.zeros(23, dtype=torch.float64)
        for rank, amount in enumerate(amounts):
            progress = fill(23, seed + 10 * number + rank, 0.1).double()
            gradient -= amount / sum(amounts) * progress
        momentum = mu * momentum + gradient
        anchor = anchor - lr * (gradient + mu * momentum if nesterov else momentum)
        for params in rows[number]:
            torch.testing.assert_close(params.double(), anchor, rtol=1e-5, atol=2e-5)


def test_history_equals_torch_sgd_on_the_flat_parameters() -> None:
    """Not to the bit: torch rounds a product and a sum together where the processor can, the ops never do."""
    start = fill(1003, 1)
    rule = DiLoCo(outer_lr=0.7, outer_momentum=0.9)
    world = Replicas(rule, [start], 2)
    reference = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([reference], lr=0.7, momentum=0.9, nesterov=True)
    for number in range(20):
        for rank, replica in enumerate(world.all):
            replica.learn(fill(1003, 10 * number + rank, 0.1), 1.0)
        world.send()
        messages = [replica.sent.double() for replica in world.all if replica.sent is not None]
        reference.grad = (0.5 * messages[0] + 0.5 * messages[1]).float()
        optimizer.step()
        world.receive()
        for replica in world.all:
            torch.testing.assert_close(replica.flat(), reference.detach(), rtol=1e-6, atol=1e-6)


def test_outer_torch_sgd_is_the_built_in_rule() -> None:
    start = [fill(12, 0).view(3, 4), fill(5, 1), fill(1, 2).view(())]
    work = [[1.0, 3.0], [2.0, 0.0], [0.0, 5.0], [1.0, 1.0]]
    built_in = history(DiLoCo(), start, work, 7)
    outer = history(DiLoCo(outer_optimizer=momentum_sgd), start, work, 7)
    for mine, theirs in zip(built_in, outer, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**31), mixing=st.floats(0.0, 0.99), work=st.lists(st.floats(0.5, 40), min_size=2, max_size=3)
)
def test_mixing_keeps_a_share_of_where_a_replica_stands_and_all_of_it_where_that_was_absent(seed, mixing, work) -> None:
    world = Replicas(DiLoCo(outer_lr=0.5, outer_momentum=0.0, mixing=mixing), [fill(7, seed)], 1 + len(work))
    absent, present = world.all[0], world.all[1:]
    x = fill(7, seed).double()
    mean = torch.zeros(7, dtype=torch.float64)
    for rank, (replica, amount) in enumerate(zip(present, work, strict=True)):
        progress = fill(7, seed + rank)
        replica.learn(progress, amount)
        mean += amount / sum(work) * progress.double()
    world.send()
    for rank, replica in enumerate(world.all):
        replica.learn(fill(7, seed + 10 + rank))
    before = [replica.flat().double() for replica in present]
    world.receive()
    target = x + 0.5 * mean
    for replica, stood in zip(present, before, strict=True):
        torch.testing.assert_close(
            replica.flat().double(), mixing * stood + (1 - mixing) * target, rtol=1e-5, atol=2e-5
        )
    torch.testing.assert_close(absent.flat().double(), target + fill(7, seed + 10).double(), rtol=1e-5, atol=2e-5)


def test_a_round_without_progress_still_moves_by_the_momentum() -> None:
    """Why a rendezvous must not be an outer step."""
    rule = DiLoCo()
    world = Replicas(rule, [torch.ones(1)], 1)
    (replica,) = world.all
    replica.learn(torch.tensor([0.1]), 1.0)
    world.send()
    world.receive()
    after = replica.flat()
    replica.work = 1.0
    world.send()
    world.receive()
    assert replica.flat().item() > after.item() + 0.05


def test_muon_gets_the_shapes_it_needs() -> None:
    rule = DiLoCo(outer_optimizer=lambda tensors: torch.optim.Muon(tensors, lr=0.1, weight_decay=0.0))
    start = [fill(12, 0).view(3, 4), fill(6, 1).view(2, 3)]
    world = Replicas(rule, start, 2)
    reference = [torch.nn.Parameter(p.clone()) for p in start]
    optimizer = torch.optim.Muon(reference, lr=0.1, weight_decay=0.0)
    for number in range(3):
        for rank, replica in enumerate(world.all):
            replica.learn(fill(18, number * 10 + rank, 0.1), 1.0)
        world.send()
        messages = [replica.sent.double() for replica in world.all if replica.sent is not None]
        gradient = (0.5 * messages[0] + 0.5 * messages[1]).float()
        for p, g in zip(reference, world.all[0].layout.views(gradient), strict=True):
            p.grad = g
        optimizer.step()
        world.receive()
        for replica in world.all:
            for mine, p in zip(replica.params, reference, strict=True):
                torch.testing.assert_close(mine, p.detach())


def test_gradients_follow_the_tensors_whatever_their_groups_and_wherever_the_bucket_lies() -> None:
    def grouped(tensors: list[torch.Tensor]) -> torch.optim.Optimizer:
        groups = [{"params": [tensors[2], tensors[0]], "lr": 1.0}, {"params": [tensors[1]], "lr": 0.5}]
        return torch.optim.SGD(groups, lr=1.0)

    rule, params = DiLoCo(outer_optimizer=grouped), torch.zeros(6)
    state = rule.init(params, FlatLayout([torch.zeros(2), torch.zeros(1), torch.zeros(3)]))
    storage = torch.cat([torch.full((4,), 99.0), torch.arange(1.0, 7.0)])
    received = storage[4:]  # a bucket that is a part of a larger one
    rule.merge_(None, received, state, Round(id=0, rank=0, work=(0.0, 1.0)))
    assert received.tolist() == [-1.0, -2.0, -1.5, -4.0, -5.0, -6.0]
    assert state.anchor.tolist() == received.tolist()
    assert storage[:4].tolist() == [99.0] * 4


def test_an_optimizer_that_leaves_a_tensor_out_is_refused() -> None:
    rule = DiLoCo(outer_optimizer=lambda tensors: torch.optim.SGD(tensors[:1], lr=1.0))
    layout = FlatLayout([torch.zeros(2), torch.zeros(3)], ["weight", "bias"])
    with pytest.raises(ValueError, match=r"left out \['bias'\]"):
        rule.init(layout.empty(), layout)
    with pytest.raises(TypeError, match="torch optimizer"):
        DiLoCo(outer_optimizer=lambda tensors: tensors).init(layout.empty(), layout)  # pyright: ignore[reportArgumentType]


def test_state_owns_its_memory() -> None:
    rule, params = DiLoCo(), torch.ones(3)
    state = rule.init(params, FlatLayout([params]))
    params.zero_()
    assert state.anchor.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("build", [momentum_sgd, adam])
def test_two_states_that_load_one_dict_stay_apart(build) -> None:
    rule, params = DiLoCo(outer_optimizer=build), fill(4, 0)
    first, second = (rule.init(params, FlatLayout([params])) for _ in range(2))
    rule.merge_(None, fill(4, 1), first, Round(id=0, rank=0, work=(0.0, 1.0)))
    second = rule.load_state_dict(second, rule.state_dict(first))
    before = copy.deepcopy(rule.state_dict(first))
    rule.merge_(None, fill(4, 2), second, Round(id=1, rank=0, work=(0.0, 1.0)))
    after = rule.state_dict(first)
    assert torch.equal(after["anchor"], before["anchor"])
    for key, value in before["optimizer"]["state"][0].items():
        assert torch.equal(after["optimizer"]["state"][0][key], value)


def test_state_with_and_without_a_torch_optimizer_do_not_mix() -> None:
    params = fill(4, 0)
    layout = FlatLayout([params])
    plain, outer = DiLoCo(), DiLoCo(outer_optimizer=adam)
    one, other = plain.init(params, layout), outer.init(params, layout)
    with pytest.raises(ValueError, match="has a torch optimizer"):
        plain.load_state_dict(one, outer.state_dict(other))
    with pytest.raises(ValueError, match="lacks a torch optimizer"):
        outer.load_state_dict(other, plain.state_dict(one))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"outer_lr": -1}, ValueError, r"`DiLoCo\(outer_lr=-1\)` must be > 0\."),
        ({"outer_lr": 0.0}, ValueError, r"`DiLoCo\(outer_lr=0\.0\)` must be > 0\."),
        ({"outer_lr": math.nan}, ValueError, "must be finite"),
        ({"outer_lr": "0.7"}, TypeError, "must be a number, got str"),
        ({"outer_lr": True}, TypeError, "must be a number, got bool"),
        ({"outer_momentum": 1.0}, ValueError, r"`DiLoCo\(outer_momentum=1\.0\)` must be < 1\."),
        ({"outer_momentum": -0.1}, ValueError, "must be >= 0"),
        ({"nesterov": 1}, TypeError, "must be True or False"),
        ({"mixing": 1.0}, ValueError, r"`DiLoCo\(mixing=1\.0\)` must be < 1\."),
        ({"mixing": -0.1}, ValueError, "must be >= 0"),
        ({"mixing": "half"}, TypeError, "must be a number, got str"),
        ({"outer_optimizer": "SGD"}, TypeError, "must be callable"),
        ({"outer_optimizer": adam, "outer_lr": 0.5}, ValueError, r"`DiLoCo\(outer_lr=0\.5\)` has no effect"),
        ({"outer_optimizer": adam, "outer_momentum": 0.0}, ValueError, "has no effect"),
        ({"outer_optimizer": adam, "nesterov": False}, ValueError, "has no effect"),
    ],
)
def test_arguments_that_cannot_mean_anything_are_refused(arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        DiLoCo(**arguments)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    work=st.lists(st.floats(0.5, 40), min_size=1, max_size=3),
    rates=st.lists(st.sampled_from([0.0, 0.01, 0.125, 1.0]), min_size=1, max_size=6),
    beta=st.floats(0.0, 0.9),
    alpha=st.floats(0.1, 1.5),
)
def test_slow_momentum_equals_a_float64_reference_as_the_learning_rate_changes(seed, work, rates, beta, alpha) -> None:
    world = Replicas(SlowMo(beta, alpha), [fill(7, seed)], len(work))
    x, u = fill(7, seed).double(), torch.zeros(7, dtype=torch.float64)
    for number, gamma in enumerate(rates):
        mean = torch.zeros(7, dtype=torch.float64)
        for rank, (replica, amount) in enumerate(zip(world.all, work, strict=True)):
            progress = fill(7, seed + 10 * number + rank, scale=gamma)
            replica.learn(progress, amount)
            mean += amount / sum(work) * progress.double()
        world.send()
        world.receive(lr=[gamma / (1 + rank) for rank in range(len(work))])  # the largest is all replicas'
        u = beta * u - (mean / gamma if gamma else 0.0)
        x = x - alpha * gamma * u
        for replica in world.all:
            torch.testing.assert_close(replica.flat().double(), x, rtol=1e-5, atol=3e-5)


def test_slow_momentum_with_a_constant_learning_rate_is_heavy_ball() -> None:
    work = [[1.0, 3.0], [2.0, 0.0], [0.0, 5.0], [1.0, 1.0]]
    slow = history(SlowMo(beta=0.5, alpha=0.75), [fill(12, 0)], work, 7)
    heavy = history(DiLoCo(outer_lr=0.75, outer_momentum=0.5, nesterov=False), [fill(12, 0)], work, 7)
    for mine, theirs in zip(slow, heavy, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_round_without_a_learning_rate_takes_up_the_progress_alone() -> None:
    world = Replicas(SlowMo(beta=0.5, alpha=0.5), [torch.ones(1)], 1)
    (replica,) = world.all
    for rate, expected in ((1.0, 0.9), (0.0, 0.8)):  # by half of 0.2; momentum would add another 0.05
        replica.learn(torch.tensor([-0.2]), 1.0)
        world.send()
        world.receive(lr=[rate])
        assert replica.flat().item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"beta": 1.0}, ValueError, r"`SlowMo\(beta=1\.0\)` must be < 1\."),
        ({"beta": -0.5}, ValueError, "must be >= 0"),
        ({"alpha": 0}, ValueError, r"`SlowMo\(alpha=0\)` must be > 0\."),
        ({"alpha": "1"}, TypeError, "must be a number, got str"),
    ],
)
def test_arguments_of_slow_momentum_that_cannot_be_are_refused(arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        SlowMo(**arguments)

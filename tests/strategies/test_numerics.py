"""Training on two ranks gives the numbers of training in one process, and of a float64 reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from tests.strategies import problem
from tests.strategies.problem import adam, batches, distance, flat, joined, momentum, train_alone, uneven
from tests.strategies.workers import Outcomes

pytestmark = pytest.mark.processes

SCENARIOS = "tests.strategies.numerics"


EQUAL = joined(batches(0, 12), batches(1, 12))
TAKEN = joined(uneven(0, 12), uneven(1, 12))
UNEQUAL = joined(batches(0, 12, 3), batches(1, 12, 9))


def sums_of_two() -> nn.Module:
    """Steps with the sum of two batches' gradients."""
    module = train_alone([])
    stepper = momentum(module.parameters())
    for number, batch in enumerate([*TAKEN, *TAKEN]):
        problem.loss_of(module, batch).backward()
        if number % 2:
            stepper.step()
            stepper.zero_grad()
    return module


@pytest.mark.parametrize(
    ("name", "alone"),
    [
        ("delta_mean_every_step", lambda: train_alone(EQUAL, epochs=2)),
        ("mean_every_step", lambda: train_alone(EQUAL, epochs=2)),
        ("mean_of_unequal_batches", lambda: train_alone(UNEQUAL)),
        ("mean_of_batches_taken", lambda: train_alone(TAKEN, epochs=2)),
        ("mean_with_accumulation", lambda: train_alone(EQUAL[:10], epochs=2, accumulate=3)),
        ("synchronous", lambda: train_alone(EQUAL, optimizer=momentum)),
        ("synchronous_batches_taken", lambda: train_alone(TAKEN, epochs=2, optimizer=momentum)),
        ("synchronous_by_hand", sums_of_two),
        ("synchronous_some_batches", lambda: train_alone(TAKEN[1:8:2], epochs=2, optimizer=momentum)),
        ("synchronous_adam", lambda: train_alone(EQUAL, optimizer=adam)),
        (
            "synchronous_clipped_and_accumulated",
            lambda: train_alone(UNEQUAL[:10], epochs=2, accumulate=3, clip=0.2, optimizer=momentum),
        ),
    ],
)
def test_equals_one_process_on_the_joined_batch(ranks: Outcomes, name: str, alone: Callable[[], nn.Module]) -> None:
    expected = flat(alone())
    for told in ranks(name):
        assert distance(told["flat"], expected) < 1e-6
        assert distance(told["history"][-1], expected) < 1e-6


@pytest.mark.parametrize(
    ("compression", "error", "apart"), [("bf16", 1e-4, 3e-4), ("int8", 2e-4, 1.5e-3), ("fp8", 1e-3, 6e-3)]
)
def test_compressed_messages_stay_near_one_process(
    ranks: Outcomes, compression: str, error: float, apart: float
) -> None:
    """What a message lacks keeps replicas apart by so much, and shifts their next gradients."""
    expected = flat(train_alone(EQUAL, epochs=2))
    told = [rank[compression] for rank in ranks("compressed")]
    assert told[0]["digest"] == told[1]["digest"]
    assert 0 < distance(told[0]["flat"], expected) < error
    assert 0 < distance(told[0]["history"][10], told[1]["history"][10]) < apart
    assert [each["rounds"] for each in told] == [24, 24]


def test_the_reference_moves_and_clips() -> None:
    """What the comparisons above compare with is not trivial."""
    start, plain = flat(problem.network()), flat(train_alone(UNEQUAL[:10], accumulate=3, optimizer=momentum))
    clipped = flat(train_alone(UNEQUAL[:10], accumulate=3, clip=0.2, optimizer=momentum))
    assert distance(start, plain) > 0.1
    assert distance(plain, clipped) > 0.05


@pytest.mark.parametrize("name", ["delta_mean_every_step", "mean_every_step", "mean_of_unequal_batches"])
def test_a_round_for_every_step(ranks: Outcomes, name: str) -> None:
    steps = 12 if "unequal" in name else 24
    for told in ranks(name):
        assert (told["steps"], told["rounds"], told["failed_rounds"]) == (steps, steps, 0)


def test_synchronous_steps_are_no_rounds(ranks: Outcomes) -> None:
    for told in ranks("synchronous"):
        assert (told["synchronous_steps"], told["rounds"]) == (12, 0)
        assert told["sent_bytes"] == 12 * 4 * len(told["flat"])
    for told in ranks("synchronous_clipped_and_accumulated"):
        assert told["synchronous_steps"] == told["steps"] == 2 * 4
        assert told["samples_by_rank"] == [2 * 10 * 3, 2 * 10 * 9]


def _local_steps(start: torch.Tensor, data: Sequence[problem.Batch], lr: float) -> torch.Tensor:
    module = problem.network().double()
    nn.utils.vector_to_parameters(start.clone(), module.parameters())
    for x, y in data:
        loss = problem.loss_of(module, (x.double(), y.double()))
        grads = torch.autograd.grad(loss, [*module.parameters()])
        with torch.no_grad():
            for p, g in zip(module.parameters(), grads, strict=True):
                p -= lr * g
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def _diloco(anchor: list[float], starts: Sequence[int], data: Sequence[Sequence[problem.Batch]]) -> list[list[float]]:
    """The anchor after each round of four steps, from the equations, in float64."""
    weights = [float(len(shard[0][0])) for shard in data]
    at, velocity, anchors = torch.tensor(anchor, dtype=torch.float64), torch.zeros(len(anchor)).double(), []
    for start in starts:
        ends = [_local_steps(at, shard[start : start + 4], 0.05) for shard in data]
        gradient = sum(w / sum(weights) * (at - end) for w, end in zip(weights, ends, strict=True))
        velocity = 0.9 * velocity + gradient
        at = at - 0.7 * (gradient + 0.9 * velocity)
        anchors.append(at.tolist())
    return anchors


def test_diloco_equals_a_float64_reference_round_by_round(ranks: Outcomes) -> None:
    start = flat(problem.network())
    anchors = _diloco(start, [0, 4, 8] * 2, [batches(0, 12, 3), batches(1, 12, 9)])
    assert distance(start, anchors[-1]) > 0.1
    for told in ranks("diloco"):
        for i, anchor in enumerate(anchors):
            assert distance(told["history"][4 * i + 3], anchor) < 2e-6
        assert told["rounds"] == 6
        assert distance(told["flat"], anchors[-1]) < 2e-6
        assert all(told["same"])


def test_after_a_synchronous_warm_up_diloco_starts_from_the_model_at_the_switch(ranks: Outcomes) -> None:
    data = [batches(0, 14, 3), batches(1, 14, 9)]
    switch = flat(train_alone(joined(*data)[:6]))
    anchors = _diloco(switch, [6, 10], data)
    for told in ranks("warm_up"):
        assert distance(told["history"][5], switch) < 1e-6
        for i, anchor in enumerate(anchors):
            assert distance(told["history"][6 + 4 * i + 3], anchor) < 2e-6
        assert (told["synchronous_steps"], told["rounds"]) == (6, 2)


@pytest.mark.parametrize(
    ("name", "counted"), [("weighted_consensus", [30, 100]), ("weighted_by_a_function", [90, 500])]
)
def test_a_sync_point_shows_the_work_weighted_mean(ranks: Outcomes, name: str, counted: list[int]) -> None:
    first, second = ranks(name)
    weights = [each / sum(counted) for each in counted]
    mean = [weights[0] * a + weights[1] * b for a, b in zip(first["history"][-1], second["history"][-1], strict=True)]
    assert distance(first["history"][-1], second["history"][-1]) > 1e-2
    for told in (first, second):
        assert distance(told["agreed"][0], mean) < 1e-6
        assert told["samples_by_rank"] == counted


@pytest.mark.parametrize("name", ["validate_again_delta_mean", "validate_again_diloco", "validate_again_easgd"])
def test_validating_again_changes_no_bit(ranks: Outcomes, name: str) -> None:
    first, second = ranks(name)
    assert first["validations"] == second["validations"]
    assert first["epochs"] == second["epochs"]
    for epoch, number in enumerate(first["validations_by_epoch"]):
        last_three = first["validations"][number - 3 : number]
        assert last_three == [first["epochs"][epoch]] * 3
    assert first["epochs"][0] != first["epochs"][1], "the second epoch trains"
    assert first["end"] == second["end"] == first["digest"] == second["digest"] == first["epochs"][1]


@pytest.mark.parametrize("policy", ["keep", "average"])
def test_equal_replicas_train_as_one_with_adam(ranks: Outcomes, policy: str) -> None:
    expected = flat(train_alone(batches(0, 12), optimizer=adam))
    for told in ranks("same_data_on_both_ranks"):
        assert distance(told[policy], expected) < 1e-6


def test_collectives_at_a_sync_point(ranks: Outcomes) -> None:
    for told in ranks("world_of_sums"):
        assert told["mean"] == told["int_mean"] == 1.5
        assert (told["sum"], told["max"], told["all"]) == (3.0, 2.0, [False, True])
        assert told["broadcast"] == {"from": 0}
        assert told["gathered"] == [[1.0, 1.0], [2.0, 2.0]]
        assert told["warnings"] == []
    assert [told["grad"] for told in ranks("world_of_sums")] == [[6.0], [10.0]]


def test_several_fits_in_one_process(ranks: Outcomes) -> None:
    for once, twice, epoch in ranks("two_trainers_in_one_process"):
        assert once != twice
        assert epoch == 2
    assert ranks("two_trainers_in_one_process")[0] == ranks("two_trainers_in_one_process")[1]

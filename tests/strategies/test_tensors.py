"""Whatever users do to a module's tensors, replicas agree on them at sync points, or the user hears of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.strategies import problem
from tests.strategies.problem import batches, distance, flat, joined
from tests.strategies.workers import Outcomes

pytestmark = pytest.mark.processes

SCENARIOS = "tests.strategies.tensors"


def one_process(epochs: int = 3, unfreeze_at: int = 1) -> nn.Sequential:
    """Plain torch on the joined batches: the first two layers are frozen at first."""
    module = problem.network()
    module[:2].requires_grad_(False)
    stepper = torch.optim.SGD(module[2].parameters(), lr=0.05)
    for epoch in range(epochs):
        if epoch == unfreeze_at:
            module.requires_grad_(True)
            stepper.add_param_group({"params": list(module[:2].parameters()), "lr": 0.05})
        for batch in joined(batches(0, 6), batches(1, 6)):
            problem.loss_of(module, batch).backward()
            stepper.step()
            stepper.zero_grad()
    return module


def test_an_unfrozen_backbone_trains_as_in_one_process(ranks: Outcomes) -> None:
    left, right = ranks("unfreezing_with_a_round_after_every_step")
    assert left["epochs"] == right["epochs"]
    assert left["rounds"] == 18
    assert distance(left["flat"], flat(one_process())) < 1e-5


@pytest.mark.parametrize("name", ["unfreezing_under_diloco", "unfreezing_with_averaged_moments"])
def test_an_unfrozen_backbone_is_averaged_from_then_on(ranks: Outcomes, name: str) -> None:
    left, right = ranks(name)
    assert left["epochs"] == right["epochs"] and len(set(left["epochs"])) == 3
    assert left["end"] == right["end"]
    assert left["backbone moved by"] > 1e-3


def test_a_momentum_teacher_and_a_buffer_assigned_anew_are_agreed_on(ranks: Outcomes) -> None:
    left, right = ranks("a_momentum_teacher")
    assert left["now"] == right["now"] != left["start"]
    assert left["loss"] == right["loss"] > 0


def test_a_replica_with_one_bad_gradient_goes_on(ranks: Outcomes) -> None:
    left, right = ranks("one_gradient_that_is_not_finite")
    assert left["end"] == right["end"]
    assert [left["healed"], right["healed"]] == [0, 1]
    assert right["moments are finite"] and right["moments"] > 0
    assert right["share of work"] == 1, "it counts in every round but the one in which it was healed"


def test_synchronous_steps_come_back(ranks: Outcomes) -> None:
    left, right = ranks("a_schedule_that_goes_back_to_synchronous_steps")
    assert left["end"] == right["end"]
    assert left["synchronous"] == right["synchronous"] == 8


def test_a_bad_variance_is_healed_and_a_mask_is_left(ranks: Outcomes) -> None:
    left, right = ranks("a_variance_that_is_not_finite")
    assert left["end"] == right["end"]
    for each in (left, right):
        assert each["variance is finite"] and each["mask"]
        assert each["phase"] == torch.view_as_real(torch.polar(torch.ones(2), torch.tensor([0.5, 1.5]))).tolist()
    assert [left["healed"], right["healed"]] == [1, 0]

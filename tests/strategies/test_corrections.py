"""Corrections for the delay on two ranks are their equations in float64; nothing speculative is left anywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.strategies import problem
from tests.strategies.problem import Batch, batches, distance, flat, momentum
from tests.strategies.workers import Outcomes

pytestmark = pytest.mark.processes

SCENARIOS = "tests.strategies.corrections"
SHARDS = (batches(0, 13, 3), batches(1, 13, 9))


class Reference:
    """One process in float64 that does what all ranks do together.

    Args:
        ahead: the strength of a prediction; 0 for none.
        warm: steps without a delay.
    """

    def __init__(self, optimizer: Callable[[Any], torch.optim.Optimizer], *, ahead: float, warm: int) -> None:
        self.module = problem.network().double()
        self.params = list(self.module.parameters())
        self.optimizer = optimizer(self.params)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.ahead, self.warm = ahead, warm
        self.steps = 0
        self.computed: list[float] = []
        self.flying: list[Tensor] | None = None
        self.before: list[Tensor] | None = None

    def now(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.params]

    @torch.no_grad()
    def go(self, there: Sequence[Tensor]) -> None:
        for p, value in zip(self.params, there, strict=True):
            p.copy_(value)

    def step(self, gradients: Sequence[Tensor]) -> None:
        for p, g in zip(self.params, gradients, strict=True):
            p.grad = g.clone()
        self.optimizer.step()

    def arrive(self) -> None:
        if self.flying is None:
            return
        gradients, self.flying = self.flying, None
        self.before = self.now()
        self.step(gradients)
        self.schedule.step()
        self.steps += 1

    def sync_point(self) -> None:
        self.arrive()
        self.before = None

    def train(self, shards: Sequence[Sequence[Batch]], size: int, sync_points: Sequence[int], epochs: int) -> None:
        for _ in range(epochs):
            held, there = 0, None
            total, samples = [torch.zeros_like(p) for p in self.params], 0
            for i, every in enumerate(zip(*shards, strict=True), start=1):
                here = self.now()
                if not held:
                    there = None
                    if self.ahead and self.flying is not None and self.before is not None:
                        there = [x + self.ahead * (x - b) for x, b in zip(here, self.before, strict=True)]
                self.go(here if there is None else there)
                self.computed.append(flat(self.module)[0])
                for x, y in every:
                    loss = problem.loss_of(self.module, (x.double(), y.double()))
                    for t, g in zip(total, torch.autograd.grad(loss, self.params), strict=True):
                        t.add_(g, alpha=len(x))
                    samples += len(x)
                self.go(here)
                held += 1
                if held == size or i == len(shards[0]):
                    self.arrive()
                    self.flying = [t / samples for t in total]
                    if self.steps < self.warm:
                        self.arrive()
                    total, samples, held = [torch.zeros_like(t) for t in total], 0, 0
                if i in sync_points:
                    self.sync_point()
                    there = None
            self.sync_point()


def reference(ahead: float = 1.5) -> Reference:
    made = Reference(momentum, ahead=ahead, warm=1)
    made.train(SHARDS, 2, sync_points=(8,), epochs=2)
    return made


def test_steps_are_those_of_one_process_in_float64(ranks: Outcomes) -> None:
    expected, (a, b) = reference(), ranks("predicted")
    assert a["digest"] == b["digest"] and a["validations"] == b["validations"]
    for told in (a, b):
        assert distance(told["flat"], flat(expected.module)) < 2e-5
        assert distance(told["computed"], expected.computed) < 2e-5
        assert told["global_step"] == told["steps"] == expected.steps
        assert told["lr"] == pytest.approx(expected.schedule.get_last_lr()[0])
        assert told["samples_by_rank"] == [78.0, 234.0]


def test_the_correction_shows() -> None:
    assert distance(flat(reference().module), flat(reference(ahead=0.0).module)) > 1e-3


def test_predicted_parameters_are_there_for_the_passes_only(ranks: Outcomes) -> None:
    """Hooks around a batch, and validations, see parameters that were stepped with."""
    sync_points = {8, 13, 21}  # where what is in flight is stepped with
    for told in ranks("predicted"):
        seen, after = told["seen"], [each[0] for each in told["history"]]
        assert all(seen[i] == after[i - 1] for i in range(1, 26) if i not in sync_points)
        assert sum(here != there for here, there in zip(seen, told["computed"], strict=True)) == 10


def test_an_exception_finds_parameters_that_were_stepped_with(ranks: Outcomes) -> None:
    assert any("computed True seen True" in error for error in ranks.errors("failed"))


def test_a_rank_without_data_takes_the_steps_of_the_others(ranks: Outcomes) -> None:
    for a, b in zip(*ranks("predicted_uneven"), strict=True):
        assert a["digest"] == b["digest"]
        assert a["epochs"] == b["epochs"] == a["validations"] == b["validations"]
        assert a["global_step"] == b["global_step"] == a["steps"]
        assert a["samples_by_rank"] == [32.0, 136.0]  # each sample once an epoch


def test_training_goes_on_from_a_sync_point_to_the_bit(ranks: Outcomes) -> None:
    for straight, again, steps, steps_again in ranks("resumed"):
        assert straight == again and steps == steps_again


def test_training_goes_on_with_another_correction(ranks: Outcomes) -> None:
    a, b = ranks("resumed_with_another")
    assert a == b and len(a) == 4 and {steps for _, steps in a.values()} == {3}


def test_parameters_that_training_step_changes_are_named(ranks: Outcomes) -> None:
    assert any("`training_step` has changed ['net.0.weight'" in error for error in ranks.errors("clamped"))

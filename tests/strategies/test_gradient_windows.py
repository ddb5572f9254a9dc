"""Windows of gradients on two ranks give the steps of one process with the same windows, and of DDP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.strategies import problem
from tests.strategies.gradient_windows import adam, momentum
from tests.strategies.problem import Batch, batches, distance, flat, joined, train_alone
from tests.strategies.workers import Outcomes

SCENARIOS = "tests.strategies.gradient_windows"
Shards = Sequence[Sequence[Batch]]

EQUAL: Shards = (batches(0, 12), batches(1, 12))
SHORT: Shards = (batches(0, 10), batches(1, 10))
UNEQUAL: Shards = (batches(0, 12, 3), batches(1, 12, 9))


def reference(
    shards: Shards,
    size: int,
    delay: int,
    *,
    epochs: int = 1,
    clip: float | None = None,
    gates: Sequence[int] = (),
    optimizer: Callable[[Any], torch.optim.Optimizer] = momentum,
) -> tuple[list[float], int]:
    """The parameters and the number of steps, in float64; ``gates`` come after so many batches of an epoch."""
    module, steps = problem.network().double(), 0
    stepper = optimizer(module.parameters())
    flying: list[Tensor] | None = None

    def step() -> None:
        nonlocal flying, steps
        if flying is None:
            return
        for p, g in zip(module.parameters(), flying, strict=True):
            p.grad = g
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        stepper.step()
        flying, steps = None, steps + 1

    for _ in range(epochs):
        total, samples = [torch.zeros_like(p) for p in module.parameters()], 0
        for i, every in enumerate(zip(*shards, strict=True), start=1):
            for x, y in every:
                loss = problem.loss_of(module, (x.double(), y.double()))
                for t, g in zip(total, torch.autograd.grad(loss, list(module.parameters())), strict=True):
                    t.add_(g, alpha=len(x))
                samples += len(x)
            if i % size == 0 or i == len(shards[0]):
                step()
                flying = [t / samples for t in total]
                total, samples = [torch.zeros_like(t) for t in total], 0
                if delay == 0:
                    step()
            if i in gates:
                step()
        step()
    return flat(module), steps


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("no_delay", lambda: reference(EQUAL, 3, 0, epochs=2)),
        ("no_delay_adam_clipped", lambda: reference(SHORT, 3, 0, epochs=2, clip=0.2, optimizer=adam)),
        ("no_delay_unequal_batches", lambda: reference(UNEQUAL, 2, 0)),
        ("delayed", lambda: reference(UNEQUAL, 2, 1, epochs=2)),
    ],
)
def test_steps_are_those_of_one_process_in_float64(
    ranks: Outcomes, name: str, expected: Callable[[], tuple[list[float], int]]
) -> None:
    where, steps = expected()
    for told in ranks(name):
        assert distance(told["flat"], where) < 1e-5
        assert told["global_step"] == told["steps"] == steps
    assert ranks(name)[0]["digest"] == ranks(name)[1]["digest"]


def test_without_delay_windows_are_accumulation_of_ddp(ranks: Outcomes) -> None:
    """Windows that divide the epoch: Lightning scales a shorter one by the number of batches of a whole one."""
    expected = flat(train_alone(joined(*EQUAL), epochs=2, accumulate=3, optimizer=momentum))
    for told in ranks("no_delay"):
        assert distance(told["flat"], expected) < 1e-6


def test_the_delay_shows() -> None:
    """What the comparisons above compare with is not trivial."""
    assert distance(reference(UNEQUAL, 2, 0)[0], reference(UNEQUAL, 2, 1)[0]) > 1e-3

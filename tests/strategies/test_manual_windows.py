"""Windows of gradients in manual optimization give the steps of one process, for each optimizer on its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.strategies import problem
from tests.strategies.problem import Batch, batches, distance, flat
from tests.strategies.workers import Outcomes

pytestmark = pytest.mark.processes

SCENARIOS = "tests.strategies.manual_windows"
SHARDS: Sequence[Sequence[Batch]] = (batches(0, 12, 3), batches(1, 12, 9))


def reference(
    size: int, delay: int, gathers: int = 1, sync_points: Sequence[int] = (), epochs: int = 2
) -> tuple[Any, int]:
    """Both networks, and the steps of both optimizers, in float64."""
    nets = problem.network().double(), problem.network(4).double()
    steppers = torch.optim.SGD(nets[0].parameters(), lr=0.05, momentum=0.9), torch.optim.SGD(nets[1].parameters(), 0.02)
    total: list[list[Tensor] | None] = [None, None]
    behind, flying, counted, steps = [0.0, 0.0], [None, None], 0, 0
    own: list[Tensor] | None = None

    def take() -> None:
        nonlocal flying, steps
        for net, stepper, mean in zip(nets, steppers, flying, strict=True):
            if mean is not None:
                for p, g in zip(net.parameters(), mean, strict=True):
                    p.grad = g
                stepper.step()
                steps += 1
        flying = [None, None]

    def gather(number: int, gradients: Sequence[Tensor], samples: float) -> None:
        weighted = [g * samples for g in gradients]
        held = total[number]
        total[number] = weighted if held is None else [a + b for a, b in zip(held, weighted, strict=True)]
        behind[number] += samples

    for _ in range(epochs):
        for i in range(12):
            x, y = (torch.cat([shard[i][part].double() for shard in SHARDS]) for part in (0, 1))
            loss = F.mse_loss(nets[0](x), y) / gathers
            gradients = torch.autograd.grad(loss, list(nets[0].parameters()))
            own = list(gradients) if own is None else [a + b for a, b in zip(own, gradients, strict=True)]
            asked = bool(i % 2)
            if (i + 1) % gathers == 0:
                gather(0, own, len(x) * gathers)
                own, asked = None, True
            if i % 2:
                loss = F.mse_loss(nets[1](x), nets[0](x).detach())
                gather(1, torch.autograd.grad(loss, list(nets[1].parameters())), len(x))
            counted += asked
            if (asked and counted >= size) or i == 11:
                take()
                flying = [None if t is None else [g / n for g in t] for t, n in zip(total, behind, strict=True)]
                total[:], behind, counted = [None, None], [0.0, 0.0], 0
                if delay == 0:
                    take()
            if i + 1 in sync_points:
                take()
        take()
    return nets, steps


@pytest.mark.parametrize(
    ("name", "settings", "error"),
    [
        ("no_delay", {"size": 3, "delay": 0}, 1e-5),
        ("delayed", {"size": 2, "delay": 1}, 1e-5),
        ("gathers_by_itself", {"size": 2, "delay": 1, "gathers": 2, "sync_points": (5, 10)}, 1e-5),
        ("bare", {"size": 2, "delay": 1}, 1e-5),
    ],
)
def test_each_optimizer_steps_with_the_mean_of_the_batches_it_asked_in(
    ranks: Outcomes, name: str, settings: dict[str, Any], error: float
) -> None:
    nets, steps = reference(**settings)
    for told in ranks(name):
        assert distance(told["flat"], [*flat(nets[0]), *flat(nets[1])]) < error
        assert told["global_step"] == steps
    assert ranks(name)[0]["digest"] == ranks(name)[1]["digest"]


def test_what_is_compared_with_differs() -> None:
    late, prompt = (reference(2, delay)[0] for delay in (1, 0))
    assert all(distance(flat(a), flat(b)) > 1e-3 for a, b in zip(late, prompt, strict=True))


def test_global_step_and_hooks_see_steps_that_are_taken(ranks: Outcomes) -> None:
    """12 batches in windows of 2, in which both optimizers ask: both step when a window has arrived."""
    for told in ranks("delayed"):
        assert told["stepped"][:12] == [0, 0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10]
        assert told["updates"][:12] == [False, False, False, *[True, False] * 4, True]
        assert told["before_step"] == [0, 1] * 12
        assert told["samples_by_rank"] == [72.0, 216.0]


def test_the_last_steps_are_not_late(ranks: Outcomes) -> None:
    for told in ranks("limited"):
        assert told["global_step"] == 6 and told["before_step"] == [0, 1] * 3
        assert told["stepped"] == [0, 0, 0, 2, 2, 6]


@pytest.mark.parametrize("name", ["until_reduced", "compressed", "uneven"])
def test_replicas_stay_alike(ranks: Outcomes, name: str) -> None:
    a, b = ranks(name)
    assert a["digest"] == b["digest"] and a["before_step"] == b["before_step"]
    assert set(a["before_step"]) == {0, 1} and a["global_step"] == len(a["before_step"])


def test_a_checkpoint_goes_on_to_the_bit(ranks: Outcomes) -> None:
    for told in ranks("goes_on"):
        assert told["losses"] == [True] * len(told["losses"]) and 0 < len(told["losses"]) < 24
        assert told["equal"]


def test_two_steps_of_one_optimizer_in_a_batch_are_refused(ranks: Outcomes) -> None:
    errors = ranks.errors("one_optimizer_twice")
    assert any("`SGD.step` (optimizer 0) was called twice in one batch" in error for error in errors), errors


def test_what_has_no_place_is_refused_by_name(ranks: Outcomes) -> None:
    for error in ranks.errors("shared"):
        assert error.startswith("ValueError") and "Optimizers 0 and 1 both have 'second.0.weight'" in error

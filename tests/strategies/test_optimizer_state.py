"""Optimizer state that is there from the start begins as each optimizer would begin it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from lightning_async.engine.averaging.optimizer_state import AveragedState, materialise, reset

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "Adadelta": lambda ps: optim.Adadelta(ps, 1.0),
    "Adafactor": lambda ps: optim.Adafactor(ps, 0.05),
    "Adagrad": lambda ps: optim.Adagrad(ps, 0.05, initial_accumulator_value=0.1),
    "Adam": lambda ps: optim.Adam(ps, 0.05),
    "AMSGrad": lambda ps: optim.Adam(ps, 0.05, amsgrad=True),
    "AdamW": lambda ps: optim.AdamW(ps, 0.05),
    "Adamax": lambda ps: optim.Adamax(ps, 0.05),
    "ASGD": lambda ps: optim.ASGD(ps, 0.05, t0=2),
    "NAdam": lambda ps: optim.NAdam(ps, 0.05),
    "RAdam": lambda ps: optim.RAdam(ps, 0.05),
    "RMSprop": lambda ps: optim.RMSprop(ps, 0.05, momentum=0.5, centered=True),
    "Rprop": lambda ps: optim.Rprop(ps, 0.05),
    "SGD": lambda ps: optim.SGD(ps, 0.05),
    "momentum": lambda ps: optim.SGD(ps, 0.05, momentum=0.9, nesterov=True),
}
AVERAGED = {
    "Adadelta": 2, "Adafactor": 2, "Adagrad": 1, "Adam": 2, "AMSGrad": 3, "AdamW": 2, "Adamax": 2, "ASGD": 1,
    "NAdam": 2, "RAdam": 2, "RMSprop": 3, "Rprop": 2, "SGD": 0, "momentum": 1,
}  # fmt: skip
"""Tensors of the state of one matrix."""


def params(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.linspace(-1.0, 2.0, max(1, torch.Size(s).numel())).view(s)) for s in shapes]


def train(ps: list[nn.Parameter], optimizer: optim.Optimizer, steps: int = 20) -> list[Tensor]:
    for step in range(steps):
        for p in ps:
            p.grad = (p.detach() - 0.5) * (1.0 + step % 3)
        optimizer.step()
    return [p.detach().clone() for p in ps]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_the_same_to_the_bit(name: str) -> None:
    shapes = ((), (4,), (3, 5), (2, 3, 2, 2))
    alone, materialised = params(*shapes), params(*shapes)
    expected = train(alone, OPTIMIZERS[name](alone))
    optimizer = OPTIMIZERS[name](materialised)
    before = [p.detach().clone() for p in materialised]
    materialise([optimizer])
    assert all(map(torch.equal, before, materialised)), "parameters are left alone"
    assert all(p.grad is None for p in materialised)
    assert all(map(torch.equal, expected, train(materialised, optimizer)))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_are_averaged_in_place_and_step_counts_are_not(name: str) -> None:
    for shape in ((3, 5), ()):
        ps = params(shape)
        optimizer = OPTIMIZERS[name](ps)
        materialise([optimizer])
        tensors = AveragedState([optimizer])()
        if shape or name != "Adafactor":  # which has one variance for a vector, and one for rows and columns each
            assert len(tensors) == AVERAGED[name]
        train(ps, optimizer, 3)
        state = optimizer.state[ps[0]]
        assert all(any(t is value for value in state.values()) for t in tensors)
        assert "step" not in state or float(state["step"]) == 3.0


def test_what_was_restored_stays_and_only_what_lacks_begins() -> None:
    ps = params((2,), (2,))
    optimizer = optim.Adam(ps, 0.05)
    ps[0].grad = torch.ones(2)
    optimizer.step()
    kept = optimizer.state[ps[0]]["exp_avg"].clone()
    materialise([optimizer])
    assert torch.equal(optimizer.state[ps[0]]["exp_avg"], kept)
    assert float(optimizer.state[ps[0]]["step"]) == 1.0
    assert float(optimizer.state[ps[1]]["step"]) == 0.0
    assert len(AveragedState([optimizer])()) == 4


def test_frozen_parameters_have_no_state() -> None:
    ps = params((2,), (2,))
    ps[0].requires_grad_(False)
    optimizer = optim.Adam(ps, 0.05)
    materialise([optimizer])
    assert ps[0] not in optimizer.state and len(AveragedState([optimizer])()) == 2


def test_complex_moments_are_averaged_as_real_numbers() -> None:
    p = nn.Parameter(torch.tensor([1.0 + 2.0j, -1.0j]))
    optimizer = optim.Adam([p], 0.05)
    materialise([optimizer])
    tensors = AveragedState([optimizer])()
    assert [(t.dtype, t.shape) for t in tensors] == [(torch.float32, (2, 2))] * 2
    tensors[0].fill_(3.0)
    assert optimizer.state[p]["exp_avg"].tolist() == [3.0 + 3.0j] * 2


def test_hooks_and_schedulers_hear_nothing_of_it() -> None:
    ps, heard = params((2,)), []
    optimizer = optim.SGD(ps, 0.05, momentum=0.9)
    optimizer.register_step_post_hook(lambda *_: heard.append("step"))
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1)
    materialise([optimizer])
    assert heard == [] and scheduler.last_epoch == 0
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert not getattr(optimizer, "_opt_called", False)


class FirstGradient(optim.Optimizer):
    """Its state is a copy of where the parameter began, as in schedule-free training."""

    def __init__(self, ps: Any, lr: float = 0.1) -> None:
        super().__init__(ps, {"lr": lr})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                start = self.state[p].setdefault("start", p.detach().clone())
                p.data.add_(p.grad + 0.1 * start, alpha=-group["lr"])


class Replacing(optim.Optimizer):
    """Makes its momentum anew at every step; counts steps as a plain number."""

    def __init__(self, ps: Any, lr: float = 0.1, in_place: bool = False) -> None:
        super().__init__(ps, {"lr": lr, "in_place": in_place})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                momentum = state.get("momentum", torch.zeros_like(p))
                new = 0.9 * momentum + p.grad
                state["momentum"] = momentum.copy_(new) if group["in_place"] else new
                p.data.add_(new, alpha=-group["lr"] / state["count"])


@pytest.mark.parametrize(
    ("make", "texts"),
    [
        (
            lambda ps: optim.SGD(ps, 0.05, momentum=0.9, dampening=0.5),
            ("SGD(lr=0.05", "dampening=0.5", "first gradient"),
        ),
        (lambda ps: optim.LBFGS(ps), ("LBFGS(lr=1", "closure")),
        (lambda ps: FirstGradient(ps), ("FirstGradient(lr=0.1)", "first gradient")),
        (lambda ps: Replacing(ps), ("Replacing(lr=0.1", "['momentum']", "in place")),
    ],
)
def test_what_cannot_begin_alike_is_refused_by_name(make: Any, texts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"optimizer_state='average'.*optimizer_state='keep'") as raised:
        materialise([make(params((2, 3)))])
    assert all(text in str(raised.value) for text in texts), raised.value


def test_an_optimizer_from_elsewhere_that_begins_with_zeros() -> None:
    alone, ps = params((2, 3)), params((2, 3))
    expected = train(alone, Replacing(alone, in_place=True))
    optimizer = Replacing(ps, in_place=True)
    materialise([optimizer])
    assert optimizer.state[ps[0]]["count"] == 0
    assert len(AveragedState([optimizer])()) == 1
    assert all(map(torch.equal, expected, train(ps, optimizer)))


def test_reset_begins_as_at_first() -> None:
    alone, ps = params((3,)), params((3,))
    expected = train(alone, optim.NAdam(alone, 0.05))
    optimizer = optim.NAdam(ps, 0.05)
    train(ps, optimizer, 5)
    reset([optimizer])
    with torch.no_grad():
        ps[0].copy_(params((3,))[0])
    assert all(map(torch.equal, expected, train(ps, optimizer)))

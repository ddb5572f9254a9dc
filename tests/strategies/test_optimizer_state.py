"""Optimizer state that is there from the start begins as each optimizer would begin it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from lightning_async.engine.averaging.optimizer_state import AveragedState, materialise, reset
from lightning_async.engine.running_means import RunningMean, count, merge_late_

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


# ---- averages over time ----

LAWS: dict[str, dict[str, tuple[float, bool]]] = {
    "Adadelta": {"acc_delta": (1.0, True), "square_avg": (0.9, True)},
    "Adafactor": {"col_var": (1.0, True), "row_var": (1.0, True)},
    "Adagrad": {"sum": (1.0, True)},
    "Adam": {"exp_avg": (0.9, False), "exp_avg_sq": (0.999, True)},
    "AMSGrad": {"exp_avg": (0.9, False), "exp_avg_sq": (0.999, True), "max_exp_avg_sq": (1.0, True)},
    "AdamW": {"exp_avg": (0.9, False), "exp_avg_sq": (0.999, True)},
    "Adamax": {"exp_avg": (0.9, False), "exp_inf": (1.0, True)},
    "ASGD": {"ax": (1.0, False)},
    "NAdam": {"exp_avg": (0.9, False), "exp_avg_sq": (0.999, True)},
    "RAdam": {"exp_avg": (0.9, False), "exp_avg_sq": (0.999, True)},
    "RMSprop": {"grad_avg": (0.99, False), "momentum_buffer": (0.5, False), "square_avg": (0.99, True)},
    "Rprop": {"prev": (1.0, False), "step_size": (1.0, True)},
    "SGD": {},
    "momentum": {"momentum_buffer": (0.9, False)},
}
"""What an update leaves of each tensor of a matrix's state, 1 where that is not known; and whether it is positive."""
OTHERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "foreach": lambda ps: optim.Adam(ps, 0.05, foreach=True),
    "fused": lambda ps: optim.Adam(ps, 0.05, fused=True),
    "groups": lambda ps: optim.Adam(
        [{"params": ps[:1], "betas": (0.5, 0.75)}, {"params": ps[1:], "betas": (0.75, 0.875)}], 0.05
    ),
    "momentum, foreach": lambda ps: optim.SGD(ps, 0.05, momentum=0.75, foreach=True),
    "momentum, fused": lambda ps: optim.SGD(ps, 0.05, momentum=0.75, fused=True),
    "momentum, one by one": lambda ps: optim.SGD(ps, 0.05, momentum=0.75, foreach=False),
    "RMSprop alone": lambda ps: optim.RMSprop(ps, 0.05),
    "from elsewhere": lambda ps: Replacing(ps, in_place=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_how_each_tensor_of_the_state_averages_over_time(name: str) -> None:
    ps = params((3, 5))
    optimizer = OPTIMIZERS[name](ps)
    state = AveragedState([optimizer])
    tensors, found = state(), state.running_means()
    names = {id(value): key for key, value in optimizer.state[ps[0]].items()}
    assert {names[id(t)]: (m.decay, m.positive) for t, m in zip(tensors, found, strict=True)} == LAWS[name]


@pytest.mark.parametrize("k", [0, 1, 5])
@pytest.mark.parametrize("name", sorted((OPTIMIZERS.keys() | OTHERS.keys()) - {"SGD", "RMSprop"}))
def test_moments_end_where_their_gradients_would_have_led_from_the_mean(name: str, k: int) -> None:
    """Parameter 1 has no gradient meanwhile: none of its moments is updated."""

    def run(steps: int, ps: list[nn.Parameter], optimizer: optim.Optimizer) -> None:
        for i in range(steps):
            for j, p in enumerate(ps):
                p.grad = None if j == 1 and i >= 3 else torch.full_like(p, (-1.0) ** i * (1 + j + i))
            optimizer.step()

    shapes = ((3, 5), (4,), (2,))
    ps = params(*shapes)
    optimizer = {**OPTIMIZERS, **OTHERS}[name](ps)
    if name == "from elsewhere":
        ps = ps[:1]
        optimizer = OTHERS[name](ps)
    state = AveragedState([optimizer])
    state()
    run(3, ps, optimizer)
    ps2 = [nn.Parameter(p.detach().clone()) for p in ps]
    oracle = {**OPTIMIZERS, **OTHERS}[name](ps2)
    oracle.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    expected = AveragedState([oracle])()
    for tensor in expected:
        tensor += 2.0
    tensors, then = state(), count(state.running_means())
    snapshot = torch.cat([t.reshape(-1) for t in tensors])
    for _ in range(k):
        for each, of in ((ps, optimizer), (ps2, oracle)):
            for j, p in enumerate(each):
                p.grad = None if j == 1 else torch.full_like(p, 3.0 - j)
            of.step()
    merge_late_(tensors, snapshot + 2.0, snapshot, state.running_means(), then)
    for mine, other, mean in zip(tensors, expected, state.running_means(), strict=True):
        if k == 0 or (mean.decay != 1.0 or name == "Adagrad"):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
        assert not mean.positive or bool((mine > 0.0).all())


def test_steps_are_counted_where_a_kernel_leaves_no_trace_until_the_state_is_closed() -> None:
    ps = params((3,), (2,))
    optimizer = optim.SGD(ps, 0.05, momentum=0.75, fused=True)
    state = AveragedState([optimizer])
    assert (state(), [mean.updates for mean in state.running_means()])[1] == [0.0, 0.0]
    for each in ([ps[0]], ps):
        optimizer.zero_grad()
        for p in each:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert [(mean.decay, mean.updates) for mean in state.running_means()] == [(0.75, 2.0), (0.75, 1.0)]
    state.close()
    optimizer.step()
    assert not optimizer._optimizer_step_post_hooks


def test_what_goes_by_a_factor_that_changes_later_has_no_decay_of_its_own() -> None:
    """Until its ``t0`` the average of ASGD is a copy of the parameter, of which each step leaves nothing."""
    state = AveragedState([optim.ASGD(params((3,)), 0.05)])
    assert (state(), state.running_means())[1] == [RunningMean()]


def test_optimizers_that_draw_random_numbers_draw_none_of_those_of_training() -> None:
    class Langevin(Replacing):
        def step(self) -> None:  # type: ignore[override]
            super().step()
            for p in self.param_groups[0]["params"]:
                p.data.add_(torch.randn(p.shape))
                self.state[p]["momentum"].add_(torch.randn(p.shape))

    state, before = AveragedState([Langevin(params((3,)), in_place=True)]), torch.get_rng_state()
    assert (state(), [mean.decay for mean in state.running_means()])[1] == [0.9]
    assert torch.equal(torch.get_rng_state(), before)


def test_momenta_that_a_scheduler_changes_are_read_anew() -> None:
    ps = params((3,))
    optimizer = optim.Adam(ps, 0.05)
    state = AveragedState([optimizer])
    assert [mean.decay for mean in (state(), state.running_means())[1]] == [0.9, 0.999]
    optimizer.param_groups[0]["betas"] = (0.85, 0.999)
    assert [mean.decay for mean in state.running_means()] == [0.85, 0.999]


def test_an_optimizer_of_which_that_cannot_be_found_out_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Single(Replacing):
        def step(self) -> None:  # type: ignore[override]
            assert self.param_groups[0]["params"][0].dtype is torch.float32, "no doubles"
            super().step()

    state = AveragedState([Single(params((3,)), in_place=True)])
    caplog.set_level(logging.WARNING, "lightning_async")
    assert (state(), state.running_means())[1] == [RunningMean()]
    assert "unknown how the state of `Single` averages over time (no doubles" in caplog.text


def test_moments_of_16_bits_stay_positive() -> None:
    p = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = optim.Adam([p], 0.05)
    state = AveragedState([optimizer])
    _, second = state()
    second.copy_(torch.linspace(1e-3, 7.0, 64))
    then = count(state.running_means())
    snapshot = torch.cat([t.float() for t in state()])
    for _ in range(200):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    merge_late_(state(), 0.25 * snapshot, snapshot, state.running_means(), then)
    assert bool((second.float() >= 0.25 * 0.999**200 * snapshot[64:] * (1.0 - 2.0**-8)).all())

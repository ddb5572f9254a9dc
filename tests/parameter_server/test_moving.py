"""What servers hold goes to another number of servers as it is, by way of torch's own state of an optimizer."""

from __future__ import annotations

import copy
import io
from collections import defaultdict
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_async.comm.p2p import ShmDial
from lightning_async.engine.averaging.optimizer_state import every_tensor
from lightning_async.parameter_server.client import Client
from lightning_async.parameter_server.tables import HeldState, fill_state, state_of
from lightning_async.parameter_server.worker import Worker, plan_of
from tests.parameter_server.running import Running, running
from tests.parameter_server.test_server import on_threads

SHAPES = {"large": (7, 11), "small": (3,), "none": (5, 2)}
BOUND = 20  # elements, so that the first one is split


def params() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).requires_grad_() for name, shape in SHAPES.items()}


def joined(servers: list[Running], named: dict[str, Tensor]) -> Worker:
    plan = plan_of(named, len(servers), BOUND)
    dials = [ShmDial(each.name, 4 * size, 4 * size) for each, size in zip(servers, plan.sizes, strict=True)]
    return Worker(named, plan, Client("a", dials, plan.fingerprint()))


def push(worker: Worker, steps: range) -> None:
    """Gradients that depend on the step alone."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in worker.params:
            p.grad = torch.randn(p.shape, generator=generator)
        worker.fill_gradients()
        worker.push(lr=0.02)
        worker.take_()


def held(worker: Worker, optimizer: Optimizer) -> dict[str, Any]:
    """The weights, and the state as a checkpoint has it."""
    worker.pull()
    worker.take_()
    fill_state(optimizer, worker)
    file = io.BytesIO()
    torch.save({"weights": [p.detach() for p in worker.params], "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize(
    ("name", "arguments", "fields"),
    [
        ("SGD", {"lr": 0.02, "momentum": 0.9}, {"momentum_buffer"}),
        ("SGD", {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {"momentum_buffer"}),
        ("Adam", {"lr": 0.02}, {"exp_avg", "exp_avg_sq", "step"}),
        ("AdamW", {"lr": 0.02, "amsgrad": True}, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"}),
        ("RMSprop", {"lr": 0.02, "momentum": 0.9}, {"square_avg", "momentum_buffer", "step"}),
        ("Adagrad", {"lr": 0.02}, {"sum", "step"}),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
@pytest.mark.parametrize("back", [False, True], ids=["two to three", "three to two"])
def test_weights_and_state_are_equal_to_the_bit_and_go_on_so(
    name: str, arguments: dict[str, Any], fields: set[str], back: bool
):
    kind: type[Optimizer] = getattr(torch.optim, name)
    with ExitStack() as opened:
        some, others = ([opened.enter_context(running()) for _ in range(n)] for n in ((3, 2) if back else (2, 3)))
        first = joined(some, params())
        first.start(name, arguments)
        push(first, range(5))
        saved = held(first, kind(first.params, **arguments))
        state = saved["optimizer"]["state"]
        assert set(state) == {0, 1, 2} and all(set(each) == fields for each in state.values())

        named = params()
        for p, weights in zip(named.values(), saved["weights"], strict=True):
            p.detach().copy_(weights)
        optimizer = kind(list(named.values()), **arguments)
        optimizer.load_state_dict(saved["optimizer"])
        second = joined(others, named)
        second.start(name, arguments, state_of(optimizer, second.params))
        assert same(held(second, optimizer), saved)

        push(first, range(5, 9))
        push(second, range(5, 9))
        assert same(held(second, optimizer), held(first, kind(first.params, **arguments)))

        alone = params()
        torchs = kind(list(alone.values()), **arguments)
        for step in range(9):
            generator = torch.Generator().manual_seed(step)
            for p in alone.values():
                p.grad = torch.randn(p.shape, generator=generator)
            torchs.step()
        for p, q in zip(alone.values(), second.params, strict=True):
            torch.testing.assert_close(q, p, rtol=0.0, atol=1e-6)
        for worker in (first, second):
            worker.close()


@pytest.mark.parametrize("name", ["Adam", "NAdam", "RMSprop", "SGD"])
def test_steps_of_each_parameter_go_to_other_servers_and_back(name: str):
    """One parameter has a gradient in all steps, one in every other one, and one in none before the move."""
    kind: Any = getattr(torch.optim, name)
    arguments: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, **({"momentum": 0.9} if name == "SGD" else {})}
    alone, named = params(), params()
    torchs = kind(list(alone.values()), **arguments)
    with ExitStack() as opened:
        worker = joined([opened.enter_context(running()) for _ in range(2)], named)
        worker.start(name, arguments)
        for step in range(8):
            if step == 5:
                saved = held(worker, kind(worker.params, **arguments))
                worker.close()
                assert saved["optimizer"]["state"].keys() == torchs.state_dict()["state"].keys() == {0, 1}
                optimizer = kind(worker.params, **arguments)
                optimizer.load_state_dict(saved["optimizer"])
                worker = joined([opened.enter_context(running()) for _ in range(3)], named)
                worker.start(name, arguments, state_of(optimizer, worker.params))
            generator = torch.Generator().manual_seed(step)
            used = {"large": True, "small": step % 2 == 0, "none": step > 5}
            for key, p in alone.items():
                p.grad = torch.randn(p.shape, generator=generator) if used[key] else None
                named[key].grad = p.grad
            torchs.step()
            worker.fill_gradients()
            worker.push(lr=0.02)
            worker.take_()
        states = held(worker, kind(worker.params, **arguments))["optimizer"]["state"]
        worker.close()
    for number, (p, q) in enumerate(zip(alone.values(), named.values(), strict=True)):
        torch.testing.assert_close(q, p, rtol=0.0, atol=1e-6)
        for field, value in torchs.state[p].items():
            torch.testing.assert_close(states[number][field], value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["Adam", "Adagrad"])
def test_state_of_complex_parameters_is_as_torch_has_it(name: str):
    """And the steps that were taken: else no checkpoint of servers could be gone on with elsewhere, on a GPU."""
    kind: Any = getattr(torch.optim, name)
    start = torch.view_as_complex(torch.arange(8.0).view(2, 2, 2))
    gradients = [
        torch.view_as_complex(torch.randn(2, 2, 2, generator=torch.Generator().manual_seed(n))) for n in (0, 1)
    ]
    alone = start.clone().requires_grad_()
    torchs = kind([alone], lr=0.02)
    with running() as one, running() as other:
        worker = joined([one, other], {"numbers": start.clone().requires_grad_()})
        worker.start(name, {"lr": 0.02})
        for gradient in gradients:
            alone.grad = worker.params[0].grad = gradient
            torchs.step()
            worker.fill_gradients()
            worker.push(lr=0.02)
            worker.take_()
        saved = held(worker, kind(worker.params, lr=0.02))
        worker.close()
    state, own = saved["optimizer"]["state"][0], torchs.state[alone]
    assert state.keys() == own.keys()
    for key, value in state.items():
        assert (value.dtype, value.shape) == (own[key].dtype, own[key].shape)
        torch.testing.assert_close(value, own[key])
    torch.testing.assert_close(saved["weights"][0], alone.detach())


@pytest.mark.parametrize(
    "change",
    [
        lambda optimizer, p: optimizer.state.clear(),
        lambda optimizer, p: optimizer.state.pop(p),
        lambda optimizer, p: optimizer.state[p].update(momentum_buffer=torch.zeros(3, 5)),
        lambda optimizer, p: optimizer.state[p]["momentum_buffer"].zero_(),
        lambda optimizer, p: optimizer.state.update({p: {}}),
        lambda optimizer, p: setattr(optimizer, "state", defaultdict(dict)),
        lambda optimizer, p: optimizer.load_state_dict(optimizer.state_dict()),
        lambda optimizer, p: optimizer.state[torch.zeros(1)],
    ],
    ids=["clear", "pop", "write", "in place", "update", "replace", "load", "missing"],
)
def test_changes_of_a_state_that_servers_hold_are_refused(change: Any):
    arguments: dict[str, Any] = {"lr": 0.02, "momentum": 0.9}
    with running() as server:
        worker = joined([server], params())
        worker.start("SGD", arguments)
        push(worker, range(2))
        optimizer = torch.optim.SGD(worker.params, **arguments)
        state = HeldState(optimizer)
        state.check_unchanged()
        for _ in range(2):
            fill_state(optimizer, worker)
            state.check_unchanged()
        state.drop()
        state.check_unchanged()
        assert not optimizer.state
        fill_state(optimizer, worker)
        copied = copy.deepcopy(optimizer.state)
        assert type(copied) is defaultdict and len(copied) == 3

        def change_and_step() -> None:
            change(optimizer, worker.params[0])
            state.check_unchanged()

        with pytest.raises(ValueError, match=r"The state of SGD was changed.*update_on_server=False"):
            change_and_step()
        worker.close()


@pytest.mark.parametrize(
    "read",
    [
        lambda state, p: [values["momentum_buffer"].zero_() for values in state.values()],
        lambda state, p: [values["momentum_buffer"].zero_() for _, values in state.items()],
        lambda state, p: [state[p]["momentum_buffer"].zero_() for p in state],
        lambda state, p: p in state and state[p]["momentum_buffer"].zero_(),
        lambda state, p: state.get(p, {}).clear(),
    ],
    ids=["values", "items", "iteration", "in", "get"],
)
def test_a_loop_over_a_state_never_fetched_is_refused(read: Any):
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], 0.1, momentum=0.9)
    state = HeldState(optimizer)
    read(optimizer.state, parameter)  # before the first step there is nothing to fetch
    state.check_unchanged()
    assert not every_tensor([optimizer])
    with pytest.raises(ValueError, match=r"The state of SGD was read.*update_on_server=False"):
        read(optimizer.state, parameter)
    assert type(copy.deepcopy(optimizer.state)) is defaultdict
    state.release()
    assert not list(optimizer.state.values())


def test_a_state_may_be_read_that_was_fetched_and_is_empty():
    """As SGD's without momentum; a worker that never fetches has an empty one."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], 0.1)
    HeldState(optimizer, fetches=False).check_unchanged()
    assert optimizer.state_dict()["state"] == {}
    state = HeldState(optimizer)
    state.check_unchanged()
    state.mark_fetched()
    state.check_unchanged()
    assert optimizer.state_dict()["state"] == {}


def test_a_state_that_servers_held_is_plain_after_training():
    with running() as server:
        worker = joined([server], params())
        worker.start("Adam", {"lr": 0.1})
        push(worker, range(2))
        optimizer = torch.optim.Adam(worker.params, lr=0.1)
        state = HeldState(optimizer)
        fill_state(optimizer, worker)
        state.release()
        assert type(optimizer.state) is defaultdict and len(optimizer.state) == 3
        optimizer.step()
        optimizer.state.clear()
        state.release()
        assert not optimizer.state
        worker.close()


def test_weights_may_begin_anew_on_servers_that_have_some():
    """As where training goes back: nobody else is there, and the optimizer's state is what is brought."""
    arguments = {"lr": 0.5, "momentum": 0.5}
    with running() as server:
        first = joined([server], params())
        first.start("SGD", arguments)
        push(first, range(3))
        first.close()
        named = {name: torch.ones_like(p).requires_grad_() for name, p in params().items()}
        second = joined([server], named)
        state = {"momentum_buffer": [torch.full_like(p, 2.0) for p in named.values()]}
        second.start("SGD", arguments, (state, [{}] * len(named)), anew=True)
        assert second.versions == (0,)
        assert all(p.eq(1.0).all() for p in second.params)
        for p in second.params:
            p.grad = torch.zeros_like(p)
        second.fill_gradients()
        second.push()
        second.take_()
        assert all(p.eq(1.0 - 0.5 * 0.5 * 2.0).all() for p in second.params)
        server.begin()  # another process over the same memory
        assert server.store.version == 1
        second.close()


def test_all_hear_of_a_call_behind_one_round():
    with running(mode="sync", num_workers=2) as server:
        a, b = server.started("a"), server.started("b")
        for calls in ((False, False), (True, False), (False, False), (False, True)):
            pushes = [partial(each.push, call=call) for each, call in zip((a, b), calls, strict=True)]
            assert [answer.called for answer in on_threads(*pushes)] == [any(calls)] * 2

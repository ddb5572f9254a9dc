"""A worker's parameters, of every kind, and what servers hold of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_async.algorithms import Bf16, TwoBit
from lightning_async.parameter_server.client import Client
from lightning_async.parameter_server.store import in_words
from lightning_async.parameter_server.tables import ParameterGroups
from lightning_async.parameter_server.worker import Worker, plan_of
from tests.algorithms.replicas import fill
from tests.parameter_server.running import running

KINDS: dict[str, Tensor] = {
    "fp16": fill(6, 1).half().view(2, 3), "bf16": fill(7, 2).bfloat16(), "fp32": fill(40, 3), "0-d": fill(1, 4)[0],
    "empty": torch.empty(0, 3), "across": fill(12, 5).view(3, 4).t(), "every other": fill(8, 6)[::2],
    "complex": torch.view_as_complex(fill(8, 8).view(4, 2)),
    "channels last": fill(24, 9).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
}  # fmt: skip


@contextmanager
def joined(named: dict[str, Tensor], optimizer: str = "SGD", lr: float = 1.0, **how: Any) -> Iterator[Worker]:
    plan = plan_of(named, 2, 10)
    with running(plan.sizes[0]) as first, running(plan.sizes[1]) as second:
        worker = Worker(named, plan, Client("a", [first.dial(), second.dial()], plan.fingerprint(), 20.0, **how))
        worker.start(optimizer, {"lr": lr} if optimizer != "delta" else {})
        yield worker
        worker.close()


def parameters() -> dict[str, Tensor]:
    return {name: torch.nn.Parameter(tensor.detach()) for name, tensor in KINDS.items()}


def real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


def test_weights_go_there_and_come_back_as_they_are() -> None:
    named = parameters()
    before = {name: real(p).clone() for name, p in named.items()}
    strides = {name: p.stride() for name, p in named.items()}
    with joined(named) as worker:
        _, held = worker.read("params")
        for (name, was), there in zip(before.items(), held, strict=True):
            assert torch.equal(there, was.float()), name
            assert torch.equal(real(named[name]), was), name
            assert named[name].stride() == strides[name]


@pytest.mark.parametrize("compression", [None, Bf16()], ids=str)
def test_a_step_moves_each_kind_by_its_gradient(compression: Any) -> None:
    named = parameters()
    expected = {}
    for number, (name, p) in enumerate(named.items()):
        if name != "fp32":  # it has no gradient
            p.grad = torch.empty_like(p)
            real(p.grad).copy_((real(p).float() + number).bfloat16())
            p.grad = p.grad.conj()  # as autograd may leave a complex one
        moved = 0.0 if p.grad is None else 0.5 * real(p.grad.resolve_conj()).float()
        expected[name] = (real(p).float() - moved).to(real(p).dtype)
    with joined(named, lr=0.5, compression=compression) as worker:
        worker.fill_gradients()
        worker.push()
        worker.take_()
        for name, p in named.items():
            torch.testing.assert_close(real(p), expected[name], rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_steps_that_half_precision_would_lose_add_up_on_servers(dtype: torch.dtype) -> None:
    parameter = torch.nn.Parameter(torch.ones(30, dtype=dtype))
    step, count = 2.0**-14, 256
    assert torch.equal(parameter.detach() - step, parameter.detach())
    with joined({"w": parameter}, lr=step) as worker:
        parameter.grad = torch.ones_like(parameter)
        for _ in range(count):
            worker.fill_gradients()
            worker.push()
            worker.take_()
        assert torch.equal(parameter.detach(), torch.full((30,), 1 - step * count, dtype=dtype))


@pytest.mark.parametrize("compression", [None, TwoBit(2.0**-10)], ids=str)
@pytest.mark.parametrize("pull", [True, False])
def test_changes_of_half_precision_are_what_they_are_there(compression: Any, pull: bool) -> None:
    """What is compared with is what the worker holds, not what a server does."""
    parameter = torch.nn.Parameter(torch.ones(30, dtype=torch.bfloat16))
    with joined({"w": parameter}, "delta", compression=compression) as worker:
        for _ in range(3):
            with torch.no_grad():
                parameter += 2.0**-7
            worker.fill_change()
            worker.push_change(pull=pull)
            if pull:
                worker.take_()
        carried_residual = worker.carried_residual().get("w", torch.zeros(30))
        _, (held,) = worker.read("params")
        if compression is None or not pull:
            assert torch.equal(held + carried_residual, torch.full((30,), 1 + 3 * 2.0**-7))
        else:
            assert torch.equal(held, torch.full((30,), 1 + 3 * 2.0**-10))


def test_sparse_gradients() -> None:
    table = torch.nn.Embedding(5, 3, sparse=True)
    before = table.weight.detach().clone()
    with joined({"table": table.weight}) as worker:
        table(torch.tensor([1, 4, 1])).sum().backward()
        assert table.weight.grad is not None and table.weight.grad.is_sparse
        worker.fill_gradients()
        worker.push()
        worker.take_()
    moved = (before - table.weight.detach())[:, 0]
    torch.testing.assert_close(moved, torch.tensor([0.0, 2.0, 0.0, 0.0, 1.0]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_what_servers_cannot_hold_is_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"\['wide'\] have 64 bits"):
        plan_of({"fits": torch.zeros(1), "wide": torch.zeros(1, dtype=dtype)}, 1, 10)


def test_a_gradient_is_as_late_as_the_weights_that_it_was_computed_at() -> None:
    """And not as those that have come since, as with `overlap=True`."""
    p = torch.nn.Parameter(torch.ones(20))
    with joined({"p": p}) as worker:
        tables, lags = ParameterGroups([worker]), []
        for taken_before in (True, True, False, False):
            if taken_before:
                worker.take_()
            with tables.backward(None):
                p.sum().backward()
            worker.take_()
            worker.fill_gradients()
            lags.append(worker.push(lr=0.1).lags)
        assert in_words(worker.client.lags()) == {"lag, in updates": "0: 50%, 1: 50%", "dropped": "0"}, (
            "there is no other"
        )
    assert lags == [(0, 0), (0, 0), (1, 1), (1, 1)]

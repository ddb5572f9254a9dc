"""Gradients that leave while the backward pass makes others: servers get what a push without would bring them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_async.algorithms import Int8
from lightning_async.comm.p2p_gloo import PairChannel
from lightning_async.engine import backward
from lightning_async.parameter_server.client import Client
from lightning_async.parameter_server.worker import Worker, plan_of
from tests.parameter_server.running import Running, running

SHAPES = ((3, 2), (5,), (40,), (7,), ())


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward, "_FIRST_BYTES", 8)
    monkeypatch.setattr(backward, "_PART_BYTES", 48)
    backward.spans.cache_clear()


class Net(nn.Module):
    """Its loss uses the parameters that it is told to, with a gradient that is known."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.ParameterList([nn.Parameter(torch.full(shape, 1.0 + i)) for i, shape in enumerate(SHAPES)])

    def loss(self, factors: dict[int, float]) -> Tensor:
        return torch.stack([factor * self.p[i].sum() for i, factor in factors.items()]).sum()


class Trained:
    """A model with two servers, and the thread that pushes.

    Args:
        gloo: not by shared memory.
        decay: of the weights.
        how: of the worker.
    """

    def __init__(self, servers: list[Running], pool: ThreadPoolExecutor, decay: float = 0.0, **how: Any) -> None:
        self.net, self.pool, self.servers = Net(), pool, servers
        named = dict(self.net.named_parameters())
        plan = plan_of(named, 2, 10)
        for server, size in zip(servers, plan.sizes, strict=True):
            server.numel = size
        self.worker = Worker(
            named, plan, Client("a", [server.dial() for server in servers], plan.fingerprint(), 20.0, **how)
        )
        self.worker.start("SGD", {"lr": 1.0, "weight_decay": decay})
        self.sent: list[Any] = []

    def send(self, do: Any) -> Any:
        future = self.pool.submit(do)
        self.sent.append(future)
        return future

    def step(self, *losses: dict[int, float], ahead: bool = True, spoil: Any = None) -> list[list[float]]:
        self.net.zero_grad(set_to_none=True)
        for factors in losses:
            if ahead and not self.worker.ahead.under_way:
                self.worker.ahead.begin(self.send)
            self.net.loss(factors).backward()
        if spoil is not None:
            spoil(self.net)
        for future in self.sent:
            future.result(20)
        self.worker.fill_gradients()
        self.pool.submit(self.worker.push, lr=None).result(20)
        self.worker.take_()
        return [p.detach().reshape(-1).tolist() for p in self.net.parameters()]


@contextmanager
def trained(gloo: bool, **how: Any) -> Iterator[Trained]:
    with running(0, gloo) as first, running(0, gloo) as second, ThreadPoolExecutor(1) as pool:
        found = Trained([first, second], pool, **how)
        yield found
        found.worker.close()


ALL = dict.fromkeys(range(5), 0.5)


def clip(net: Any) -> None:
    for p in net.parameters():
        p.grad.mul_(0.5)


def replace(net: Any) -> None:
    net.p[4].grad = torch.tensor(9.0)


def drop(net: Any) -> None:
    net.p[4].grad = None


@pytest.mark.parametrize("gloo", [False, True], ids=["shm", "gloo"])
def test_a_gradient_dropped_after_it_was_sent_moves_nothing(gloo: bool) -> None:
    with trained(gloo, decay=0.5) as here:
        here.step(ALL)
        before = here.step({0: 0.5, 1: 0.5})
        after = here.step(ALL, spoil=drop)
        assert before[2:] == [[3.0 - 0.5 - 1.5] * 40, [4.0 - 0.5 - 2.0] * 7, [5.0 - 0.5 - 2.5]]
        assert after[4] == before[4]
        assert after[3] == [value - (0.5 + 0.5 * value) for value in before[3]]


STEPS: list[tuple[Any, ...]] = [
    ((ALL,), None), (({0: 1.0, 2: 2.0},), None), ((ALL, {4: 3.0}),), (({4: 1.0, 1: 1.0},), replace), ((ALL,), clip),
    ((ALL,), None), (({3: 1.0},), None),
]  # fmt: skip


@pytest.mark.parametrize("compression", [None, Int8()], ids=["as it is", "int8"])
@pytest.mark.parametrize("gloo", [False, True], ids=["shm", "gloo"])
def test_what_is_stepped_with_is_what_the_gradients_are_in_the_end(gloo: bool, compression: Any) -> None:
    """Parameters without a gradient, used again in a second pass, changed behind it; as a push after all of it."""
    found = []
    for ahead in (False, True):
        with trained(gloo, compression=compression) as here:
            found.append([here.step(*losses, ahead=ahead, spoil=next(iter(spoil), None)) for losses, *spoil in STEPS])
    assert found[0] == found[1]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is said, and how many bytes go along."""
    said: list[tuple[str, int]] = []
    send = PairChannel.send

    def counting(self: Any, header: Any, size: int = 0, *rest: Any) -> None:
        if header.get("do") in ("part", "push"):
            said.append((header["do"], size))
        send(self, header, size, *rest)

    monkeypatch.setattr(PairChannel, "send", counting)
    return said


def test_parts_have_left_before_the_pass_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first parameter's gradient, which comes last, is made when the others have been moved."""
    with trained(gloo=True) as here:
        here.step(ALL)
        said = counted(monkeypatch)
        gone = threading.Event()

        def wait(_: Tensor) -> None:
            here.pool.submit(gone.set)
            assert gone.wait(20)
            assert said and {what for what, _ in said} == {"part"}

        here.net.p[0].register_hook(wait)
        here.step(ALL)
        assert sum(size for _, size in said) == 4 * sum(p.numel() for p in here.net.parameters())
        assert sum(size for what, size in said if what == "part") >= 4 * (40 + 7 + 1)


def test_a_server_that_is_killed_within_a_pass_gets_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = []
    for kill in (False, True):
        with trained(gloo=True) as here:
            here.step(ALL)

            def killed(net: Any, here: Trained = here) -> None:
                for future in here.sent:
                    future.result(20)
                for server in here.servers:
                    before = server.server
                    server.begin()
                    before.close()

            expected.append(here.step(ALL, spoil=killed if kill else None))
    assert expected[0] == expected[1]


def test_a_pass_that_fails_is_nothing() -> None:
    with trained(gloo=True) as here:
        here.step(ALL)
        here.net.zero_grad(set_to_none=True)
        here.worker.ahead.begin(here.send)
        here.net.loss({4: 100.0, 3: 100.0}).backward()
        here.worker.ahead.give_up()
        after = here.step({4: 1.0})
        assert after[4] == [5.0 - 0.5 - 1.0]
        assert after[3] == [4.0 - 0.5] * 7


def test_where_most_is_changed_nothing_leaves_ahead_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    with trained(gloo=True) as here:
        here.step(ALL)
        here.step(ALL, spoil=clip)
        said = counted(monkeypatch)
        here.step(ALL)
        assert [what for what, _ in said] == ["push", "push"]


@pytest.mark.parametrize("gloo", [False, True], ids=["shm", "gloo"])
def test_a_push_behind_one_that_left_ahead_leaves_whole(gloo: bool) -> None:
    """As with `overlap=True`, where a pass finds the push before it still under way."""
    with trained(gloo) as here:
        here.step(ALL)
        after = here.step({4: 2.0, 3: 1.0}, ahead=False)
        assert after[4] == [5.0 - 0.5 - 2.0]
        assert after[3] == [4.0 - 0.5 - 1.0] * 7
        assert after[2] == [3.0 - 0.5] * 40

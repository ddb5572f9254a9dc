"""Pushes that travel compressed: nothing is lost, whoever is killed, and servers do with them as with others."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_async.algorithms import NAMES, Bf16, Fp8, Int8, TopK, TwoBit
from lightning_async.algorithms.compression import described, from_description, make_compression
from lightning_async.comm.p2p import ShmChannel, ShmDial
from lightning_async.comm.p2p_gloo import PairChannel
from lightning_async.errors import SettingsMismatch
from lightning_async.parameter_server.client import Client, PushResiduals
from lightning_async.parameter_server.consistency import WorkerRules
from lightning_async.parameter_server.worker import Worker, plan_of
from tests.algorithms.replicas import fill
from tests.parameter_server.running import Running, running
from tests.parameter_server.test_server import lose_answer, on_threads

KINDS = [Bf16(), Fp8(), Int8(), TwoBit(0.25), TopK(0.1), TopK(0.1, bits=2)]
every_kind = pytest.mark.parametrize("compression", KINDS, ids=str)
N = 700
EPS = torch.finfo(torch.float32).eps


def room(compression: Any, numel: int) -> Tensor:
    return torch.zeros(-(-compression.message_bytes(numel) // 4), dtype=torch.int32).view(torch.uint8)


@every_kind
@settings(max_examples=25, deadline=None)
@given(numel=st.integers(0, 1100), seed=st.integers(0, 2**31), exponent=st.integers(-6, 6), pushes=st.integers(1, 8))
def test_what_arrived_and_what_is_yet_to_come_is_what_was_pushed(
    compression: Any, numel: int, seed: int, exponent: int, pushes: int
) -> None:
    feedback, memory, out = PushResiduals(compression, numel), room(compression, numel), torch.empty(numel)
    pushed, arrived = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    largest = 0.0
    for number in range(pushes):
        feedback.source.copy_(fill(numel, seed + number) * 10.0**exponent)
        before = feedback.source.clone()
        size = feedback.encode_(memory)
        assert size == compression.message_bytes(numel)
        assert torch.equal(feedback.source, before)
        compression.decode_(out, memory[:size])
        pushed += before.double()
        arrived += out.double()
        largest = max(largest, *(float(each.abs().max()) for each in (before, out, feedback.residual) if numel), 0.0)
    torch.testing.assert_close(arrived + feedback.residual.double(), pushed, rtol=0, atol=4 * pushes * EPS * largest)


@every_kind
def test_the_residual_of_what_has_no_gradient_stays(compression: Any) -> None:
    feedback, memory, out = PushResiduals(compression, N), room(compression, N), torch.empty(N)
    feedback.source.copy_(fill(N, 1))
    feedback.encode_(memory)
    before = feedback.residual.clone()
    assert before[40:300].any()
    feedback.source.copy_(fill(N, 2))
    feedback.source[40:300] = 0.0
    compression.decode_(out, memory[: feedback.encode_(memory, [(40, 300)])])
    assert torch.equal(feedback.residual[40:300], before[40:300])
    assert not out[40:300].any()
    expected = (before + fill(N, 2))[300:]
    torch.testing.assert_close((out + feedback.residual)[300:], expected, rtol=0, atol=1e-5)


@every_kind
def test_what_is_no_number_is_told_and_does_not_stay(compression: Any) -> None:
    feedback, memory, out = PushResiduals(compression, N), room(compression, N), torch.empty(N)
    for value in (math.inf, -math.inf, math.nan):
        feedback.source.copy_(fill(N, 1))
        feedback.source[300] = value
        compression.decode_(out, memory[: feedback.encode_(memory)])
        assert not out[300].isfinite()
        assert feedback.residual.isfinite().all()


@pytest.mark.parametrize(
    ("compression", "size"),
    [
        (Bf16(), 2000), (Fp8(), 1016), (Int8(), 1016), (TwoBit(), 250), (TopK(0.01), 4 + 6 * 10),
        (TopK(1.0), 4 + 6 * 1000), (TopK(0.01, bits=2), 4 + 8 + 2 * 10 + 4), (TopK(1.0, 2), 4 + 4 * 8 + 2000 + 250 + 2),
    ],
    ids=str,
)  # fmt: skip
def test_bytes_of_a_push_of_a_thousand_elements(compression: Any, size: int) -> None:
    assert compression.message_bytes(1000) == size
    assert compression.message_bytes(0) == 0


@every_kind
def test_a_server_makes_the_same_of_its_description(compression: Any) -> None:
    assert from_description(described(compression)) == compression


def test_two_bits_are_mxnets() -> None:
    """https://mxnet.apache.org/versions/1.9.1/api/faq/gradient_compression: threshold 0.5, one push after the other."""
    feedback, memory, out = PushResiduals(TwoBit(), 4), room(TwoBit(), 4), torch.empty(4)
    for gradient, arrives, rest in (
        ([0.3, -0.7, 0.5, 2.0], [0.0, -0.5, 0.5, 0.5], [0.3, -0.2, 0.0, 1.5]),
        ([0.3, -0.2, 0.0, 0.0], [0.5, 0.0, 0.0, 0.5], [0.1, -0.4, 0.0, 1.0]),
    ):
        feedback.source.copy_(torch.tensor(gradient))
        TwoBit().decode_(out, memory[: feedback.encode_(memory)])
        assert out.tolist() == arrives
        torch.testing.assert_close(feedback.residual, torch.tensor(rest))


# ---- with a server ----


def joined(server: Running, name: str, compression: Any, optimizer: str = "delta", **arguments: Any) -> Client:
    client = server.worker(name, compression=compression)
    client.gradients[0].zero_()
    client.start(optimizer, arguments)
    return client


def push(client: Client, gradient: Tensor, **how: Any) -> Tensor:
    client.gradients[0].copy_(gradient)
    client.push(**how)
    return client.weights[0].clone()


@every_kind
@pytest.mark.parametrize("gloo", [False, True], ids=["shm", "gloo"])
def test_a_server_has_what_two_workers_have_pushed_but_for_what_they_keep(compression: Any, gloo: bool) -> None:
    with running(N, gloo) as server:
        workers = [joined(server, name, compression) for name in "ab"]
        pushed = torch.zeros(N, dtype=torch.float64)
        for number in range(6):
            for place, worker in enumerate(workers):
                gradient = fill(N, 10 * place + number)
                push(worker, gradient)
                pushed += gradient.double()
        workers[0].gradients[0].fill_(7.0)
        workers[0].push(weight=0.0)
        carried_residual = sum(worker.feedback[0].residual.double() for worker in workers)
        assert carried_residual.abs().max() > 0  # pyright: ignore[reportAttributeAccessIssue]
        workers[0].pull()
        torch.testing.assert_close(workers[0].weights[0].double() + carried_residual, pushed, rtol=0, atol=1e-4)


@every_kind
def test_weights_begin_as_they_are(compression: Any) -> None:
    with running(N) as server:
        client = server.worker("a", compression=compression)
        client.gradients[0].copy_(fill(N, 3))
        client.bring("exp_avg")
        client.gradients[0].copy_(fill(N, 4))
        client.start("Adam", {"lr": 0.1}, ["exp_avg"], [[(N, {"step": 1.0})]])
        assert torch.equal(client.weights[0], fill(N, 4))
        client.read("exp_avg")
        assert torch.equal(client.weights[0], fill(N, 3))


@every_kind
def test_in_step_it_is_the_mean_of_what_arrives(compression: Any) -> None:
    with running(N, mode="sync", num_workers=2) as server:
        workers = [joined(server, name, compression, "SGD", lr=1.0) for name in "ab"]
        mirror, memory, out = [PushResiduals(compression, N) for _ in workers], room(compression, N), torch.empty(N)
        expected, weights = torch.zeros(N, dtype=torch.float64), (1.0, 3.0)
        for number in range(4):
            gradients = [fill(N, 10 * place + number) for place in range(2)]
            found = on_threads(
                lambda g=gradients: push(workers[0], g[0], weight=weights[0]),
                lambda g=gradients: push(workers[1], g[1], weight=weights[1]),
            )
            for gradient, weight, each in zip(gradients, weights, mirror, strict=True):
                each.source.copy_(gradient)
                compression.decode_(out, memory[: each.encode_(memory)])
                expected -= weight / sum(weights) * out.double()
            assert torch.equal(found[0], found[1])
            torch.testing.assert_close(found[0].double(), expected, rtol=1e-5, atol=1e-5)
        alone = [fill(N, 77), fill(N, 78)]
        on_threads(lambda: push(workers[0], alone[0], weight=0.0), lambda: push(workers[1], alone[1], weight=2.0))
        assert torch.equal(workers[0].feedback[0].residual, mirror[0].residual), "nothing of it was sent"


def rounds(server: Running, compression: Any, policy: str, lose: Any = None) -> Tensor:
    """Three pushes of each of two workers, each pull two pushes late; what is pulled in the end."""
    optimizer = ("SGD", {"lr": 0.1, "momentum": 0.5}) if "dana" in policy else ("Adam", {"lr": 0.1})
    workers = []
    for name in "ab":
        worker = server.worker(name, compression=compression)
        worker.gradients[0].copy_(fill(N, 5))
        worker.start(*optimizer)
        workers.append(worker)
    for number in range(3):
        for place, worker in enumerate(workers):
            if lose is not None:
                lose("ab"[place])
            push(worker, 0.1 * fill(N, 10 * place + number))
    workers[0].pull()
    kept = torch.stack([each.feedback[0].residual for each in workers]) if compression else torch.empty(0)
    return torch.cat([workers[0].weights[0], kept.flatten()])


def kill_within(server: Running, monkeypatch: pytest.MonkeyPatch, worker: str) -> None:
    """The next push, which is this worker's, is applied, and nobody hears any more of this server."""
    lose_answer(server, ShmChannel, monkeypatch, new_server=True)
    begin, before = server.begin, server.server

    def begins() -> None:
        server.begin = begin
        presence = before._sessions  # pyright: ignore[reportPrivateUsage]
        presence.away = lambda worker: None  # the dead write nothing
        begin()
        for name, channel in list(presence.channels.items()):
            if name != worker:  # who goes on when its own is closed
                channel.break_off()

    server.begin = begins


@pytest.mark.parametrize("policy", sorted(NAMES))
@pytest.mark.parametrize("compression", [Int8(), TwoBit(0.05), TopK(0.1)], ids=str)
def test_policies_see_what_has_arrived_also_when_servers_are_killed(
    compression: Any, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes out, and what workers keep, is as without kills, to the bit."""
    with running(N, staleness=policy) as server:
        smooth = rounds(server, compression, policy)
    with running(N, staleness=policy) as server:
        rough = rounds(server, compression, policy, lambda name: kill_within(server, monkeypatch, name))
    assert torch.equal(smooth.view(torch.int32), rough.view(torch.int32))
    mirror = [PushResiduals(compression, N) for _ in range(2)]
    memory, out = room(compression, N), torch.empty(N)
    decoded = []
    for number in range(3):
        for place, each in enumerate(mirror):
            each.source.copy_(0.1 * fill(N, 10 * place + number))
            compression.decode_(out, memory[: each.encode_(memory)])
            decoded.append(out.clone())
    with running(N, staleness=policy) as server:
        plain = iter(decoded)
        monkeypatch.setattr("tests.parameter_server.test_compressed.push", lambda w, _, p=push: p(w, next(plain)))
        weights = rounds(server, None, policy)
    assert torch.equal(weights.view(torch.int32), smooth[:N].view(torch.int32))


@every_kind
@pytest.mark.parametrize("kind", [ShmChannel, PairChannel])
def test_what_is_said_again_is_the_same(compression: Any, kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for lost in (False, True):
        with running(N, gloo=kind is PairChannel) as server:
            client = joined(server, "a", compression)
            for number in range(4):
                if lost:
                    lose_answer(server, kind, monkeypatch, new_server=number % 2 == 0)
                client.gradients[0].copy_(fill(N, number))
                assert client.push().resent == int(lost)
            found.append(torch.cat([client.weights[0], client.feedback[0].residual]))
    assert torch.equal(found[0].view(torch.int32), found[1].view(torch.int32))


def test_a_push_that_is_not_what_it_says_is_refused() -> None:
    with running(N) as server:
        client = joined(server, "a", Int8())
        line = client._lines[0]  # pyright: ignore[reportPrivateUsage]
        header = {"do": "push", "lr": None, "weight": 1.0, "pull": False, "sync_point": 0, "number": 1, "base": 0}
        header["skips"] = ()
        for compression, size in ((["int8", {}], 4), (["2bit", {"threshold": 0}], 175), (["zip", {}], 8), (None, 8)):
            line.ask({**header, "compression": compression}, size)
            with pytest.raises(SettingsMismatch, match=r"has 4 bytes, and is|must be > 0|none of|has 8 bytes, and is"):
                line.reply(time.monotonic() + 20)
        assert torch.equal(push(client, torch.full((N,), 127.0)), torch.full((N,), 127.0))


def test_what_is_owed_goes_on_under_another_number_of_servers() -> None:
    """By the parameters' names: whoever is new, or of another size, owes nothing."""
    named = {
        "a": torch.zeros(3, 5),
        "b": torch.zeros(()),
        "c": torch.zeros(2, dtype=torch.complex64),
        "d": torch.zeros(0),
    }

    def worker(count: int) -> Worker:
        plan = plan_of(named, count, 4)
        dials = [ShmDial("nobody", 4 * size, 4 * size) for size in plan.sizes]
        return Worker(named, plan, Client("w", dials, compression=TopK(0.5)))

    one, three = worker(1), worker(3)
    carried_residual = {
        "a": fill(15, 1).view(3, 5),
        "b": torch.tensor(2.0),
        "c": torch.ones(2, 2),
        "d": torch.zeros(0),
        "e": torch.ones(1),
    }
    one.load_residual(carried_residual)
    three.load_residual(one.carried_residual())
    assert three.carried_residual().keys() == named.keys()
    for name, value in three.carried_residual().items():
        assert torch.equal(value, carried_residual[name])
    three.load_residual({"a": torch.ones(2)})
    assert torch.equal(three.carried_residual()["a"], carried_residual["a"])
    for each in (one, three):
        each.close()


@pytest.mark.parametrize(
    ("compression", "error", "words"),
    [
        ("int4", ValueError, r"Strategy\(compression='int4'\)` must be one of \('none', 'bf16'"),
        (TopK, TypeError, "must be one of"),
        (8, TypeError, "compression=8"),
    ],
)
def test_what_is_no_compression_of_pushes(compression: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make_compression("Strategy", compression)


@pytest.mark.parametrize(
    ("value", "error"), [(0.0, ValueError), (-1.0, ValueError), ("1", TypeError), (math.inf, ValueError)]
)
def test_a_threshold_that_cannot_be(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="threshold="):
        TwoBit(value)


def test_terms_know_nothing_of_it() -> None:
    """Each push says how it travels: workers may differ."""
    assert "compression" not in WorkerRules().plain()
    with running(N) as server:
        a, b = joined(server, "a", TwoBit(1.0)), joined(server, "b", None)
        push(a, torch.ones(N))
        assert torch.equal(push(b, torch.ones(N)), torch.full((N,), 2.0))

"""Compressed gradients: what a message lacks comes with later ones, through failures, and nothing is lost."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_async import ops
from lightning_async.algorithms import PowerSGD, Synchronous, TopK
from lightning_async.engine.gradients.compression import GradientResiduals
from lightning_async.engine.replica import Replica
from tests.comm.faulty import Fail, Fault, Kill
from tests.engine.fault_ranks import HEADER, PAYLOAD, FaultyRank, outcomes, values
from tests.engine.ranks import Rank, bits, run

KINDS = ["bf16", "fp8", "int8", TopK(0.1), TopK(0.1, bits=2), PowerSGD(2)]
every_kind = pytest.mark.parametrize("compression", KINDS, ids=str)


def network(frozen: bool = False) -> nn.Module:
    """A matrix that PowerSGD makes smaller, one that it does not, and vectors."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(24, 16), nn.Linear(16, 1))
    for param in net[1].parameters():
        param.requires_grad_(not frozen)
    return net


class Round:
    """What all ranks bring to one sum; the same numbers on every rank."""

    def __init__(self, world_size: int, replica: Replica, seed: int) -> None:
        draw, layout = torch.Generator().manual_seed(seed), replica.layout
        self.present = torch.rand(world_size, generator=draw) > 0.3
        self.present[seed % world_size] = True
        shares = torch.rand(world_size, generator=draw) * self.present
        self.used = (torch.rand(len(layout), generator=draw) > 0.3).float()
        size = 10.0 ** float(4 * torch.rand((), generator=draw) - 2)
        self.messages = size * torch.randn(world_size, layout.numel, generator=draw) * (shares / shares.sum())[:, None]
        for message in self.messages:
            for view, any_used in zip(layout.views(message), self.used.tolist(), strict=True):
                view.mul_(any_used)


def number(rank: Rank) -> int:
    return rank.averager.summary.rank


@every_kind
@pytest.mark.parametrize("world_size", [2, 5])
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_error_feedback_loses_nothing(compression: Any, world_size: int, seed: int) -> None:
    """Whatever shares are, whoever is absent, and with parameters that nobody uses for a while."""

    def body(rank: Rank) -> Any:
        replica = Replica(network())
        feedback = GradientResiduals(compression, replica, rank.averager.control.transfer)
        exact = torch.zeros(replica.layout.numel, dtype=torch.float64)
        delivered, left = torch.zeros_like(exact), 0.0
        for i in range(10):
            this = Round(world_size, replica, seed + i)
            out, present = this.messages[number(rank)].clone(), bool(this.present[number(rank)])
            residual = feedback.move_(out, present, this.used)
            assert residual is not None
            feedback.commit(residual)
            exact += this.messages.double().sum(0)
            delivered += out.double()
            for view, any_used in zip(replica.layout.views(out), this.used.tolist(), strict=True):
                assert any_used or not view.any(), "it gets no gradient, so it would be lost"
            left = max(left, float(residual.abs().max()))
        return delivered, feedback.residual.double(), exact, left

    found = run(world_size, body)
    assert all(torch.equal(found[0][0], delivered) for delivered, *_ in found)
    assert any(left > 0.0 for *_, left in found), "there was something to lose"
    total = found[0][0] + sum(residual for _, residual, _, _ in found)
    torch.testing.assert_close(total, found[0][2], rtol=0, atol=2e-6 * 100 * world_size)


def small(rank: FaultyRank) -> Any:
    """Steps on gradients that all ranks have others of."""
    draw = torch.Generator().manual_seed(rank.number)
    rank.goal = torch.randn(rank.x.shape, generator=draw)  # pyright: ignore[reportAttributeAccessIssue]
    rank.train(6, samples=1.0 + rank.number)
    feedback = rank.gradients.rounds.feedback
    assert feedback is not None
    return rank.x.clone(), feedback.residual.clone(), rank.averager.control.shared_state.failed


@every_kind
@pytest.mark.parametrize("world_size", [2, 5])
def test_a_reduction_that_fails_is_repeated_and_leaves_no_trace(compression: Any, world_size: int) -> None:
    """Whatever had moved when it failed, and where a rank loses the last answer."""
    power = isinstance(compression, PowerSGD)
    options: Any = {
        "schedule": Synchronous(), "numel": 96, "rows": 24, "part_bytes": 4096, "gradients": compression
    }  # fmt: skip
    smooth = values(world_size, small, **options)
    op = "all_reduce" if power else "all_to_all" if world_size > 4 and isinstance(compression, str) else "all_gather"
    faults = [Fault(op=op, nth=nth, action=Fail(after=True), name=PAYLOAD) for nth in (2, 3)]
    faults += [Fault(op="all_gather", nth=nth, action=Fail(after=True), name=HEADER) for nth in (5, 6)]
    for fault in faults:
        rough = values(world_size, small, scripts={1: [fault]}, **options)
        for (x, residual, failed), expected in zip(rough, smooth, strict=True):
            assert torch.equal(bits(x), bits(expected[0])), fault
            assert torch.equal(bits(residual), bits(expected[1])), fault
            assert failed == 1
    assert all(residual.any() for _, residual, _ in smooth)


@every_kind
def test_a_window_that_is_not_finite_leaves_no_trace(compression: Any) -> None:
    """All ranks see that it is not, and the next sums are what they are without it."""

    def body(rank: Rank) -> Any:
        replica, seen = Replica(network()), []
        transfer, others = rank.averager.control.transfer, (None, float("inf"), float("nan"))
        for spoilt in others:
            feedback = GradientResiduals(compression, replica, transfer)
            for i in range(4):
                this = Round(2, replica, i)
                this.used.fill_(1.0)
                if i == 2 and spoilt is not None:
                    before = feedback.residual.clone()
                    bad = this.messages[number(rank)].clone()
                    if number(rank) == 1:
                        bad[3] = spoilt
                    assert feedback.move_(bad, True, this.used) is None
                    assert not bad.isfinite().all()
                    assert torch.equal(feedback.residual, before)
                out = this.messages[number(rank)].clone()
                residual = feedback.move_(out, True, this.used)
                assert residual is not None
                feedback.commit(residual)
                seen.append(out)
        return seen[:4], seen[4:8], seen[8:]

    for clean, *spoilt in run(2, body):
        for outs in spoilt:
            assert all(torch.equal(bits(a), bits(b)) for a, b in zip(clean, outs, strict=True))


class Counted:
    """Collectives of which every message is counted, in bytes."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.bytes = inner, 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)
        if name not in ("all_gather", "all_reduce"):
            return method

        def counted(buffer: Tensor, *args: Any) -> Any:
            self.bytes += buffer.numel() * buffer.element_size()
            return method(buffer, *args)

        return counted


@pytest.mark.parametrize(
    ("compression", "expected"),
    [
        ("bf16", 2 * 417), ("int8", 417 + 4 * 2), ("fp8", 417 + 4 * 2), (TopK(0.1), 4 + 6 * 42),
        (TopK(0.1, bits=2), 4 + 8 + 2 * 42 + 12),
        (PowerSGD(2), 4 * (2 * (16 + 24) + 16 + 17)),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_sum_takes_on_the_wire(compression: Any, expected: int) -> None:
    """Of 417 gradients, 16 by 24, and 33 that are in no matrix of a size."""

    def body(rank: Rank) -> int:
        replica, transfer = Replica(network()), rank.averager.control.transfer
        counted: Any = Counted(transfer.large)
        transfer.large = counted
        assert replica.layout.numel == 417
        GradientResiduals(compression, replica, transfer).move_(replica.layout.empty() + 1.0, True, torch.ones(4))
        return counted.bytes

    assert run(2, body) == [expected] * 2


def test_a_sum_of_low_rank_arrives_whole() -> None:
    """Of rank 2, that no single message is: the sum is what power iteration finds, not what each rank has."""
    left, right = (torch.randn(2, n, generator=torch.Generator().manual_seed(n)) for n in (16, 24))

    def body(rank: Rank) -> Any:
        replica = Replica(network())
        feedback = GradientResiduals(PowerSGD(2), replica, rank.averager.control.transfer)
        own = torch.randn(16, 24, generator=torch.Generator().manual_seed(5)) * (1.0 if number(rank) else -1.0)
        out = replica.layout.empty()
        replica.layout.views(out)[0].copy_(torch.outer(left[number(rank)], right[number(rank)]) + own)
        assert feedback.move_(out, True, torch.ones(4)) is not None
        return replica.layout.views(out)[0]

    for found in run(2, body):
        torch.testing.assert_close(found, left.T @ right, rtol=0, atol=2e-5)


@every_kind
def test_a_rank_that_begins_anew_does_not_fork_the_others(compression: Any) -> None:
    """One that has nothing of what the others keep, as after it has joined them."""
    meet = threading.Barrier(3, timeout=60)

    def body(rank: FaultyRank) -> Any:
        small(rank)
        meet.wait()
        if rank.number == 1:
            rank.gradients.compress(compression)
        meet.wait()
        return small(rank)

    options: Any = {"schedule": Synchronous(), "numel": 96, "rows": 24, "gradients": compression}
    found = values(3, body, **options)
    assert all(torch.equal(bits(x), bits(found[0][0])) for x, _, _ in found)


@every_kind
def test_state_goes_on_to_the_bit_and_parameters_may_be_unfrozen(compression: Any) -> None:
    def body(rank: Rank) -> None:
        transfer, ranks = rank.averager.control.transfer, []
        for thaw in (False, True):
            net = network(frozen=thaw)
            replica = Replica(net)
            feedback, me = GradientResiduals(compression, replica, transfer), number(rank)
            for i in range(3):
                this = Round(2, replica, i)
                out = this.messages[me].clone()
                residual = feedback.move_(out, True, torch.ones(len(replica.layout)))
                assert residual is not None
                feedback.commit(residual)
            held = feedback.state_dict()
            if thaw:
                for param in net.parameters():
                    param.requires_grad_(True)
                replica.take_thawed()
                feedback._follow()  # as the next sum does first
                now = dict(zip(replica.layout.names, replica.layout.views(feedback.residual), strict=True))
                assert len(now) == 4 > len(held["residual"]) == 2
                assert all(torch.equal(now[name], held["residual"][name]) for name in held["residual"])
                assert not now["1.weight"].any()
                older = GradientResiduals(compression, replica, transfer)
                older.load_state_dict(held)
                assert torch.equal(older.residual, feedback.residual)
                held = feedback.state_dict()
            other = GradientResiduals(compression, replica, transfer)
            other.load_state_dict(held)
            ranks.append((feedback, other))
            this = Round(2, replica, 9)
            outs = [this.messages[me].clone() for _ in range(2)]
            for each, out in zip((feedback, other), outs, strict=True):
                each.move_(out, True, torch.ones(4))
            assert torch.equal(bits(outs[0]), bits(outs[1])) and ops.all_finite(outs[0])

    run(2, body)


@pytest.mark.parametrize(
    ("compression", "fault", "near"),
    [
        ("int8", Fault(op="all_to_all", nth=7, action=Kill(), name=PAYLOAD), 0.01),
        (TopK(0.3), Fault(op="all_gather", nth=7, action=Kill(), name=PAYLOAD), 0.5),
        (PowerSGD(6), Fault(op="all_reduce", nth=8, action=Kill(), name=PAYLOAD), 0.5),
    ],
    ids=str,
)
def test_those_that_are_left_go_on_with_what_their_own_messages_lacked(
    compression: Any, fault: Fault, near: float
) -> None:
    """Of five ranks one dies in the fourth step: four move their messages in another way."""

    def body(rank: FaultyRank) -> Any:
        told = [small(rank) for _ in range(2)]
        return told[-1]

    options: Any = {"schedule": Synchronous(), "numel": 96, "rows": 24, "gradients": compression}
    all_ = outcomes(5, body, scripts={2: [fault]}, dead_after=timedelta(seconds=0.5), min_replicas=1, **options)
    assert all_[2].error is not None
    left = [outcome.value for number, outcome in enumerate(all_) if number != 2]
    goals = [torch.randn(24, 96, generator=torch.Generator().manual_seed(number)).double() for number in range(5)]
    x = torch.ones(24, 96, dtype=torch.float64)
    for step in range(12):
        living = [number for number in range(5) if step < 3 or number != 2]
        weight = sum(1.0 + number for number in living)
        x = x - 0.1 * (x - sum((1.0 + number) * goals[number] for number in living) / weight)
    for found, residual, failed in left:
        assert torch.equal(bits(found), bits(left[0][0])) and failed == 1
        assert residual.any()
        assert 0.0 < (found.double() - x).norm() < near * (x - 1.0).norm()

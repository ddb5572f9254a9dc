"""What strangers found: two features together, and orders of events that are rare."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from lightning_async.algorithms import DiLoCo, EveryNSteps, Mean, Warmup
from lightning_async.algorithms.schedules import Action, ReplicaClock
from lightning_async.engine.fingerprint import is_finite, real
from lightning_async.engine.replica import Replica
from lightning_async.engine.shared_state import Arrival, SyncPointKind, Vote
from lightning_async.errors import AsyncTrainingError, LayoutMismatch
from tests.comm.faulty import Fail, Fault
from tests.engine.fault_ranks import HEADER, LIMIT_S, NEVER, FaultyRank, values
from tests.engine.ranks import Rank, bits, run
from tests.engine.test_replayable_calls import LIGHTNING, Caller, call
from tests.engine.test_tensors import BLOCKING, Model, on_ranks


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("batches", [(5, 10), (6, 7)])
def test_unequal_shards_over_a_warm_up_have_no_negative_work(batches, overlap) -> None:
    def body(rank: Rank) -> Any:
        ledger, seen = rank.averager.ledger, []

        def note(step: int = -1) -> None:
            seen.append((ledger.work[0].steps, ledger.since_round[0]))

        for epoch in range(3):
            rank.train(batches[rank.averager.summary.rank], each=note)
            mine = rank.x[0, 0].item()
            assert rank.meet(SyncPointKind.EPOCH_END, epoch) is Arrival.OPEN
            rank.averager.sync_points.resume()
            note()
            ends.append((epoch, mine, rank.x[0, 0].item()))
        return min(work for work, _ in seen), min(since for _, since in seen)

    ends: list[tuple[int, float, float]] = []
    schedule = Warmup(EveryNSteps(4), steps=8)
    for least_work, least_since in run(2, body, schedule=schedule, config={"overlap": overlap}):
        assert least_work >= 0
        assert least_since >= 0
    for epoch in range(3):
        before = [mine for at, mine, _ in ends if at == epoch]
        for at, _, after in ends:
            if at == epoch and not overlap:
                assert min(before) - 1e-6 <= after <= max(before) + 1e-6


def test_float64_that_is_alike_keeps_its_bits_where_something_else_differs() -> None:
    fine = torch.tensor([1 / 3, 1e300, torch.finfo(torch.float64).min], dtype=torch.float64)

    def make() -> Model:
        model = Model(fine=fine.clone(), count=torch.zeros((), dtype=torch.int64))
        model.still = nn.Parameter(torch.full((2,), 1 / 3, dtype=torch.float64))
        return model

    def body(rank: Rank, module: Any, number: int) -> Any:
        module.count += number
        rank.train(4)
        rank.meet(SyncPointKind.VALIDATE)
        return module.fine.clone(), module.still.detach().clone(), module.count.item(), rank.averager.summary.healed

    for schedule in (NEVER, EveryNSteps(2)):
        for found, still, count, healed in on_ranks(make, body, 3, schedule=schedule, config=BLOCKING):
            assert torch.equal(found, fine)
            cut = 0 if schedule is NEVER else 1e-7  # rounds move fp32
            torch.testing.assert_close(still, torch.full((2,), 1 / 3, dtype=torch.float64), rtol=0, atol=cut)
            assert (count, healed) == (2, 0)


def test_a_buffer_that_becomes_infinite_everywhere_is_meant_so() -> None:
    def body(rank: Rank, module: Any, number: int) -> Any:
        module.mask = torch.full((2,), -torch.inf)
        rank.train(8)
        before = rank.x[0, 0].item()
        rank.meet(SyncPointKind.VALIDATE)
        return before, rank.x[0, 0].item(), rank.averager.summary

    for schedule in (NEVER, EveryNSteps(4)):
        found = on_ranks(lambda: Model(mask=torch.zeros(2)), body, schedule=schedule, config=BLOCKING)
        for _, after, summary in found:
            assert after == pytest.approx(sum(before for before, _, _ in found) / 2)
            assert summary.healed == 0
            assert summary.rounds == (2 if schedule is not NEVER else 0)


def test_where_no_replica_is_finite_nobody_is_healed() -> None:
    def body(rank: Rank, module: Any, number: int) -> Any:
        healed: list[int] = []
        rank.averager.on_healed = lambda: healed.append(1)
        rank.train(1)
        rank.x[0, number] = torch.nan
        rank.meet(SyncPointKind.VALIDATE)
        return healed, rank.averager.summary.healed

    assert on_ranks(Model, body, schedule=NEVER) == [([], 0), ([], 0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_momentum_of_sparse_gradients_is_looked_at(dtype) -> None:
    momentum = torch.zeros(3, 2, dtype=dtype).index_fill(0, torch.tensor([1]), 2.0).to_sparse(1)
    assert is_finite([momentum, momentum + momentum, torch.zeros(3, 2, dtype=dtype).to_sparse(1)])
    assert not is_finite([momentum, momentum * torch.inf])


def test_a_frozen_parameter_of_one_replica_that_is_not_finite_reaches_no_other() -> None:
    def body(rank: Rank, module: Any, number: int) -> Any:
        rank.train(2)
        with torch.no_grad():
            module.teacher.fill_(torch.nan if number == 1 else 0.5)
        rank.meet(SyncPointKind.VALIDATE)
        return module.teacher.tolist()

    found = on_ranks(lambda: Model(teacher=nn.Parameter(torch.ones(4), requires_grad=False)), body, schedule=NEVER)
    assert found == [[0.5] * 4] * 2


def test_a_complex_parameter_may_be_given_new_memory() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))

    def body(rank: Rank, module: Any, number: int) -> Any:
        module.weight.data = torch.full((2,), 2.0 + number, dtype=torch.complex64)
        rank.averager.tick(Action.LOCAL, 1.0)
        rank.meet(SyncPointKind.VALIDATE)
        return module.weight.tolist()

    assert on_ranks(Complex, body, schedule=NEVER) == [[2.5 + 0j] * 2] * 2


def test_buffers_registered_anew_keep_their_places() -> None:
    def body(rank: Rank, module: Any, number: int) -> Any:
        rank.train(2)
        a = module.a
        del module.a
        module.register_buffer("a", a)
        rank.train(2)
        rank.meet(SyncPointKind.VALIDATE)
        return module.a.tolist(), module.b.tolist()

    found = on_ranks(lambda: Model(a=torch.ones(2), b=torch.full((2,), 2.0)), body, schedule=EveryNSteps(2))
    assert found == [([1.0, 1.0], [2.0, 2.0])] * 2


@pytest.mark.parametrize("kind", ["expanded", "conjugated", "sparse"])
def test_odd_buffers_are_refused_by_name_wherever_they_come_from(kind) -> None:
    odd = {
        "expanded": torch.ones(1).expand(4),
        "conjugated": torch.ones(4, dtype=torch.complex64).conj(),
        "sparse": torch.eye(2).to_sparse(),
    }[kind]
    with pytest.raises(ValueError, match="odd"):
        Replica(Model(odd=odd))

    def body(rank: Rank, module: Any, number: int) -> None:
        module.odd = odd
        rank.train(2)
        rank.meet(SyncPointKind.VALIDATE)

    plain = torch.zeros(odd.shape, dtype=odd.dtype)
    with pytest.raises(AsyncTrainingError, match="odd"):
        on_ranks(lambda: Model(odd=plain.clone()), body, schedule=NEVER)


@pytest.mark.parametrize("world_size", [2, 3])
def test_constant_buffers_keep_their_bits_over_many_rounds(world_size) -> None:
    """The mean of equal numbers with unequal weights is not that number, in fp32."""
    table = torch.rand(64, generator=torch.Generator().manual_seed(0)) + 0.5

    def body(rank: Rank, module: Any, number: int) -> Any:
        for i in range(60):
            rank.train(1, samples=float((7, 11, 13)[number] + i % 5))
        return module.table.clone(), module.moving.clone()

    def make() -> Model:
        return Model(table=table.clone(), moving=torch.zeros(1))

    for found, _ in on_ranks(make, body, world_size, schedule=EveryNSteps(1), rule=Mean(), config=BLOCKING):
        assert torch.equal(bits(found), bits(table))


def test_one_rank_that_unfreezes_alone_is_named_even_if_a_round_is_due() -> None:
    def body(rank: Rank, module: Any, number: int) -> None:
        for epoch in range(2):
            rank.averager.sync_points.resume()
            rank.train(6)
            rank.meet(SyncPointKind.EPOCH_END, epoch)
            if number == 0:
                module.backbone.requires_grad_(True)

    def make() -> Model:
        return Model(backbone=nn.Parameter(torch.ones(2), requires_grad=False))

    with pytest.raises(LayoutMismatch):
        on_ranks(make, body, schedule=EveryNSteps(4))


def test_a_rank_without_batches_follows_what_is_unfrozen() -> None:
    def body(rank: Rank, module: Any, number: int) -> Any:
        for epoch in range(2):
            if epoch == 1:
                module.backbone.requires_grad_(True)
            if number == 0:
                rank.averager.sync_points.resume()
                rank.train(6)
            assert rank.meet(SyncPointKind.EPOCH_END, epoch) is Arrival.OPEN
        return rank.x.tolist()

    def make() -> Model:
        return Model(backbone=nn.Parameter(torch.ones(2), requires_grad=False))

    left, right = on_ranks(make, body, schedule=EveryNSteps(4))
    assert left == right


def test_parameters_may_be_unfrozen_before_the_first_batch() -> None:
    def body(rank: Rank, module: Any, number: int) -> Any:
        module.backbone.requires_grad_(True)
        rank.averager.sync_points.resume()
        with torch.no_grad():
            module.backbone.add_(number)
        rank.train(4)
        rank.meet(SyncPointKind.EPOCH_END)
        return module.backbone.tolist()

    def make() -> Model:
        return Model(backbone=nn.Parameter(torch.ones(2), requires_grad=False))

    assert on_ranks(make, body, schedule=EveryNSteps(4)) == [[1.5, 1.5]] * 2


def test_a_rules_state_is_restored_by_the_names_of_parameters() -> None:
    """Saved after parameters were unfrozen, loaded where they are frozen, as Lightning does when it resumes."""

    def body(rank: Rank, module: Any, number: int) -> Any:
        averager = rank.averager
        saved = averager.state_dict() | {
            "round": 7,
            "parameters": [["other", 2], ["weight", 8]],
            "rule_state": {"anchor": torch.arange(10.0), "momentum": torch.arange(10.0) * 2},
        }
        averager.load_state_dict(saved, averager.clocks())
        state = averager.state_dict()
        return state["round"], state["rule_state"]["anchor"].tolist(), state["rule_state"]["momentum"].tolist()

    for round_id, anchor, momentum in on_ranks(Model, body, rule=DiLoCo(), schedule=NEVER):
        assert round_id == 7
        assert anchor == list(range(2, 10))
        assert momentum == [2.0 * i for i in range(2, 10)]


def test_the_clock_of_all_goes_on_where_another_rank_comes() -> None:
    """A rank that is ahead of the others stays so: its learning rate, which follows the mean, does not jump."""

    def body(rank: Rank, module: Any, number: int) -> Any:
        averager = rank.averager
        averager.load_state_dict(averager.state_dict(), {**averager.clocks(), "step": 45, "mean_steps": 29.0})
        return averager.global_step()

    assert on_ranks(Model, body, schedule=NEVER) == [29, 29]


def test_the_clock_of_all_is_not_ahead_of_them_where_a_rank_has_begun_late() -> None:
    """At its first header the others are far ahead; its pace until the next one is not that of its first step."""

    def body(rank: Rank, module: Any, number: int) -> Any:
        averager = rank.averager
        averager.load_state_dict(averager.state_dict(), {**averager.clocks(), "step": 1, "mean_steps": 50.0})
        rank.train(9)
        return averager.global_step()

    assert on_ranks(Model, body, schedule=NEVER) == [59, 59]


class BackAt11:
    """Local steps with a round after every third, synchronous ones from the twelfth on."""

    def next(self, clock: ReplicaClock) -> Action:
        if clock.step >= 11:
            return Action.GRADIENTS
        return Action.ROUND if clock.steps_since_round >= 2 else Action.LOCAL


def test_a_rank_that_comes_late_to_synchronous_steps_is_taken_in() -> None:
    def body(rank: Rank) -> Any:
        seen, x = {}, torch.empty(0)
        for epoch in range(5):
            for _ in range(5 + rank.averager.summary.rank):
                rank.averager.sync_points.resume()
                rank.train(1)
                seen[epoch] = rank.averager.ledger.synchronous
            x = rank.x.clone()
            assert rank.meet(SyncPointKind.EPOCH_END, epoch) is Arrival.OPEN
        return seen, x, rank.averager.summary.synchronous_steps

    (left, x, steps), (right, x2, steps2) = run(2, body, schedule=BackAt11())
    assert left[4] and right[4]
    assert (steps, steps2) == (14, 19)
    torch.testing.assert_close(x, x2, atol=0.1, rtol=0)  # the other took one synchronous step more, alone


class OnceAtTheFourthStep:
    def next(self, clock: ReplicaClock) -> Action:
        return Action.ROUND if clock.step == 3 else Action.LOCAL


def test_a_vote_is_heard_of_although_its_header_only_says_to_catch_up() -> None:
    never = threading.Event()

    def body(rank: FaultyRank) -> bool:
        averager = rank.averager
        recover = averager.control._loop._recover

        def vote_and_recover(error: Any) -> None:
            if rank.number == 1:
                averager.sync_points.vote(Vote.STOP)
            recover(error)

        averager.control._loop._recover = vote_and_recover
        deadline = time.monotonic() + LIMIT_S
        while Vote.STOP not in averager.sync_points.agreed and time.monotonic() < deadline:
            rank.train(1)
            never.wait(0.001)
        agreed = Vote.STOP in averager.sync_points.agreed
        rank.meet(SyncPointKind.STOP)
        return agreed

    script = [Fault(op="all_gather", nth=2, action=Fail(after=True), name=HEADER)]  # the commit's answer
    assert values(2, body, scripts={1: script}, schedule=OnceAtTheFourthStep(), overlap=True) == [True, True]


def test_what_a_caller_does_to_an_answer_reaches_no_other() -> None:
    def body(caller: Caller) -> Any:
        caller.averager.tick(caller.averager.plan(), 1.0)
        assert caller.averager.sync_points.rendezvous(SyncPointKind.VALIDATE) is Arrival.OPEN
        total = caller.world.reduce(torch.tensor([1.0 + caller.number]), "sum")
        total /= 2
        caller.world.barrier("after")
        return total.tolist()

    for op in ("all_gather", "all_reduce"):
        script = [Fault(op=op, nth=1, action=Fail(after=True), name=LIGHTNING)]
        assert call(2, body, {1: script}) == [[1.5], [1.5]]


def test_views_as_real_numbers_share_memory() -> None:
    x = torch.zeros(2, dtype=torch.complex64)
    real(x).fill_(1.0)
    assert x.tolist() == [1 + 1j] * 2

"""Compressed messages: nothing is lost, all ranks see the same bits, and the bytes are as promised."""

from __future__ import annotations

import copy
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_async.algorithms import DeltaMean, DiLoCo, EveryNSteps, Mean
from lightning_async.engine.averaging.rule_state import AveragerConfig
from lightning_async.engine.compressed_mean import CODES, mean_of
from lightning_async.engine.shared_state import Arrival
from tests.comm.faulty import Fail, Fault
from tests.comm.simulated import InProcessWorld
from tests.engine.fault_ranks import HEADER, PAYLOAD, FaultyRank, values
from tests.engine.ranks import Rank, bits, run
from tests.engine.test_faults import assert_alike, train_and_meet

LOCAL_SGD = DiLoCo(outer_lr=1.0, outer_momentum=0.0)
STEP = {"bf16": 2.0**-7, "fp8": 2.0**-3, "int8": 1 / 127}
"""The largest distance of neighbouring values, over the largest magnitude."""


def messages(world_size: int, numel: int, seed: int = 0) -> list[Tensor]:
    return list(torch.randn(world_size, numel, generator=torch.Generator().manual_seed(seed)))


def moved(sent: list[Tensor | None], weights: list[float], compression: Any, part_bytes: int, rounds: int = 1) -> Any:
    """What `CompressedMean` makes of these messages on every rank: means, messages, and what is owed."""
    world, numel = InProcessWorld(len(sent)), next(len(each) for each in sent if each is not None)

    def body(collectives: Any) -> Any:
        mine = sent[collectives.rank]
        each = mean_of(
            collectives, lambda pending: pending.result(), compression, numel, part_bytes, torch.device("cpu")
        )
        means = []
        for _ in range(rounds):
            mine = None if sent[collectives.rank] is None else sent[collectives.rank].clone()
            out = torch.full((numel,), torch.nan)
            each.carried_residual = each.move_(out, mine, weights)
            means.append(out)
        return means, mine, each

    return world.run(body, timedelta(seconds=20))


@pytest.mark.parametrize("compression", CODES)
@pytest.mark.parametrize(("world_size", "numel", "part_bytes"), [(2, 1000, 400), (2, 257, 1 << 20), (4, 5000, 3000)])
def test_the_mean_is_that_of_what_was_sent(compression: str, world_size: int, numel: int, part_bytes: int) -> None:
    sent: list[Any] = messages(world_size, numel)
    sent[1] = None
    weights = [float(rank != 1) * (rank + 1) for rank in range(world_size)]
    weights = [w / sum(weights) for w in weights]
    found = moved(sent, weights, compression, part_bytes)
    means = [rank[0][0] for rank in found]
    assert all(torch.equal(bits(mean), bits(means[0])) for mean in means)
    assert found[1][1] is None
    expected = torch.zeros(numel, dtype=torch.float64)
    for rank, (_, decoded, _) in enumerate(found):
        if decoded is not None:
            largest = sent[rank].abs().max().item()
            assert (decoded - sent[rank]).abs().max() <= 0.5001 * STEP[compression] * largest
            assert not torch.equal(decoded, sent[rank])
            expected += weights[rank] * decoded.double()
    carried_residual = torch.cat([rank[2].carried_residual for rank in found])
    if world_size == 2:
        assert carried_residual.numel() == 0
        torch.testing.assert_close(means[0].double(), expected, atol=1e-6, rtol=1e-5)
    else:  # what the second encoding took is owed, and nothing else
        assert 0 < carried_residual.abs().max() <= 0.5001 * STEP[compression] * expected.abs().max()
        torch.testing.assert_close(
            means[0].double().sum() + carried_residual.double().sum(), expected.sum(), atol=1e-4, rtol=0
        )


@pytest.mark.parametrize("world_size", [2, 5])
def test_nothing_to_send(world_size: int) -> None:
    for (mean,), _, each in moved([torch.empty(0)] * world_size, [1 / world_size] * world_size, "int8", 1000):
        assert mean.numel() == each.carried_residual.numel() == each.message_bytes == 0


def test_what_is_owed_comes_with_the_next_means() -> None:
    """Over many rounds of the same messages the means add up to the exact ones, but for what is owed at the end."""
    sent, rounds = messages(5, 3000, seed=1), 40
    found = moved(list(sent), [0.2] * 5, "int8", 1000, rounds)
    exact = torch.stack([decoded for _, decoded, _ in found]).double().mean(0)
    total = torch.stack(found[0][0]).double().sum(0)
    assert ((total - rounds * exact).abs() <= 1.01 * STEP["int8"] * exact.abs().max()).all()
    single = (found[0][0][0].double() - exact).abs().max()
    assert (total / rounds - exact).abs().max() < single / 10


@pytest.mark.parametrize("world_size", [2, 6])
def test_messages_that_their_codes_hold_arrive_to_the_bit(world_size: int) -> None:
    numel = 700
    whole = torch.randint(-126, 127, (numel,), generator=torch.Generator().manual_seed(0)).float()
    whole[::256] = 127.0
    whole *= 2.0**-10
    found = moved([whole.clone() for _ in range(world_size)], [1.0] + [0.0] * (world_size - 1), "int8", 1 << 20)
    for (mean,), decoded, _ in found:
        assert torch.equal(bits(mean), bits(whole))
        assert torch.equal(bits(decoded), bits(whole))


@pytest.mark.parametrize(("world_size", "steps"), [(2, 1), (2, 4), (3, 4)])
@pytest.mark.parametrize(
    ("compression", "rule"), [("int8", LOCAL_SGD), ("fp8", LOCAL_SGD), ("bf16", DeltaMean()), ("bf16", LOCAL_SGD)]
)
def test_nothing_is_lost(compression: str, rule: Any, world_size: int, steps: int) -> None:
    """The mean of the replicas after training is what it is without compression, and at a sync point all are there."""
    goals = messages(world_size, 300, seed=3)

    def body(rank: Rank) -> Tensor:
        rank.train(40)
        assert rank.meet() is Arrival.OPEN
        return rank.x.clone()

    config = {"overlap": False, "compression": compression, "part_bytes": 256}
    found = run(world_size, body, rule=rule, schedule=EveryNSteps(steps), goals=goals, numel=300, config=config)
    assert all(torch.equal(bits(x), bits(found[0])) for x in found)
    # SGD on squares is linear: however replicas drift apart, their mean moves as one replica with the mean goal.
    x = torch.ones((), dtype=torch.float64)
    for _ in range(40):
        x = x - 0.1 * (x - torch.stack(goals).double().mean(0))
    torch.testing.assert_close(found[0].double(), x[None], atol=2e-6 if world_size == 2 else 5e-3, rtol=0)


def test_replicas_that_agree_do_not_move() -> None:
    def body(rank: Rank) -> Tensor:
        with torch.no_grad():
            rank.module.weight.copy_(torch.linspace(-1.0, 1.0, 300))  # pyright: ignore
        rank.lr = 0.0
        rank.train(12)
        return rank.x.clone()

    start = torch.linspace(-1.0, 1.0, 300)[None]
    options: Any = {"schedule": EveryNSteps(2), "numel": 300}
    for overlap in (True, False):
        config = {"overlap": overlap, "compression": "bf16"}
        for x in run(4, body, rule=DeltaMean(), config=config, **options):
            assert torch.equal(bits(x), bits(start))


def test_a_round_reports_what_it_took_on_the_wire() -> None:
    def body(rank: Rank) -> int:
        rank.train(1)
        return rank.averager.summary.payload_bytes

    options: Any = {"schedule": EveryNSteps(1), "numel": 1024}
    for compression, rule, expected in (
        ("none", DeltaMean(), 4096),
        ("bf16", DeltaMean(), 2048),
        ("int8", LOCAL_SGD, 1024 + 16),
        ("fp8", LOCAL_SGD, 1024 + 16),
    ):
        config = {"overlap": False, "compression": compression}
        assert run(2, body, rule=rule, config=config, **options) == [expected, expected]


def test_what_the_last_average_lacked_goes_with_a_save_between_sync_points() -> None:
    """Five ranks, of which each averages a part for all: training goes on to the bit."""
    met = threading.Barrier(5, timeout=60)
    options: Any = {"schedule": EveryNSteps(4), "goals": messages(5, 600), "rule": DiLoCo(), "numel": 600}
    options["config"] = {"overlap": False, "compression": "int8"}

    def save(rank: Rank) -> Any:
        averager = rank.averager
        rank.train(8)
        saved = copy.deepcopy((rank.x, averager.state_dict(), averager.clocks(), averager.marks.replica()))
        return *saved, go_on(rank)

    def resume(rank: Rank) -> Any:
        x, shared, clocks, replica, _ = first[rank.averager.summary.rank]
        rank.averager.load_state_dict(shared, clocks)
        rank.averager.marks.part(replica, {"weight": x}, rank.module)
        return go_on(rank)

    def go_on(rank: Rank) -> Tensor:
        met.wait()
        rank.train(8)
        return rank.x.clone()

    first = run(5, save, **options)
    assert any(part.any() for _, _, _, replica, _ in first for part in replica["residuals"]["parts"])
    for x, (*_, expected) in zip(run(5, resume, **options), first, strict=True):
        assert torch.equal(bits(x), bits(expected))


def test_unequal_numbers_of_steps() -> None:
    def body(rank: Rank) -> Any:
        rank.train(10 if rank.averager.summary.rank == 0 else 45)
        assert rank.meet() is Arrival.OPEN
        return rank.x.clone(), rank.averager.summary

    for world_size in (2, 5):
        found = run(world_size, body, rule=DiLoCo(), schedule=EveryNSteps(4), config={"compression": "int8"})
        assert all(torch.equal(bits(x), bits(found[0][0])) for x, _ in found)
        assert found[0][1].rounds == found[1][1].rounds


def test_a_replica_that_is_not_finite_takes_over_the_others_model() -> None:
    seen = threading.Barrier(2, timeout=60)

    def body(rank: Rank) -> Tensor:
        rank.train(4)
        if rank.averager.summary.rank == 0:
            rank.x[0, 3] = torch.nan
        seen.wait()
        rank.train(8)
        assert rank.meet() is Arrival.OPEN
        return rank.x.clone()

    config = {"compression": "int8", "overlap": False}
    left, right = run(2, body, rule=LOCAL_SGD, schedule=EveryNSteps(2), config=config)
    assert torch.equal(left, right) and left.isfinite().all()


@pytest.mark.parametrize("compression", ["int8", "bf16"])
@pytest.mark.parametrize(
    ("world_size", "op", "nth"),
    [(2, "all_gather", 1), (2, "all_gather", 4), (5, "all_to_all", 2), (5, "all_gather", 1), (5, "all_gather", 2)],
)
def test_a_round_that_fails_is_repeated_and_nothing_is_lost(
    world_size: int, op: str, nth: int, compression: str
) -> None:
    """Whatever had moved when it failed."""

    def body(rank: FaultyRank) -> dict[str, Any]:
        rank.goal = messages(world_size, 3000)[rank.number]  # pyright: ignore[reportAttributeAccessIssue]
        return train_and_meet(rank)

    options: Any = {"rule": DiLoCo(), "numel": 3000, "part_bytes": 1024, "compression": compression}
    smooth = values(world_size, body, **options)
    for after in (False, True):
        script = [Fault(op=op, nth=nth, action=Fail(after=after), name=PAYLOAD)]
        rough = values(world_size, body, scripts={1: script}, **options)
        for mine, expected in zip(rough, smooth, strict=True):
            assert torch.equal(bits(mine["x"]), bits(rough[0]["x"]))
            assert mine["summary"].failed_rounds == 1 and mine["summary"].rounds == 3
            torch.testing.assert_close(mine["x"], expected["x"], atol=1e-6, rtol=0)
            torch.testing.assert_close(mine["state"]["anchor"], expected["state"]["anchor"], atol=1e-6, rtol=0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_loses_the_last_answer_owes_what_the_others_know(world_size: int) -> None:
    def body(rank: FaultyRank) -> dict[str, Any]:
        rank.goal = messages(world_size, 3000)[rank.number]  # pyright: ignore[reportAttributeAccessIssue]
        rank.train(12)
        compressed = rank.averager.component.average._compressed[0]
        assert compressed is not None
        return {"x": rank.x.clone(), "state": rank.rule_state, "carried_residual": compressed.carried_residual.clone()}

    options: Any = {"rule": DiLoCo(), "numel": 3000, "part_bytes": 1024, "compression": "int8"}
    smooth = values(world_size, body, **options)
    script = [Fault(op="all_gather", nth=4, action=Fail(after=True), name=HEADER)]  # the second round's commit
    rough = values(world_size, body, scripts={1: script}, **options)
    assert_alike(rough, smooth)
    assert all(
        torch.equal(mine["carried_residual"], expected["carried_residual"])
        for mine, expected in zip(rough, smooth, strict=True)
    )
    assert (world_size == 3) == any(mine["carried_residual"].any() for mine in rough)


def test_a_sync_point_ends_all_debts_so_that_a_checkpoint_needs_none() -> None:
    def body(rank: Rank) -> Any:
        compressed = rank.averager.component.average._compressed[0]
        assert compressed is not None
        rank.train(12)
        carried_residual = compressed.carried_residual.clone()
        rank.meet()
        return carried_residual, compressed.carried_residual.clone()

    config = {"overlap": False, "compression": "int8"}
    found = run(5, body, rule=DiLoCo(), schedule=EveryNSteps(3), numel=2000, goals=messages(5, 2000), config=config)
    assert any(before.any() for before, _ in found)
    assert not any(after.any() for _, after in found)


@pytest.mark.parametrize("rule", [DeltaMean(), Mean()], ids=repr)
@pytest.mark.parametrize("compression", ["int8", "fp8"])
def test_eight_bits_for_the_parameters_themselves_are_refused(rule: Any, compression: Any) -> None:
    config = AveragerConfig(compression=compression, overlap=False)
    with pytest.raises(ValueError, match=r"DeltaMean\(\)|Mean\(\).*compression=.*too coarsely"):
        config.check_rule("Owner", rule)
    AveragerConfig(compression="bf16", overlap=False).check_rule("Owner", rule)


def test_an_unknown_compression_is_refused() -> None:
    with pytest.raises(ValueError, match=r"AveragerConfig\(compression='int4'\).*must be one of"):
        AveragerConfig(compression="int4")  # pyright: ignore

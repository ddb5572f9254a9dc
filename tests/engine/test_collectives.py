"""Lightning's collectives: what is short takes one exchange, what is long takes two, and both give the same."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_async.engine import collectives as module
from lightning_async.engine.collectives import LightningCollectives, StepsInterrupted, packed
from lightning_async.errors import CollectiveError, CollectiveTimeout, GateMismatch
from tests.comm.simulated import InProcessWorld

RANKS, ROOM = 3, 1888
"""Bytes that go along with the question."""


class Counting:
    """Calls, and what they were."""

    def __init__(self, calls: Any) -> None:
        self._calls, self.made = calls, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._calls, name)

    def __call__(self, what: str, start: Any) -> Any:
        self.made.append(what)
        return self._calls(what, start)


def on_ranks(body: Any) -> list[Any]:
    """What each rank makes of its world, and its number of exchanges."""

    def on_rank(collectives: Any) -> Any:
        world: Any = LightningCollectives(collectives.fork("lightning"), deadline=timedelta(seconds=20))
        world.calls = Counting(world.calls)
        return body(world), len(world.calls.made)

    return InProcessWorld(RANKS).run(on_rank, timedelta(seconds=40))


def test_who_reduces_while_replicas_drift_hears_once_what_is_of_all(caplog: pytest.LogCaptureFixture) -> None:
    """What was logged by step and by epoch is reduced by epoch, and needs no advice to do so."""

    def body(world: LightningCollectives) -> float:
        world.asynchronous = True
        return float(sum(world.reduce(torch.tensor(float(world.rank + 1))) for _ in range(2)))

    assert on_ranks(body) == [(2.0, 0), (4.0, 0), (6.0, 0)]
    assert sorted(record.getMessage() for record in caplog.records) == [
        f"Rank {rank}: reduce(mean) was called between two sync points, where replicas run at their own pace: it "
        "returns this replica's own value (`on_epoch=True` logs that of all, at the end of the epoch)."
        for rank in range(RANKS)
    ]


@pytest.mark.parametrize("size", [0, 1, 8 * ROOM // 64, 8 * ROOM // 64 + 1, 5000])
@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "product"])
def test_a_reduction_is_that_of_all_ranks_whatever_its_size(op: str, size: int) -> None:
    rows = torch.rand(RANKS, size, generator=torch.Generator().manual_seed(size), dtype=torch.float64) + 0.5
    way: Any = {"sum": rows.sum(0), "mean": rows.mean(0), "product": rows.prod(0)}
    expected = way[op] if op in way else getattr(torch, f"a{op}")(rows, 0)
    for found, exchanges in on_ranks(lambda world: world.reduce(rows[world.rank], op)):
        torch.testing.assert_close(found, expected, rtol=1e-15, atol=0.0)
        assert exchanges == (1 if 8 * size <= ROOM else 2)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [3, 3000])
def test_short_and_long_reductions_of_a_type_give_it_back(dtype: torch.dtype, size: int) -> None:
    rows = (torch.arange(RANKS * size).view(RANKS, size) % 2).to(dtype)
    largest = rows.to(torch.float32).amax(0).to(dtype)
    for found, _ in on_ranks(lambda world: world.reduce(rows[world.rank], "max")):
        assert found.dtype is dtype and torch.equal(found, largest)


@pytest.mark.parametrize("longest", [0, 1, 9000])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.complex64, torch.float64])
def test_tensors_of_unequal_sizes_come_whole(longest: int, dtype: torch.dtype) -> None:
    rows = [torch.arange(longest if rank == 1 else rank).to(dtype) for rank in range(RANKS)]
    for found, exchanges in on_ranks(lambda world: world.gather_objects(rows[world.rank])):
        assert all(torch.equal(one, other) and one.dtype is dtype for one, other in zip(found, rows, strict=True))
        assert exchanges == (1 if longest < ROOM else 2)


def test_shapes_of_no_and_of_two_dimensions_come_whole() -> None:
    scalars = [torch.tensor(float(rank)) for rank in range(RANKS)]
    tables = [torch.full((rank, 200 * rank), float(rank)) for rank in range(RANKS)]

    def body(world: LightningCollectives) -> Any:
        return world.gather_objects(scalars[world.rank]), world.gather_objects(tables[world.rank])

    for (found, found_tables), _ in on_ranks(body):
        assert [each.item() for each in found] == [0.0, 1.0, 2.0] and {each.shape for each in found} == {()}
        assert [each.shape for each in found_tables] == [(0, 0), (1, 200), (2, 400)]
        assert all(torch.equal(one, other) for one, other in zip(found_tables, tables, strict=True))


@pytest.mark.parametrize("size", [2, 3000])
def test_ranks_with_more_steps_exchange_without_the_others(size: int) -> None:
    """Rank ``r`` takes ``r`` steps, whose means, gathers and broadcasts are of the ranks that take that step, too."""

    def body(world: LightningCollectives) -> Any:
        steps = []
        for step in range(world.rank):
            world.begin_steps()
            mine = torch.full((size,), 10.0 * world.rank + step)
            world.barrier("step")
            reduced = [world.reduce(mine, op)[0].item() for op in ("mean", "sum", "max", "product")]
            rows = world.all_gather(mine)[:, -1].tolist()
            told = world.broadcast("a" * size if world.rank == 2 else None, 2)
            steps.append([*reduced, rows, told, world.gather_objects([world.rank])])
        world.finish_steps()
        return steps, world.reduce(torch.tensor(float(world.rank)), "sum").item()

    text = "a" * size
    (first, second, third) = [answer for answer, _ in on_ranks(body)]
    both = [15.0, 30.0, 20.0, 200.0, [10.0, 20.0], text, [[1], [2]]]
    assert (first, second) == (([], 3.0), ([both], 3.0))
    assert third == ([both, [21.0, 21.0, 21.0, 21.0, [21.0], text, [[2]]]], 3.0)


def test_one_rank_interrupts_the_steps_of_all() -> None:
    def body(world: LightningCollectives) -> Any:
        world.begin_steps()
        with pytest.raises(StepsInterrupted):
            (world.interrupt_steps, world.finish_steps, partial(world.barrier, "a step"))[world.rank]()
        return world.reduce(torch.tensor(1.0), "sum").item()

    assert [answer for answer, _ in on_ranks(body)] == [3.0] * RANKS


def test_a_rank_outside_of_steps_is_not_left_out() -> None:
    def body(world: LightningCollectives) -> Any:
        if world.rank:
            return world.finish_steps()
        return world.barrier("elsewhere")

    with pytest.raises(GateMismatch, match=r"rank 0 calls barrier\('elsewhere'\), rank 1 calls no more evaluation"):
        on_ranks(body)


@pytest.mark.parametrize("length", [10, 1000, 100_000])
@pytest.mark.parametrize("source", [0, 2])
def test_an_object_is_broadcast_as_it_is(length: int, source: int) -> None:
    sent = {"text": "a" * length, "x": torch.arange(3.0), "of a class": timedelta(seconds=length)}

    def body(world: LightningCollectives) -> Any:
        return world.broadcast(sent if world.rank == source else None, source)

    for found, exchanges in on_ranks(body):
        assert (found["text"], found["of a class"]) == (sent["text"], sent["of a class"])
        assert torch.equal(found["x"], sent["x"])
        assert exchanges == (2 if length > ROOM else 1)


class Moving:
    """Collectives, and how large what they broadcast was."""

    def __init__(self, collectives: Any) -> None:
        self._collectives, self.moved = collectives, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collectives, name)

    def broadcast(self, buffer: torch.Tensor, src: int) -> Any:
        self.moved.append(buffer.nbytes)
        return self._collectives.broadcast(buffer, src)


def handed_over(state: Any, source: int = 0, damaged: bool = False) -> list[Any]:
    """What each rank has of it, and the sizes of what moved."""

    def on_rank(collectives: Any) -> Any:
        moving: Any = Moving(collectives.fork("lightning"))
        world = LightningCollectives(moving, deadline=timedelta(seconds=20))
        mine = packed(state) if world.rank == source else None
        if damaged and mine is not None:
            broadcast = moving.broadcast

            def changing(buffer: torch.Tensor, src: int) -> Any:
                buffer[-1] ^= 1
                return broadcast(buffer, src)

            moving.broadcast = changing
        return world.hand_over(mine, source), moving.moved

    return InProcessWorld(RANKS).run(on_rank, timedelta(seconds=40))


@pytest.mark.parametrize("source", [0, 2])
def test_a_state_that_is_handed_over_is_as_it_was_then(source: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of large tensors in parts, of small ones together, and of none where there is nothing in them."""
    monkeypatch.setattr("lightning_async.engine.collectives._PART_BYTES", 4096)
    monkeypatch.setattr("lightning_async.engine.collectives._SMALL_BYTES", 1024)
    large, half = torch.arange(2500, dtype=torch.float32).view(50, 50).T, torch.arange(300, dtype=torch.bfloat16)
    small = [torch.full((), float(i)) for i in range(3)]
    state = {"large": large, "again": large, "small": small, "none": torch.empty(0, 3), "half": half, "step": (3, None)}
    for rank, (found, moved) in enumerate(handed_over(state, source)):
        assert moved == [4096, 4096, 1808, 12 + 600]
        if rank == source:
            assert found is None
            continue
        assert torch.equal(found["large"], large) and found["again"] is found["large"]
        assert torch.equal(found["half"], half) and found["half"].dtype is torch.bfloat16
        assert torch.stack(found["small"]).tolist() == [0.0, 1.0, 2.0]
        assert found["none"].shape == (0, 3) and found["step"] == (3, None)


def test_a_state_is_what_it_was_when_it_was_packed() -> None:
    tensor = torch.zeros(5)
    state = packed({"x": tensor})
    tensor.fill_(1.0)
    assert [each.tolist() for each in state.tensors] == [[0.0] * 5]


def test_a_state_with_an_object_of_a_class_is_handed_over_whole() -> None:
    for found, moved in handed_over({"x": SimpleNamespace(y=torch.arange(4))})[1:]:
        assert found["x"].y.tolist() == [0, 1, 2, 3]
        assert len(moved) == 1


def test_a_state_that_has_changed_on_the_way_is_an_error() -> None:
    with pytest.raises(CollectiveError, match=r"of 4000 bytes that rank 0 has handed over others have come than were"):
        handed_over({"x": torch.zeros(1000)}, damaged=True)


@pytest.mark.parametrize("size", [2, 5000])
def test_who_comes_for_something_else_is_told_so_on_every_rank(size: int) -> None:
    def body(world: LightningCollectives) -> Any:
        call = partial(world.barrier, "epoch") if world.rank == 0 else partial(world.reduce, torch.ones(size), "sum")
        with pytest.raises(GateMismatch, match=r"rank 0 calls barrier\('epoch'\), rank 1 calls reduce\(sum\) of shape"):
            call()

    assert [exchanges for _, exchanges in on_ranks(body)] == [1] * RANKS


def test_ranks_wait_without_limit_and_say_for_whom(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FIRST_WORD_S", 0.3)

    def on_rank(collectives: Any) -> int:
        world = LightningCollectives(
            collectives.fork("lightning"), deadline=timedelta(seconds=0.1), behind=lambda call: [f"{2 * call}"]
        )
        # As `Timeouts(sync_point=None)` sets it.
        world.calls.deadline = None
        if world.rank == 1:
            time.sleep(1.5)
        return int(world.reduce(torch.tensor(world.rank), "sum"))

    assert InProcessWorld(2).run(on_rank, timedelta(seconds=40)) == [1, 1]
    words = [record.getMessage() for record in caplog.records]
    assert len(words) in (2, 3), "after 0.3 s, 0.6 s and 1.2 s, on a machine that is not too slow"
    for word in words:
        assert word.startswith("Rank 0 has waited ")
        assert "in reduce(sum) of shape (), torch.int64 for rank 2. It waits as long as that process lives" in word


def test_a_limit_ends_the_wait_for_a_live_rank() -> None:
    def on_rank(collectives: Any) -> None:
        world = LightningCollectives(collectives.fork("lightning"), blame=timedelta(seconds=0.1))
        world.calls.deadline = timedelta(seconds=0.3)
        if world.rank == 0:
            world.barrier("validation")

    with pytest.raises(CollectiveTimeout, match=r"barrier\('validation'\) failed 0\.\d s after it began"):
        InProcessWorld(2).run(on_rank, timedelta(seconds=40))

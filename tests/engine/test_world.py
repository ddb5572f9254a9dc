"""Lightning's collectives: what is short takes one exchange, what is long takes two, and both give the same."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch

from lightning_async.comm.simulated.inprocess import InProcessWorld
from lightning_async.engine.world import World, packed
from lightning_async.errors import GateMismatch

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
        world: Any = World(collectives.fork("lightning"), deadline=timedelta(seconds=20))
        world.calls = Counting(world.calls)
        return body(world), len(world.calls.made)

    return InProcessWorld(RANKS).run(on_rank, timedelta(seconds=40))


def test_who_reduces_while_replicas_drift_hears_once_what_is_of_all(caplog: pytest.LogCaptureFixture) -> None:
    """What was logged by step and by epoch is reduced by epoch, and needs no advice to do so."""

    def body(world: World) -> float:
        world.drifting = True
        return float(sum(world.reduce(torch.tensor(float(world.rank + 1))) for _ in range(2)))

    assert on_ranks(body) == [(2.0, 0), (4.0, 0), (6.0, 0)]
    assert sorted(record.getMessage() for record in caplog.records) == [
        f"Rank {rank}: reduce(mean) was called between two rendezvous, where replicas run at their own pace: it "
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


@pytest.mark.parametrize("longest", [0, 1, ROOM - 8, ROOM - 7, 9000])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.complex64, torch.float64])
def test_tensors_of_unequal_sizes_come_whole(longest: int, dtype: torch.dtype) -> None:
    rows = [torch.arange(longest if rank == 1 else rank).to(dtype) for rank in range(RANKS)]
    for found, exchanges in on_ranks(lambda world: world.gather_uneven(rows[world.rank])):
        assert all(torch.equal(one, other) and one.dtype is dtype for one, other in zip(found, rows, strict=True))
        nbytes = max(row.nbytes for row in rows) + 8
        assert exchanges == (1 if nbytes <= ROOM else 2)


def test_shapes_of_no_and_of_two_dimensions_come_whole() -> None:
    scalars = [torch.tensor(float(rank)) for rank in range(RANKS)]
    tables = [torch.full((rank, 200 * rank), float(rank)) for rank in range(RANKS)]

    def body(world: World) -> Any:
        return world.gather_uneven(scalars[world.rank]), world.gather_uneven(tables[world.rank])

    for (found, found_tables), _ in on_ranks(body):
        assert [each.item() for each in found] == [0.0, 1.0, 2.0] and {each.shape for each in found} == {()}
        assert [each.shape for each in found_tables] == [(0, 0), (1, 200), (2, 400)]
        assert all(torch.equal(one, other) for one, other in zip(found_tables, tables, strict=True))


@pytest.mark.parametrize("length", [10, 1000, 100_000])
@pytest.mark.parametrize("source", [0, 2])
def test_an_object_is_broadcast_as_it_is(length: int, source: int) -> None:
    sent = {"text": "a" * length, "x": torch.arange(3.0), "of a class": timedelta(seconds=length)}

    def body(world: World) -> Any:
        return world.broadcast(packed(sent) if world.rank == source else None, source)

    for found, exchanges in on_ranks(body):
        assert (found["text"], found["of a class"]) == (sent["text"], sent["of a class"])
        assert torch.equal(found["x"], sent["x"])
        assert exchanges == (2 if length > ROOM else 1)


@pytest.mark.parametrize("size", [2, 5000])
def test_who_comes_for_something_else_is_told_so_on_every_rank(size: int) -> None:
    def body(world: World) -> Any:
        call = partial(world.barrier, "epoch") if world.rank == 0 else partial(world.reduce, torch.ones(size), "sum")
        with pytest.raises(GateMismatch, match=r"rank 0 calls barrier\('epoch'\), rank 1 calls reduce\(sum\) of shape"):
            call()

    assert [exchanges for _, exchanges in on_ranks(body)] == [1] * RANKS

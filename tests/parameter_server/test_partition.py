"""Each element is on one server, once, and loads are balanced."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_async.parameter_server.partition import ServerPartition

SHAPES = st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), max_size=8)


@st.composite
def plans(draw: st.DrawFn) -> tuple[ServerPartition, ServerPartition]:
    shapes = tuple(draw(SHAPES))
    names = tuple(f"key {i}" for i in range(len(shapes)))
    one, other = (ServerPartition(names, shapes, draw(st.integers(1, 5)), draw(st.integers(1, 60))) for _ in range(2))
    return one, other


def keys_of(plan: ServerPartition) -> list[torch.Tensor]:
    numbers = torch.arange(sum(math.prod(shape) for shape in plan.shapes), dtype=torch.float64)
    parts = numbers.split([math.prod(shape) for shape in plan.shapes])
    return [part.view(shape) for part, shape in zip(parts, plan.shapes, strict=True)]


def shards_of(plan: ServerPartition) -> list[torch.Tensor]:
    keys, shards = keys_of(plan), [torch.full((size,), -1.0, dtype=torch.float64) for size in plan.sizes]
    for server, shard in enumerate(shards):
        for piece in plan.pieces[server]:
            elements = keys[piece.key].reshape(-1)[piece.start : piece.stop]
            shard[piece.offset : piece.offset + elements.numel()] = elements
    return shards


@given(plans())
def test_each_element_is_on_one_server_once(two: tuple[ServerPartition, ServerPartition]):
    plan, _ = two
    everything = torch.cat([*shards_of(plan), torch.empty(0, dtype=torch.float64)]).sort().values
    total = sum(math.prod(shape) for shape in plan.shapes)
    assert torch.equal(everything, torch.arange(total, dtype=torch.float64))
    assert sum(plan.sizes) == total


@given(plans())
def test_loads_differ_by_no_more_than_the_largest_key_that_is_whole(two: tuple[ServerPartition, ServerPartition]):
    plan, _ = two
    whole = [size for shape in plan.shapes if (size := math.prod(shape)) < plan.bigarray_bound]
    assert max(plan.sizes) - min(plan.sizes) <= max([1, *whole])


@given(plans())
def test_large_keys_are_split_evenly_and_others_not_at_all(two: tuple[ServerPartition, ServerPartition]):
    plan, _ = two
    for key, shape in enumerate(plan.shapes):
        parts = [piece.stop - piece.start for pieces in plan.pieces for piece in pieces if piece.key == key]
        if math.prod(shape) >= plan.bigarray_bound:
            assert max(parts) - min(parts) <= 1 and len(parts) == min(plan.num_servers, math.prod(shape))
        else:
            assert len(parts) <= 1


@given(plans())
def test_only_equal_plans_have_equal_fingerprints(two: tuple[ServerPartition, ServerPartition]):
    plan, other = two
    assert (plan.fingerprint() == other.fingerprint()) == (plan == other)


def test_it_is_the_same_on_every_machine():
    plan = ServerPartition.of(
        {"embedding": torch.zeros(700, 2), "bias": torch.zeros(10), "norm": torch.zeros(4)}, 3, 1000
    )
    assert plan.fingerprint() == "8036c0ec2b246acc"
    assert plan.sizes == (471, 467, 476)
    assert "server 2: 0.0 MiB" in str(plan)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((("a",), ((1,),), 0), ValueError, "num_servers=0.*>= 1"),
        ((("a",), ((1,),), 1.5), TypeError, "num_servers=1.5.*int"),
        ((("a",), ((1,),), 1, 0), ValueError, "bigarray_bound=0"),
    ],
)
def test_what_it_refuses(arguments: tuple, error: type[Exception], match: str):
    with pytest.raises(error, match=match):
        ServerPartition(*arguments)


def test_what_is_printed_of_it():
    plan = ServerPartition(("weight", "bias", "scale"), ((1024, 1025), (1024,), (3,)), 2, 1_000_000)
    assert str(plan).splitlines() == [
        "3 keys on 2 server(s)",
        "server 0: 2.0 MiB, 2 keys, 1 of them in part",
        "server 1: 2.0 MiB, 2 keys, 1 of them in part",
    ]

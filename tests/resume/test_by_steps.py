"""What is left of an epoch, dealt out by steps: each sample once, and in each step those that belong to it."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_async.data.redistribution import DataShard, by_steps, distributed, divide, inherited
from tests.resume.test_shares import samples, shares

SIZE = 3


def steps(dealt: dict[str, DataShard], number: int) -> list[list[int]]:
    """Of each step, what all ranks have."""
    found = []
    for step in range(number):
        parts = [samples(each, each.first + step, each.first + step + 1) for each in dealt.values()]
        found.append(sorted(i for part in parts for i in part))
    return found


@pytest.mark.parametrize("length", [60, 61, 71, 72])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("taken", [0, 2])
def test_a_step_has_the_samples_that_it_has_with_equal_batches(length: int, shuffle: bool, taken: int) -> None:
    """By DistributedSamplers, but for what they repeat."""
    held = shares(length, 4, SIZE, shuffle=shuffle, seed=1)
    dealt = by_steps(
        [(each, taken) for each in held.values()],
        dict.fromkeys(held, taken),
        dict(zip(held, [5, 4, 2, 1], strict=True)),
    )
    order = distributed({
        "length": length, "num_replicas": 1, "rank": 0, "shuffle": shuffle, "seed": 1, "epoch": 2, "drop_last": False,
    }).tolist()  # fmt: skip
    expected = [sorted(order[at : at + 4 * SIZE]) for at in range(taken * 4 * SIZE, length, 4 * SIZE)]
    assert steps(dealt, len(expected)) == expected
    assert [each.loaders[0][0]["batch_size"] for each in dealt.values()] == [5, 4, 2, 1]  # type: ignore[index]


@given(st.integers(1, 90), st.lists(st.integers(1, 7), min_size=1, max_size=5), st.randoms())
def test_again_and_again_each_sample_is_taken_once(length: int, sizes: list[int], chance: random.Random) -> None:
    """By ranks that are not equally far, and others that come."""
    held = shares(length, 3, 2, shuffle=True)
    left, counted = [(each, chance.randint(0, int(each.end))) for each in held.values()], []
    counted += [i for each, place in left for i in samples(each, end=place)]
    for _ in range(3):
        chance.shuffle(sizes)
        names = {str(i): size for i, size in enumerate(sizes)}
        dealt = by_steps(left, {name: chance.randint(0, 9) for name in names}, names)
        if not dealt:
            assert sum(len(samples(each, place)) for each, place in left) < sum(sizes)
            break
        left = [(each, chance.randint(each.first, int(each.end))) for each in dealt.values()]
        counted += [i for each, place in left for i in samples(each, each.first, place)]
    counted += [i for each, place in left for i in samples(each, place)]
    assert sorted(counted) == list(range(length))


def test_whole_steps_only_and_no_sample_twice() -> None:
    held = shares(61, 3, 4, drop_last=True, shuffle=False)  # repeats two samples
    names = {"0": 6, "1": 5, "2": 1}
    dealt = by_steps([(each, 0) for each in held.values()], dict.fromkeys(names, 0), names, whole=True)
    found = [i for each in dealt.values() for i in samples(each)]
    assert len(found) == len(set(found)) == 60
    assert {each.end for each in dealt.values()} == {5}


def test_what_a_checkpoint_of_more_ranks_repeats_is_taken_once() -> None:
    rest = list(range(50))
    parts = [torch.tensor(divide(rest, rank, 3, 4)) for rank in range(3)]
    assert sum(map(len, parts)) == 51
    told = [{"kind": "given", "length": 50, "batch_size": 4, "indices": part} for part in parts]
    left = [(DataShard(2, 7, 0, False, [(each, 5)]), 2) for each in told]
    dealt = by_steps(left, {"0": 2, "1": 2, "3": 2}, {"0": 6, "1": 6, "3": 4})
    assert sorted(i for each in dealt.values() for i in samples(each)) == rest


def test_where_ranks_have_unequal_batches_the_lost_ones_are_taken_by_the_smallest_size() -> None:
    held = by_steps(
        [(each, 0) for each in shares(60, 3, 4).values()], dict.fromkeys("012", 0), {"0": 7, "1": 4, "2": 1}
    )
    dealt = inherited([(held["0"], 2), (held["2"], 5)], {"1": 5})
    ((told, count),) = dealt["1"].loaders
    assert told is not None and told["batch_size"] == 1 == len(torch.unique(told["indices"])) // count
    assert sorted(samples(dealt["1"])) == sorted(samples(held["0"], 2) + samples(held["2"], 5))

"""What is left of lost ranks' shares of an epoch, dealt out among the others: each sample once, without padding."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from lightning_async.data.redistribution import (
    DataShard,
    JoinedBatches,
    before,
    describe,
    distributed,
    inherited,
    joined,
    share,
    unheard,
)
from lightning_async.trainer.data.samplers import resized

Shares = dict[str, DataShard]


def shares(length: int, ranks: int, size: int = 3, limit: int | None = None, **settings: Any) -> Shares:
    found = {}
    drop_last = settings.pop("drop_last", False)
    for rank in range(ranks):
        data: Any = range(length)
        sampler = DistributedSampler(data, ranks, rank, **settings)
        sampler.set_epoch(2)
        loader: DataLoader[Any] = DataLoader(data, size, sampler=sampler, drop_last=drop_last)
        end = len(loader) if limit is None else min(limit, len(loader))
        found[str(rank)] = DataShard(0, end, 0, True, [(describe(loader, None), len(loader))])
    return found


def batches_of(of: DataShard, begin: int) -> list[tuple[list[int], ...]]:
    """From the batch with this number on, the indices of each for every loader."""
    found = JoinedBatches.of([(of, begin)])
    columns = [
        [part.tolist() for part in found.take(column, torch.arange(len(found))).split(lengths.tolist())]
        for column, lengths in enumerate(found.lengths)
    ]
    return list(zip(*columns, strict=True))


def samples(of: DataShard, begin: int = 0, end: int | None = None) -> list[int]:
    one: DataShard = of._replace(end=of.end if end is None else end)
    return [index for batch in batches_of(one, begin) for index in batch[0]]


@pytest.mark.parametrize("length", [60, 61, 62, 71])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_whoever_is_lost_each_sample_is_taken_once(length: int, shuffle: bool, drop_last: bool) -> None:
    chance = random.Random(length)
    held = shares(length, 5, shuffle=shuffle, seed=3, drop_last=drop_last)
    everything = sorted(sample for each in held.values() for sample in samples(each))
    if not drop_last:
        assert everything == list(range(length))
    counted: list[int] = []
    ready, there = {name: int(each.end) for name, each in held.items()}, set(held)
    while held:
        lost = set(chance.sample(sorted(there), min(chance.choice([0, 1, 2]), len(there) - 1)))
        there -= lost
        left = []
        for name, each in held.items():
            place = chance.randint(each.first, int(each.end)) if name in lost else int(each.end)
            counted += samples(each, end=place)
            left += [(each, place)] if name in lost else []
        held = inherited(left, {name: ready[name] for name in sorted(there)})
        assert {each.first for each in held.values()} <= {ready[name] for name in held}
        sizes = {each.end - each.first for each in held.values()} | ({0} if len(held) < len(there) else set())
        assert not held or max(sizes) - min(sizes) <= 1
        ready |= {name: int(each.end) for name, each in held.items()}
    assert sorted(counted) == everything


@pytest.mark.parametrize("length", [60, 62])
@pytest.mark.parametrize("places", [(2, 3, 1), (0, 0, 0), (2, 99, 1)], ids=["amid", "at the start", "one is done"])
def test_what_was_joined_beforehand_changes_nothing(length: int, places: tuple[int, ...]) -> None:
    """Of what ranks have, and of what was dealt out of it; where one has nothing left it is joined anew."""
    held: Any = shares(length, 3, shuffle=True)
    for _ in range(2):
        already, left = joined(held.values()), list(zip(held.values(), places, strict=True))
        ready = {"0": 2, "1": 3, "3": 0}
        found, expected = inherited(left, ready, already), inherited(left, ready)
        assert len(already) == 1
        assert [samples(each) for each in found.values()] == [samples(each) for each in expected.values()]
        assert [each.end for each in found.values()] == [each.end for each in expected.values()]
        held = found


def test_a_loader_of_full_batches_only_gets_these() -> None:
    held = shares(47, 2, size=2, drop_last=True)  # of 48 samples, one of which fills up
    dealt = inherited([(each, 0) for each in held.values()], {"0": 12, "1": 12, "2": 0})
    for each in dealt.values():
        ((told, count),) = each.loaders
        assert told is not None and len(told["indices"]) == 2 * count == 2 * (each.end - each.first)
    assert {sample for each in dealt.values() for sample in samples(each)} == set(range(47))


def test_a_limit_on_batches_is_one_for_those_who_inherit() -> None:
    held = shares(60, 3, limit=4, shuffle=False)
    dealt = inherited([(held["1"], 3)], {"0": 4, "2": 4})
    assert {name: samples(each) for name, each in dealt.items()} == {"0": samples(held["1"], 3)}
    assert dealt["0"].end == 5


@pytest.mark.parametrize("cycles", [True, False])
def test_batches_of_several_loaders_stay_together(cycles: bool) -> None:
    long, short = shares(60, 3, size=4, shuffle=False)["1"], shares(12, 3, size=1, shuffle=False)["1"]
    both = DataShard(0, 5 if cycles else 4, 0, cycles, [*long.loaders, *short.loaders])
    own = [share({"share": each.loaders[0][0]}) for each in (long, short)]
    expected = [(own[0][4 * k : 4 * k + 4], [own[1][k % 4]]) for k in range(int(both.end))]
    assert batches_of(both, 0) == expected
    dealt = inherited([(both, 1)], {"0": 5, "2": 5})
    assert [batch for each in dealt.values() for batch in batches_of(each, 0)] == expected[1::2] + expected[2::2]


def test_an_epoch_that_was_gone_on_with_from_the_middle_is_counted_from_there() -> None:
    whole = shares(60, 3, shuffle=False)["0"]
    resumed = whole._replace(first=2, skipped=2)
    assert samples(resumed, 3) == samples(whole, 3)
    told = {"kind": "given", "length": 60, "batch_size": 3, "indices": torch.arange(12)}
    divided = DataShard(3, 7, 0, True, [(told, 4)])  # its epoch has been counted to 3
    assert samples(divided, 5) == list(range(6, 12)) and samples(divided) == list(range(12))


def test_those_who_were_lost_before_they_said_what_they_have_are_found_by_their_numbers() -> None:
    held = shares(61, 4, shuffle=True)
    missing = {name: held.pop(name) for name in ("1", "3")}
    assert [each.loaders for each in unheard(held.values())] == [each.loaders for each in missing.values()]
    resumed = [each._replace(first=1, skipped=1) for each in held.values()]
    assert unheard(resumed) == []


def test_what_nobody_can_tell_is_not_dealt_out() -> None:
    weighted: DataLoader[Any] = DataLoader(range(9), 3, sampler=torch.utils.data.WeightedRandomSampler([1.0] * 9, 9))  # pyright: ignore
    unknown = DataShard(0, 3, 0, True, [(describe(weighted, None), 3)])
    assert not unknown.is_known and inherited([(unknown, 0)], {"0": 3}) == {}
    assert unheard([unknown]) == []


def test_one_that_was_started_again_within_its_own_share_is_left_it() -> None:
    """It begins at another's place, behind its own: what lies between is left; what it goes on with is not."""
    held = shares(60, 3, shuffle=True)
    again = [held["0"]._replace(first=3, skipped=3), held["1"]._replace(first=4, skipped=4)]
    left = before(held["1"], again)
    assert samples(left, 1) == samples(held["1"], 1, 4)
    assert before(held["2"], again) == held["2"]
    behind = [held["1"]._replace(first=0, skipped=0)]
    assert samples(before(held["1"], behind), 1) == []


@pytest.mark.parametrize("has_ended", [False, True])
def test_by_another_number_of_ranks_what_a_lost_one_has_left_is_divided_with_the_rest(has_ended: bool) -> None:
    held = shares(60, 3, shuffle=True)
    (told, _), *_ = held["0"].loaders
    here = {"ended": True} if has_ended else {"taken": 4, "made": 4, "drawn": {}, "share": told}
    there = {"taken": 5, "made": 5, "drawn": {}, "share": held["2"].loaders[0][0]}
    unsaved = {"gradients": {}, "left": [["1", list(held["1"]), 2]]}
    common: dict[str, Any] = {"random": {"torch": b"1"}, "unsaved": unsaved}
    states = [{**common, "loaders": [position]} for position in (here, here, there)]  # the lost one's is another's
    found = [resized(states, rank, 2) for rank in range(2)]
    left = [index for state in found for index in state["loaders"][0]["share"]["indices"].tolist()]
    own = [] if has_ended else samples(held["0"], 4)
    expected = sorted([*own, *samples(held["1"], 2), *samples(held["2"], 5)])
    assert set(left) == set(expected) and len(left) - len(expected) in (0, 1)
    assert [state["unsaved"]["left"] for state in found] == [[], []]


@given(
    length=st.integers(1, 40), ranks=st.integers(1, 9), shuffle=st.booleans(), drop_last=st.booleans(),
    seed=st.integers(0, 9), epoch=st.integers(0, 9),
)  # fmt: skip
def test_the_indices_of_a_rank_are_those_of_torchs_sampler(
    length: int, ranks: int, shuffle: bool, drop_last: bool, seed: int, epoch: int
) -> None:
    for rank in range(ranks):
        settings: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
        sampler = DistributedSampler(cast(Any, range(length)), ranks, rank, **settings)
        sampler.set_epoch(epoch)
        told = {"length": length, "num_replicas": ranks, "rank": rank, "epoch": epoch, **settings}
        assert distributed(told).tolist() == list(sampler)


def test_the_order_of_an_epoch_is_drawn_once_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks wait for this when one comes back."""
    drawn: list[int] = []
    draw = torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda n, **kwargs: drawn.append(n) or draw(n, **kwargs))
    held = shares(1009, 5, shuffle=True, seed=71)
    drawn.clear()
    assert len(JoinedBatches.of([(each, 0) for each in held.values()])) == 4 * 68 + 67
    assert drawn == [1009]


def test_lost_ranks_of_unequal_batch_sizes_are_inherited_in_the_smallest() -> None:
    held = {name: shares(60, 3, size)[name] for name, size in (("0", 7), ("1", 4), ("2", 1))}
    dealt = inherited([(held["0"], 2), (held["2"], 5)], {"1": 5})
    ((told, count),) = dealt["1"].loaders
    assert told is not None and told["batch_size"] == 1 == len(torch.unique(told["indices"])) // count
    assert sorted(samples(dealt["1"])) == sorted(samples(held["0"], 2) + samples(held["2"], 5))

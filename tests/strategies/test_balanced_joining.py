"""Batches by speed where ranks are lost and come back, and from a checkpoint of more ranks: real processes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.strategies import test_joining
from tests.strategies.balanced import LENGTH
from tests.strategies.balanced_joining import LENGTH as LONG
from tests.strategies.balanced_joining import STEP
from tests.support import run_ranks

pytestmark = pytest.mark.processes


def test_one_that_comes_back_has_the_same_sizes_as_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the epoch is dealt out in the smallest rank's batches first, and in sizes by speed at once."""
    monkeypatch.setattr(test_joining, "TRAIN", "tests.strategies.balanced_joining:train")
    with test_joining.ranks(tmp_path, 1, deaths={"1": ("step", 1, 4)}) as group:
        results = group.join()
    said = test_joining.told(results, [0, 2, 3])
    assert len({str(each["sizes"]) for each in said}) == 1 and sum(said[0]["sizes"].values()) == STEP
    came_at = said[-1]["came_at"]
    for epoch in map(str, range(came_at + 1, said[0]["epochs"])):
        assert Counter(i for each in said for i in each["trained"][epoch]) == Counter(range(LONG))
        assert set(_samples(said, epoch)[:-1]) == {STEP}
    within = _samples(said, str(came_at))
    assert within[2:-1] == [STEP] * (len(within) - 3)  # but for its first steps, and the last one of the epoch


def test_a_slow_rank_sets_no_size_where_fewer_ranks_go_on(tmp_path: Path) -> None:
    begun = [[ids for ids in each if ids[:2] < [1, 5]] for each in _trained(tmp_path, 4, [9.0, 1.0, 1.0, 1.0], 42)]
    rest = _trained(tmp_path, 3, [1.0, 1.0, 1.0])
    for epoch in range(2):
        taken = [ids for each in begun + rest for number, _, ids in each if number == epoch]
        assert Counter(i for ids in taken for i in ids) == Counter(range(LENGTH))


def _samples(said: list[Any], epoch: str) -> list[int]:
    """Of all ranks, in each step of an epoch since the last one came.

    Each counts its own steps, and in the last one of an epoch some may have no part; who comes within it counts on from
    rank 0's.
    """
    begun = [min(map(int, each["lengths"][epoch])) for each in said]
    came, begun[-1] = begun[-1], begun[0] if said[-1]["came_at"] == int(epoch) else begun[-1]
    lengths = [
        {int(step) - first: samples for step, samples in each["lengths"][epoch].items()}
        for each, first in zip(said, begun, strict=True)
    ]
    steps = range(came - begun[-1], max(step for each in lengths for step in each) + 1)
    return [sum(each.get(step, 0) for each in lengths) for step in steps]


def _trained(folder: Path, ranks: int, costs: list[float], stops_after: int = -1) -> list[Any]:
    """Of each rank, its batches."""
    arguments = {"folder": str(folder), "costs": costs, "stops_after": stops_after}
    run_ranks("tests.strategies.balanced_resized:train", ranks, kwargs=arguments)
    return [json.loads((folder / f"{ranks}.{rank}.json").read_text()) for rank in range(ranks)]

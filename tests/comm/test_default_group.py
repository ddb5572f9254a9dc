"""torch's default group within one process: its time limit, its numbers, and how it is formed again."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_async.comm.default_group import DefaultGroup, DefaultGroupWatch, Numbering
from lightning_async.errors import CollectiveError


class Waiting(DefaultGroupWatch):
    """Knows of a rank that waits at a sync point, after so many collectives; infinite if none does."""

    fewest = math.inf

    def check(self, number: float) -> None:
        if self.fewest < number:
            raise CollectiveError("another rank waits at a sync point.")


def pair() -> list[DefaultGroup]:
    store = dist.HashStore()
    numbers = [Numbering(rank, 2, (0, 0)) for rank in range(2)]
    cpu = torch.device("cpu")
    return [DefaultGroup(lambda: store, each, "gloo", cpu, "127.0.0.1") for each in numbers]


def sum_of_step(group: DefaultGroup) -> float:
    group.begin_step()
    total = torch.ones(1)
    group.allreduce([total], dist.AllreduceOptions())
    return float(total)


def sums(groups: list[DefaultGroup]) -> list[float]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(sum_of_step, groups))


def test_collectives_have_torchs_own_limit() -> None:
    groups = pair()
    assert sums(groups) == [2.0, 2.0]
    for group in groups:
        assert group._group is not None and group._group.pg.options._timeout == timedelta(minutes=30)
        group.shutdown()


def test_a_rank_that_loses_batches_to_a_waiting_one_meets_it_after_the_sync_point() -> None:
    first, second = groups = pair()
    first.watch = watch = Waiting()
    assert sums(groups) == [2.0, 2.0]
    watch.fewest = second.count
    for _ in range(3):  # the last ones while the group is formed, which the other rank does not do
        with pytest.raises(CollectiveError):
            sum_of_step(first)
        assert watch.fewest < first.number
    watch.fewest = math.inf
    for group in groups:
        group.stage = (0, 1)
    assert sums(groups) == [2.0, 2.0]
    for group in groups:
        group.shutdown()


@pytest.mark.parametrize("latches", [True, False])
def test_numbers_that_a_batch_has_read_hold_to_its_end(latches: bool) -> None:
    group = pair()[0]
    group.begin_step(latches)
    assert group.size() == 2
    group.renumber(Numbering(0, 1, (0, 1)))
    assert group.size() == (2 if latches else 1)
    if latches:
        with pytest.raises(CollectiveError, match="ranks were lost"):
            group.allreduce([torch.ones(1)], dist.AllreduceOptions())
    assert sum_of_step(group) == group.size() == 1
    group.shutdown()

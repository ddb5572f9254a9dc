"""Batches of unequal size: steps take all ranks equally long, and have the samples that they have without."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch

from lightning_async import BalancedBatchSizes
from tests.strategies import problem
from tests.strategies.balanced import COSTS, LENGTH, RANKS, SIZE, dataset
from tests.strategies.problem import momentum
from tests.strategies.workers import Outcomes

pytestmark = pytest.mark.processes

STEP, SIZES = RANKS * SIZE, [10, 10, 9, 3]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes("tests.strategies.balanced", tmp_path_factory.mktemp("balanced"), RANKS)


def epochs(told: list[Any]) -> list[list[list[list[int]]]]:
    """Of each epoch and rank, the samples of its batches."""
    number = 1 + max(epoch for each in told for epoch, *_ in each["batches"])
    return [[[ids for epoch, _, ids in each["batches"] if epoch == now] for each in told] for now in range(number)]


def once(told: list[Any], length: int = LENGTH) -> None:
    """Each sample in each epoch."""
    for of_ranks in epochs(told):
        assert Counter(i for batches in of_ranks for ids in batches for i in ids) == Counter(range(length))


def steps_of(of_ranks: list[list[list[int]]]) -> list[list[list[int]]]:
    """Of each step, the samples of each rank's batch."""
    return [[batches[s] if s < len(batches) else [] for batches in of_ranks] for s in range(max(map(len, of_ranks)))]


def seconds(steps: list[list[list[int]]]) -> float:
    """By the ranks' clocks, where each waits for the slowest."""
    return sum(max(cost * len(ids) for cost, ids in zip(COSTS, step, strict=True)) for step in steps)


def alone(told: list[Any], size: int = 1) -> list[float]:
    """One process in float64, on what all ranks' batches are together; ``size`` batches a step."""
    module, data = problem.network().double(), dataset()
    stepper = momentum(module.parameters())
    for of_ranks in epochs(told):
        steps = steps_of(of_ranks)
        for at in range(0, len(steps), size):
            ids = [i for step in steps[at : at + size] for batch in step for i in batch]
            x, y = (torch.stack([data[i][part] for i in ids]).double() for part in (0, 1))  # pyright: ignore
            stepper.zero_grad()
            problem.loss_of(module, (x, y)).backward()
            stepper.step()
    return problem.flat(module)


@pytest.mark.parametrize(
    ("name", "size"),
    [("in_step", 1), ("within_an_epoch", 1), ("windows_of_two", 2), ("without_room", 1), ("without_room_backwards", 1)],
)
def test_numbers_are_those_of_one_process(ranks: Outcomes, name: str, size: int) -> None:
    told = ranks(name)
    once(told)
    expected = alone(told, size)
    for each in told:
        assert problem.distance(each["flat"], expected) < 1e-5
        assert each["digest"] == told[0]["digest"]


def test_each_step_has_the_samples_that_it_has_without(ranks: Outcomes) -> None:
    for number, of_ranks in enumerate(epochs(ranks("in_step"))):
        order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(number)).tolist()
        found = [sorted(i for ids in step for i in ids) for step in steps_of(of_ranks)]
        assert found == [sorted(order[at : at + STEP]) for at in range(0, LENGTH, STEP)]


def test_a_step_takes_all_ranks_equally_long(ranks: Outcomes) -> None:
    """The first epoch has equal batches; 2.5 is the ideal, 10 / 4."""
    told = ranks("in_step")
    first, *others = (steps_of(of_ranks) for of_ranks in epochs(told))
    for steps in others:
        assert [len(ids) for ids in steps[0]] == SIZES
        assert seconds(first) / seconds(steps) > 2.3
    assert list(told[0]["sizes"].values()) == SIZES
    assert len(told[0]["told"]) == 2 and told[1]["told"] == []  # equal ones, and these


@pytest.mark.parametrize("name", ["within_an_epoch", "windows_of_two", "averaged"])
def test_sizes_change_within_an_epoch_at_a_sync_point(ranks: Outcomes, name: str) -> None:
    told = ranks(name)
    once(told, 4 * LENGTH if name == "averaged" else LENGTH)
    first = [[len(ids) for ids in steps] for steps in epochs(told)[0]]
    assert list(told[0]["sizes"].values()) == SIZES
    assert all(mine[0] == SIZE for mine in first) and first[0][-2] > 8 > first[3][-2]
    assert len({each["digest"] for each in told}) == 1


def test_windows_of_any_length(ranks: Outcomes) -> None:
    told = ranks("windows_until_reduced")
    once(told)
    assert list(told[0]["sizes"].values()) == SIZES
    assert len({each["digest"] for each in told}) == 1


def test_bounds_are_kept(ranks: Outcomes) -> None:
    told = ranks("bounded")
    once(told)
    assert [len(ids) for ids in steps_of(epochs(told)[0])[0]] == [9, 8, 8, 8]
    assert [len(ids) for ids in steps_of(epochs(told)[1])[0]] == [9, 9, 9, 6]


@pytest.mark.parametrize("name", ["without_room", "without_room_backwards"])
def test_a_rank_without_memory_takes_smaller_batches(ranks: Outcomes, name: str) -> None:
    """A batch of 8 has no room in 7: it is trained on in pieces of 4, which is what the rank takes from then on."""
    told = ranks(name)
    assert [each["too_large"] for each in told] == [0, 1, 0, 0]
    assert told[0]["sizes"]["1"] == 4 and sum(told[0]["sizes"].values()) == STEP


def test_it_goes_on_from_a_checkpoint_to_the_bit(ranks: Outcomes) -> None:
    for told in ranks("saved_and_resumed"):
        whole, begun, rest = told["whole"], told["begun"], told["rest"]
        assert len(begun["batches"]) == 49 and begun["batches"] == whole["batches"][:49]
        assert rest["batches"] == whole["batches"][43:]
        assert rest["digest"] == whole["digest"] and rest["sizes"] == whole["sizes"]
        assert rest["steps"] == whole["steps"]


def test_it_goes_on_from_the_end_of_an_epoch(ranks: Outcomes) -> None:
    told = ranks("resumed_behind_an_epoch")
    once(told)
    steps = steps_of(epochs(told)[1])
    assert [each["resumed"] for each in told] == [len(steps)] * RANKS
    assert {sum(map(len, step)) for step in steps[:-1]} == {STEP} and [len(ids) for ids in steps[-2]] == SIZES


def test_where_there_is_less_than_a_step(ranks: Outcomes) -> None:
    once(ranks("fewer_than_a_step"), 6)


def test_a_loader_of_full_batches_only(ranks: Outcomes) -> None:
    for of_ranks in epochs(ranks("whole_steps_only")):
        counted = Counter(i for batches in of_ranks for ids in batches for i in ids)
        assert set(counted.values()) == {1} and counted.total() == LENGTH - LENGTH % STEP


REFUSED = {
    "servers": "`BalancedBatchSizes` is for strategies that weight what ranks exchange by samples, and `Param",
    "DDP": "`BalancedBatchSizes` is for strategies that weight what ranks exchange by samples, and `DDPStrategy`",
    "weighting": "`AsyncAveragingStrategy(weighting='steps')` beside `BalancedBatchSizes`: take 'samples'",
    "accumulation": "`AdaptiveGradientAccumulation` beside `BalancedBatchSizes`",
    "scheduler": "The Trainer has a `GradientAccumulationScheduler` beside `BalancedBatchSizes`: leave it out",
    "overfit": "`Trainer(overfit_batches=2)` beside `BalancedBatchSizes`",
    "maximum": "(minimum=1, maximum=7)`: 4 ranks are to take 32 samples in a step, 8 each on average.",
    "minimum": "(minimum=9, maximum=None)`: 4 ranks are to take 32 samples in a step",
    "stream": "`BalancedBatchSizes`: which samples a Stream gives to which rank is not known.",
    "batches": "its batches are made by a Halves.",
    "no batches": "the train dataloader makes no batches (`batch_size=None`).",
    "partition": "a PartitionedSampler says which samples are whose.",
    "weighted": "which samples a DistributedSamplerWrapper gives to which rank is not known.",
    "two loaders": "there are 2 train dataloaders.",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_balanced_is_refused_by_name(ranks: Outcomes, what: str) -> None:
    for told in ranks("refused"):
        assert REFUSED[what] in told[what]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"minimum": 0}, ValueError, "BalancedBatchSizes(minimum=0)` must be >= 1"),
        ({"minimum": 4, "maximum": 3}, ValueError, "BalancedBatchSizes(maximum=3)` must be >= 4"),
        ({"every": 0}, ValueError, "BalancedBatchSizes(every=0)` must be >= 1"),
        ({"global_batch_size": 2.5}, TypeError, "BalancedBatchSizes(global_batch_size=2.5)` must be an int"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        BalancedBatchSizes(**arguments)

"""Evaluations: each sample once, on any number of ranks, and metrics of all of them, whatever their states are."""

from __future__ import annotations

import copy
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import CatMetric, Metric, PearsonCorrCoef
from torchmetrics.retrieval import RetrievalMAP

from lightning_async.checkpoint.store import CheckpointStore
from lightning_async.engine.collectives import LightningCollectives
from lightning_async.trainer.namespace import sync_metrics_through
from tests.comm.simulated import InProcessWorld
from tests.strategies.evaluations import SIZES, Evaluated
from tests.strategies.workers import Outcomes
from tests.support import run_ranks

SCENARIOS = "tests.strategies.evaluations"
pytestmark = pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
"""torchmetrics warns on a rank without a sample."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes(SCENARIOS, tmp_path_factory.mktemp("evaluations"), nprocs=3)


def alone() -> dict[str, Any]:
    """What one process computes of all samples of all loaders."""
    module = Evaluated()
    module.log = lambda *_, **__: None
    for number, size in enumerate(SIZES):
        module.validation_step([torch.arange(float(size)).view(-1, 1)], 0, number)
    metrics = (module.total, module.precision, module.correlation)
    return {type(metric).__name__: float(metric.compute()) for metric in metrics}


SAMPLES = sorted(float(sample) for size in SIZES for sample in range(size))


@pytest.mark.processes
@pytest.mark.parametrize("stage", ["fit", "fit_with_gradients", "fit_with_servers", "validate", "test"])
def test_each_sample_is_evaluated_once(ranks: Outcomes, stage: str) -> None:
    told = ranks(stage)
    expected = alone()
    for answer in told:
        logged = answer["logged"]
        for number, size in enumerate(SIZES):
            assert logged[f"sum/dataloader_idx_{number}"] == size * (size - 1) / 2
            assert logged[f"mean_epoch/dataloader_idx_{number}"] == pytest.approx((size - 1) / 2, rel=1e-6)
            assert logged[f"largest/dataloader_idx_{number}"] == size - 1
        assert logged["last/dataloader_idx_1"] == 1.0
        assert answer["computed"].pop("all") == SAMPLES
        assert answer["computed"] == pytest.approx(expected, rel=1e-5)
        assert answer.get("results", 3) == 3
    # The first rank has the most batches, and collects all samples in its steps.
    assert sorted(told[0]["seen"]) == SAMPLES
    assert told[0]["rows"] == [3, 1, 2, 3, 3, 1]


@pytest.mark.processes
def test_each_sample_is_predicted_once(ranks: Outcomes) -> None:
    told = ranks("predict")
    predicted = [[answer["predicted"][number] for answer in told] for number in range(3)]
    assert predicted == [[[float(sample) for sample in range(rank, size, 3)] for rank in range(3)] for size in SIZES]
    assert sorted(told[0]["seen"]) == SAMPLES


@pytest.mark.processes
@pytest.mark.parametrize(("limit", "counts"), [("limited_to_a_half", (12, 3)), ("limited_to_one", (12, 2, 3))])
def test_limits_count_batches_of_each_rank(ranks: Outcomes, limit: str, counts: tuple[int, ...]) -> None:
    for answer in ranks(limit):
        for number, count in enumerate(counts):
            assert answer["logged"][f"sum/dataloader_idx_{number}"] == count * (count - 1) / 2


@pytest.mark.processes
def test_a_rank_whose_own_loaders_are_empty_takes_part(ranks: Outcomes) -> None:
    for number, answer in enumerate(ranks("own_loaders")):
        # The ranks have evaluated 0 and 1, and 0 to 3.
        assert answer["fit"] == answer["validate"] == [7.0, [0.0, 0.0, 1.0, 1.0, 2.0, 3.0]]
        assert answer["predict"] == [[], [1, 1], [1, 1, 1, 1]][number]
        assert answer["nowhere"] == {}, "as in Lightning, an evaluation without a batch on any rank is left out"


@pytest.mark.processes
def test_a_signal_within_a_validation_ends_it_in_a_step(ranks: Outcomes) -> None:
    for number, answer in enumerate(ranks("told")):
        assert answer["codes"] == [0, 75, 0]
        assert answer["saved"] == [4, "preemption", [0, 1, 2]]
        assert answer["first"]["2"] == 7
        assert 2 <= answer["first"]["4"] < 7, "a few batches after the second one"
        assert answer["second"] == {"4": 7, "6": 7}, "the whole validation again"
        assert answer["equal"], number


@pytest.mark.processes
def test_a_validation_of_other_weights_ends_before_a_save(ranks: Outcomes) -> None:
    for answer in ranks("told_with_other_weights"):
        assert answer["codes"] == [0, 75, 0]
        assert answer["first"] == {"2": 7, "4": 7}
        assert answer["equal"]


@pytest.mark.processes
@pytest.mark.parametrize("step", [0, 3])
def test_a_signal_within_a_long_step_saves_the_state_before(step: int, tmp_path: Path) -> None:
    kwargs = {"folder": str(tmp_path), "step": step}
    results = run_ranks("tests.strategies.evaluations:stop_in_a_step", 3, kwargs=kwargs, check=False, timeout=120)
    assert [result.returncode for result in results] == [75, 75, 75], "\n".join(map(str, results))
    saved = [entry for entry in CheckpointStore(tmp_path).entries() if entry.manifest is not None]
    assert [entry.step for entry in saved] == ([3] if step else []), "without a step there is nothing to save"


def of_three_ranks(make: Any, update: Any) -> list[Any]:
    """What each of three ranks computes of a metric that ``update`` has updated with the rank's samples."""

    def on_rank(collectives: Any) -> Any:
        world = LightningCollectives(collectives.fork("lightning"), deadline=timedelta(seconds=20))
        module = nn.ModuleDict({"metric": make()})
        metric: Any = module["metric"]
        update(metric, world.rank)
        undo = sync_metrics_through(lambda: world, module)
        clone = copy.deepcopy(metric)
        assert type(pickle.loads(pickle.dumps(metric))) is type(metric)
        results = [metric.compute(), clone.compute()]
        for each in undo:
            each()
        assert "_sync_dist" not in vars(metric)
        return results

    return InProcessWorld(3).run(on_rank, timedelta(seconds=40))


PARTS = ((0, 7), (7, 7), (7, 10))
"""The samples of each rank; the second has none."""


class Listed(Metric):
    whole: Any
    joined: Any

    def __init__(self) -> None:
        super().__init__()
        self.add_state("whole", [], dist_reduce_fx=None)
        self.add_state("joined", [], dist_reduce_fx="cat")

    def update(self, value: Any) -> None:
        self.whole.append(value)
        self.joined.append(value)

    def compute(self) -> Any:
        joined = torch.cat(self.joined) if isinstance(self.joined, list) else self.joined
        return torch.cat(self.whole), joined


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("columns", [(), (2,)])
def test_a_list_state_is_of_all_ranks(dtype: torch.dtype, columns: tuple[int, ...]) -> None:
    """One rank has no entry, and the others have unequal numbers of them, of unequal lengths."""

    # Above 2**24, where fp32 would lose integers.
    samples = (torch.arange(2**24, 2**24 + 10) % (2 if dtype is torch.bool else 2**30)).to(dtype)
    samples = samples.view(-1, *[1] * len(columns)).expand(-1, *columns).clone()

    def update(metric: Any, rank: int) -> None:
        (first, end) = PARTS[rank]
        for begin in range(first, end, 3):
            metric.update(samples[begin : min(begin + 3, end)])

    for results in of_three_ranks(Listed, update):
        for together in (state for result in results for state in result):
            assert together.dtype is dtype
            assert torch.equal(together, samples)


@pytest.mark.parametrize("kind", [CatMetric, RetrievalMAP, PearsonCorrCoef])
def test_a_metric_of_lists_is_that_of_one_process(kind: Any) -> None:
    value = torch.arange(10.0)

    def update(metric: Any, rank: int, parts: Any = PARTS) -> None:
        (first, end) = parts[rank]
        for begin in range(first, end, 2):
            part = value[begin : min(begin + 2, end)]
            if kind is RetrievalMAP:
                metric.update(torch.sin(part), part.long() % 2, indexes=part.long() // 4)
            elif kind is PearsonCorrCoef:
                metric.update(part + torch.cos(part), part)
            else:
                metric.update(part)

    single = kind()
    update(single, 0, ((0, 10),))
    for results in of_three_ranks(kind, update):
        for result in results:
            torch.testing.assert_close(result, single.compute())

"""Scenarios in which three ranks evaluate fewer or more samples than they can divide evenly."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, PearsonCorrCoef, SumMetric
from torchmetrics.retrieval import RetrievalMAP

from lightning_async import (
    AsyncAveragingStrategy,
    AsyncGradientStrategy,
    EveryNSteps,
    FaultTolerantCheckpoint,
    ParameterServerStrategy,
    Synchronous,
)
from lightning_async.checkpoint.store import CheckpointStore
from lightning_async.trainer.loops import preemption
from lightning_async.trainer.namespace import pl
from tests.strategies import problem
from tests.strategies.workers import Net, loader, make_trainer, rank, scenario

SIZES = (13, 2, 7)
"""Samples of each loader; three ranks have 5, 4 and 4 of the first, and the last rank has none of the second."""


def samples(size: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(size)).view(-1, 1))


class Gathering(pl.Callback):
    """A callback that collects on every rank what all ranks have evaluated in a step."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.rows: list[int] = []

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        if trainer.sanity_checking:
            return
        everyones = trainer.strategy.world.gather_objects(batch[0].flatten().tolist())
        self.seen += [sample for of_rank in everyones for sample in of_rank]
        self.rows.append(len(module.all_gather(torch.ones(()))))

    on_test_batch_end = on_validation_batch_end
    on_predict_batch_end = on_validation_batch_end


class Evaluated(Net):
    """A module that logs in every way, of several loaders."""

    def __init__(self, sizes: Sequence[int] = SIZES) -> None:
        super().__init__(pause_s=(0.0, 0.0, 0.0))
        self.sizes = sizes
        self.total = SumMetric()
        self.last = SumMetric()
        self.all = CatMetric()
        self.precision = RetrievalMAP()
        self.correlation = PearsonCorrCoef()
        self.computed: dict[str, Any] = {}

    def val_dataloader(self) -> Any:
        return [DataLoader(samples(size), batch_size=4 if size > 7 else 1) for size in self.sizes]

    test_dataloader = val_dataloader
    predict_dataloader = val_dataloader

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        value = batch[0][:, 0]
        count = len(value)
        self.log("sum", value.sum(), reduce_fx="sum", sync_dist=True)
        self.log("mean", value.mean(), batch_size=count, on_step=True, on_epoch=True, sync_dist=True)
        self.log("largest", value.max().double(), reduce_fx="max", sync_dist=True)
        if dataloader_idx == 1:
            # Only a rank with samples of this loader comes here.
            self.last.update(value)
            self.log("last", self.last)
        self.total.update(value)
        self.all.update(value)
        self.precision.update(torch.sin(value), value.long() % 2, indexes=value.long() // 2 + 10 * dataloader_idx)
        self.correlation.update(value + torch.cos(value), value)

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            metrics = (self.total, self.precision, self.correlation)
            self.computed = {type(metric).__name__: float(metric.compute()) for metric in metrics}
            self.computed["all"] = sorted(self.all.compute().tolist())
        for metric in (self.total, self.precision, self.correlation, self.all):
            metric.reset()

    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return batch[0][:, 0]


def averaging() -> Any:
    return AsyncAveragingStrategy(schedule=EveryNSteps(2), transport="torch")


def evaluated(strategy: Any, stage: str, sizes: Sequence[int] = SIZES, **options: Any) -> dict[str, Any]:
    """What a rank has logged, computed and gathered in one evaluation."""
    module = Evaluated(sizes)
    gathering = Gathering()
    trainer = make_trainer(strategy, callbacks=[gathering], devices=3, use_distributed_sampler=True, **options)
    run = getattr(trainer, stage)
    results = run(module, loader(problem.batches(0, 12))) if stage == "fit" else run(module)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    answer = {"logged": logged, "computed": module.computed, "seen": gathering.seen, "rows": gathering.rows}
    if stage == "predict":
        answer["predicted"] = [torch.cat(of_loader).tolist() if of_loader else [] for of_loader in results]
    elif stage != "fit":
        answer["results"] = len(results)
    return answer


@scenario
def fit() -> Any:
    return evaluated(averaging(), "fit")


@scenario
def fit_with_gradients() -> Any:
    return evaluated(AsyncGradientStrategy(transport="torch"), "fit", num_sanity_val_steps=0)


@scenario
def fit_with_servers() -> Any:
    return evaluated(ParameterServerStrategy(transport="torch"), "fit", num_sanity_val_steps=-1)


@scenario
def validate() -> Any:
    return evaluated(averaging(), "validate")


@scenario
def test() -> Any:
    return evaluated(averaging(), "test")


@scenario
def predict() -> Any:
    return evaluated(averaging(), "predict")


class Own(Evaluated):
    """A module whose loaders its user has divided: rank 0 has no sample, the others have 2 and 4 of one loader."""

    def __init__(self) -> None:
        super().__init__((0, 2, 4)[rank() : rank() + 1])
        self.allow_zero_length_dataloader_with_multiple_devices = True


@scenario
def own_loaders() -> Any:
    """Rank 0 has none, in every kind of evaluation; then no rank has any."""
    told: dict[str, Any] = {}
    for stage in ("fit", "validate", "predict"):
        module = Own()
        trainer = make_trainer(averaging(), devices=3, use_distributed_sampler=False)
        run = getattr(trainer, stage)
        results = run(module, loader(problem.batches(0, 4))) if stage == "fit" else run(module)
        told[stage] = [float(trainer.callback_metrics.get("sum", -1.0)), module.computed.get("all")]
        if stage == "predict":
            told[stage] = [len(batch) for batch in results or []]
    nowhere = Own()
    nowhere.sizes = (0,)
    make_trainer(averaging(), devices=3, use_distributed_sampler=False).validate(nowhere)
    told["nowhere"] = nowhere.computed
    return told


@scenario
def limited_to_a_half() -> Any:
    return evaluated(averaging(), "validate", (13, 7), limit_val_batches=0.5)


@scenario
def limited_to_one() -> Any:
    return evaluated(averaging(), "validate", limit_val_batches=1)


class Told(Evaluated):
    """A module of which rank 1 is told to stop in the second batch of a validation; ``swaps`` puts in other weights."""

    def __init__(self, told_at: int = -1, swaps: bool = False) -> None:
        super().__init__((21,))
        self.told_at = told_at
        self.swaps = swaps
        self.kept: list[Tensor] = []
        self.validated: dict[int, int] = {}

    def _swap(self) -> None:
        """As averages of weights are validated, past the counts of versions."""
        if self.swaps:
            kept = self.kept or [torch.zeros_like(each) for each in self.parameters()]
            self.kept = [each.detach().clone() for each in self.parameters()]
            for parameter, value in zip(self.parameters(), kept, strict=True):
                parameter.data.copy_(value)

    def on_validation_start(self) -> None:
        self._swap()

    def on_validation_end(self) -> None:
        self._swap()
        self.kept = []

    def val_dataloader(self) -> Any:
        return DataLoader(samples(21))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx, dataloader_idx)
        step = self.global_step
        self.validated[step] = self.validated.get(step, 0) + 1
        if rank() == 1 and batch_idx == 1 and step == self.told_at:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)


def fit_saving(folder: Path, module: Told) -> Any:
    """Fit, and return how it has ended."""
    strategy = AsyncAveragingStrategy(schedule=Synchronous(), transport="torch")
    callbacks = [FaultTolerantCheckpoint(str(folder), every_n_train_steps=1000)]
    options = {"devices": 3, "use_distributed_sampler": True, "val_check_interval": 2, "enable_checkpointing": True}
    try:
        trainer = make_trainer(strategy, callbacks=callbacks, **options)
        trainer.fit(module, loader(problem.batches(0, 18)))
    except SystemExit as ended:
        return ended.code
    return 0


def told_in_validation(folder: Path, swaps: bool) -> dict[str, Any]:
    whole = Told(swaps=swaps)
    first = Told(told_at=4, swaps=swaps)
    second = Told(swaps=swaps)
    codes = [fit_saving(folder / "whole", whole)]
    codes.append(fit_saving(folder / "parts", first))
    manifest = CheckpointStore(folder / "parts").entries()[0].manifest
    codes.append(fit_saving(folder / "parts", second))
    return {
        "codes": codes,
        "saved": [manifest.step, manifest.reason, list(manifest.ranks)] if manifest else [],
        "first": {str(step): count for step, count in first.validated.items()},
        "second": {str(step): count for step, count in second.validated.items()},
        "equal": problem.digest(whole) == problem.digest(second),
    }


@scenario
def told(folder: Path) -> Any:
    return told_in_validation(folder, swaps=False)


@scenario
def told_with_other_weights(folder: Path) -> Any:
    return told_in_validation(folder, swaps=True)


class Stuck(Told):
    """A module that is told to stop in a step that takes long."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == self.told_at:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        return super().training_step(batch, batch_idx)


def stop_in_a_step(folder: str, step: int) -> None:
    """In a rank: end in the midst of this step."""
    preemption._LATE_S = 1.0
    fit_saving(Path(folder), Stuck(told_at=step))

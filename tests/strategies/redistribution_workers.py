"""What a rank of the tests of inheritance does: it writes down each sample that it trains on, and may be killed."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_async import (
    AdaptiveGradientAccumulation,
    AsyncAveragingStrategy,
    AsyncGradientStrategy,
    DeltaMean,
    EveryNSteps,
    FaultTolerantCheckpoint,
    ParameterServerStrategy,
    Synchronous,
)
from lightning_async.data.partition import ByKey, Partition, PartitionedSampler, PartitionedStream, Random, Weighted
from lightning_async.trainer.namespace import pl, pytorch
from tests.strategies.failure_workers import digest
from tests.strategies.live_rank_workers import DEADLINES, NUMBER, RANKS, die

PERIOD = 3
PARTITIONS: dict[str, Partition] = {
    "random": Random(seed=3), "weighted": Weighted({0: 1.5, 2: 1.2}, seed=1), "by key": ByKey(lambda i: i % 9, seed=1),
}  # fmt: skip
STREAMS: dict[str, Partition] = {"in turn": Random(), "by key": ByKey(lambda sample: int(sample) % 9, seed=1)}


class Noted(pl.LightningModule):
    """Writes what it sees into a file, which outlives it.

    Args:
        folder: of the files.
        death: where this rank dies: "step", "validation" or "epoch end", the epoch, and the batch of it.
        alive: ranks that a rank waits for before it dies: they have merged what it has shared.
    """

    def __init__(self, folder: Path, death: Any, alive: list[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(1, 1)
        self.folder, self._death, self._alive, self.period = folder, death, alive, PERIOD
        self.told: list[Any] = []
        self.last: list[int] = []

    def _note(self, what: str, batch: Any, batch_idx: int) -> None:
        columns = [part.flatten().int().tolist() for part in (batch if isinstance(batch, list) else [batch])]
        self.told.append([what, self.current_epoch, batch_idx, columns])
        with open(self.folder / f"{NUMBER}.{what}.{self.current_epoch}", "a") as file:
            file.write(f"{batch_idx}\n")

    def _at(self, place: str, taken: int) -> None:
        if self._death != [place, self.current_epoch, taken]:
            return
        (self.folder / f"{NUMBER}.json").write_text(json.dumps(self.told))
        began = taken // self.period * self.period if place == "step" else 0
        deadline = time.monotonic() + 60
        for name in self._alive:
            while began and not self._has_begun(name, began):
                assert time.monotonic() < deadline
                time.sleep(0.005)
        die()

    def _has_begun(self, name: str, batch: int) -> bool:
        path = self.folder / f"{name}.train.{self.current_epoch}"
        return path.exists() and any(int(line) >= batch for line in path.read_text().splitlines())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._at("step", batch_idx)
        time.sleep(0.002)
        self._note("train", batch, batch_idx)
        if self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self.last.append(batch_idx)
        x = batch[0] if isinstance(batch, list) else batch
        loss = self.layer(x / 100).pow(2).mean()
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._at("validation", batch_idx)
        self._note("validate", batch, batch_idx)
        self.log("val_mean", batch.mean(), sync_dist=True, batch_size=len(batch))

    def on_validation_epoch_end(self) -> None:
        self.told.append(["validated", self.current_epoch, 0, []])

    def on_train_epoch_end(self) -> None:
        self.told.append(["epoch", self.current_epoch, float(self.trainer.num_training_batches), []])
        self._at("epoch end", 0)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        return {"optimizer": optimizer, "lr_scheduler": self.scheduler}


class Streamed(IterableDataset[Tensor]):
    """This rank's part of a stream, among those that are there."""

    trainer: Any = None

    def __iter__(self) -> Iterator[Tensor]:
        for sample in range(self.trainer.global_rank, 54, self.trainer.world_size):
            yield torch.tensor([float(sample)])


def stream(settings: dict[str, Any]) -> DataLoader[Any]:
    """54 samples that all ranks can read, divided among them."""
    workers = settings.get("num_workers", 0)
    samples = [torch.tensor([float(sample)]) for sample in range(54)]
    part = PartitionedStream(samples, STREAMS[settings["stream"]])
    return DataLoader(part, 2, num_workers=workers, persistent_workers=workers > 0)


def loaders(settings: dict[str, Any]) -> Any:
    """One loader, or two of unequal length in one."""
    if "stream" in settings:
        return stream(settings)
    size, workers = settings.get("batch_size", 2), settings.get("num_workers", 0)
    own, shuffle, found = settings.get("own_sampler"), settings.get("shuffle", False), []
    for samples in settings.get("samples", [54]):
        data: Any = torch.arange(samples).float().unsqueeze(1)
        sampler: Any = DistributedSampler(data, RANKS, NUMBER, shuffle=shuffle) if own else None
        if "partition" in settings:
            sampler = PartitionedSampler(data, PARTITIONS[settings["partition"]])
        loader = DataLoader(
            data, size, sampler=sampler, shuffle=shuffle if sampler is None else None, num_workers=workers,
            drop_last=settings.get("drop_last", False), persistent_workers=settings.get("persistent", False),
        )  # fmt: skip
        found.append(loader)
    if len(found) == 1:
        return found[0]
    return pytorch("utilities.combined_loader").CombinedLoader(found, settings["mode"])


@contextmanager
def caught() -> Iterator[list[str]]:
    """What the package warns of."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())
    logger = logging.getLogger("lightning_async")
    logger.addHandler(handler)
    yield texts
    logger.removeHandler(handler)


class OneCycle(Noted):
    """Follows a schedule that raises where it is stepped beyond its end."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        steps = self.trainer.estimated_stepping_batches
        cycle = {"cycle_momentum": False, "total_steps": steps}
        self.scheduler: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, **cycle)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.scheduler, "interval": "step"}}


def scheduled(folder: str, deaths: dict[str, Any], kind: str) -> Any:
    """Train under a schedule of all steps, and say how far it is."""
    alive = [str(rank) for rank in range(RANKS) if str(rank) not in deaths]
    module = OneCycle(Path(folder), deaths.get(str(NUMBER)), alive)
    module.period = PERIOD if kind == "averaging" else 1
    options: dict[str, Any] = {"timeouts": DEADLINES, "min_replicas": 1}
    strategy = {
        "averaging": lambda: AsyncAveragingStrategy(DeltaMean(), EveryNSteps(PERIOD), overlap=False, **options),
        "gradients": lambda: AsyncGradientStrategy(**options),
        "servers": lambda: ParameterServerStrategy(**options),
    }[kind]()
    fit = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=RANKS, max_epochs=3, default_root_dir=folder, logger=False,
        enable_model_summary=False, enable_checkpointing=False, enable_progress_bar=False, num_sanity_val_steps=0,
    )  # fmt: skip
    fit.fit(module, loaders({}))
    return {
        "told": module.told, "digest": digest(module), "last_epoch": module.scheduler.last_epoch,
        "total": module.scheduler.total_steps, "steps": fit.global_step,
    }  # fmt: skip


def inherit(folder: str, deaths: dict[str, Any], epochs: int = 2, trainer: Any = None, **settings: Any) -> Any:
    """Train, and say what was seen."""
    alive = [str(rank) for rank in range(RANKS) if str(rank) not in deaths]
    module = Noted(Path(folder), deaths.get(str(NUMBER)), alive)
    synchronous = settings.get("synchronous", False)
    module.period = 1 if synchronous else PERIOD
    strategy = AsyncAveragingStrategy(
        rule=DeltaMean(), schedule=Synchronous() if synchronous else EveryNSteps(PERIOD), overlap=False,
        timeouts=DEADLINES, min_replicas=1,
    )  # fmt: skip
    fit = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=RANKS, max_epochs=epochs, default_root_dir=folder, logger=False,
        enable_model_summary=False, enable_checkpointing=settings.get("saved", False), num_sanity_val_steps=0,
        callbacks=[
            *([AdaptiveGradientAccumulation(settings["windows"])] if "windows" in settings else []),
            *([FaultTolerantCheckpoint(folder, every_n_train_steps=1000)] if settings.get("saved") else []),
        ],
        **({"enable_progress_bar": False} | (trainer or {})),
    )  # fmt: skip
    numbers: Any = torch.arange(24).float().unsqueeze(1)
    validation = DataLoader(numbers, 2, num_workers=settings.get("val_workers", 0))
    with caught() as logged:
        Streamed.trainer = fit
        train: Any = DataLoader(Streamed(), 2) if settings.get("iterable") else loaders(settings)
        fit.fit(module, train, validation)
    bar: Any = fit.progress_bar_callback
    return {
        "bar": None if bar is None else bar.train_progress_bar.total,
        "told": module.told, "logged": logged, "digest": digest(module), "last": module.last,
        "epochs_scheduled": module.scheduler.last_epoch, "mean": float(fit.callback_metrics["val_mean"]),
        "batches": fit.num_training_batches, "val_check_batch": fit.val_check_batch,
    }  # fmt: skip

"""Ways of synchronous training that are bound by their gradients: Horovod's own, ours, and DDP."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from tests.benchmarks.measured import Job, Meter, RankResult, note_step

__all__ = ["DEPTH", "ddp", "optimizer_in_lightning", "optimizer_raw", "strategy", "synchronous", "windows"]

DEPTH = 24
SAMPLES = 2


class Noise(IterableDataset[Tensor]):
    """Random inputs, without end."""

    def __init__(self, seed: int, width: int) -> None:
        self.seed, self.width = seed, width

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            yield torch.randn(self.width, generator=generator)


def batches(job: Job) -> DataLoader[Tensor]:
    return DataLoader(Noise(job.rank, job.width), batch_size=SAMPLES)


class Wide(pl.LightningModule):
    """Next to no compute: what is measured is the gradients' way.

    Args:
        width: of its layers; 1024 makes 25 million parameters, 100 MB of gradients.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(width, width), nn.Tanh())]
        self.net = nn.Sequential(*layers)

    def loss(self, batch: Tensor) -> Tensor:
        return self.net(batch).pow(2).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class WideByHorovod(Wide):
    """The same, its optimizer wrapped by Horovod's: that waits before the step, so the step needs the gradients."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        # Lightning counts the steps of its own wrapper only.
        self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.increment_completed()

    def configure_optimizers(self) -> Any:
        return _wrapped(self)


def _wrapped(module: nn.Module) -> Any:
    hvd: Any = importlib.import_module("horovod.torch")
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    return hvd.DistributedOptimizer(optimizer, named_parameters=module.named_parameters())


def _fit(job: Job, module: Wide, strategy: Strategy, num_nodes: int = 1, accumulate: int = 1) -> RankResult:
    meter = Meter(job)
    trainer = pl.Trainer(
        accumulate_grad_batches=accumulate,
        accelerator="cpu",
        devices=1,
        num_nodes=num_nodes,
        strategy=strategy,
        callbacks=[meter],
        max_steps=(job.warmup + job.steps) // job.accumulate,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, batches(job))
    return meter.result


def ddp(job: Job) -> RankResult:
    """Lightning's DDPStrategy over Gloo."""
    strategy = DDPStrategy(process_group_backend="gloo")
    return _fit(job, Wide(job.width), strategy, job.num_replicas, job.accumulate)


def strategy(job: Job) -> RankResult:
    """The strategy under test."""
    from lightning_async import HorovodStrategy

    return _fit(job, Wide(job.width), HorovodStrategy())


def synchronous(job: Job) -> RankResult:
    """The same over torch."""
    from lightning_async import AsyncAveragingStrategy, Synchronous

    return _fit(job, Wide(job.width), AsyncAveragingStrategy(schedule=Synchronous()), num_nodes=job.num_replicas)


def windows(job: Job) -> RankResult:
    """Several batches a step, over torch, without a delay."""
    from lightning_async import AsyncGradientStrategy

    return _fit(job, Wide(job.width), AsyncGradientStrategy(job.accumulate, delay=0), num_nodes=job.num_replicas)


def optimizer_in_lightning(job: Job) -> RankResult:
    """`hvd.DistributedOptimizer` within Lightning, by manual optimization."""
    hvd: Any = importlib.import_module("horovod.torch")
    hvd.init()
    return _fit(job, WideByHorovod(job.width), SingleDeviceStrategy(torch.device("cpu")))


def optimizer_raw(job: Job) -> RankResult:
    """`hvd.DistributedOptimizer` in a loop of its own."""
    hvd: Any = importlib.import_module("horovod.torch")
    hvd.init()
    module = Wide(job.width)
    optimizer = _wrapped(module)
    result = RankResult()
    stream = iter(batches(job))
    while len(result.ends) < job.warmup + job.steps:
        batch = next(stream)
        optimizer.zero_grad()
        module.loss(batch).backward()
        optimizer.step()
        note_step(job, result)
    return result

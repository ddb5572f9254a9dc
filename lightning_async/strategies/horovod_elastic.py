"""`trainer.fit` under Horovod Elastic: entered again from memory when ranks are lost or come."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DistributedSampler

from lightning_async.comm.horovod.collectives import HorovodCollectives
from lightning_async.comm.horovod.elastic import Committed, run_elastic
from lightning_async.comm.horovod.world import HorovodWorld
from lightning_async.engine.world import World
from lightning_async.strategies.horovod import HorovodStrategy
from lightning_async.trainer.namespace import pytorch

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    Callback = pytorch("callbacks").Callback

__all__ = ["ElasticSampler", "fit_elastic"]

IN_MEMORY = "memory://committed"


@dataclass(frozen=True, kw_only=True)
class Commit:
    """One moment of training, equal on all ranks.

    Args:
        checkpoint: of Lightning, without its loops.
        step: optimizer steps.
        batches: batches of each rank, in all epochs.
        epoch: that is under way.
        samples: of this epoch, that all ranks together are done with.
    """

    checkpoint: dict[str, Any] | None = None
    step: int = 0
    batches: int = 0
    epoch: int = 0
    samples: int = 0


class ElasticSampler(DistributedSampler[Any]):
    """An epoch's samples for one of however many ranks there are, without those that are done with.

    Args:
        dataset: what is sampled; of constant length.
        num_replicas, rank: of this world.
        shuffle: in another order in each epoch.
        seed: of the order; equal on all ranks.
        epoch, samples: so many samples of this epoch are left out, in its order.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        num_replicas: int,
        rank: int,
        shuffle: bool = True,
        seed: int = 0,
        epoch: int = 0,
        samples: int = 0,
    ) -> None:
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=shuffle, seed=seed)
        self.epoch = epoch
        self._begun = (epoch, samples)

    @property
    def skipped(self) -> int:
        """Samples of the present epoch that are left out."""
        epoch, samples = self._begun
        return min(samples, len(self.dataset)) if self.epoch == epoch else 0  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        size: int = len(self.dataset)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(size, generator=generator).tolist() if self.shuffle else list(range(size))
        rest = order[self.skipped :]
        total = len(self) * self.num_replicas
        rest += (rest * math.ceil(total / max(1, len(rest))))[: total - len(rest)]
        return iter(rest[self.rank : total : self.num_replicas])

    def __len__(self) -> int:
        return math.ceil((len(self.dataset) - self.skipped) / self.num_replicas)  # type: ignore[arg-type]


class _Commits(Callback):
    """Commits every so many steps and at the end of each epoch; a fit that is entered again begins from there."""

    def __init__(self, committed: Committed[Commit], every: int) -> None:
        self._committed, self._every = committed, every
        self._sampler: ElasticSampler | None = None
        self._batch_size = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        begun = self._committed.value
        fit: Any = trainer.fit_loop
        # A new fit, in the middle of an epoch: its samples so far are left out by the sampler, not by the loops.
        for progress in (fit.epoch_progress.current, fit.epoch_progress.total):
            progress.ready = progress.started = progress.processed = progress.completed = begun.epoch
        batches = fit.epoch_loop.batch_progress.total
        batches.ready = batches.started = batches.processed = batches.completed = begun.batches
        fit.epoch_loop._batches_that_stepped = begun.step
        steps = fit.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
        if not pl_module.automatic_optimization:
            steps = fit.epoch_loop.manual_optimization.optim_step_progress.total
        steps.ready = steps.completed = begun.step
        if begun.samples:  # the loops take this epoch's number of batches for that of all
            trainer.reload_dataloaders_every_n_epochs = 1  # pyright: ignore[reportAttributeAccessIssue]
        strategy: Any = trainer.strategy
        process = strategy.process_dataloader
        strategy.process_dataloader = lambda loader: process(self._elastic(trainer, loader))

    def _elastic(self, trainer: Trainer, loader: Any) -> Any:
        """Lightning's distributed sampler, but for the samples that are done with."""
        sampler = getattr(loader, "sampler", None)
        if not trainer.training or not isinstance(sampler, DistributedSampler):
            return loader
        begun = self._committed.value
        self._sampler = ElasticSampler(
            sampler.dataset,
            num_replicas=trainer.world_size,
            rank=trainer.global_rank,
            shuffle=sampler.shuffle,
            seed=sampler.seed,
            epoch=begun.epoch,
            samples=begun.samples,
        )
        self._batch_size = loader.batch_size or 1
        return pytorch("utilities.data")._update_dataloader(loader, self._sampler)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._committed.value.checkpoint is None:
            self._commit(trainer, 0, 0)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        steps = trainer.global_step
        if steps > self._committed.value.step and steps % self._every == 0:
            samples = (batch_idx + 1) * self._batch_size * trainer.world_size
            self._commit(trainer, trainer.current_epoch, samples + (self._sampler.skipped if self._sampler else 0))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._commit(trainer, trainer.current_epoch + 1, 0)

    def _commit(self, trainer: Trainer, epoch: int, samples: int) -> None:
        loops: Any = trainer.fit_loop.epoch_loop
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        del checkpoint["loops"]
        commit = Commit(
            checkpoint=_to_memory(checkpoint),  # a copy: training goes on with the tensors
            step=trainer.global_step,
            batches=loops.batch_progress.total.ready,
            epoch=epoch,
            samples=samples,
        )
        self._committed.commit(commit)


def fit_elastic(
    make_trainer: Callable[[], Trainer],
    module: LightningModule,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    *,
    datamodule: Any = None,
    commit_every: int = 10,
    gloo_timeout: timedelta = timedelta(seconds=30),
) -> Trainer:
    """`trainer.fit`, for ranks that come and go: ``horovodrun --min-np 1 --max-np 4 --host-discovery-script ...``.

    Every so many steps, and at the end of every epoch, all ranks commit a checkpoint in memory. When a rank is lost,
    the others go back to the last one and train on without it; a rank that joins is given it. The rest of the epoch's
    samples is dealt out anew.

    Args:
        make_trainer: makes a new Trainer with ``strategy=HorovodStrategy()``; called for every world.
        module: what is trained.
        train_dataloaders, val_dataloaders, datamodule: as for `Trainer.fit`.
        commit_every: steps between two commits: so many are lost at most. A commit copies the model and the
            optimizers' state. Default 10.
        gloo_timeout: how long a rank that is lost without a trace (a host without power) goes unnoticed.

    Returns:
        The last Trainer.

    Raises:
        ValueError: ``commit_every`` is not positive, or the Trainer has another strategy.
    """
    if commit_every < 1:
        raise ValueError(f"`fit_elastic(commit_every={commit_every})` must be at least 1.")
    committed = Committed(Commit())
    trainers = []

    def train() -> None:
        trainer = make_trainer()
        strategy: Any = trainer.strategy
        if not isinstance(strategy, HorovodStrategy):
            raise ValueError(
                f"`fit_elastic` trains with `Trainer(strategy=HorovodStrategy())`; `make_trainer` chose {strategy!r}."
            )
        trainers[:] = [trainer]
        callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        callbacks.insert(0, _Commits(committed, commit_every))
        path = None
        if committed.value.checkpoint is not None:
            path, strategy.memory = IN_MEMORY, {IN_MEMORY: committed.value.checkpoint}
        trainer.fit(module, train_dataloaders, val_dataloaders, datamodule=datamodule, ckpt_path=path)

    run_elastic(train, committed, _broadcast, gloo_timeout)
    return trainers[0]


def _broadcast(obj: Any) -> Any:
    """Rank 0's object, between two fits or within one."""
    world = HorovodWorld.join()
    world.num_runs += 1
    collectives = HorovodCollectives(world, name=f"run{world.num_runs}")
    try:
        return World(collectives).broadcast(obj)
    finally:
        collectives.close()


def _to_memory(value: Any) -> Any:
    """A copy that shares nothing, its tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return type(value)((key, _to_memory(each)) for key, each in value.items())
    if type(value) in (list, tuple):
        return type(value)(_to_memory(each) for each in value)
    return copy.deepcopy(value)

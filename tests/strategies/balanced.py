"""Scenarios of batches of unequal size on four ranks, of which one is 3 times slower by a clock of its own."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, WeightedRandomSampler

from lightning_async import (
    AdaptiveGradientAccumulation,
    AsyncAveragingStrategy,
    AsyncGradientStrategy,
    BalancedBatchSizes,
    DeltaMean,
    EveryNSteps,
    ParameterServerStrategy,
    PartitionedSampler,
    Synchronous,
    Timeouts,
)
from lightning_async.callbacks.checkpoint import FaultTolerantCheckpoint
from lightning_async.checkpoint.store import CheckpointStore
from lightning_async.checkpoint.writer_process import DirectoryLock
from lightning_async.engine.shared_state import Vote
from lightning_async.errors import PeerLost
from lightning_async.trainer.namespace import pytorch
from tests.strategies import problem
from tests.strategies.problem import momentum
from tests.strategies.workers import PATIENT, Net, logged, make_trainer, rank, scenario

RANKS, SIZE, LENGTH = 4, 8, 1003
HASTY = Timeouts(grace=timedelta(seconds=0.05))
"""Headers go on without a rank that is in the middle of a batch."""
COSTS = (1000.0, 1010.0, 1030.0, 3000.0)
"""Seconds for a sample, that nobody waits for: what ranks really wait is nothing beside it. By these, of 32 samples the
ranks have 10, 10, 9 and 3."""


def dataset(length: int = LENGTH) -> list[tuple[Tensor, Tensor, int]]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(length, problem.FEATURES, generator=generator)
    return [(x[i], x[i].sin().sum().view(1), i) for i in range(length)]


class Halves(BatchSampler):
    """Batches of a kind of its own."""

    def __init__(self, sampler: Any, batch_size: int = 4, drop_last: bool = False) -> None:
        super().__init__(sampler, batch_size, drop_last)


class Interrupted(Exception):
    pass


class Noted(Net):
    """Notes which samples each batch has, and moves its rank's clock."""

    def __init__(self, room: int | None = None, within: str = "forward", hears_at: int = -1, **options: Any) -> None:
        super().__init__(**options)
        self.hears_at, self.stops_after = hears_at, -1
        self.now, self.room, self.within, self.too_large = 0.0, room, within, 0
        self.batches: list[list[Any]] = []

    def on_train_start(self) -> None:
        if (pacing := getattr(self.trainer.strategy, "pacing", None)) is not None:
            pacing.now = lambda: self.now

    def _hear(self, behind: int) -> None:
        """Headers tell rank 0 how fast all are, and it calls them; nobody comes to the end of the epoch before."""
        sync_points = self.trainer.strategy.sync_points
        (callback,) = (each for each in self.trainer.callbacks if isinstance(each, BalancedBatchSizes))  # pyright: ignore
        if rank() == 0 and behind == 0:
            ring = self.trainer.strategy.averager.control.ring  # for a header
            until(lambda: ring() or (len(sync_points.paces) == RANKS and all(sync_points.speeds.values())))
        if rank() != 0 and behind == 3:
            until(lambda: Vote.DECIDE in sync_points.agreed or callback.batch_sizes["3"] != SIZE)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, ids = batch
        if self.hears_at >= 0 and not self.trainer.current_epoch:
            self._hear(batch_idx - self.hears_at)
        lacks = rank() == 1 and self.room is not None and len(ids) > self.room
        self.too_large += lacks
        if self.trainer.global_step == self.stops_after:
            raise Interrupted
        if lacks and self.within == "forward":
            raise torch.OutOfMemoryError("no room for so many")
        self.now += COSTS[rank()] * len(ids)
        loss = problem.loss_of(self.net, (x, y))
        if lacks:
            loss.register_hook(_fail)
            return loss + 0.0
        if self.batches and self.batches[-1][:2] == [self.trainer.current_epoch, batch_idx]:
            self.batches[-1][2] += ids.tolist()  # another piece of it
        else:
            self.batches.append([self.trainer.current_epoch, batch_idx, ids.tolist()])
        return loss


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 40.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _fail(gradient: Tensor) -> None:
    raise torch.OutOfMemoryError("no room for so many gradients")


def train(strategy: Any, callback: Any, module: Noted | None = None, length: int = LENGTH, **options: Any) -> Any:
    module = module or Noted(optimizer=momentum)
    callbacks = [*([callback] if callback is not None else []), *options.pop("callbacks", [])]
    trainer = make_trainer(
        strategy, callbacks=callbacks, use_distributed_sampler=True,
        **({"max_epochs": 3, "devices": RANKS} | options),
    )  # fmt: skip
    data = DataLoader(dataset(length), SIZE, shuffle=True)  # pyright: ignore[reportArgumentType]
    events = logging.getLogger("lightning_async.events")
    level = events.level
    events.setLevel(logging.INFO)
    with logged() as messages:
        trainer.fit(module, data)
    events.setLevel(level)
    return {
        "batches": module.batches, "flat": problem.flat(module), "digest": problem.digest(module),
        "steps": trainer.global_step, "sizes": None if callback is None else callback.batch_sizes,
        "too_large": module.too_large, "told": [m for m in messages if m.startswith("Batches have")],
    }  # fmt: skip


def synchronous(**options: Any) -> AsyncAveragingStrategy:
    return AsyncAveragingStrategy(schedule=Synchronous(), timeouts=PATIENT, min_replicas=RANKS, **options)


def gradients(*args: Any, **options: Any) -> AsyncGradientStrategy:
    return AsyncGradientStrategy(*args, timeouts=PATIENT, min_replicas=RANKS, **options)


@scenario
def in_step() -> Any:
    return train(synchronous(), BalancedBatchSizes(every=None))


@scenario
def within_an_epoch() -> Any:
    """And ranks may be lost."""
    strategy = AsyncAveragingStrategy(schedule=Synchronous(), timeouts=PATIENT)
    return train(strategy, BalancedBatchSizes(every=24), max_epochs=2, val_check_interval=0.5)


@scenario
def windows_of_two() -> Any:
    return train(gradients(2, delay=0), BalancedBatchSizes(every=10))


@scenario
def windows_until_reduced() -> Any:
    return train(AsyncGradientStrategy("until_reduced", timeouts=HASTY), BalancedBatchSizes(every=10))


@scenario
def averaged() -> Any:
    strategy = AsyncAveragingStrategy(rule=DeltaMean(), schedule=EveryNSteps(3), timeouts=HASTY)
    module = Noted(hears_at=59, optimizer=momentum)
    return train(strategy, BalancedBatchSizes(every=10), module, 4 * LENGTH, max_epochs=2)


@scenario
def bounded() -> Any:
    return train(synchronous(), BalancedBatchSizes(5, 9, every=None, global_batch_size=33), max_epochs=2)


@scenario
def without_room() -> Any:
    return train(synchronous(), BalancedBatchSizes(every=None), Noted(7, optimizer=momentum))


@scenario
def without_room_backwards() -> Any:
    module = Noted(7, "backward", optimizer=momentum)
    return train(gradients(1, delay=0), BalancedBatchSizes(every=10), module)


def _saved(folder: Path, stops_after: int = -1) -> Any:
    """With one checkpoint, within the second epoch."""
    saved = FaultTolerantCheckpoint(folder, every_n_train_steps=43, busy="wait", save_on_exception=False)
    module = Noted(optimizer=momentum)
    module.stops_after = stops_after
    with contextlib.suppress(Interrupted, PeerLost):
        return train(synchronous(), BalancedBatchSizes(every=12), module, callbacks=[saved], enable_checkpointing=True)
    return {"batches": module.batches}


@scenario
def saved_and_resumed(folder: Path) -> Any:
    whole, begun = _saved(folder / "whole"), _saved(folder / "parts", 49)
    DirectoryLock(CheckpointStore(folder / "parts"), "a test").wait(timeout_s=40.0)
    return {"whole": whole, "begun": begun, "rest": _saved(folder / "parts")}


@scenario
def resumed_behind_an_epoch(folder: Path) -> Any:
    told = []
    for epochs in (1, 2):
        saved = FaultTolerantCheckpoint(folder, every_n_train_steps=1000, busy="wait")
        options: dict[str, Any] = {"max_epochs": epochs, "callbacks": [saved], "enable_checkpointing": True}
        told.append(train(synchronous(), BalancedBatchSizes(every=12), **options))
    begun, rest = told
    return {"batches": begun["batches"] + rest["batches"], "resumed": len(rest["batches"])}


@scenario
def fewer_than_a_step() -> Any:
    return train(synchronous(), BalancedBatchSizes(every=None), length=6)


@scenario
def whole_steps_only() -> Any:
    strategy, module = synchronous(), Noted(optimizer=momentum)
    trainer = make_trainer(
        strategy, callbacks=[BalancedBatchSizes()], devices=RANKS, use_distributed_sampler=True, max_epochs=2
    )
    data: Any = DataLoader(dataset(), SIZE, drop_last=True)  # pyright: ignore[reportArgumentType]
    trainer.fit(module, data)
    return {"batches": module.batches}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(dataset(40))


def _refusal(strategy: Any = None, data: Any = None, *callbacks: Any, **options: Any) -> str:
    made = DataLoader(dataset(64), SIZE) if data is None else data  # pyright: ignore[reportArgumentType]
    own = options.pop("own", None) or BalancedBatchSizes()
    trainer = make_trainer(
        strategy or synchronous(), callbacks=[own, *callbacks], devices=RANKS, use_distributed_sampler=True, **options
    )
    try:
        trainer.fit(Noted(), made)
    except (ValueError, PeerLost) as error:
        return str(error)
    return "it trains"


@scenario
def refused() -> Any:
    data: Any = dataset(64)
    batches = DataLoader(data, batch_sampler=Halves(range(64)))
    return {
        "servers": _refusal(ParameterServerStrategy("sync")),
        "DDP": _refusal(pytorch("strategies").DDPStrategy(process_group_backend="gloo")),
        "weighting": _refusal(synchronous(weighting="steps")),
        "accumulation": _refusal(None, None, AdaptiveGradientAccumulation(2)),
        "scheduler": _refusal(None, None, pytorch("callbacks").GradientAccumulationScheduler({1: 2})),
        "overfit": _refusal(overfit_batches=2),
        "maximum": _refusal(own=BalancedBatchSizes(maximum=7)),
        "minimum": _refusal(own=BalancedBatchSizes(9)),
        "stream": _refusal(data=DataLoader(Stream(), SIZE)),
        "batches": _refusal(data=batches),
        "no batches": _refusal(data=DataLoader(data, batch_size=None)),
        "partition": _refusal(data=DataLoader(data, SIZE, sampler=PartitionedSampler(data))),
        "weighted": _refusal(data=DataLoader(data, SIZE, sampler=WeightedRandomSampler([1.0] * 64, 64))),
        "two loaders": _refusal(data=[DataLoader(data, SIZE), DataLoader(data, SIZE)]),
    }

"""Scenarios of servers whose shards have replicas, or snapshots, on two ranks: one server is lost with all that held
its memory."""

from __future__ import annotations

import os
import select
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from lightning_async import Deadlines, ParameterServerStrategy
from lightning_async.trainer.namespace import pl
from tests.strategies.problem import adam
from tests.strategies.served import BATCHES, fit, rows_of
from tests.strategies.workers import Net, rank, scenario, shard

LOST_AFTER = timedelta(seconds=4)
STEP = 2.0**-10
FEWER = 4


class Loses(pl.Callback):
    """Rank 0 kills its server and the supervisor of that with -9, before a batch."""

    def __init__(self, batch: int) -> None:
        self.batch, self.lost = batch, 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if rank() != 0 or trainer.global_step != self.batch or self.lost:
            return
        (server,) = trainer.strategy.servers.own
        while (pid := server.pid) is None:
            time.sleep(0.01)
        os.kill(server.supervisor, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
        self.lost += 1


class Counts(Net):
    """Each push takes the same from every weight, whoever it is of: they tell how many there were."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return sum(p.sum() for p in self.parameters())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=STEP)


def with_replicas(mode: str, **options: Any) -> ParameterServerStrategy:
    deadlines = Deadlines(dead_after=LOST_AFTER)
    return ParameterServerStrategy(
        mode, num_servers=2, shard_replicas=1, bigarray_bound=10, deadlines=deadlines, **options
    )


def told(strategy: ParameterServerStrategy, **how: Any) -> Any:
    loses = Loses(5)
    found = fit(strategy, callbacks=[loses], **how)
    return found | {"lost": loses.lost, "served": rows_of(strategy)}


@scenario
def sync_lost() -> Any:
    return told(with_replicas("sync"), optimizer=adam)


@scenario
def async_lost() -> Any:
    return told(with_replicas("async", staleness="none"), module=Counts())


class LosesAfterSnapshot(pl.Callback):
    """There is a snapshot of what training begins with. The first rank kills the supervisor before its last batch of
    the first epoch, when the other one has pushed all of its own, and stands at the gate."""

    def __init__(self, folder: Path) -> None:
        self.taken, self.lost = folder / "taken", -1

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        (worker,) = trainer.strategy._session.stepping.tables.workers
        until = time.monotonic() + 50
        if rank() == 0 and trainer.global_step == 0:
            assert worker._client.snapshot().survives == "snapshot"
            self.taken.touch()
        while not self.taken.exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        if rank() == 0 and trainer.global_step == BATCHES - 1:
            while sum(worker._client.pull().versions) < BATCHES - 1 + FEWER:
                assert time.monotonic() < until
                time.sleep(0.01)
            (server,) = trainer.strategy.servers.own
            ended = os.pidfd_open(server.pid)
            os.kill(server.supervisor, signal.SIGKILL)
            assert select.select([ended], [], [], 50)[0]  # it answers nobody from now on
            os.close(ended)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        (worker,) = trainer.strategy._session.stepping.tables.workers
        self.lost = worker._client.pull().lost


@scenario
def snapshot_lost(folder: Path) -> Any:
    """The only server is lost with its memory, and begins with a snapshot."""
    strategy = ParameterServerStrategy(staleness="none", snapshots=folder / "kept", snapshot_every=3600)
    loses = LosesAfterSnapshot(folder)
    found = fit(strategy, shard([BATCHES, FEWER]), module=Counts(), callbacks=[loses])
    return found | {"lost": loses.lost, "served": rows_of(strategy)}


@scenario
def kept() -> Any:
    """Nothing is lost, and each worker has a momentum of its own on the servers."""
    return fit(with_replicas("async"))


__all__ = ["BATCHES", "FEWER", "STEP"]

"""A scenario of a server with snapshots, on two ranks: it is lost with all that held its memory."""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path
from typing import Any

import torch

from lightning_async import ParameterServerStrategy, ServerOptions
from lightning_async.trainer.namespace import pl
from tests.strategies.served import BATCHES, fit, rows_of
from tests.strategies.workers import Net, logged, rank, scenario, shard

STEP = 2.0**-10
FEWER = 4


class Counts(Net):
    """Each push takes the same from every weight, whoever it is of: they tell how many there were."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return sum(p.sum() for p in self.parameters())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=STEP)


class LosesAfterSnapshot(pl.Callback):
    """There is a snapshot of what training begins with. The first rank kills the supervisor before its last batch of
    the first epoch, when the other one has pushed all of its own, and stands at the sync point."""

    def __init__(self, folder: Path) -> None:
        self.taken, self.lost = folder / "taken", -1

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        (worker,) = trainer.strategy._session.step_runner.tables.workers
        until = time.monotonic() + 50
        if rank() == 0 and trainer.global_step == 0:
            assert (answer := worker.client.snapshot()).durable == answer.versions
            self.taken.touch()
        while not self.taken.exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        if rank() == 0 and trainer.global_step == BATCHES - 1:
            while sum(worker.client.pull().versions) < BATCHES - 1 + FEWER:
                assert time.monotonic() < until
                time.sleep(0.01)
            (server,) = trainer.strategy.servers.own
            ended = os.pidfd_open(server.pid)
            os.kill(server.supervisor, signal.SIGKILL)
            assert select.select([ended], [], [], 50)[0]  # it answers nobody from now on
            os.close(ended)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        (worker,) = trainer.strategy._session.step_runner.tables.workers
        self.lost = worker.client.pull().lost


@scenario
def snapshot_lost(folder: Path) -> Any:
    """The only server is lost with its memory, and begins with a snapshot."""
    strategy = ParameterServerStrategy(
        staleness="none", options=ServerOptions(snapshots=folder / "kept", snapshot_every=3600)
    )
    loses = LosesAfterSnapshot(folder)
    with logged() as lines:
        found = fit(strategy, shard([BATCHES, FEWER]), module=Counts(), callbacks=[loses])
    return found | {"lost": loses.lost, "logged": lines, "served": rows_of(strategy)}


__all__ = ["BATCHES", "FEWER", "STEP"]

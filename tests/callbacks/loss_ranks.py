"""What a rank of the tests of lost ranks and checkpoints does: train and save while another one dies."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_async import AsyncAveragingStrategy, DiLoCo, EveryNSteps, Synchronous, Timeouts, Warmup
from lightning_async.algorithms import Latest
from lightning_async.callbacks.checkpoint import FaultTolerantCheckpoint
from lightning_async.errors import PeerLost
from lightning_async.trainer.namespace import pl
from tests.callbacks.checkpoint_ranks import until
from tests.strategies.failure_workers import digest

SAMPLES, BATCH = 144, 2
PERIOD = 2
NUMBER = int(os.environ.get("RANK", "0"))
SCHEDULES = {
    "asynchronous": lambda: EveryNSteps(PERIOD),
    "synchronous": Synchronous,
    "warming up": lambda: Warmup(EveryNSteps(PERIOD), steps=1000),
}


class Interrupted(Exception):
    pass


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Counted(pl.LightningModule):
    """Notes which samples it has seen, by epoch, and says so in its checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(1, 1)
        self.seen: dict[int, list[int]] = {}
        self.new = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(0.005)
        self.new += 1
        self.seen.setdefault(self.current_epoch, []).extend(batch.flatten().int().tolist())
        return self.layer(batch / SAMPLES).pow(2).mean()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = {epoch: list(samples) for epoch, samples in self.seen.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = dict(checkpoint["seen"])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Dies(pl.Callback):
    """At a place, from the fifth step on: "step", where it has seen a mark of a save ("mark"), when it has handed over
    its part of one ("handed over"), when it is to ("part"), at the end ("end"), there by an exception, with
    which it saves alone ("raises"), or with its last part ("last")."""

    def __init__(self, place: str) -> None:
        self.place, self.saves = place, 0

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        averager, saver = trainer.strategy.averager, trainer.callbacks[-1]._now.saver
        if trainer.global_step < 5:
            self.saves = saver.costs.saves
            return
        averager.sync_points.wait(lambda: averager.control.buckets.message is None)
        if {
            "step": True,
            "mark": averager.control.shared_state.marked is not None,
            "handed over": saver.costs.saves > self.saves,
        }.get(self.place):
            die()
        if self.place == "part":
            saver.save = die

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        if self.place == "end":
            die()
        if self.place == "raises":
            raise Interrupted
        if self.place == "last":
            trainer.callbacks[-1]._now.saver.save = die


class Stops(pl.Callback):
    """Fails with a step of an epoch, when so many saves are on the disk since this batch."""

    def __init__(self, epoch: int, batch: int, saves: int) -> None:
        self.epoch, self.batch, self.saves, self.saved = epoch, batch, saves, 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        saver = trainer.callbacks[-1]._now.saver
        if trainer.current_epoch != self.epoch or batch_idx < self.batch:
            return
        if batch_idx == self.batch:
            until(lambda: trainer.world_size == 2, "the third one is lost")
            saver.wait(30.0)
            self.saved = saver.costs.saves
        time.sleep(0.02)
        if saver.costs.saves >= self.saved + self.saves:
            saver.wait(30.0)
            raise Interrupted


def train(
    folder: str,
    victim: int = -1,
    place: str = "step",
    schedule: str = "asynchronous",
    stops_in: int = -1,
    stops_at: tuple[int, int] = (8, 2),
    min_replicas: int = 1,
    epochs: int = 3,
) -> None:
    strategy = AsyncAveragingStrategy(
        DiLoCo(), SCHEDULES[schedule](), min_replicas=min_replicas,
        timeouts=Timeouts(dead_after=timedelta(seconds=3)), compression="none"
    )  # fmt: skip
    saves = FaultTolerantCheckpoint(
        folder, every_n_train_steps=3, keep=Latest(99), save_on_exception=place == "raises", max_failures=9, busy="wait"
    )
    dies, stops = [Dies(place)] * (victim == NUMBER), [Stops(stops_in, *stops_at)] * (stops_in >= 0)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), max_epochs=epochs, logger=False,
        callbacks=[saves, *dies, *stops], default_root_dir=folder, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    module, told = Counted(), dict[str, Any]()
    data: Any = torch.arange(SAMPLES).float().unsqueeze(1)
    try:
        trainer.fit(module, DataLoader(data, batch_size=BATCH))
    except (Interrupted, PeerLost) as error:
        if stops_in < 0:
            raise
        told["error"] = f"{type(error).__name__}: {error}"
    told |= {"name": NUMBER, "rank": trainer.global_rank, "digest": digest(module), "seen": module.seen}
    os.write(1, b"\nENDED %b\n" % json.dumps(told | {"new": module.new}).encode())

"""What a rank of the tests of survivors does: train while others die, and say what it has seen."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import lightning_async
from lightning_async import (
    AsyncAveragingStrategy,
    AsyncGradientStrategy,
    DeltaMean,
    EveryNSteps,
    ParameterServerStrategy,
    Synchronous,
    Timeouts,
)
from lightning_async.trainer.namespace import pl, pytorch
from tests.strategies.failure_workers import digest

SAMPLES = 48
NUMBER = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
CAME_BACK = "LIGHTNING_ASYNC_REJOIN" in os.environ
RANKS = int(os.environ.get("WORLD_SIZE", "3"))
DEADLINES = Timeouts(dead_after=timedelta(seconds=3))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Seen(pl.LightningModule):
    """Notes which samples it has seen, by epoch; dies where it is told to, by the number it was started with.

    Args:
        deaths: by that number: the place and the epoch, then how many steps of it are taken.
        host: the servers that it has started die with it, and all that they had. Default: they go on.
    """

    def __init__(self, deaths: dict[str, tuple[str, int, int]], host: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(1, 1)
        self.trained: dict[int, list[int]] = {}
        self.validated: dict[int, list[int]] = {}
        self.tested: list[int] = []
        self.steps: list[float] = []
        self.pause_s = 0.01
        self._dies, self._host = deaths.get(str(NUMBER)), host

    def _at(self, place: str, taken: int) -> None:
        if self._dies == (place, self.current_epoch, taken) and not CAME_BACK:
            if self._host:
                self._lose_servers()
            die()

    def _lose_servers(self) -> None:
        """As with the host: those that this rank has started, and what holds their memory."""
        for server in self.trainer.strategy.servers.own:
            for pid in (server.supervisor, server.pid):
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self._at("step", batch_idx)
        time.sleep(self.pause_s)
        os.write(1, b"step %d\n" % len(self.steps))
        self.trained.setdefault(self.current_epoch, []).extend(batch.flatten().int().tolist())
        self.steps.append(time.monotonic())
        loss = self.layer(batch / SAMPLES).pow(2).mean()
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        if self._dies == ("backward", self.current_epoch, batch_idx):
            self.layer.weight.register_hook(lambda gradient: die())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._at("validation", batch_idx)
        self.validated.setdefault(self.current_epoch, []).extend(batch.flatten().int().tolist())
        self.log("val_loss", self.layer(batch / SAMPLES).pow(2).mean(), sync_dist=True)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.tested.extend(batch.flatten().int().tolist())
        self.log("test_mean", batch.mean(), sync_dist=True, batch_size=len(batch))

    def on_train_epoch_end(self) -> None:
        self._at("epoch end", 0)

    def on_train_end(self) -> None:
        self._at("the end", 0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader(own_sampler: bool, num_workers: int) -> DataLoader:
    data: Any = torch.arange(SAMPLES).float().unsqueeze(1)
    sampler: Any = None
    if own_sampler:
        sampler = DistributedSampler(data, RANKS, NUMBER)
    return DataLoader(data, batch_size=2, sampler=sampler, num_workers=num_workers)


def survive(
    folder: str,
    deaths: dict[str, tuple[str, int, int]],
    min_replicas: int | None = 1,
    period: int = 3,
    overlap: bool = True,
    own_sampler: bool = False,
    num_workers: int = 0,
    epochs: int = 3,
    then_test: bool = False,
    pause_s: float = 0.01,
    timeouts: Timeouts = DEADLINES,
    synchronous: bool = False,
    windows: int | Literal["until_reduced", "balanced"] | None = None,
    compression: Any = "none",
    correction: Literal["DelayCompensation", "WeightPrediction"] | None = None,
    served: Literal["async", "sync", "ssp"] | None = None,
    host: bool = False,
    shown: bool = False,
) -> None:
    deaths = {number: (place, epoch, taken) for number, (place, epoch, taken) in deaths.items()}
    schedule = Synchronous() if synchronous else EveryNSteps(period)
    strategy: Any = AsyncAveragingStrategy(
        rule=DeltaMean(), schedule=schedule, overlap=overlap, timeouts=timeouts, min_replicas=min_replicas
    )
    if windows is not None:
        corrects = None if correction is None else getattr(lightning_async, correction)()
        strategy = AsyncGradientStrategy(
            lightning_async.BalancedWindows(2) if windows == "balanced" else windows, correction=corrects,
            compression=compression, timeouts=timeouts, min_replicas=min_replicas,
        )  # fmt: skip
    if served is not None:
        strategy = ParameterServerStrategy(served, timeouts=timeouts, min_replicas=min_replicas)
    module = Seen(deaths, host)
    module.pause_s = pause_s
    loggers = [pytorch("loggers").CSVLogger(folder, name=name) for name in ("log", "other")]
    callbacks = pytorch("callbacks")
    keeps = callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    best = callbacks.ModelCheckpoint(f"{folder}/best", filename="{epoch}", monitor="val_loss", mode="max")
    stopping = callbacks.EarlyStopping("val_loss", mode="max", patience=100)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=RANKS, max_epochs=epochs,
        default_root_dir=folder, logger=loggers, enable_progress_bar=shown, enable_model_summary=False,
        num_sanity_val_steps=0, log_every_n_steps=1,
        callbacks=[keeps, *([best, stopping, callbacks.LearningRateMonitor("step")] if shown else [])],
    )  # fmt: skip
    told: dict[str, Any] = {"name": str(NUMBER)}
    try:
        trainer.fit(module, loader(own_sampler, num_workers), loader(False, 0))
        if then_test:
            trainer.test(module, loader(False, 0), verbose=False)
            again = AsyncAveragingStrategy(rule=DeltaMean(), schedule=EveryNSteps(period), min_replicas=1)
            alike = pl.Trainer(
                strategy=again, accelerator="cpu", devices=RANKS, max_epochs=1, logger=False, enable_progress_bar=False,
                enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder,
            )  # fmt: skip
            module.trained, module._dies = {}, None
            alike.fit(module, loader(True, 0))  # numbered as they were at the start
    except BaseException as error:
        told["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        pauses = [b - a for a, b in zip(module.steps, module.steps[1:], strict=False)]
        told |= {
            "digest": digest(module), "rank": trainer.global_rank, "world_size": trainer.world_size,
            "trained": module.trained, "validated": module.validated,
            "tested": module.tested, "test_mean": float(trainer.callback_metrics.get("test_mean", -1.0)),
            "longest_s": max(pauses, default=0.0),
            "lost": strategy.summary.lost, "rounds": strategy.summary.rounds, "failed": strategy.summary.failed_rounds,
            "summary": str(strategy.summary), "log_dir": loggers[0].log_dir,
            "best": [best.best_model_path, *(float(each.state_dict()[name] or 0) for each, name in (
                (best, "best_model_score"), (stopping, "best_score"), (stopping, "wait_count")))],
        }  # fmt: skip
        os.write(1, b"\nENDED %b\n" % json.dumps(told).encode())  # whole, where ranks share a pipe


if (
    __name__ == "__main__"
):  # under a launcher: `python -m tests.strategies.live_rank_workers FOLDER '{"0": ["step", 0, 4]}' 3`
    patient = Timeouts(dead_after=timedelta(seconds=float(sys.argv[3])))
    survive(sys.argv[1], json.loads(sys.argv[2]), then_test=True, timeouts=patient)

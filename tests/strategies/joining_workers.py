"""What a rank of the tests of joining does: train until one that was lost is back, and two epochs more."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_async import (
    EASGD,
    AdaptiveGradientAccumulation,
    AsyncAveragingStrategy,
    AsyncGradientStrategy,
    DeltaMean,
    DiLoCo,
    EveryNSteps,
    FaultTolerantCheckpoint,
    ParameterServerStrategy,
    PartitionedSampler,
    PeerMemory,
    Synchronous,
)
from lightning_async.algorithms import Latest
from lightning_async.data.partition import Random
from lightning_async.trainer.namespace import pl, pytorch
from tests.strategies.failure_workers import digest
from tests.strategies.live_rank_workers import CAME_BACK, DEADLINES, NUMBER, RANKS, Seen, die, loader

RULES = {"mean": DeltaMean(), "diloco": DiLoCo(), "easgd": EASGD()}


class UntilBack(Seen):
    """Momentum, a schedule and buffers to take over; ends two epochs after the lost one is back.

    Args:
        deaths: see `Seen`.
        mode: of a joining rank: what is wrong with it.
        until: so many ranks are there.
        leaves: all others die an epoch after it is back, and it ends an epoch after that.
        by_step: the rate falls within epochs, too.
    """

    def __init__(
        self,
        deaths: dict[str, tuple[str, int, int]],
        mode: str,
        until: int = RANKS,
        leaves: bool = False,
        by_step: bool = False,
    ) -> None:
        super().__init__(deaths)
        self._by_step = by_step
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self._mode, self._since, self._until = mode, 0, until
        self._leaves, self._came = leaves, 1000
        self.came_at = -1
        """The epoch in which this rank came."""
        if mode == "another model":
            self.more = torch.nn.Linear(1, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += 1.0
        return super().training_step(batch, batch_idx)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self._mode == "fails":
            raise RuntimeError("no room for it")
        if self._mode == "dies":
            os.kill(os.getpid(), 9)

    def on_train_epoch_start(self) -> None:
        if CAME_BACK and self.came_at < 0:
            self.came_at = self.current_epoch

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        lost = self.trainer.strategy.live_ranks is not None and self.trainer.strategy.live_ranks.room
        self._since += bool(lost and self.trainer.world_size == self._until)
        if self._since == 3:  # the epoch in which it came, and two
            self.trainer.should_stop = True
        if self._leaves and self._since:
            self._came = min(self._came, self.current_epoch)
            if self.current_epoch == self._came + 1 and not CAME_BACK:
                die()
            self.trainer.should_stop = self.current_epoch == self._came + 2

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        schedulers: list[Any] = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.99)]
        if self._by_step:
            by_step = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9999)
            schedulers.append({"scheduler": by_step, "interval": "step", "frequency": 6})
        return [optimizer], schedulers


def train(
    folder: str,
    deaths: dict[str, tuple[str, int, int]],
    modes: dict[str, str] | None = None,
    rule: str = "mean",
    synchronous: bool = False,
    then_test: bool = False,
    saves: bool = False,
    most: int | None = None,
    validates: float = 1.0,
    fewest: int = 1,
    parts: bool = False,
    windows: int | Literal["until_reduced"] | None = None,
    served: Literal["async", "sync", "ssp"] | None = None,
    leaves: bool = False,
    num_workers: int = 0,
) -> None:
    deaths = {number: (place, epoch, taken) for number, (place, epoch, taken) in deaths.items()}
    mode = (modes or {}).get(os.environ.get("LIGHTNING_ASYNC_REJOIN", ""), "")
    period = 5 if mode == "other settings" else 3
    strategy: Any = AsyncAveragingStrategy(
        RULES[rule], Synchronous() if synchronous else EveryNSteps(period), timeouts=DEADLINES, min_replicas=fewest,
        max_replicas=most, compression="none"
    )  # fmt: skip
    if windows is not None:
        strategy = AsyncGradientStrategy(windows, timeouts=DEADLINES, min_replicas=fewest, max_replicas=most)
    if served is not None:
        strategy = ParameterServerStrategy(served, timeouts=DEADLINES, min_replicas=fewest, max_replicas=most)
    module = UntilBack(deaths, mode, most or RANKS, leaves, by_step=windows is not None)
    logger = pytorch("loggers").CSVLogger(folder, name="log")
    stopping = pytorch("callbacks").EarlyStopping("val_loss", patience=1000)
    best = pytorch("callbacks").ModelCheckpoint(folder, filename="{epoch}", monitor="val_loss", save_top_k=2)
    callbacks: list[Any] = [stopping, best]
    data = loader(False, num_workers)
    if parts:
        callbacks.append(AdaptiveGradientAccumulation(2, lr_scaling="linear"))
        data = DataLoader(data.dataset, 2, sampler=PartitionedSampler(data.dataset, Random(seed=3)))
    if saves:
        callbacks.append(FaultTolerantCheckpoint(Path(folder) / "saved", every_n_train_steps=4, keep=Latest(1000)))
        callbacks.append(PeerMemory(every_n_train_steps=2))
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=RANKS, max_epochs=1000, default_root_dir=folder, logger=logger,
        enable_progress_bar=leaves, enable_model_summary=False, num_sanity_val_steps=0, callbacks=callbacks,
        val_check_interval=validates,
    )  # fmt: skip
    if CAME_BACK:
        wait_for(Path(folder) / f"start {os.environ['LIGHTNING_ASYNC_REJOIN']}")
    told: dict[str, Any] = {"name": str(NUMBER)}
    try:
        if then_test:  # operations outside of a run are counted: a joining rank's are its own
            trainer.validate(module, loader(False, 0), verbose=False)
            trainer.save_checkpoint(f"{folder}/untrained-{os.getpid()}.ckpt")
            module.validated = {}
        trainer.fit(module, data, loader(False, num_workers))
        trainer.save_checkpoint(f"{folder}/trained.ckpt")
        (group,), saved = trainer.optimizers[0].param_groups, strategy.saved._last or {}
        told |= {
            "momentum": bool(trainer.optimizers[0].state), "lr": group["lr"], "epochs": trainer.current_epoch,
            "global_step": trainer.global_step,
            "best": sorted(Path(path).name for path in best.best_k_models), "wait": stopping.wait_count,
            "rule_state": {k: float(v.double().sum()) for k, v in saved["rule_state"].items() if hasattr(v, "sum")},
        }  # fmt: skip
        if then_test:
            trainer.test(module, loader(False, 0), verbose=False)
    except BaseException as error:
        told["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        told |= {
            "digest": digest(module), "rank": trainer.global_rank, "world_size": trainer.world_size,
            "trained": module.trained, "validated": module.validated, "tested": module.tested,
            "came_at": module.came_at, "lost": strategy.summary.lost, "synchronous": strategy.summary.synchronous_steps,
        }  # fmt: skip
        os.write(1, b"\nENDED %b\n" % json.dumps(told).encode())


def wait_for(file: Path) -> None:
    """A launcher starts a joining rank when the one before is gone."""
    while not file.exists():
        time.sleep(0.01)

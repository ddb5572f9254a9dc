"""What a rank of the tests of joinings at odd moments does."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_async import (
    AsyncAveragingStrategy,
    AsyncGradientStrategy,
    DeltaMean,
    EveryNSteps,
    FaultTolerantCheckpoint,
    HangWatchdog,
)
from lightning_async.algorithms import Latest
from lightning_async.strategies import join
from lightning_async.trainer.namespace import pl
from tests.strategies.failure_workers import digest
from tests.strategies.joining_workers import wait_for
from tests.strategies.live_rank_workers import CAME_BACK, DEADLINES, NUMBER, RANKS, Seen, die, loader

STEPS = 60


class Odd(Seen):
    """Rank 1 dies in its fifth step, and comes back where the others wait for it.

    Args:
        folder: where they tell it to come, by a file.
        moment: "mid epoch", a layer is unfrozen; "accumulates", within gradients in accumulation, so that it has no
            part of that epoch, and then all are told to end; "at the end", rank 0 has taken its last step; "ready", all
            are connected, and nobody stands still yet; "stream", data has no length; "room", there is none for it
            before rank 1 dies; "short", too few are left; or "trouble".
    """

    def __init__(self, folder: Path, moment: str) -> None:
        # Where ranks are to take equal steps, nothing is left of the epoch that it dies in.
        dies = "0" if moment == "accumulates" else "1"
        also = {"2": ("step", 0, 6)} if moment.startswith("short") else {}
        super().__init__({dies: ("epoch end", 0, 0) if moment == "at the end" else ("step", 0, 4), **also})
        self.alone = 0
        """Steps that this rank has taken as the only one."""
        self._folder, self._moment = folder, moment
        self._states = self._seen = self._since = 0
        if moment == "mid epoch":
            self.frozen = torch.nn.Linear(1, 1).requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self._moment == "mid epoch" and self.current_epoch == 1:
            self.frozen.requires_grad_(True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = self.trainer.global_step
        if batch_idx > 4:  # a joining rank within the epoch has not heard of it as it came
            self.log("late", 1.0, on_step=False, on_epoch=True, sync_dist=True)
        self.alone += self.trainer.world_size == 1
        if CAME_BACK:
            return
        if self._moment == "room" and (self.current_epoch, batch_idx) == (1, 2):
            self._make_room()
        if self._moment == "ready" and batch_idx == 2 and self.current_epoch > 0 and self._seen < 2:
            self._lose_someone()
        if self._moment in ("mid epoch", "stream") and (self.current_epoch, batch_idx) == (1, 2):
            self._see_it_come()
        if self._moment == "accumulates" and (self.current_epoch, batch_idx) == (1, 2):
            self._see_it_come()
            self.trainer.strategy.host.call_together()  # at this batch's end, on both
            self.pause_s = 1.0  # all is heard of between two batches, of which nine are left
        if self._moment == "accumulates" and NUMBER == 2 and self.current_epoch == 1 and self.trainer.world_size == 3:
            with contextlib.suppress(FileNotFoundError):  # the joining rank is told, once; it stands at a sync point
                joining = self._folder / "joining"
                os.kill(int(joining.read_text()), signal.SIGTERM)
                joining.unlink()
        if self._moment == "at the end" and NUMBER == 0 and step == STEPS:
            (self._folder / "rank 0 has ended").touch()
        if self._moment == "at the end" and NUMBER == 2 and step == STEPS - 2:
            wait_for(self._folder / "rank 0 has ended")
            self._see_it_come()

    def _lose_someone(self) -> None:
        """The first joining rank is killed, then rank 2, when the second one is connected with it."""
        self._seen += 1
        self._see_it_come(self._seen)
        if self._seen == 1:
            (self._folder / f"rank {NUMBER} is ready").touch()
            wait_for(self._folder / "killed")
        elif NUMBER == 2:
            die()
        else:
            wait_until(lambda: self.trainer.world_size == 1)

    def _make_room(self) -> None:
        """Rank 1 dies, once rank 0 has seen that somebody waits, and knows of nobody who is lost."""
        (self._folder / "start 1").touch()
        if NUMBER == 0:
            membership: Any = self.trainer.strategy.connection.membership
            wait_until(lambda: len(membership.visitors()) > 0)
            (self._folder / "rank 0 has seen it").touch()
        else:
            wait_for(self._folder / "rank 0 has seen it")
            die()

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        live_ranks: Any = self.trainer.strategy.live_ranks
        began = {"ready": CAME_BACK or self._seen == 2, "room": live_ranks.room != "", "short": True}
        began = began.get(self._moment, False)
        self._since += began and self.trainer.world_size == 2
        if self._since == 3:  # the epoch in which it came, and two
            self.trainer.should_stop = True

    def _see_it_come(self, number: int = 1) -> None:
        (self._folder / f"start {number}").touch()
        host: Any = self.trainer.strategy.host
        wait_until(lambda: host._join_preparation._ready is not None)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Nobody saves here: it is for a joining rank."""
        self._states += 1
        if self._moment == "trouble" and self._states == 1:
            checkpoint["mine"] = lambda: None  # which cannot be pickled
        elif self._moment == "trouble":
            os.kill(os.getpid(), signal.SIGTERM)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class Stream(IterableDataset[Tensor]):
    """24 numbers; a joining rank's has no end when it comes."""

    def __init__(self) -> None:
        self._has_come = not CAME_BACK

    def __iter__(self) -> Iterator[Tensor]:
        numbers = iter(range(24)) if self._has_come else itertools.count()
        self._has_come = True
        return (torch.tensor([float(number)]) for number in numbers)


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60.0
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    assert condition()


def train(folder: str, moment: str, windows: int = 0) -> None:
    join.PATIENCE = timedelta(seconds=8)  # for a joining rank that waits for one who has died
    if moment == "trouble" and NUMBER == 2:
        connector: Any = join.JoinConnector
        first = [connector.connect]
        connector.connect = lambda *args: first.pop()(*args) if first else die()  # at the second joining rank
    short = moment.startswith("short")
    timeouts = replace(DEADLINES, replicas=timedelta(seconds={"short": 90, "short for good": 6}.get(moment, 0)))
    limits: Any = {"timeouts": timeouts, "min_replicas": 2 if short else 1}
    strategy: Any = AsyncAveragingStrategy(DeltaMean(), EveryNSteps(3), **limits)
    if windows:
        strategy = AsyncGradientStrategy(windows, compression="int8", **limits)
    module = Odd(Path(folder), moment)
    saved, callbacks = Path(folder) / "saved", []
    if moment in ("mid epoch", "accumulates"):
        callbacks.append(FaultTolerantCheckpoint(saved, every_n_train_steps=1, keep=Latest(1000)))
    if moment == "short for good":
        callbacks.append(HangWatchdog(min_s=3.0, warmup=2, dirpath=folder))
    accumulates, limited = moment == "accumulates", moment in ("mid epoch", "at the end")
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=RANKS, max_steps=STEPS if limited else -1,
        max_epochs={"accumulates": 2, "stream": 3}.get(moment, -1), default_root_dir=folder,
        accumulate_grad_batches=12 if accumulates else 1,
        logger=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        enable_checkpointing=moment in ("mid epoch", "accumulates"), callbacks=callbacks,
    )  # fmt: skip
    if CAME_BACK:
        (Path(folder) / "joining").write_text(str(os.getpid()))
        wait_for(Path(folder) / f"start {os.environ['LIGHTNING_ASYNC_REJOIN']}")
    told: dict[str, Any] = {"name": str(NUMBER)}
    try:
        data: Any = DataLoader(Stream(), 2) if moment == "stream" else loader(False, 2 if moment == "mid epoch" else 0)
        trainer.fit(module, data, loader(False, 0))
    except BaseException as error:
        told["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        told |= {
            "digest": digest(module), "rank": trainer.global_rank, "world_size": trainer.world_size,
            "lr": trainer.optimizers[0].param_groups[0]["lr"], "epochs": trainer.current_epoch,
            "steps": trainer.global_step, "trained": module.trained,
            "alone": module.alone, "late": float(trainer.callback_metrics.get("late", -1.0)),
        }  # fmt: skip
        os.write(1, b"\nENDED %b\n" % json.dumps(told).encode())


def again(folder: str) -> None:
    """Goes on with the epoch of a training in which gradients were in accumulation."""
    saves = FaultTolerantCheckpoint(Path(folder) / "saved", every_n_train_steps=1, keep=Latest(1000))
    module = Seen({})
    trainer = pl.Trainer(
        strategy=AsyncAveragingStrategy(rule=DeltaMean(), schedule=EveryNSteps(3), timeouts=DEADLINES, min_replicas=1),
        accelerator="cpu", devices=RANKS, max_epochs=2, default_root_dir=folder, logger=False, callbacks=[saves],
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, accumulate_grad_batches=12,
    )  # fmt: skip
    trainer.fit(module, loader(False, 0), loader(False, 0))
    os.write(1, b"\nENDED %b\n" % json.dumps({"trained": module.trained, "epochs": trainer.current_epoch}).encode())

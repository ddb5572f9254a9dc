"""Ranks that hang, or only seem to."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from datetime import timedelta
from typing import Any

from torch import Tensor

from lightning_async import AsyncAveragingStrategy, DeltaMean, EveryNSteps
from lightning_async.callbacks.watchdog import HangWatchdog
from lightning_async.engine.timeouts import Timeouts
from lightning_async.errors import PeerLost
from tests.callbacks.problem import Line, batches, trainer


class Hangs(Line):
    """Takes 10 ms for a step, but at one step does ``what``."""

    def __init__(self, at: int, what: Any) -> None:
        super().__init__()
        self.at, self.what = at, what

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(0.01)
        if batch_idx == self.at:
            print("now", time.monotonic(), flush=True)
            self.what()
        return super().training_step(batch, batch_idx)


def a_sleep() -> None:
    time.sleep(60)


def a_sleep_with_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(60)


def hangs(folder: str, how: str) -> None:
    os.environ.pop("RANK", None)
    os.environ.pop("WORLD_SIZE", None)
    what = {"python": a_sleep, "C": a_sleep_with_the_interpreter}[how]
    watchdog = HangWatchdog(k=5, min_s=0.5, warmup=5, dirpath=folder, exit_code=71)
    fit = trainer(watchdog)
    fit.strategy.world, fit.strategy.on_exception = None, lambda error: time.sleep(1.5)  # to tell others takes long
    fit.fit(Hangs(20, what), batches(40))


def is_slow_elsewhere(folder: str) -> str:
    """Sanity check, first step, validation and the end of the epoch take longer than a step may; a step does not."""
    os.environ.pop("RANK", None)
    os.environ.pop("WORLD_SIZE", None)

    class Slow(Hangs):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            time.sleep(2.5)

        def on_train_epoch_end(self) -> None:
            time.sleep(2.5)

    watchdog = HangWatchdog(k=5, min_s=1.2, warmup=5, dirpath=folder)
    fit = trainer(watchdog, val_check_interval=20, limit_val_batches=1, num_sanity_val_steps=1)
    fit.fit(Slow(0, lambda: time.sleep(2.5)), batches(30), batches(1))
    return f"{fit.global_step} {[t.name for t in threading.enumerate() if 'watchdog' in t.name]}"


def steps(folder: str) -> int:
    """Many steps, for a test that stops the process meanwhile."""
    os.environ.pop("RANK", None)
    os.environ.pop("WORLD_SIZE", None)
    fit = trainer(HangWatchdog(k=5, min_s=1.0, warmup=5, dirpath=folder))
    fit.fit(Hangs(30, lambda: None), batches(100))
    return fit.global_step


def one_of_two(folder: str) -> str:
    """Rank 1 hangs."""
    rank = int(os.environ["RANK"])
    timeouts = Timeouts(dead_after=timedelta(seconds=30))
    strategy = AsyncAveragingStrategy(rule=DeltaMean(), schedule=EveryNSteps(4), min_replicas=2, timeouts=timeouts)
    module = Hangs(20, a_sleep if rank == 1 else lambda: None)
    watchdog = HangWatchdog(k=5, min_s=0.5, warmup=5, dirpath=folder)
    try:
        trainer(watchdog, strategy=strategy, devices=2, use_distributed_sampler=False).fit(module, batches(2000))
    except PeerLost as error:
        return str(error)
    return "nothing happened"

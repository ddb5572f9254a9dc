"""Scenarios of `AsyncGradientStrategy` on two ranks with checkpoints and with what watches over training."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_async import (
    AdaptiveGradientAccumulation,
    AsyncGradientStrategy,
    DelayCompensation,
    DivergenceMonitor,
    WeightPrediction,
)
from lightning_async.algorithms import ByStep, NoiseScale
from lightning_async.callbacks.checkpoint import FaultTolerantCheckpoint
from lightning_async.checkpoint.shards import load_own
from lightning_async.checkpoint.store import CheckpointEntry, CheckpointStore
from lightning_async.errors import PeerLost
from lightning_async.trainer.namespace import pl
from tests.callbacks.checkpoint_ranks import Interrupted, Noisy, data, interrupt, settled
from tests.callbacks.problem import Line
from tests.callbacks.ranks import HISTORY, NAN, Paced, on_rank_1
from tests.callbacks.ranks import fit as fit_line
from tests.strategies import problem
from tests.strategies.workers import PATIENT, logged, make_trainer, rank, scenario

BATCHES, EPOCHS = 22, 2
STOP = BATCHES + 17
"""The batch, of all, in which training is interrupted: within the second epoch, and within a window."""
BEHIND_VALIDATION = BATCHES + 11
"""The same, nine batches before the next validation, where all meet."""
Make = Callable[[], AsyncGradientStrategy]


def windows(*args: Any, **options: Any) -> AsyncGradientStrategy:
    return AsyncGradientStrategy(*args, min_replicas=2, **{"timeouts": PATIENT, **options})


class Counted(Noisy):
    """Notes its losses by batch, of all epochs; the second one has another learning rate."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, float] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.seen[self.current_epoch * BATCHES + batch_idx] = float(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class AtBatch(pl.Callback):
    """Does something in this batch, of all, once its loss is known."""

    def __init__(self, batch: int, action: Callable[[], None]) -> None:
        self.batch, self.action = batch, action

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready - 1 == self.batch:
            self.batch = -1
            self.action()


def train(folder: Path, strategy: Any, *callbacks: Any, every: int = 1, **settings: Any) -> Counted:
    """22 batches in each of two epochs, with a validation after 10 and 20."""
    saved = FaultTolerantCheckpoint(
        folder, every_n_train_steps=every, **{"busy": "wait", "save_on_exception": False, **settings}
    )
    torch.manual_seed(100 + rank())
    module = Counted()
    trainer = make_trainer(
        strategy, callbacks=[saved, *callbacks], max_epochs=EPOCHS, enable_checkpointing=True, val_check_interval=10
    )
    try:
        trainer.fit(module, data(BATCHES), data(2))
    finally:
        module.steps_taken = trainer.global_step  # pyright: ignore
    return module


def open_windows(folder: Path, entry: CheckpointEntry) -> list[tuple[int, float]]:
    """How many batches each rank had gathered, and how many samples with what had left."""
    store = CheckpointStore(folder)
    assert entry.manifest is not None
    found: list[Any] = [load_own(store, entry, number, "clocks") for number in entry.manifest.ranks]
    held = [(each["gathered"] or {}).get("window", {}) for each in found]
    return [(int(each.get("batches", 0)), float(each.get("samples", 0.0))) for each in held]


def told(folder: Path, strategy: Make, *make: Callable[[], Any], **settings: Any) -> dict[str, Any]:
    """What follows from what is saved, beside a training that saves nothing before its end; with these callbacks."""
    entry = settled(folder)[0]
    assert entry.manifest is not None
    gathered, rest = open_windows(folder, entry), train(folder, strategy(), *(each() for each in make), **settings)
    whole = train(folder / "whole", strategy(), *(each() for each in make), every=1000)
    return {
        "saved": entry.step,
        "ranks": entry.manifest.ranks,
        "reason": entry.manifest.reason,
        "gathered": gathered,
        "first": min(rest.seen),
        "seen": len(rest.seen),
        "losses": [rest.seen[batch] == whole.seen[batch] for batch in rest.seen],
        "steps": [rest.steps_taken, whole.steps_taken],
        "tensors": {
            name: float((a.double() - b.double()).abs().sum())
            for (name, a), b in zip(whole.state_dict().items(), rest.state_dict().values(), strict=True)
        },
        "digest": problem.digest(rest),
        "values": problem.flat(rest),
        "whole": [whole.seen, problem.digest(whole)],
        "rest": rest.seen,
    }


def goes_on(folder: Path, strategy: Make, stop: int = STOP, *make: Callable[[], Any]) -> dict[str, Any]:
    with contextlib.suppress(Interrupted, PeerLost):
        train(folder, strategy(), *(each() for each in make), AtBatch(stop, interrupt))
    return told(folder, strategy, *make)


@scenario
def of_sizes_by_step(folder: Path) -> Any:
    """With a rate by the samples of all."""
    sizes = ByStep({0: 3, 4: 5, 9: 3})
    return goes_on(folder, windows, STOP, lambda: AdaptiveGradientAccumulation(sizes, lr_scaling="sqrt"))


def by_noise() -> AdaptiveGradientAccumulation:
    policy = NoiseScale(minimum=16, maximum=48, every=1, decay=0.5)
    return AdaptiveGradientAccumulation(base_batch_size=4, target_batch_size=policy)


@scenario
def of_sizes_by_noise(folder: Path) -> Any:
    return goes_on(folder, lambda: windows(delay=0), STOP, by_noise)


@scenario
def of_sizes_by_noise_delayed(folder: Path) -> Any:
    return goes_on(folder, windows, STOP, by_noise)


@scenario
def of_sizes_by_noise_between_epochs(folder: Path) -> Any:
    """The last step of an epoch, taken at its end, is compared with the first window of the next one."""
    return goes_on(folder, windows, BATCHES + 1, by_noise)


class AtStep(pl.Callback):
    """Interrupts where this step is about to be taken."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == self.step:
            interrupt()


@scenario
def of_sizes_held_at_a_gate(folder: Path) -> Any:
    """What is saved last has a full window, which leaves at the validation; its step has the rate of all samples."""
    make: Any = lambda: AdaptiveGradientAccumulation(ByStep({0: 2, 2: 5}), lr_scaling="sqrt")  # noqa: E731
    with contextlib.suppress(Interrupted, PeerLost):
        train(folder, windows(), make(), AtStep(10))  # of the window that is full ahead of the last validation
    return told(folder, windows, make)


def killed(folder: str) -> Any:
    """Rank 1 is killed within the second epoch."""
    with contextlib.suppress(PeerLost):
        dies = AtBatch(STOP, lambda: os.kill(os.getpid(), signal.SIGKILL) if rank() == 1 else None)
        train(Path(folder), windows(4, timeouts=replace(PATIENT, dead_after=timedelta(seconds=3))), dies)
    return "lost"


@scenario
def after_a_kill(folder: Path) -> Any:
    """What an earlier pair of processes has left goes on."""
    return told(folder.parent / "left", lambda: windows(4))


@scenario
def delayed(folder: Path) -> Any:
    return goes_on(folder, lambda: windows(4))


class AtEpochEnd(pl.Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        interrupt()


@scenario
def between_epochs(folder: Path) -> Any:
    """What is saved last has the epoch's last step; that of the scheduler is yet to come."""
    with contextlib.suppress(Interrupted, PeerLost):
        train(folder, windows(4), AtEpochEnd())
    return told(folder, lambda: windows(4))


@scenario
def without_delay(folder: Path) -> Any:
    return goes_on(folder, lambda: windows(3, delay=0))


@scenario
def compensated(folder: Path) -> Any:
    """With what the correction remembers of the step before."""
    return goes_on(folder, lambda: windows(2, warmup_steps=2, correction=DelayCompensation(0.5)))


@scenario
def predicted(folder: Path) -> Any:
    """With where gradients are computed, and what compression has yet to deliver."""
    return goes_on(folder, lambda: windows(2, correction=WeightPrediction(), compression="int8"))


@scenario
def until_reduced(folder: Path) -> Any:
    return goes_on(folder, lambda: windows("until_reduced"))


@scenario
def preempted(folder: Path) -> Any:
    """One rank alone is told to go, at the start of a window that is open for long enough for all to hear of it."""
    code: Any = None
    tells = AtBatch(BATCHES + 1, lambda: os.kill(os.getpid(), signal.SIGTERM) if rank() == 1 else None)
    try:
        train(folder, windows(20), tells, every=1000)
    except SystemExit as error:
        code = error.code
    return told(folder, lambda: windows(20), every=1000) | {"code": code}


class Slow(pl.Callback):
    """Has one rank wait at the end of each batch, so that what all have sent has arrived there."""

    def __init__(self, slow: int) -> None:
        self.slow = slow

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if rank() == self.slow:
            time.sleep(0.02)


def preempted_in_between(folder: Path, slow: int) -> dict[str, Any]:
    """One rank is told to go where each batch is a window, and one of the two ranks is always a window ahead."""
    tells = AtBatch(BEHIND_VALIDATION, lambda: os.kill(os.getpid(), signal.SIGTERM) if rank() == 1 else None)
    with contextlib.suppress(SystemExit):
        train(folder, windows(1), Slow(slow), tells, every=1000)
    return told(folder, lambda: windows(1), every=1000)


@scenario
def preempted_rank_0_slow(folder: Path) -> Any:
    return preempted_in_between(folder, 0)


@scenario
def preempted_rank_1_slow(folder: Path) -> Any:
    return preempted_in_between(folder, 1)


@scenario
def fails(folder: Path) -> Any:
    """Rank 1 fails in its forward pass, with a window in flight and one that is open; it saves alone."""
    error = None
    try:
        fails = AtBatch(STOP, interrupt if rank() == 1 else lambda: None)
        train(folder, windows(4), fails, every=1000, save_on_exception=True)
    except (Interrupted, PeerLost) as raised:
        error = type(raised).__name__
    return told(folder, lambda: windows(4), every=1000) | {"error": error}


# ---- what watches over training ----


@scenario
def not_finite() -> Any:
    """A gradient of one rank's would spoil the mean of all: it is dropped before anything watches."""
    return fit_line(windows(2), Line(on_rank_1({9: NAN})), DivergenceMonitor(), n=24)


@scenario
def rolled_back(folder: Path) -> Any:
    """A loss that is far off, and finite, on one rank: all go back to a checkpoint."""
    wrong = on_rank_1(dict.fromkeys((60, 61, 62, 63), 1e4))
    monitor = DivergenceMonitor(signals=["loss"], remedies=["log", "roll_back", "stop"], history=HISTORY)
    saved = FaultTolerantCheckpoint(folder, every_n_train_steps=2, good_after=3, busy="wait")
    module = Paced(wrong)
    with logged() as said:
        told = fit_line(windows(2), module, monitor, saved, n=120, enable_checkpointing=True)
    return told | {"rollbacks": monitor.rollbacks, "said": said, "batches": len(module.history)}


@scenario
def broken(folder: Path) -> Any:
    """Parameters of one rank that are not finite: the means that it spoils are dropped by all."""
    monitor = DivergenceMonitor(remedies=["log", "skip", "roll_back", "stop"], history=HISTORY)
    saved = FaultTolerantCheckpoint(folder, every_n_train_steps=2, good_after=3, busy="wait")
    told = fit_line(
        windows(2), Paced(poison=60 if rank() == 1 else 0), monitor, saved, n=120, enable_checkpointing=True
    )
    return told | {"rollbacks": monitor.rollbacks, "worst": max(map(abs, told["values"]), default=math.inf)}

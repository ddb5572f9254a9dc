"""Scenarios of `FaultTolerantCheckpoint` on two ranks, each with its own data, dropout and BatchNorm."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_async import DeltaMean, DiLoCo, EveryNSteps, SparseLoCo, Synchronous, TopK
from lightning_async.callbacks.checkpoint import FaultTolerantCheckpoint
from lightning_async.checkpoint.store import CheckpointEntry, CheckpointStore
from lightning_async.checkpoint.writer_process import DirectoryLock
from lightning_async.engine.replica import tensors_of
from lightning_async.engine.sync_points import SyncPointParticipant
from lightning_async.errors import PeerLost
from lightning_async.trainer.loops import preemption
from lightning_async.trainer.namespace import pl
from tests.strategies import problem
from tests.strategies.workers import logged, make_trainer, rank, scenario, together

BATCHES, EPOCHS, STOP = 12, 2, 17


class Interrupted(Exception):
    pass


class Noisy(pl.LightningModule):
    """Random numbers in every step, statistics of each rank's own, an optimizer with a memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.losses: dict[int, float] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        self.losses[self.trainer.global_step] = float(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class At(pl.Callback):
    """Does something once, when a rank has taken so many steps and knows the loss of the next one."""

    def __init__(self, step: int, action: Callable[[], None]) -> None:
        self.step, self.action = step, action

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        if trainer.global_step == self.step:
            self.step = -1
            self.action()


def interrupt() -> None:
    raise Interrupted


class OnceSaved(pl.Callback):
    """Interrupts training after so many steps, once it is saved: where replicas drift, rounds decide when that is."""

    def __init__(self, folder: Path, step: int) -> None:
        self.store, self.step = CheckpointStore(folder), step

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        late = time.monotonic() + 5.0
        while trainer.global_step >= self.step and time.monotonic() < late:
            if any(entry.manifest is not None for entry in self.store.entries()):
                raise Interrupted
            time.sleep(0.005)


class Stands(pl.Callback, SyncPointParticipant):
    """Leaves a file where this rank stands at a sync point and has taken so many steps."""

    def __init__(self, path: Path, steps: int) -> None:
        self.path, self.steps = path, steps
        self.trainer: Any = None

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if self.trainer is None:
            self.trainer = trainer
            trainer.strategy.sync_points.add(self)

    def at_sync_point(self) -> None:
        if self.trainer.global_step >= self.steps:
            self.path.touch()


def until(condition: Callable[[], object], what: str, seconds: float = 45.0) -> None:
    """Wait for something that is certain to come."""
    late = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < late, f"rank {rank()} waits in vain until {what}"
        time.sleep(0.005)


def send(command: str, wait: bool = True) -> None:
    """By a process of another group: workers forgive a signal of their parent's."""
    shell = subprocess.Popen(["sh", "-c", command], start_new_session=True)
    if wait:
        shell.wait()


def settled(folder: Path) -> list[CheckpointEntry]:
    """The checkpoints, once nothing is written any more: the first rank commits, maybe after the others have ended."""
    store = CheckpointStore(folder)
    DirectoryLock(store, "a test").wait(timeout_s=40.0)
    return store.entries()


def data(batches: int = BATCHES, workers: int = 0) -> DataLoader[Any]:
    """Shuffled with this rank's random numbers."""
    generator = torch.Generator().manual_seed(rank())
    x = torch.randn(4 * batches, 4, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=4, shuffle=True, num_workers=workers)


def train(folder: Path, strategy: Any, *callbacks: Any, **settings: Any) -> Noisy:
    batches, workers = settings.pop("batches", BATCHES), settings.pop("workers", 0)
    module = settings.pop("module", None) or Noisy()
    limits = {"max_epochs": EPOCHS, **settings.pop("limits", {})}
    usual = {"every_n_train_steps": 4, "busy": "wait", "save_on_exception": False}
    saved = FaultTolerantCheckpoint(folder, **{**usual, **settings})
    torch.manual_seed(100 + rank())
    trainer = make_trainer(strategy, callbacks=[saved, *callbacks], enable_checkpointing=True, **limits)
    trainer.fit(module, data(batches, workers))
    return module


def goes_on(
    folder: Path,
    strategy: Callable[[], Any],
    make: Callable[[], Noisy] = Noisy,
    callbacks: Callable[[], Sequence[Any]] = tuple,
    **settings: Any,
) -> dict[str, Any]:
    """Trained without and with an interruption: the steps that followed, and whether they and all tensors are equal."""
    whole, begun = train(folder / "whole", strategy(), *callbacks(), module=make(), **settings), make()
    with contextlib.suppress(Interrupted, PeerLost):
        stops = OnceSaved(folder / "parts", STOP)
        train(folder / "parts", strategy(), stops, *callbacks(), module=begun, **settings)
    entry = settled(folder / "parts")[0]
    assert entry.manifest is not None
    rest = train(folder / "parts", strategy(), *callbacks(), module=make(), **settings)
    first = min(rest.losses)
    # After a sync point, at an epoch's end, another round may have come; or the first run did not come to this step.
    unknown = first % BATCHES == 0 or first not in begun.losses
    return {
        "saved": entry.step,
        "ranks": entry.manifest.ranks,
        "first": first,
        "goes_on": unknown or rest.losses[first] == begun.losses[first],
        "losses": [rest.losses[step] == whole.losses[step] for step in rest.losses],
        "tensors": {
            name: float((a - b).abs().sum())
            for (name, a), b in zip(tensors_of(whole).items(), tensors_of(rest).values(), strict=True)
        },
        "digest": problem.digest(rest),
    }


@scenario
def ddp(folder: Path) -> dict[str, Any]:
    return goes_on(folder, lambda: "ddp")


@scenario
def synchronous(folder: Path) -> dict[str, Any]:
    return goes_on(folder, lambda: together(DeltaMean(), Synchronous()))


@scenario
def standing_still(folder: Path) -> dict[str, Any]:
    return goes_on(folder, lambda: together(DiLoCo(), EveryNSteps(4), overlap=False))


@scenario
def standing_still_sparse(folder: Path) -> dict[str, Any]:
    """Each rank has what its messages lacked."""
    options: Any = {"overlap": False, "compression": TopK(0.2, bits=2)}
    return goes_on(folder, lambda: together(SparseLoCo(), EveryNSteps(4), **options))


@scenario
def asynchronous(folder: Path) -> dict[str, Any]:
    return goes_on(folder, lambda: together(DiLoCo(), EveryNSteps(4)))


def _raised(folder: Path, strategy: Callable[[], Any], batches: int) -> dict[str, Any]:
    """Training that has ended after 14 steps goes on with a limit of 16."""
    whole, first, second = (
        train(folder / name, strategy(), batches=batches, limits={"max_steps": steps, "max_epochs": -1}).losses
        for name, steps in (("whole", 16), ("parts", 14), ("parts", 16))
    )
    epoch = [entry.manifest.epoch for entry in settled(folder / "parts") if entry.manifest is not None]
    return {"steps": [min(second), max(second)], "equal": first | second == whole, "epoch": epoch[0]}


@scenario
def raised(folder: Path) -> dict[str, Any]:
    """Epochs have 12 batches; of drifting replicas, rank 1's have 8, so that it has come to the end of one."""
    return {
        "synchronous": _raised(folder / "synchronous", lambda: together(DeltaMean(), Synchronous()), 12),
        "asynchronous": _raised(
            folder / "asynchronous", lambda: together(DeltaMean(), EveryNSteps(3)), (12, 8)[rank()]
        ),
    }


@scenario
def uneven(folder: Path) -> dict[str, Any]:
    """Rank 0 has finished when the last rounds of rank 1 are marked."""
    strategy = together(DeltaMean(), EveryNSteps(3))
    module = train(folder, strategy, batches=(3, BATCHES)[rank()])
    entries = CheckpointStore(folder).entries()
    again = train(folder, together(DeltaMean(), EveryNSteps(3)), batches=(3, BATCHES)[rank()])
    return {
        "ranks": [entry.manifest.ranks for entry in entries if entry.manifest],
        "reason": [entry.manifest.reason for entry in entries if entry.manifest],
        "again": len(again.losses),
        "equal": problem.digest(again) == problem.digest(module),
    }


class BeforeTraining(At):
    """Does something once, before there is a batch."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.step = -1
        self.action()


def tell_this() -> None:
    """This process alone."""
    os.kill(os.getpid(), signal.SIGTERM)


def held_up(folder: str) -> None:
    """Rank 0 is told to stop; rank 1 does not end the step in which all would learn of it."""
    preemption._LATE_S = 1.0
    if rank() == 0:
        told = At(STOP, tell_this)
    else:
        told = At(STOP + 1, lambda: until(lambda: CheckpointStore(folder).entries(), "rank 0 has saved alone"))
    train(Path(folder), "ddp", told, every_n_train_steps=1000)


def preempted(
    folder: Path,
    strategy: Callable[[], Any],
    who: Collection[int] = (1,),
    when: type[At] = At,
    tell: Callable[[], None] = tell_this,
    leave: Callable[[Path], None] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Some ranks are told to go, and ``leave`` when their training has ended."""
    told = when(STOP, lambda: tell() if rank() in who else None)
    code: Any = None
    try:
        train(folder, strategy(), told, every_n_train_steps=1000, **settings)
    except SystemExit as error:
        code = error.code
    if leave is not None:
        leave(folder)
    store = CheckpointStore(folder)
    until(store.entries, "a save of which another rank's part may have come last")
    entries = store.entries()
    rest = train(folder, strategy(), every_n_train_steps=1000)
    return {
        "code": code,
        "reasons": [entry.manifest.reason for entry in entries if entry.manifest],
        "step": entries[0].step,
        "ranks": entries[0].manifest.ranks if entries[0].manifest else (),
        "first": min(rest.losses, default=BATCHES * EPOCHS),
        "steps": len(rest.losses),
    }


@scenario
def ddp_preempted(folder: Path) -> dict[str, Any]:
    return preempted(folder, lambda: "ddp")


@scenario
def drifting_preempted(folder: Path) -> dict[str, Any]:
    return preempted(folder, lambda: together(DiLoCo(), EveryNSteps(4)))


@scenario
def told_before_training(folder: Path) -> dict[str, Any]:
    """The rank that commits."""
    return preempted(folder, lambda: together(DiLoCo(), EveryNSteps(4)), who=(0,), when=BeforeTraining)


@scenario
def damaged(folder: Path) -> dict[str, Any]:
    """A bit of the newest one has changed: both ranks go on from the one before, which one of them verified."""
    with contextlib.suppress(Interrupted, PeerLost):
        train(folder, "ddp", At(STOP, interrupt))
    newest, older = settled(folder)[:2]
    torch.distributed.barrier()
    if rank() == 0:
        path = Path(newest.path) / "rank-1.bin"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    torch.distributed.barrier()
    with logged() as messages:
        rest = train(folder, "ddp")
    return {
        "from": min(rest.losses),
        "newest": newest.step,
        "older": older.step,
        "said": [message for message in messages if "rank-1.bin" in message],
        "aside": [path.name for path in folder.iterdir() if ".damaged-" in path.name],
    }

"""The ways of saving that the benchmark of checkpoints compares, each within Lightning's Trainer."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from lightning_async import FaultTolerantCheckpoint
from lightning_async.algorithms import Adaptive, EveryNth

__all__ = ["PEERS", "Job", "Peer", "Saves"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training.

    Args:
        peer: a name in `PEERS`.
        folder: where checkpoints go; empty.
        width: of the model's layers; the state has ``384 * width * (width + 1)`` bytes.
        batch: samples of a step.
        every: steps from one save to the next.
        saves: so many at that interval. Measured are the steps from the first one to where another would follow.
    """

    peer: str
    folder: str
    width: int
    batch: int
    every: int
    saves: int

    @property
    def first(self) -> int:
        """The step that makes the first save due: it is measured from there on."""
        return 1 if PEERS[self.peer].adaptive else self.every

    @property
    def steps(self) -> int:
        return (self.saves + 1) * self.every * (3 if PEERS[self.peer].adaptive else 1) - 1


class Saves:
    """How a peer saves: callbacks and a plugin for the Trainer, and how many saves have begun and are done."""

    def __init__(self, job: Job, *callbacks: pl.Callback, io: CheckpointIO | None = None) -> None:
        self.job, self.callbacks, self.io = job, callbacks, io

    def begun(self, step: int) -> int:
        return step // self.job.every

    def done(self, step: int) -> int:
        return self.begun(step)

    def finish(self) -> None:
        """Training is over: wait for what is being written."""


class Nothing(Saves):
    def begun(self, step: int) -> int:
        return 0


class TorchSave(Saves, pl.Callback):
    """What a loop of one's own would do."""

    def __init__(self, job: Job) -> None:
        super().__init__(job, self)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step % self.job.every == 0:
            path = Path(self.job.folder, f"step-{trainer.global_step}")
            self.save({"model": pl_module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}, path)

    def save(self, state: dict[str, Any], path: Path) -> None:
        torch.save(state, path)


class InThread(TorchSave):
    """Copied on the training thread, written on another one. The save before must be done: its memory may be used."""

    kind = AsyncCheckpointerType.THREAD
    stager: DefaultStager | None = None

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.futures: list[Future[Any]] = []

    def save(self, state: dict[str, Any], path: Path) -> None:
        self._wait()
        future = dcp.async_save(state, checkpoint_id=path, async_checkpointer_type=self.kind, async_stager=self.stager)
        assert isinstance(future, Future)
        self.futures.append(future)

    def done(self, step: int) -> int:
        return sum(future.done() for future in self.futures)

    def finish(self) -> None:
        self._wait()

    def _wait(self) -> None:
        for future in self.futures[-1:]:
            future.result()


class InProcess(InThread):
    """The same with a process that writes, and memory that both have and that is kept: all that DCP has to offer."""

    kind = AsyncCheckpointerType.PROCESS

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.stager = DefaultStager(StagingOptions(False, True, False, False))
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        # It starts with the first save, which takes many seconds: here not within what is measured.
        begin = dcp.async_save({}, checkpoint_id=f"{job.folder}/../started", async_checkpointer_type=self.kind)
        assert isinstance(begin, Future)
        begin.result()

    def finish(self) -> None:
        super().finish()
        dist.destroy_process_group()


class CountingIO(TorchCheckpointIO):
    """Lightning's own, which also tells how many files are there."""

    written = 0

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(*args, **kwargs)
        self.written += 1


class Lightnings(Saves):
    """Lightning's callback, in the training thread or on one of its own."""

    def __init__(self, job: Job, *, asynchronous: bool = False) -> None:
        self.counting = CountingIO()
        callback = ModelCheckpoint(
            job.folder, every_n_train_steps=job.every, save_top_k=-1, save_on_train_epoch_end=False
        )
        super().__init__(job, callback, io=AsyncCheckpointIO(self.counting) if asynchronous else self.counting)

    def done(self, step: int) -> int:
        return self.counting.written


class Ours(Saves):
    def __init__(self, job: Job, *, adaptive: bool = False) -> None:
        when: dict[str, Any] = {"save": Adaptive(0.05)} if adaptive else {"every_n_train_steps": job.every}
        self.callback = FaultTolerantCheckpoint(job.folder, keep=EveryNth(1), buffers=2, **when)
        super().__init__(job, self.callback)

    def _costs(self) -> Any:
        assert self.callback._now is not None
        assert self.callback._now.saver is not None
        return self.callback._now.saver.costs

    def begun(self, step: int) -> int:
        return self._costs().saves

    def done(self, step: int) -> int:
        assert self._costs().failed == 0
        return self._costs().committed


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One way of saving.

    Args:
        about: a few words for the report.
        make: for one training.
        durable: whether what it calls written has been brought to the disk (fsync), and survives a power failure.
        adaptive: it chooses the interval itself, and so trains three times as long.
    """

    about: str
    make: Callable[[Job], Saves]
    durable: bool = False
    adaptive: bool = False


PEERS: dict[str, Peer] = {
    "nothing": Peer(about="no checkpoints", make=Nothing),
    "torch.save": Peer(about="in the training thread", make=TorchSave),
    "ModelCheckpoint": Peer(about="Lightning's, every_n_train_steps", make=Lightnings),
    "AsyncCheckpointIO": Peer(
        about="the same, written by a thread", make=lambda job: Lightnings(job, asynchronous=True)
    ),
    "DCP thread": Peer(about="torch.distributed.checkpoint.async_save", make=InThread, durable=True),
    "DCP process": Peer(about="the same, by a process, shared memory that is kept", make=InProcess, durable=True),
    "ours": Peer(about="ours, every_n_train_steps", make=Ours, durable=True),
    "ours adaptive": Peer(
        about="ours, Adaptive(0.05), from the first step on",
        make=lambda job: Ours(job, adaptive=True),
        durable=True,
        adaptive=True,
    ),
}

"""One rank of the benchmark of deaths, under ``lightning-async launch``: ``-m tests.benchmarks.elastic_rank JOB``.

It trains, writes down what it sees, line by line, and kills itself where it is told to. A line is on its way to the
file when the write returns, so that a kill takes none away.

    FOLDER/trace-<name>-<process>.jsonl   what it has seen, by the clock that all processes of a host share
    FOLDER/die-<name>                     the place at which it is to die: step, header, payload, commit, optimizer,
                                          merge, gate, checkpoint, or reform: while the others form their groups anew
    FOLDER/stop                           all end in order
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_async import (
    AsyncAveragingStrategy,
    DeltaMean,
    EveryNSteps,
    FaultTolerantCheckpoint,
    Synchronous,
    Timeouts,
)
from lightning_async.checkpoint.saver import Saver
from lightning_async.engine.averaging.averager import BackgroundAverager
from lightning_async.engine.averaging.rounds import AnchorRound, AveragingRound
from lightning_async.engine.buckets import InFlightRound
from lightning_async.engine.consensus import ConsensusRound
from lightning_async.engine.control_plane import EngineLoop, Stage
from lightning_async.engine.gradients.overlap import InParts
from lightning_async.engine.gradients.reduction import GradientRounds
from lightning_async.engine.replica import Replica
from lightning_async.engine.sync_points import SyncPoints
from lightning_async.engine.transfer import Transfer
from lightning_async.flat import FlatLayout
from lightning_async.membership import launcher_channel, process_liveness
from lightning_async.membership.membership import Membership
from lightning_async.transports import base
from tests.benchmarks.elastic_trace import BATCH, Writer

__all__ = ["Job"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all ranks do.

    Args:
        folder: of the traces.
        synchronous: all steps are; else local ones with a round every ``period``.
        step_s: compute of a step, which is slept.
        period: steps per round.
        gate_every: steps between two validations.
        samples: of an epoch, over all ranks.
        dead_after_s: see `Timeouts`.
        num_workers: of the loader.
        slow: by name, how many times longer a rank's steps take.
        min_replicas: see `AsyncAveragingStrategy`.
        save_every: steps between two checkpoints of all ranks; 0 for none.
        untold: ranks hear of no death from the launcher.
        apart: nor do they find each other's processes, as on hosts of their own.
    """

    folder: str
    synchronous: bool = False
    step_s: float = 0.024
    period: int = 10
    gate_every: int = 100
    samples: int = 400_000
    dead_after_s: float = 30.0
    num_workers: int = 0
    slow: dict[str, float] = field(default_factory=dict)
    min_replicas: int = 1
    save_every: int = 0
    untold: bool = False
    apart: bool = False


NAME = os.environ.get("RANK", "0")


class Trace(Writer):
    """What this rank writes down, and whether it is to die."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder, NAME)
        self._order = Path(folder, f"die-{NAME}")

    def dies(self, place: str) -> bool:
        """Whether this is the place."""
        if not self._order.exists():
            return False
        with contextlib.suppress(OSError):
            return self._order.read_text() == place
        return False

    def at(self, place: str) -> None:
        """Die, if this is the place."""
        if self.dies(place):
            self.note("die", place=place)
            os.kill(os.getpid(), signal.SIGKILL)


def digest_of(*tensors: Tensor) -> str:
    return hashlib.blake2b(b"".join(each.detach().numpy().tobytes() for each in tensors), digest_size=8).hexdigest()


def around(owner: type, name: str, wrap: Callable[..., Any]) -> None:
    """Have ``wrap(original, self, ...)`` called in place of a method."""
    original = getattr(owner, name)
    setattr(owner, name, lambda self, *args, **kwargs: wrap(original, self, *args, **kwargs))


def watch(trace: Trace, module: Trained) -> None:
    """See what the engine does, and die in the middle of it."""
    digests: dict[int, str] = {}

    def apply(original: Any, loop: Any, exchange: Any) -> None:
        original(loop, exchange)
        strategy: Any = module.trainer.strategy
        generation, live_ranks = loop._membership.generation, strategy.live_ranks
        trace.note(
            "commit", run=strategy.num_runs, id=exchange.id, kind=type(exchange.kind).__name__,
            generation=generation.number, members=generation.members if live_ranks is None else live_ranks.names,
            failed=loop._box.failed, digest=digests.pop(exchange.id), step=getattr(exchange.message, "step", None),
        )  # fmt: skip

    def commit(original: Any, kind: Any, exchange: InFlightRound) -> None:
        original(kind, exchange)
        digests[exchange.id] = digest_of(exchange.target)

    def to(original: Any, loop: Any, stage: Stage) -> None:
        if stage in (Stage.HEADER, Stage.COMMIT):
            trace.at(stage.value)
        if stage is Stage.FAILED:
            trace.note("failed")
        original(loop, stage)

    def begin_sum(transfer: Any, bucket: Tensor) -> None:
        """Its first part is on its way when this rank dies."""
        if trace.dies("payload"):
            transfer.large.all_reduce(next(iter(FlatLayout.parts(bucket, transfer.part_bytes))))
            trace.at("payload")

    def sum_(original: Any, transfer: Any, bucket: Tensor) -> None:
        begin_sum(transfer, bucket)
        original(transfer, bucket)

    def put_(original: Any, sums: Any, *args: Any) -> Tensor:
        begin_sum(sums._transfer, part := original(sums, *args))
        return part

    def merge_(original: Any, replica: Any, *args: Any, **kwargs: Any) -> Any:
        trace.at("merge")
        return original(replica, *args, **kwargs)

    def stand(original: Any, averager: Any) -> None:
        trace.at("sync_point")
        original(averager)

    def rendezvous(original: Any, sync_points: Any, *args: Any, **kwargs: Any) -> Any:
        module.gated = True
        return original(sync_points, *args, **kwargs)

    def save(original: Any, saver: Saver, *args: Any, **kwargs: Any) -> Any:
        trace.at("checkpoint")
        return original(saver, *args, **kwargs)

    def next_generation(original: Any, membership: Any, *args: Any) -> Any:
        trace.at("reform")
        return original(membership, *args)

    for kind in (AveragingRound, ConsensusRound, AnchorRound, GradientRounds):
        around(kind, "commit", commit)
    around(EngineLoop, "_apply", apply)
    around(EngineLoop, "_to", to)
    around(Transfer, "sum_", sum_)
    around(InParts, "_put_", put_)
    around(Replica, "merge_", merge_)
    around(BackgroundAverager, "at_sync_point", stand)
    around(SyncPoints, "rendezvous", rendezvous)
    around(Saver, "save", save)
    around(Membership, "next_generation", next_generation)


def hear_nothing() -> None:
    """The launcher tells this rank of no deaths; it is told of generations as ever, or it would end all."""
    descriptor = int(os.environ.pop(launcher_channel.CHANNEL).partition(":")[0])
    launcher_channel._mine = lambda: descriptor
    base.listen = lambda on_death: None


class Mortal(torch.optim.SGD):
    """May die when some parameters have moved and others have not."""

    trace: Trace

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        if self.trace.dies("optimizer"):
            first = self.param_groups[0]["params"][0]
            with torch.no_grad():
                first -= self.param_groups[0]["lr"] * first.grad
            self.trace.at("optimizer")
        super().step()
        return loss


class Samples(Dataset[Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((32,), (index % 97) / 97.0)


class Trained(pl.LightningModule):
    def __init__(self, job: Job) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.job, self.trace = job, Trace(job.folder)
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
        self.gated = True
        """A sync point came since the last step, or none has been taken: the pause says nothing of averaging."""
        self._stop, self._ended = Path(job.folder, "stop"), time.monotonic()
        self._step_s = job.step_s * job.slow.get(NAME, 1.0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        started = time.monotonic()
        self.trace.at("step")
        self.trace.note("step", gap=started - self._ended, gated=self.gated, n=self.trainer.global_step)
        self.gated = False
        loss = (self.layers(batch) - batch.mean(1, keepdim=True)).pow(2).mean()
        time.sleep(max(0.0, self._step_s - (time.monotonic() - started)))
        self._ended = time.monotonic()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._stop.exists():
            self.trainer.should_stop = True

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.gated = True

    def on_train_epoch_start(self) -> None:
        self.gated = True

    def configure_optimizers(self) -> Any:
        optimizer = Mortal(self.parameters(), lr=0.05)
        optimizer.trace = self.trace
        return optimizer


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    module = Trained(job)
    watch(module.trace, module)
    if job.untold:
        hear_nothing()
    if job.apart:
        process_liveness.place_of = lambda process: NAME
    module.trace.note("start", process=os.getpid(), name=NAME)
    strategy = AsyncAveragingStrategy(
        rule=DeltaMean(),  # its payload moves as one bucket, in which ranks die
        schedule=Synchronous() if job.synchronous else EveryNSteps(job.period),
        min_replicas=job.min_replicas,
        timeouts=Timeouts(dead_after=timedelta(seconds=job.dead_after_s)),
    )
    saves: list[Any] = []
    if job.save_every:
        saves.append(FaultTolerantCheckpoint(f"{job.folder}/checkpoints", every_n_train_steps=job.save_every))
    trainer = pl.Trainer(
        callbacks=saves,
        strategy=strategy, accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), max_epochs=-1, logger=False,
        enable_checkpointing=bool(saves), enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        val_check_interval=job.gate_every, limit_val_batches=1, default_root_dir=job.folder,
    )  # fmt: skip
    loader = DataLoader(Samples(job.samples), batch_size=BATCH, num_workers=job.num_workers)
    try:
        trainer.fit(module, loader, DataLoader(Samples(BATCH * 8), batch_size=BATCH))
    except BaseException as error:
        module.trace.note("error", error=f"{type(error).__name__}: {error}")
        raise
    module.trace.note(
        "end", digest=digest_of(*module.parameters()), step=trainer.global_step, lost=strategy.summary.lost
    )


if __name__ == "__main__":
    main()

"""A user's script under Horovod Elastic: says which samples each rank took, what was committed, and what came out.

``elastic_script.py horovod|averaging|gradients``: a rank that is alone waits in the first epoch for a host to come;
beside another one it hears of hosts once more, without there being others; in the second epoch rank 1 holds, until it
is killed.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_async import (
    AsyncAveragingStrategy,
    AsyncGradientStrategy,
    DiLoCo,
    EveryNSteps,
    FaultTolerantCheckpoint,
    HorovodStrategy,
    fit_elastic,
)
from lightning_async.horovod.collectives import Committed
from lightning_async.trainer.namespace import pl, pytorch

SAMPLES, VALIDATED, BATCH = 117, 20, 2
WAITS_AT, HEARS_AT, HOLDS_AT, LIMIT_S = 7, 15, 7, 60.0
PATIENCE = timedelta(seconds=150)  # with one that starts on a busy machine
ADDED = 2  # of Horovod's `HostUpdateResult`


def tell(kind: str, *values: object) -> None:
    # One write: the lines of ranks that share a pipe must not mix.
    os.write(1, f"\n{kind} {os.getpid()} {' '.join(map(str, values))}\n".encode())


def ids(batch: Any) -> str:
    return ",".join(str(int(value)) for value in batch[0].view(-1))


def listeners() -> list[Any]:
    return list(importlib.import_module("horovod.common.elastic").notification_manager._listeners)


def wait_for_hosts() -> None:
    """Until the launcher has said that there are others."""
    end = time.monotonic() + LIMIT_S
    while all(listener._host_messages.empty() for listener in listeners()):
        assert time.monotonic() < end
        time.sleep(0.01)


class Module(pl.LightningModule):
    def __init__(self, plays: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.plays, self.heard = torch.nn.Linear(1, 1), plays, False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        trainer = self.trainer
        tell(
            "STEP", self.global_rank, trainer.world_size, self.current_epoch, trainer.global_step, time.time(),
            getattr(trainer.strategy, "weight", 1.0), ids(batch),
        )  # fmt: skip
        if not self.began and (averager := getattr(trainer.strategy, "averager", None)) is not None:
            state = averager.state_dict()
            moved = sum(float(value.abs().sum()) for name, value in state["rule_state"].items() if "mom" in name)
            tell("BEGINS", averager.clocks()["step"], state["round"], moved)
        self.began = True
        if self.plays and trainer.world_size == 1 and trainer.global_step == WAITS_AT:
            wait_for_hosts()
        hears = trainer.global_step >= HEARS_AT and not self.heard  # a sync point may bring two steps at once
        if self.plays and self.global_rank == 0 and trainer.world_size == 2 and hears:
            self.heard = True
            for listener in listeners():
                listener.on_hosts_updated(int(time.time()) + 1, ADDED)
        if self.plays and self.global_rank == 1 and self.current_epoch == 1 and batch_idx == HOLDS_AT:
            tell("HOLDS")
            time.sleep(LIMIT_S)
        return (self.layer(batch[0] / SAMPLES) - 1.0).pow(2).mean()

    def on_train_start(self) -> None:
        self.began = False

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            tell("VALIDATED", self.current_epoch, ids(batch))
            self.log("val_loss", batch[0].mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Stream(IterableDataset[Any]):
    """Each rank has the numbers that are its own, of those that there are when it is iterated over."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __iter__(self) -> Any:
        trainer = self.module.trainer
        return iter([(torch.tensor([float(number)]),) for number in range(trainer.global_rank, 12, trainer.world_size)])


def make_trainer() -> Any:
    saves = "horovod" in sys.argv and not os.path.exists("done")
    asynchronous = {
        "averaging": AsyncAveragingStrategy(DiLoCo(), EveryNSteps(5)), "gradients": AsyncGradientStrategy(2),
    }  # fmt: skip
    tell("WORLD")
    return pl.Trainer(
        accelerator="cpu",
        callbacks=[FaultTolerantCheckpoint("checkpoints", every_n_train_steps=7)] if saves else [],
        strategy=asynchronous.get(sys.argv[1], HorovodStrategy()),
        max_epochs=2,
        logger=pytorch("loggers").CSVLogger("logs", name=None) if not os.path.exists("done") else False,
        log_every_n_steps=1,
        enable_checkpointing=saves,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def numbers(count: int) -> Dataset[Any]:
    return TensorDataset(torch.arange(float(count)).view(-1, 1))


def main() -> None:
    commit = Committed.commit

    def told(self: Any, value: Any) -> None:
        tell("COMMIT", value.number)
        commit(self, value)

    Committed.commit = told  # type: ignore[method-assign]
    module, workers = Module(), 2 if "horovod" in sys.argv else 0
    train = DataLoader(numbers(SAMPLES), BATCH, shuffle=True, num_workers=workers)
    val = DataLoader(numbers(VALIDATED), BATCH)
    trainer = fit_elastic(make_trainer, module, train, val, commit_every=5, gloo_timeout=PATIENCE)
    open("done", "w").close()
    tell("DONE", trainer.global_step, f"{float(module.layer.weight.detach()):.7f}")
    trainer.validate(module, val, verbose=False)
    tell("SECOND")
    module = Module(plays=False)
    fit_elastic(make_trainer, module, DataLoader(Stream(module), BATCH), commit_every=2)
    tell("ENDED", f"{float(module.layer.weight.detach()):.7f}")


if __name__ == "__main__":
    sys.exit(main())

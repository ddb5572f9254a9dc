"""What a rank of the test of fragments does: train in rounds of fragments in int8, die, and resume."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from lightning_async import AsyncAveragingStrategy, DiLoCo, EveryNSteps, FaultTolerantCheckpoint, Timeouts
from lightning_async.checkpoint.store import CheckpointStore
from lightning_async.trainer.namespace import pl
from tests.strategies.problem import batches, flat, loss_of, momentum, network

BATCHES = 200


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> Any:
        return momentum(self.net.parameters())


class Dies(pl.Callback):
    """Ends some ranks at a step, or, where ``step`` is None, as soon as a save is whole.

    All take their time, so that those that are left have rounds without them.
    """

    def __init__(self, folder: str, dies: list[int], step: int | None) -> None:
        self.folder = folder
        self.dies = int(os.environ["RANK"]) in dies
        self.step = step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(0.01)
        is_there = trainer.global_step > 20 and self.step is None and CheckpointStore(Path(self.folder)).entries()
        if self.dies and (is_there or trainer.global_step == self.step):
            os.kill(os.getpid(), signal.SIGKILL)


class Notices(pl.Callback):
    """Lets this rank go on from a step once it has heard that the other one is lost."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        until = time.monotonic() + 60
        while trainer.global_step == 40 and not trainer.strategy.live_ranks.lost and time.monotonic() < until:
            time.sleep(0.01)


class Begins(pl.Callback):
    """Notes what this rank goes on from."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not hasattr(self, "step"):
            averager = trainer.strategy.fit_sessions.session.averager
            state = averager.state_dict()
            self.step = trainer.global_step
            self.rounds = state["num_rounds"]
            self.momentum = state["rule_state"]["momentum"].tolist()


def train(
    folder: str, epochs: int, fragments: int = 3, dies_at: int | None = -1, dies: list[int] | None = None
) -> None:
    rank = int(os.environ["RANK"])
    strategy = AsyncAveragingStrategy(
        DiLoCo(outer_lr=0.7, outer_momentum=0.5), EveryNSteps(6), compression="int8", fragments=fragments,
        min_replicas=1, timeouts=Timeouts(dead_after=timedelta(seconds=3)), transport="torch",
    )  # fmt: skip
    begins = Begins()
    saves = FaultTolerantCheckpoint(folder, every_n_train_steps=10)
    callbacks: list[Any] = [saves, begins, Dies(folder, dies or [], dies_at)]
    callbacks += [Notices()] * (bool(dies) and rank not in (dies or []))
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), max_epochs=epochs, logger=False,
        callbacks=callbacks, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    model = Net()
    data: Any = batches(rank, BATCHES)
    trainer.fit(model, DataLoader(data, batch_size=None))
    summary = strategy.summary
    told = {
        "from": [begins.step, begins.rounds], "momentum": begins.momentum, "step": trainer.global_step,
        "rounds": summary.rounds, "values": flat(model.net),
    }  # fmt: skip
    print("ENDED", json.dumps(told), flush=True)

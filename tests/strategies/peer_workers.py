"""What a rank of the tests of peer memory does: it notes what is its own at each step, and what it gets back."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_async import AsyncAveragingStrategy, EveryNSteps, PeerMemory
from lightning_async.trainer.namespace import pl
from tests.strategies.failure_workers import digest
from tests.strategies.joining_workers import UntilBack, wait_for
from tests.strategies.survivor_workers import CAME_BACK, DEADLINES, NUMBER, RANKS, die, loader


class Noted(PeerMemory):
    """Notes what a rank has that comes back."""

    own: list[Any] | None = None

    def come(self, told: dict[str, Any]) -> None:
        super().come(told)
        assert self._now is not None
        self.own = what_is_own(self._now._trainer)


class Own(UntilBack):
    """Rank 1 dies in its fifth step; rank 2, which has what rank 1 had, when it has heard of that. Both come back.

    Args:
        memory: the callback.
    """

    def __init__(self, memory: PeerMemory) -> None:
        super().__init__({}, "")
        self._memory = memory

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if not CAME_BACK and NUMBER == 1 and self.trainer.global_step == 4:
            die()
        if not CAME_BACK and NUMBER == 2 and "1" not in self.trainer.strategy.survivors.names:
            die()
        torch.rand(NUMBER + 1)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if CAME_BACK:
            return
        courier: Any = self._memory._now and self._memory._now._courier  # it comes before the module
        until = time.monotonic() + 60.0
        while courier.busy and time.monotonic() < until:
            time.sleep(0.001)
        os.write(1, b"\nOWN %b\n" % json.dumps([self.trainer.global_step, *what_is_own(self.trainer)]).encode())


def what_is_own(trainer: Any) -> list[Any]:
    """The momentum of each parameter, and the random number that comes next."""
    (optimizer,) = trainer.optimizers
    state = torch.get_rng_state()
    draw = float(torch.rand(()))
    torch.set_rng_state(state)
    return [[each["momentum_buffer"].flatten().tolist() for each in optimizer.state.values()], draw]


def train(folder: str) -> None:
    memory = Noted(every_n_train_steps=1)
    strategy = AsyncAveragingStrategy(schedule=EveryNSteps(3), deadlines=DEADLINES, min_replicas=1)
    torch.manual_seed(NUMBER)
    module = Own(memory)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=RANKS, max_epochs=1000, default_root_dir=folder, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=0,
        callbacks=[memory],
    )  # fmt: skip
    if CAME_BACK:
        wait_for(Path(folder) / f"start {os.environ['LIGHTNING_ASYNC_REJOIN']}")
    told: dict[str, Any] = {"name": str(NUMBER)}
    try:
        trainer.fit(module, loader(False, 0))
    except BaseException as error:
        told["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        told |= {
            "digest": digest(module), "rank": trainer.global_rank, "world_size": trainer.world_size, "own": memory.own,
            "lost": strategy.summary.lost,
        }  # fmt: skip
        os.write(1, b"\nENDED %b\n" % json.dumps(told).encode())

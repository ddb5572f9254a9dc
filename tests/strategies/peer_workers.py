"""What a rank of the tests of peer memory does: it notes what is its own at each step, and what it gets back."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_async import AsyncAveragingStrategy, DeltaMean, EveryNSteps, PeerMemory
from lightning_async.algorithms import SaveProgress
from lightning_async.trainer.namespace import pl
from tests.strategies.failure_workers import digest
from tests.strategies.joining_workers import UntilBack, wait_for
from tests.strategies.live_rank_workers import CAME_BACK, DEADLINES, NUMBER, RANKS, die, loader


class Noted(PeerMemory):
    """Notes what a rank has that comes back."""

    own: list[Any] | None = None
    asked = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self.asked = self._now is not None and self._now._asked

    def come(self, told: dict[str, Any]) -> None:
        super().come(told)
        assert self._now is not None
        self.own = what_is_own(self._now._trainer)


@dataclass(frozen=True)
class Once:
    """A copy after the first step, or none at all: others only where the next rank is another one."""

    ever: bool

    def due(self, progress: SaveProgress) -> bool:
        return self.ever and progress.saved_step == 0


class Own(UntilBack):
    """Rank 1 dies before its first copy; rank 0 when its copy, which that had, is with rank 2. Both come back.

    Args:
        memory: the callback.
    """

    def __init__(self, memory: PeerMemory) -> None:
        super().__init__({}, "", RANKS)
        self._memory = memory

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if not CAME_BACK and NUMBER == 1 and self.trainer.global_step == 4:
            die()
        torch.rand(NUMBER + 1)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        peers: Any = self._memory._now  # it comes before the module
        if CAME_BACK:
            return
        os.write(1, b"\nOWN %b\n" % json.dumps([self.trainer.global_step, *what_is_own(self.trainer)]).encode())
        if (
            NUMBER == 0
            and "1" not in self.trainer.strategy.live_ranks.names
            and (peer_copy_sender := peers._peer_copy_sender)
        ):
            until = time.monotonic() + 60.0
            while peer_copy_sender.busy and time.monotonic() < until:
                time.sleep(0.001)
            if peer_copy_sender._at and peer_copy_sender._at.port == peers._door.read_keeper("2")["port"]:
                die()


def what_is_own(trainer: Any) -> list[Any]:
    """The momentum of each parameter, and the random number that comes next."""
    (optimizer,) = trainer.optimizers
    state = torch.get_rng_state()
    draw = float(torch.rand(()))
    torch.set_rng_state(state)
    return [[each["momentum_buffer"].flatten().tolist() for each in optimizer.state.values()], draw]


def train(folder: str) -> None:
    memory = Noted(save=Once(NUMBER != 1))
    strategy = AsyncAveragingStrategy(rule=DeltaMean(), schedule=EveryNSteps(3), timeouts=DEADLINES, min_replicas=1)
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
            "asked": memory.asked,
            "lost": strategy.summary.lost,
        }  # fmt: skip
        os.write(1, b"\nENDED %b\n" % json.dumps(told).encode())

"""What a rank of the tests of batches by speed does where one is lost and comes back: the last one is slow."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_async import AsyncAveragingStrategy, BalancedBatchSizes, Synchronous
from lightning_async.trainer.namespace import pl
from tests.strategies.failure_workers import digest
from tests.strategies.joining_workers import UntilBack, wait_for
from tests.strategies.live_rank_workers import CAME_BACK, DEADLINES, NUMBER, RANKS

LENGTH, SIZE, STEP = 1600, 8, 24
SAMPLE_S = (0.004, 0.004, 0.012)
"""Of 24 samples the ranks have 10, 10 and 4; of 16 those that are left, 0 and 2, have 18 and 6."""


class Paced(UntilBack):
    """Takes a time by the samples in a batch, and notes how many there are in the batch of each step."""

    def __init__(self, deaths: dict[str, tuple[str, int, int]]) -> None:
        super().__init__(deaths, "")
        self.lengths: dict[int, dict[int, int]] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.pause_s = SAMPLE_S[NUMBER] * len(batch)
        self.lengths.setdefault(self.current_epoch, {})[self.trainer.global_step] = len(batch)
        return super().training_step(batch, batch_idx)


def train(folder: str, deaths: dict[str, tuple[str, int, int]], every: int = 10, num_workers: int = 0) -> None:
    strategy = AsyncAveragingStrategy(schedule=Synchronous(), timeouts=DEADLINES, min_replicas=1)
    module = Paced({number: (place, epoch, taken) for number, (place, epoch, taken) in deaths.items()})
    balanced = BalancedBatchSizes(every=every)
    data: Any = torch.arange(LENGTH).float().unsqueeze(1)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=RANKS, max_epochs=100, default_root_dir=folder, logger=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[balanced], enable_checkpointing=False,
    )  # fmt: skip
    if CAME_BACK:
        wait_for(Path(folder) / f"start {os.environ['LIGHTNING_ASYNC_REJOIN']}")
    trainer.fit(module, DataLoader(data, SIZE, num_workers=num_workers))
    told = {
        "digest": digest(module), "rank": trainer.global_rank, "world_size": trainer.world_size,
        "lost": strategy.summary.lost, "came_at": module.came_at, "trained": module.trained,
        "lengths": module.lengths, "sizes": balanced.batch_sizes, "epochs": trainer.current_epoch,
    }  # fmt: skip
    os.write(1, b"\nENDED %b\n" % json.dumps(told).encode())

"""What a rank of the tests of torch's default group does: gather in each step, as contrastive losses do."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_async import AsyncAveragingStrategy, AsyncGradientStrategy, DeltaMean, EveryNSteps, Timeouts
from lightning_async.trainer.namespace import pl

NUMBER = int(os.environ.get("LOCAL_RANK", "0"))
RANKS = int(os.environ.get("WORLD_SIZE", "1"))


class Gathers(pl.LightningModule):
    """Gathers the ranks' numbers in each step; rank 2 kills itself once in its fifth step."""

    def __init__(self, died: Path, pause_s: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(1, 1)
        self.sums: list[tuple[int, float]] = []
        self.sampler_sizes: list[int] = []
        self._died = died
        self._pause_s = pause_s
        self._world: Any = None

    def prepare_data(self) -> None:
        """Exists, so that Lightning has all ranks wait for it."""

    def train_dataloader(self) -> DataLoader[Any]:
        data = TensorDataset(torch.arange(240.0).unsqueeze(1))
        sampler: DistributedSampler[Any] = DistributedSampler(data)  # as users write it: numbers of torch.distributed
        self.sampler_sizes.append(sampler.num_replicas)
        return DataLoader(data, batch_size=2, sampler=sampler)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._world = self._world or dist.group.WORLD  # captured early, and used from then on
        numbers = torch.tensor([float(self.trainer.global_rank + 1)])
        rows = [torch.zeros(1) for _ in range(dist.get_world_size())]
        if NUMBER == 2 and batch_idx == 5 and not self._died.exists():
            self._died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_gather(rows, numbers, group=self._world)
        self.sums.append((len(rows), float(sum(rows))))
        time.sleep(self._pause_s if len(rows) == 2 else 0.05)
        return self.layer(batch[0] / 240).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main(folder: Path, windows: bool, pause_s: float) -> None:
    timeouts = Timeouts(dead_after=timedelta(seconds=20))
    rounds: Any = {"rule": DeltaMean(), "schedule": EveryNSteps(4), "timeouts": timeouts, "min_replicas": 1}
    strategy: Any = AsyncAveragingStrategy(**rounds)
    if windows:
        strategy = AsyncGradientStrategy(2, timeouts=timeouts, min_replicas=1)
    module = Gathers(folder / "died", pause_s)
    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=RANKS, max_epochs=2, use_distributed_sampler=False,
        enable_model_summary=False, **quiet,
    )  # fmt: skip
    trainer.fit(module)
    total = torch.tensor([1.0])
    dist.all_reduce(total)  # after `fit`, as scripts do
    told = {
        "rank": dist.get_rank(), "size": dist.get_world_size(), "sums": module.sums, "total": float(total),
        "sampler_sizes": module.sampler_sizes, "same": module._world is dist.group.WORLD,
    }  # fmt: skip
    (folder / f"told{NUMBER}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "windows", float(sys.argv[3]))

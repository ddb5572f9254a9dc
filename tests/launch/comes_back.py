"""A user's script for two ranks: rank 0, or that in DIES, dies at its first start; all stop when it has been back.

Before that, its own state of its last step is with the other one. With DEAD_AFTER silence is death after so many
seconds.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any, cast

import torch
from torch import Tensor

from lightning_async import AsyncAveragingStrategy, EveryNSteps, PeerMemory, Timeouts
from lightning_async.membership.launcher_channel import came_back
from lightning_async.trainer.namespace import pl


class Waits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.alone, self.together = False, 0

    def on_train_start(self) -> None:
        self.alone = came_back() is not None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(0.01)
        if came_back() is None and batch_idx == 10 and os.environ["RANK"] == os.environ.get("DIES", "0"):
            peers: Any = memory._now
            while peers._peer_copy_sender.busy:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)
        if batch_idx == 10:
            print("TEN", os.environ["RANK"], os.getpid(), flush=True)
        here = self.trainer.world_size
        self.alone, self.together = self.alone or here == 1, self.together + (self.alone and here == 2)
        if self.together == 10:
            self.trainer.should_stop = True
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


if __name__ == "__main__":
    torch.manual_seed(0)
    here, everywhere = (int(os.environ[name]) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    memory = PeerMemory(every_n_train_steps=1)
    timeouts = Timeouts(dead_after=timedelta(seconds=float(os.environ.get("DEAD_AFTER", "30"))))
    trainer = pl.Trainer(
        strategy=AsyncAveragingStrategy(schedule=EveryNSteps(5), min_replicas=1, timeouts=timeouts),
        accelerator="cpu", num_nodes=everywhere // here, devices=here, max_epochs=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        callbacks=[memory],
    )  # fmt: skip
    module, data = Waits(), cast("Any", torch.ones(1_000_000, 2))
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=2))
    print("ENDED", os.environ["RANK"], trainer.world_size, float(module.layer.weight.detach().sum()), flush=True)

"""A user's script under Horovod Elastic: says which samples each rank took, and when.

``elastic_script.py [holds] [slow]``: rank 1 stays in its 20th step, until it is killed; a rank that is alone takes its
time, so that another one can come.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_async import HorovodStrategy, fit_elastic
from lightning_async.trainer.namespace import pl

SAMPLES, BATCH = 240, 2


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        alone = self.trainer.world_size == 1
        time.sleep(0.1 if alone and "slow" in sys.argv else 0.02)
        (x,) = batch
        taken = ",".join(str(int(value)) for value in x.view(-1))
        told = f"{os.getpid()} {self.global_rank} {self.trainer.world_size} {self.current_epoch}"
        # One write: the lines of ranks that share a pipe must not mix.
        os.write(1, f"\nSTEP {told} {self.trainer.global_step} {time.time()} {taken}\n".encode())
        if "holds" in sys.argv and self.global_rank == 1 and self.trainer.global_step == 20:
            time.sleep(60.0)  # it is killed meanwhile
        return (self.layer(x / SAMPLES) - 1.0).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def make_trainer() -> Any:
    return pl.Trainer(
        accelerator="cpu",
        strategy=HorovodStrategy(),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def main() -> None:
    data = TensorDataset(torch.arange(float(SAMPLES)).view(-1, 1))
    module = Module()
    trainer = fit_elastic(make_trainer, module, DataLoader(data, BATCH, shuffle=True), commit_every=5)
    told = f"{trainer.global_step} {trainer.current_epoch} {float(module.layer.weight):.6f}"
    os.write(1, f"\nDONE {os.getpid()} {told}\n".encode())


if __name__ == "__main__":
    sys.exit(main())

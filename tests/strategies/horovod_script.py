"""A user's script of synchronous training, for Horovod's launchers: tells the weights after some steps.

``horovod_script.py WHAT...`` trains once with each reduction, and for ``averaging`` does what `launch_script` does.
``blind``, which comes first, is a fork that trains with a Horovod that does not look for MPI, and says what is refused.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_async import HorovodStrategy
from lightning_async.trainer.namespace import pl
from tests.strategies import launch_script

LR, STEPS, BATCH = 0.1, 4, 3


def data(rank: int) -> tuple[Tensor, Tensor]:
    """Rank's inputs and targets."""
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(STEPS * BATCH, 4, generator=generator)
    return inputs, torch.randn(STEPS * BATCH, 2, generator=generator) + 3.0 * rank


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def loss(net: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return (net(inputs) - targets).pow(2).mean()


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*data(self.global_rank)), BATCH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return loss(self.net, *batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LR)


def train(reduction: Any) -> None:
    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu", strategy=HorovodStrategy(reduction=reduction), max_epochs=1, use_distributed_sampler=False,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module)
    weights = [p.tolist() for p in module.parameters()]
    told = json.dumps({"size": trainer.world_size, "reduction": reduction, "weights": weights})
    # One write: the lines of ranks that share a pipe must not mix.
    os.write(1, f"\nTOLD {told}\n".encode())


def blind() -> None:
    if fork := os.fork():
        os.waitpid(fork, 0)
        return
    os.environ.update(HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo")
    try:
        train("mean")
    except Exception as error:
        os.write(1, f"\nREFUSED {error}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    for what in sys.argv[1:]:
        if what == "blind":
            blind()
        elif what == "averaging":
            launch_script.main("horovod", "2", "fit", "test")
        else:
            train(what)

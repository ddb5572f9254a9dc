"""Four workers of a parameter server read digits; one of them is slow."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lightning_async import ParameterServerStrategy
from lightning_async.trainer.namespace import pl
from tests.strategies.digits import accuracy, digits, network
from tests.strategies.workers import loader, make_trainer, rank, scenario

WORKERS, BATCHES, BATCH, SLOWER = 4, 250, 16, 5
STEP_S = 0.01


class Reader(pl.LightningModule):
    """A CNN, and SGD with momentum; the last worker's batches take longer, and it has fewer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.pause_s = STEP_S * (SLOWER if rank() == WORKERS - 1 else 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = cross_entropy(self.net(x), y)
        time.sleep(self.pause_s)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.06, momentum=0.9)


def read(staleness: str) -> dict[str, float]:
    module, count = Reader(), BATCHES // (SLOWER if rank() == WORKERS - 1 else 1)
    x, y = digits(count * BATCH, seed=rank())
    strategy = ParameterServerStrategy("async", staleness=staleness)
    trainer = make_trainer(strategy, devices=WORKERS)
    trainer.fit(module, loader(zip(x.split(BATCH), y.split(BATCH), strict=True)))
    return {"accuracy": accuracy(module.net), "steps": trainer.global_step}


@scenario
def auto() -> Any:
    return read("auto")


@scenario
def none() -> Any:
    return read("none")

"""Scenarios of `ParameterServerStrategy` that cannot be: all ranks say why, at the start."""

from __future__ import annotations

from typing import Any

import torch

from lightning_async import ParameterServerStrategy
from tests.strategies import problem
from tests.strategies.problem import adam, momentum
from tests.strategies.served import fit
from tests.strategies.workers import Net, rank, scenario


@scenario
def more_servers() -> Any:
    return fit(ParameterServerStrategy(num_servers=3))


@scenario
def not_to_be_sharded() -> Any:
    return fit(ParameterServerStrategy(), optimizer=torch.optim.Adafactor)


@scenario
def no_gradients_of_its_own() -> Any:
    return fit(ParameterServerStrategy(), optimizer=torch.optim.LBFGS)


@scenario
def other_models() -> Any:
    return fit(ParameterServerStrategy(), module=Net(network=lambda: problem.network(8 + rank())))


@scenario
def other_optimizers() -> Any:
    return fit(ParameterServerStrategy(), optimizer=adam if rank() else momentum)


@scenario
def other_servers() -> Any:
    return fit(ParameterServerStrategy(num_servers=1 + rank()))


class Cycling(Net):
    """Its scheduler changes the momentum with the rate."""

    def configure_optimizers(self) -> Any:
        optimizer = momentum(self.parameters())
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@scenario
def cycled_momentum() -> Any:
    return fit(ParameterServerStrategy("sync"), module=Cycling())


class Decaying(Net):
    """It changes more than the rate by itself."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.optimizers[0].param_groups[0]["momentum"] *= 0.5


@scenario
def other_momentum_than_at_the_start() -> Any:
    return fit(ParameterServerStrategy("sync"), module=Decaying(optimizer=momentum))

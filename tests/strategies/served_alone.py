"""A scenario of `ParameterServerStrategy` after which one rank is alone."""

from __future__ import annotations

from typing import Any

from lightning_async import ParameterServerStrategy
from tests.strategies import problem
from tests.strategies.served import fit
from tests.strategies.workers import Net, rank, scenario, shard


@scenario
def host_fails() -> Any:
    """The rank that has started the server fails, and ends; the other one trains on."""
    module = Net()
    if rank() == 0:
        module.training_step = lambda batch, batch_idx: 1 / 0 if batch_idx == 4 else problem.loss_of(module, batch)
    return fit(ParameterServerStrategy("async", min_replicas=1), shard([12, 12]), module=module)

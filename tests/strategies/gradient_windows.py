"""Scenarios of windows of gradients, compared with DDP's steps, and with a reference in float64."""

from __future__ import annotations

from typing import Any

import torch

from lightning_async import AsyncGradientStrategy
from tests.strategies.workers import Net, fit, loader, scenario, shard


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def strategy(*args: Any, **options: Any) -> AsyncGradientStrategy:
    return AsyncGradientStrategy(*args, min_replicas=2, **options)


@scenario
def no_delay() -> Any:
    return fit(strategy(3, delay=0), loader(shard((12, 12))), Net(optimizer=momentum), max_epochs=2)


@scenario
def no_delay_adam_clipped() -> Any:
    """The epoch's last window is shorter, as Lightning's."""
    return fit(
        strategy(3, delay=0), loader(shard((10, 10))), Net(optimizer=adam), max_epochs=2, gradient_clip_val=0.2,
        val=loader(shard((2, 2))), val_check_interval=6,
    )  # fmt: skip


@scenario
def no_delay_unequal_batches() -> Any:
    return fit(strategy(2, delay=0), loader(shard((12, 12), (3, 9))), Net(optimizer=momentum))


@scenario
def delayed() -> Any:
    return fit(strategy(2), loader(shard((12, 12), (3, 9))), Net(optimizer=momentum), max_epochs=2)

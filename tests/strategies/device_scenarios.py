"""Scenarios that run on whatever device the environment names: ranks that share one GPU, or on the CPU."""

from __future__ import annotations

import os
from typing import Any

from lightning_async import AsyncAveragingStrategy, DeltaMean, DiLoCo, EveryNSteps, Synchronous, TorchTransport
from lightning_async.algorithms.schedules import Schedule
from tests.strategies.problem import momentum
from tests.strategies.workers import Net, fit, loader, scenario, shard

ACCELERATOR = os.environ.get("SCENARIO_ACCELERATOR", "cpu")
BACKEND = "nccl" if ACCELERATOR == "cuda" else "gloo"


def train(
    schedule: Schedule, overlap: bool = False, backend: str = BACKEND, pause_s: float = 0.0, **options: Any
) -> dict[str, Any]:
    """Each rank is a node with one device, which may be the same for all."""
    transport = TorchTransport(backend=backend)
    rule = DiLoCo(outer_lr=1.0, outer_momentum=0.0) if options else DeltaMean()  # which is the same
    strategy = AsyncAveragingStrategy(rule, schedule, overlap, transport=transport, **options)
    data = loader(shard((12, 12), (3, 9)))
    return fit(strategy, data, Net((pause_s, pause_s), momentum), accelerator=ACCELERATOR, devices=1, num_nodes=2)


@scenario
def averaged() -> Any:
    return train(EveryNSteps(2))


@scenario
def averaged_over_gloo() -> Any:
    return train(EveryNSteps(2), backend="gloo")


@scenario
def compressed() -> Any:
    return train(EveryNSteps(2), compression="int8")


@scenario
def overlapped() -> Any:
    return train(EveryNSteps(2), overlap=True, pause_s=0.03)  # time for rounds


@scenario
def synchronous() -> Any:
    return train(Synchronous())

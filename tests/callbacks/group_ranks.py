"""Scenarios of `FaultTolerantCheckpoint` on two ranks whose process groups are told to go, with all that these hold."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from lightning_async import AsyncGradientStrategy, DeltaMean, DiLoCo, EveryNSteps, Synchronous
from tests.callbacks.checkpoint_ranks import preempted, send, until
from tests.strategies.workers import scenario, together


def tell_group() -> None:
    """All of the rank's processes, the workers of its loader among them."""
    send(f"kill -TERM -{os.getpgid(0)}")


def tell_group_with_pool() -> None:
    """The same, and this rank notices it amid a step."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        pool.submit(int).result()
        tell_group()
        until(lambda: any(each.exitcode is not None for each in (pool._processes or {}).values()), "the pool has died")
        pool.submit(int).result()


def synchronously() -> Any:
    return together(DeltaMean(), Synchronous())


def in_windows() -> Any:
    return AsyncGradientStrategy(1, min_replicas=2)


@scenario
def ddp_group(folder: Path) -> dict[str, Any]:
    return preempted(folder, lambda: "ddp", (0, 1), tell=tell_group, workers=2)


@scenario
def synchronous_group(folder: Path) -> dict[str, Any]:
    return preempted(folder, synchronously, (0, 1), tell=tell_group, workers=2)


@scenario
def drifting_group(folder: Path) -> dict[str, Any]:
    return preempted(folder, lambda: together(DiLoCo(), EveryNSteps(4)), (0, 1), tell=tell_group, workers=2)


@scenario
def windows_group(folder: Path) -> dict[str, Any]:
    return preempted(folder, in_windows, tell=tell_group, workers=2)


@scenario
def ddp_pool(folder: Path) -> dict[str, Any]:
    return preempted(folder, lambda: "ddp", (0, 1), tell=tell_group_with_pool, save_on_exception=True)


@scenario
def synchronous_pool(folder: Path) -> dict[str, Any]:
    return preempted(folder, synchronously, tell=tell_group_with_pool)


@scenario
def drifting_pool(folder: Path) -> dict[str, Any]:
    return preempted(folder, lambda: together(DiLoCo(), EveryNSteps(4)), (0, 1), tell=tell_group_with_pool)


@scenario
def windows_pool(folder: Path) -> dict[str, Any]:
    return preempted(folder, in_windows, (0, 1), tell=tell_group_with_pool)

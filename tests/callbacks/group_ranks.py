"""Scenarios of `FaultTolerantCheckpoint` on two ranks whose process groups are told to go, with all that these hold."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from lightning_async import AsyncGradientStrategy, DeltaMean, DiLoCo, EveryNSteps, Synchronous
from lightning_async._sockets import listening_port, own_address, shut_down, snapshot
from tests.callbacks.checkpoint_ranks import preempted, send, until
from tests.strategies.workers import rank, scenario, together
from tests.support import free_port


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


def leave_group(folder: Path) -> None:
    """End torch's process group as the end of a process does, and make the next one where nothing is left of it.

    A rank whose worker has died of the signal may leave within a step. The others wait for it in DDP's collectives
    until its connections close.
    """
    # Whatever still holds the group, as garbage in a cycle does. A Unix socket has no such address.
    shut_down({fd: inode for fd, inode in snapshot().items() if own_address(fd) and listening_port(fd) is None})
    torch.distributed.destroy_process_group()
    (folder / f"port-{rank()}").write_text(str(free_port()))
    ports = [folder / f"port-{each}" for each in (0, 1)]
    until(lambda: all(port.exists() and port.read_text() for port in ports), "both have left")
    os.environ["MASTER_PORT"] = ports[0].read_text()


def synchronously() -> Any:
    return together(DeltaMean(), Synchronous())


def in_windows() -> Any:
    return AsyncGradientStrategy(1, min_replicas=2)


@scenario
def ddp_group(folder: Path) -> dict[str, Any]:
    return preempted(folder, lambda: "ddp", (0, 1), tell=tell_group, leave=leave_group, workers=2)


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
    told = {"tell": tell_group_with_pool, "leave": leave_group}
    return preempted(folder, lambda: "ddp", (0, 1), save_on_exception=True, **told)


@scenario
def synchronous_pool(folder: Path) -> dict[str, Any]:
    return preempted(folder, synchronously, tell=tell_group_with_pool)


@scenario
def drifting_pool(folder: Path) -> dict[str, Any]:
    return preempted(folder, lambda: together(DiLoCo(), EveryNSteps(4)), (0, 1), tell=tell_group_with_pool)


@scenario
def windows_pool(folder: Path) -> dict[str, Any]:
    return preempted(folder, in_windows, (0, 1), tell=tell_group_with_pool)

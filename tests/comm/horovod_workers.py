"""What the processes of the tests of `HorovodCollectives` run."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch

from lightning_async.errors import CollectiveError
from lightning_async.horovod.collectives import HorovodCollectives, HorovodWorld
from tests.comm.contract import CHECKS, LAST_CHECKS
from tests.comm.workers import TIMEOUT, WORLD_SIZE, end, open_store, other_threads, run_checks


def contract(last: str | None = None) -> dict[str, Any]:
    """Every check of the contract, or, as it poisons the world, one of the last."""
    store = open_store()
    world = HorovodWorld.join(WORLD_SIZE, timedelta(seconds=5))
    checks = CHECKS if last is None else {last: LAST_CHECKS[last]}
    told = run_checks(checks, store, lambda name: HorovodCollectives(world, name=name, timeout=TIMEOUT))
    threads = other_threads()
    end(store)
    return told | {"threads": threads}


def metric_beside_a_large_message(megabytes: int, piece_bytes: int) -> dict[str, float]:
    """Seconds of a small all-reduce alone, while a large one is under way in another fork, and of the large one."""
    world = HorovodWorld.join(WORLD_SIZE)
    comm = HorovodCollectives(world, timeout=TIMEOUT, piece_bytes=piece_bytes)
    large, small = comm.fork("payload"), comm.fork("metric")
    buffer = torch.ones(megabytes << 18)
    alone, beside, whole = [], [], []
    for times, busy in ((alone, False), (beside, True)) * 6:
        comm.barrier().result()
        started = time.monotonic()
        pending = large.all_reduce(buffer) if busy else None
        small.all_reduce(torch.ones(1)).result()
        times.append(time.monotonic() - started)
        if pending is not None:
            pending.result()
            whole.append(time.monotonic() - started)
    return {"alone": min(alone), "beside": min(beside), "whole": min(whole)}


def lose_a_rank() -> dict[str, Any]:
    """Rank 1 dies within an operation; the other learns it, and is left with a world that refuses all."""
    world = HorovodWorld.join(WORLD_SIZE, timedelta(seconds=5))
    comm = HorovodCollectives(world, timeout=TIMEOUT)
    comm.barrier().result()
    if comm.rank == 1:
        os._exit(9)
    started, told = time.monotonic(), {}
    try:
        comm.all_reduce(torch.ones(1000)).result()
    except CollectiveError as error:
        told = {"error": [kind.__name__ for kind in type(error).__mro__], "after_s": time.monotonic() - started}
    try:
        comm.fork("other").barrier()
    except CollectiveError as error:
        return told | {"later": str(error)}
    raise AssertionError("the world goes on")

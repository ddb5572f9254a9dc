"""The contract of `tests.comm.contract`, over every implementation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from lightning_async.comm.gpu_staging import StagedCollectives
from tests.comm.contract import ALL_CHECKS, Check, Stage
from tests.comm.faulty import FaultyCollectives
from tests.comm.simulated import InProcessWorld
from tests.support import run_ranks

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "wrap",
    [lambda plain: plain, FaultyCollectives, lambda plain: StagedCollectives(plain, torch.device("cpu"))],
    ids=["inprocess", "faulty", "staged"],
)
@pytest.mark.parametrize("check", ALL_CHECKS.values(), ids=ALL_CHECKS.keys())
def test_threads(check: Check, wrap: Callable[[Any], Any], world_size: int) -> None:
    world = InProcessWorld(world_size)
    barrier = threading.Barrier(world_size)

    def on_rank(collectives: Any) -> None:
        try:
            check(Stage(wrap(collectives), lambda where: void(barrier.wait(60))))
        except BaseException:
            barrier.abort()
            raise

    world.run(on_rank, timedelta(seconds=60))


def void(_: object) -> None:
    return None


@pytest.fixture(scope="module", params=[2, 3])
def gloo(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The whole contract in one launch, as starting processes is what takes time."""
    results = run_ranks("tests.comm.workers:contract", request.param, timeout=150)
    return [result.value for result in results]


@pytest.mark.parametrize("name", ALL_CHECKS)
def test_gloo(gloo: list[dict[str, Any]], name: str) -> None:
    failures = [f"rank {rank}:\n{told['failures'][name]}" for rank, told in enumerate(gloo) if name in told["failures"]]
    assert not failures, "\n".join(failures)


def test_gloo_leaves_no_thread(gloo: list[dict[str, Any]]) -> None:
    for told in gloo:
        assert told["threads"] == []
        # Main, the store's server (rank 0), torch's watchdogs; a group left open would add two for each check.
        assert told["native"] < 8, told["native"]


def test_gloo_forms_groups_fast(gloo: list[dict[str, Any]]) -> None:
    assert max(told["timings"]["reconfigure_s"] for told in gloo) < 10.0, "half of what it may take"

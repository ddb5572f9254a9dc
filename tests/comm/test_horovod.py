"""`HorovodCollectives`, over a real Horovod: the contract, and what is Horovod's own."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from tests.comm.contract import CHECKS, LAST_CHECKS
from tests.horovod import horovod_environment, needs_horovod
from tests.support import run_ranks

pytestmark = [pytest.mark.processes, needs_horovod]
WORKERS = "tests.comm.horovod_workers:"


def run(function: str, nprocs: int = 2, **options: Any) -> list[Any]:
    with horovod_environment(nprocs) as env:
        return [result.value for result in run_ranks(WORKERS + function, nprocs, env=env, **options)]


def assert_kept(told: list[dict[str, Any]], name: str) -> None:
    failures = [f"rank {rank}:\n{each['failures'][name]}" for rank, each in enumerate(told) if name in each["failures"]]
    assert not failures, "\n".join(failures)


@pytest.fixture(scope="module", params=[2, 3])
def contract(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """The contract in one launch, but for what poisons the world."""
    return run("contract", request.param, timeout=150)


@pytest.mark.parametrize("name", CHECKS)
def test_contract(contract: list[dict[str, Any]], name: str) -> None:
    assert_kept(contract, name)


def test_no_thread_is_left(contract: list[dict[str, Any]]) -> None:
    assert [told["threads"] for told in contract] == [[]] * len(contract)


@pytest.mark.parametrize("name", LAST_CHECKS)
def test_contract_of_failures(name: str) -> None:
    assert_kept(run("contract", kwargs={"last": name}, timeout=150), name)


@pytest.mark.alone
def test_a_metric_is_quick_beside_a_large_message() -> None:
    """Pieces of 4 MB, one at a time: the small message waits for one of them at most, not for 128 MB."""
    kwargs = {"megabytes": 128, "piece_bytes": 4 << 20}
    pieces = run("metric_beside_a_large_message", kwargs=kwargs, timeout=150)[0]
    whole = run("metric_beside_a_large_message", kwargs=kwargs | {"piece_bytes": 1 << 30}, timeout=150)[0]
    assert pieces["beside"] < 0.3 * pieces["whole"], pieces
    assert pieces["beside"] < 0.5 * whole["beside"], (pieces, whole)


def test_a_lost_rank_poisons_the_world_and_is_an_error_that_horovod_elastic_knows() -> None:
    with horovod_environment(2) as env:
        survivor, dead = run_ranks(WORKERS + "lose_a_rank", env=env, timeout=150, check=False)
    assert dead.returncode == 9
    assert survivor.returncode == 0, survivor
    assert {"CollectiveError", "HorovodInternalError"} <= set(survivor.value["error"])
    assert survivor.value["after_s"] < timedelta(seconds=20).total_seconds(), "half of what it may wait"
    assert "earlier failure" in survivor.value["later"]

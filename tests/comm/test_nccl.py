"""NCCL: ranks that share one GPU. Left out where there is no GPU, but for what the CPU can do as well.

NCCL tells no peer that a rank has broken off, so there a peer's own deadline ends its wait, and heartbeats say who is
gone.
"""

from __future__ import annotations

import signal
from functools import partial
from typing import Any

import pytest
import torch
from torch.cuda import nccl

from tests.comm.contract import ALL_CHECKS
from tests.strategies.problem import batches, distance, flat, joined, momentum, train_alone
from tests.strategies.test_failures import ENDLESS, LIMIT_S, TRAIN, all_well, survivor_of_two, wait_for_step
from tests.strategies.workers import Outcomes
from tests.support import RankResult, run_ranks, start_ranks

pytestmark = pytest.mark.processes

NEEDS_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))
GPU = pytest.param("cuda", marks=NEEDS_GPU)
SOCKETS_ONLY = "abort_in_the_middle_of_large_messages"
"""It is about half-sent messages of Gloo's, and waits for peers to hear of an abort."""


def one_device(rank: int, accelerator: str, version: tuple[int, ...]) -> dict[str, str]:
    """The environment of a rank that is a node of its own: Lightning, and NCCL, then let ranks share a device."""
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
    if version < (2, 30):
        shared = {"NCCL_HOSTID": f"rank-{rank}", "NCCL_IB_DISABLE": "1"}
    return {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "NODE_RANK": str(rank),
        "SCENARIO_ACCELERATOR": accelerator,
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_DEBUG": "WARN",
        **shared,
    }


def environment(accelerator: str) -> Any:
    version = nccl.version()[:2] if accelerator == "cuda" else (2, 30)
    return partial(one_device, accelerator=accelerator, version=version)


def test_an_old_nccl_takes_each_rank_for_a_host() -> None:
    old, new = (one_device(1, "cuda", version) for version in ((2, 28, 9), (2, 30, 3)))
    assert old["NCCL_HOSTID"] != one_device(0, "cuda", (2, 28, 9))["NCCL_HOSTID"]
    assert new["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert "NCCL_HOSTID" not in new and "NCCL_MULTI_RANK_GPU_ENABLE" not in old


# ---- the strategy ----


@pytest.fixture(scope="module", params=["cpu", GPU])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder = tmp_path_factory.mktemp("scenarios")
    return Outcomes("tests.strategies.device_scenarios", folder, timeout=150.0, env=environment(request.param))


def test_averaging_is_the_same_over_gloo(ranks: Outcomes) -> None:
    for told, over_gloo in zip(ranks("averaged"), ranks("averaged_over_gloo"), strict=True):
        assert (told["steps"], told["rounds"], told["failed_rounds"]) == (12, 6, 0)
        for step, expected in zip(told["history"], over_gloo["history"], strict=True):
            assert distance(step, expected) < 1e-6
        assert distance(told["flat"], over_gloo["flat"]) < 1e-6


def test_compressed_rounds_end_with_one_model_near_the_uncompressed_one(ranks: Outcomes) -> None:
    first, second = ranks("compressed")
    assert first["digest"] == second["digest"]
    for told, plain in zip((first, second), ranks("averaged"), strict=True):
        assert (told["rounds"], told["failed_rounds"]) == (6, 0)
        assert told["sent_bytes"] < plain["sent_bytes"]
        assert 0 < distance(told["flat"], plain["flat"]) < 1e-2


def test_overlapped_rounds_end_with_one_model(ranks: Outcomes) -> None:
    first, second = ranks("overlapped")
    assert first["digest"] == second["digest"]
    for told in (first, second):
        assert told["rounds"] > 0 and told["failed_rounds"] == 0
        assert told["samples_by_rank"] == [12 * 3, 12 * 9]


def test_synchronous_steps_are_those_of_one_process(ranks: Outcomes) -> None:
    data = joined(batches(0, 12, 3), batches(1, 12, 9))
    expected = flat(train_alone(data, optimizer=momentum))
    for told in ranks("synchronous"):
        assert (told["synchronous_steps"], told["rounds"]) == (12, 0)
        assert distance(told["flat"], expected) < 1e-5


@pytest.mark.parametrize("accelerator", ["cpu", GPU])
def test_a_killed_rank_ends_the_other_with_its_name(accelerator: str) -> None:
    kwargs = {"batches": [ENDLESS] * 2, "timeouts": {"dead_after": 3.0}}
    kwargs |= {"accelerator": accelerator, "devices": 1, "num_nodes": 2}
    told = survivor_of_two(kwargs, environment(accelerator))
    assert told["error"].startswith("PeerLost") and "rank 1" in told["error"]


@pytest.mark.parametrize("accelerator", ["cpu", GPU])
def test_two_ranks_go_on_without_a_killed_third(accelerator: str) -> None:
    period, steps = 4, 1500
    kwargs = {"batches": [steps, steps, ENDLESS], "period": period, "timeouts": {"dead_after": 3.0}, "fewest": 2}
    kwargs |= {"accelerator": accelerator, "devices": 1, "num_nodes": 3}
    with start_ranks(TRAIN, 3, kwargs=kwargs, timeout=LIMIT_S, env=environment(accelerator)) as group:
        wait_for_step(group, 30, 3)
        group.signal(2, signal.SIGKILL)
        with_all_three = max(group.output(rank).count("step ") for rank in range(3)) // period + 1
        *live, _ = group.join()
    for told in all_well(live):
        assert told["taken"] == steps and told["rounds"] > with_all_three


# ---- the contract ----


@pytest.fixture(scope="module", params=[2, 3])
def contract(request: pytest.FixtureRequest) -> list[RankResult]:
    """One launch; what a rank has kept is read from what it printed, which a later hang takes nothing of."""
    kwargs = {"backend": "nccl", "device": "cuda", "peers_hear": False, "without": [SOCKETS_ONLY]}
    env = environment("cuda")
    return run_ranks("tests.comm.workers:contract", request.param, kwargs=kwargs, timeout=60.0, env=env, check=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", [name for name in ALL_CHECKS if name != SOCKETS_ONLY])
def test_contract(contract: list[RankResult], name: str) -> None:
    assert_kept(contract, name)


def assert_kept(contract: list[RankResult], name: str) -> None:
    for result in contract:
        if f"{name}: kept" not in result.stdout:
            _, failed, why = result.stdout.partition(f"{name}: failed")
            raise AssertionError(f"rank {result.rank}: " + (why[:4000] if failed else f"no outcome\n{result}"))


def test_an_outcome_outlives_its_process() -> None:
    kwargs = {"without": [name for name in ALL_CHECKS if name not in ("all_gather_values", "broadcast_values")]}
    results = run_ranks("tests.comm.workers:contract", 2, kwargs=kwargs, timeout=LIMIT_S, env=environment("cpu"))
    assert_kept(results, "all_gather_values")
    with pytest.raises(AssertionError, match="no outcome"):
        assert_kept(results, "all_to_all_values")

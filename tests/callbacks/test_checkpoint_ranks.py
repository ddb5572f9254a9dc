"""Two ranks save together and apart, and go on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_async.checkpoint.store import CheckpointStore
from tests.callbacks.checkpoint_ranks import BATCHES, EPOCHS, STOP
from tests.strategies.workers import Outcomes
from tests.support import run_ranks

pytestmark = pytest.mark.processes

SCENARIOS = "tests.callbacks.checkpoint_ranks"
WITH_WORKERS = ("ddp_group", "synchronous_group", "drifting_group", "windows_group")
WITH_POOLS = ("ddp_pool", "synchronous_pool", "drifting_pool", "windows_pool")


@pytest.fixture(scope="module")
def with_workers(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes("tests.callbacks.group_ranks", tmp_path_factory.mktemp("workers"), only=WITH_WORKERS)


@pytest.fixture(scope="module")
def with_pools(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes("tests.callbacks.group_ranks", tmp_path_factory.mktemp("pools"), only=WITH_POOLS)


@pytest.mark.parametrize("name", ["ddp", "synchronous", "standing_still", "standing_still_sparse"])
def test_what_follows_is_equal_to_the_bit(ranks: Outcomes, name: str) -> None:
    told = ranks(name)
    for rank in told:
        assert rank["saved"] == rank["first"] == STOP // 4 * 4
        assert rank["ranks"] == [0, 1]
        assert rank["losses"] == [True] * (BATCHES * EPOCHS - rank["first"])
        assert {tensor: value for tensor, value in rank["tensors"].items() if value} == {}


def test_replicas_that_drift_go_on_each_from_its_own_state(ranks: Outcomes) -> None:
    first, second = ranks("asynchronous")
    assert first["saved"] == second["saved"]
    assert first["ranks"] == [0, 1]
    for rank in (first, second):
        assert abs(rank["first"] - rank["saved"]) <= BATCHES, "its own number of steps: they meet after each epoch"
        assert len(rank["losses"]) == BATCHES * EPOCHS - rank["first"]
        assert rank["goes_on"], "its own parameters, random numbers and place in its data"
    assert first["digest"] == second["digest"]


def test_a_rank_that_has_finished_resumes_as_finished(ranks: Outcomes) -> None:
    for rank in ranks("uneven"):
        assert rank["ranks"] == [[0, 1]] * len(rank["ranks"])
        assert rank["reason"][0] == "the end"
        assert set(rank["reason"][1:]) == {"due"}, "rounds while rank 0 waited at its last gate"
        assert rank["again"] == 0
        assert rank["equal"]


def test_training_that_had_ended_within_an_epoch_goes_on_with_the_rest_of_it(ranks: Outcomes) -> None:
    for rank in ranks("raised"):
        assert [told["steps"] for told in rank.values()] == [[14, 15]] * 2
        assert [told["epoch"] for told in rank.values()] == [2, 2], "the second epoch has ended once more, and no third"
        assert rank["synchronous"]["equal"]


@pytest.mark.parametrize("name", ["ddp_preempted", "drifting_preempted"])
def test_a_signal_to_one_rank_saves_on_all_and_ends_with_75(ranks: Outcomes, name: str) -> None:
    told = ranks(name)
    for rank in told:
        assert rank["code"] == 75
        assert rank["reasons"] == ["preemption"]
        assert rank["ranks"] == [0, 1]
        assert rank["steps"] == BATCHES * EPOCHS - rank["first"], "no batch is lost, none comes twice"
    assert told[1]["first"] - STOP in range(8), "all leave a few steps later"


def test_a_rank_told_to_stop_waits_for_no_hanging_peer(tmp_path: Path) -> None:
    kwargs = {"folder": str(tmp_path)}
    results = run_ranks("tests.callbacks.checkpoint_ranks:held_up", 2, kwargs=kwargs, check=False, timeout=120)
    assert results[0].returncode == 75, "\n".join(map(str, results))
    (entry,) = CheckpointStore(tmp_path).entries()
    assert entry.manifest is not None
    assert (entry.step, list(entry.manifest.ranks)) == (STOP + 1, [0])


def assert_preempted(name: str, rank: dict[str, Any]) -> None:
    """All have saved together; under DDP one whose worker has died within the step of the others saves alone."""
    assert rank["code"] == 75
    if name.startswith("ddp"):
        assert set(rank["reasons"]) == {"preemption"}
        assert rank["ranks"] in ([0, 1], [0], [1])
    else:
        assert (rank["reasons"], rank["ranks"]) == (["preemption"], [0, 1])


@pytest.mark.parametrize("name", WITH_WORKERS)
def test_signals_to_groups_with_workers_save_on_all_and_end_with_75(with_workers: Outcomes, name: str) -> None:
    for rank in with_workers(name):
        assert_preempted(name, rank)
        if name != "windows_group":  # whose batches are steps later
            assert rank["steps"] == BATCHES * EPOCHS - rank["first"], "no batch is lost, none comes twice"


@pytest.mark.parametrize("name", WITH_POOLS)
def test_what_the_signal_breaks_is_no_failure(with_pools: Outcomes, name: str) -> None:
    for rank in with_pools(name):
        assert_preempted(name, rank)


def test_a_signal_before_training_ends_all_ranks_after_a_batch(ranks: Outcomes) -> None:
    for rank in ranks("told_before_training"):
        assert (rank["code"], rank["reasons"], rank["ranks"]) == (75, ["preemption"], [0, 1])
        assert 0 < rank["first"] < STOP
        assert rank["steps"] == BATCHES * EPOCHS - rank["first"]


def test_damage_is_noticed_and_the_one_before_is_taken(ranks: Outcomes) -> None:
    told = ranks("damaged")
    for rank in told:
        assert rank["from"] == rank["older"] < rank["newest"]
        assert len(rank["aside"]) == 1
    assert any(rank["said"] for rank in told)

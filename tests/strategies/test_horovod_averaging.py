"""Averaging over a real Horovod: the numbers of `test_numerics`, its launchers, and what a lost rank does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.horovod import KINDS, horovod_environment, needs_horovod
from tests.strategies.test_failures import LIMIT_S, TRAIN, ended, survivor_of_two
from tests.strategies.test_launch import SCRIPT, assert_one_test_result, assert_two_ranks_fitted, launch
from tests.strategies.test_numerics import (  # noqa: F401
    test_compressed_messages_stay_near_one_process,
    test_equals_one_process_on_the_joined_batch,
    test_the_reference_moves_and_clips,
)
from tests.strategies.workers import Outcomes
from tests.support import start_ranks

pytestmark = [pytest.mark.processes, needs_horovod]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """The scenarios of `test_numerics`, by engine "auto", where Horovod has started the ranks."""
    with horovod_environment(2) as env:
        return Outcomes("tests.strategies.numerics", tmp_path_factory.mktemp("averaging"), env=env)


def test_lightnings_collectives_at_a_sync_point(ranks: Outcomes) -> None:
    for told in ranks("world_of_sums"):
        assert [told["mean"], told["sum"], told["max"]] == [1.5, 3.0, 2.0]
        assert told["broadcast"] == {"from": 0}


def test_a_killed_rank_ends_the_other_with_an_error_of_horovods_kind() -> None:
    kwargs = {"batches": [100_000] * 2, "timeouts": {"dead_after": 3.0}}
    with horovod_environment(2) as env:
        told = survivor_of_two(kwargs, env)
    assert told["error"].startswith(KINDS), told


@pytest.mark.parametrize("at", [[1, 0, "raise in validation"], [0, 30, "raise"]], ids=["in validation", "in a step"])
def test_an_exception_on_one_rank_is_named_by_the_other(at: list[Any]) -> None:
    """Horovod only tells that it has been shut down; the heartbeats tell by whom, and why."""
    kwargs = {"batches": [40] * 2, "at": at}
    with horovod_environment(2) as env, start_ranks(TRAIN, 2, kwargs=kwargs, timeout=LIMIT_S, env=env) as group:
        results = group.join()
    assert ended(results[at[0]])["error"] == "ValueError: the data ran dry"
    other = results[1 - at[0]]
    assert other.returncode == 1 and ended(other)["error"].startswith(KINDS), other
    assert f"rank {at[0]} failed: ValueError: the data ran dry" in ended(other)["error"]


def test_horovodrun(tmp_path: Path) -> None:
    horovodrun = str(Path(sys.executable).with_name("horovodrun"))
    command = [horovodrun, "--gloo", "-np", "2", sys.executable, SCRIPT, "popen", "2", "fit", "refit", "test"]
    text = launch(command, tmp_path)
    clean = "\n".join(line.partition("<stdout>:")[2] or line for line in text.splitlines())
    assert_two_ranks_fitted(clean, times=2)
    assert_one_test_result(clean)

"""One of two ranks ends by an exception: what was trained is saved by one, and both go on from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.callbacks.checkpoint_ranks import BATCHES, EPOCHS, STOP, settled
from tests.strategies.workers import Outcomes
from tests.support import run_ranks

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exceptions")


@pytest.fixture(scope="module")
def failed(folder: Path) -> list[Any]:
    results = run_ranks(
        "tests.callbacks.exception_ranks:ddp_fails", 2, kwargs={"folder": str(folder / "left")}, timeout=210.0
    )
    return [result.value for result in results]


@pytest.fixture(scope="module")
def outcomes(failed: list[Any], folder: Path) -> Outcomes:
    return Outcomes("tests.callbacks.exception_ranks", folder)


def test_a_rank_of_ddp_saves_alone_and_shows_its_own_error(failed: list[Any], outcomes: Outcomes) -> None:
    first, second = failed
    assert second["error"] == "Interrupted"
    assert first["error"] not in (None, "Interrupted"), "its collective has failed"
    assert first["last"] == second["last"] == STOP
    told = outcomes("ddp")
    for rank in told:
        assert rank["error"] is None
        assert all(rank["seen"]), "the other rank, too, goes on with the data that it has not seen"
        assert rank["losses"]
        assert rank["equal"]
    assert sum(len(rank["said"]) for rank in told) == 1
    (said,) = [message for rank in told for message in rank["said"]]
    assert f"-step-{STOP}" in said


@pytest.mark.parametrize("later", [0, 1])
def test_who_is_told_to_stop_and_fails_within_an_accumulation_is_not_waited_for(later: int, tmp_path: Path) -> None:
    kwargs = {"folder": str(tmp_path), "later": later}
    results = run_ranks("tests.callbacks.exception_ranks:ddp_ends_within_accumulation", 2, kwargs=kwargs, timeout=120.0)
    assert [(told.value["code"], told.value["error"]) for told in results] == [(75, None)] * 2
    assert [len(told.value["said"]) for told in results] == [0, 1]
    (entry,) = settled(tmp_path)
    assert entry.manifest is not None
    assert (entry.step, entry.manifest.reason, len(entry.manifest.ranks)) == (4, "preemption", 1)


@pytest.mark.parametrize("name", ["synchronous", "standing_still", "asynchronous"])
def test_replicas_go_on_from_the_model_of_one(outcomes: Outcomes, name: str) -> None:
    told = outcomes(name)
    assert [rank["error"] for rank in told] == ["PeerLost", "Interrupted"]
    (saved,) = told[0]["ranks"]
    for rank in told:
        assert rank["reason"] == "exception"
        assert rank["first"] - told[saved]["last"] in (0, 1), "a peer may be lost behind a step that is done"
        assert rank["steps"] == BATCHES * EPOCHS - rank["first"]
    assert told[saved]["goes_on"], "the loss of the batch that had failed, to the bit"
    assert told[0]["digest"] == told[1]["digest"]


def test_who_waits_at_a_sync_point_for_one_that_fails(outcomes: Outcomes) -> None:
    told = outcomes("at_a_gate")
    assert [rank["error"] for rank in told] == ["PeerLost", "Interrupted"]
    for rank in told:
        assert rank["reason"] == "exception"
        assert rank["first"] == BATCHES
    assert told[0]["digest"] == told[1]["digest"]

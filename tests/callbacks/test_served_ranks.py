"""Training with servers is saved, and gone on with; where it diverges, servers go back, too."""

from __future__ import annotations

from typing import Any

import pytest

from tests.callbacks import served_ranks
from tests.callbacks.window_ranks import BATCHES, EPOCHS, STOP
from tests.strategies.workers import SCENARIOS, Outcomes
from tests.support import run_ranks

pytestmark = pytest.mark.processes

MODULE = served_ranks.__name__
WATCHED = ("not_finite", "not_finite_async", "stops", "rolled_back", "rolled_back_async", "broken")
EXACT = ("after_a_kill", "own_optimizers")
CALLED = ("due_on_one", "carried_residual", "preempted")
OTHERS = ("asynchronous", "warmed_up", "fails")
MOVED = ("to_replicas", "from_replicas", "to_another_mode")


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder = tmp_path_factory.mktemp("exact")
    kwargs = {"folder": str(folder / "left")}
    results = run_ranks(f"{MODULE}:killed", 2, kwargs=kwargs, timeout=60.0, check=False)
    assert results[1].returncode == -9, results
    return Outcomes(MODULE, folder, only=EXACT)


@pytest.fixture(scope="module")
def called(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes(MODULE, tmp_path_factory.mktemp("called"), only=CALLED)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes(MODULE, tmp_path_factory.mktemp("others"), only=OTHERS)


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes(MODULE, tmp_path_factory.mktemp("moved"), only=MOVED)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes(MODULE, tmp_path_factory.mktemp("watched"), only=WATCHED)


def test_all_scenarios_are_run() -> None:
    assert sorted(SCENARIOS[MODULE]) == sorted((*EXACT, *CALLED, *OTHERS, *MOVED, *WATCHED))


@pytest.mark.parametrize("name", ["after_a_kill", "own_optimizers", "carried_residual", "due_on_one"])
def test_what_follows_a_kill_with_servers_is_equal_to_the_bit(request: pytest.FixtureRequest, name: str) -> None:
    """And saving has changed nothing: the other training has saved at its end only."""
    told = request.getfixturevalue("called" if name in CALLED else "exact")(name)
    for rank in told:
        assert rank["reason"] == "due"
        assert rank["ranks"] == [0, 1]
        assert BATCHES < rank["first"] <= STOP, "within the second epoch"
        assert rank["first"] == served_ranks.DUE or name != "due_on_one"
        assert rank["losses"] == [True] * (BATCHES * EPOCHS - rank["first"])
        assert {tensor: value for tensor, value in rank["tensors"].items() if value} == {}
        assert rank["steps"] == [BATCHES * EPOCHS] * 2
    assert told[0]["values"] == told[1]["values"]
    assert told[0]["first"] == told[1]["first"], "all have saved behind one step"


@pytest.mark.parametrize("name", ["asynchronous", "warmed_up"])
def test_each_goes_on_from_its_place_where_time_decides(others: Outcomes, name: str) -> None:
    told = others(name)
    for rank in told:
        assert (rank["reason"], rank["ranks"]) == ("due", [0, 1])
        assert rank["seen"] == BATCHES * EPOCHS - rank["first"], "no batch is lost, none comes twice"
    assert told[0]["values"] == told[1]["values"]


def test_a_signal_saves_on_all(called: Outcomes) -> None:
    told = called("preempted")
    for rank in told:
        assert (rank["code"], rank["reason"], rank["ranks"]) == (75, "preemption", [0, 1])
        assert rank["seen"] == BATCHES * EPOCHS - rank["first"]
        assert rank["steps"] == [BATCHES * EPOCHS] * 2
    assert told[0]["values"] == told[1]["values"]


def test_a_worker_that_fails_saves_what_servers_have(others: Outcomes) -> None:
    told = others("fails")
    assert {rank["error"] for rank in told} == {"Interrupted", "PeerLost"}
    for rank in told:
        assert rank["reason"] == "exception" and len(rank["ranks"]) == 1
        assert rank["first"] >= STOP
        assert rank["seen"] == BATCHES * EPOCHS - rank["first"]
    assert told[0]["values"] == told[1]["values"]


@pytest.mark.parametrize("name", MOVED)
def test_another_strategy_goes_on_from_what_servers_had_and_they_from_what_it_had(moved: Outcomes, name: str) -> None:
    first, second = moved(name)
    assert first["values"] == second["values"]
    for told in (first, second):
        assert BATCHES <= told["first"] <= STOP
        assert told["seen"] == BATCHES * EPOCHS - told["first"]


def lines(told: dict[str, Any], what: str) -> list[str]:
    return [line for line in told["said"] if what in line]


@pytest.mark.parametrize("name", ["not_finite", "not_finite_async"])
def test_a_gradient_that_is_not_finite_is_not_pushed(watched: Outcomes, name: str) -> None:
    first, second = watched(name)
    assert first["values"] == second["values"]
    assert first["finite"]
    assert not lines(first, "Remedy") and len(lines(second, "Remedy: skip")) == 1
    assert first["step"] == second["step"] == 24


def test_training_that_diverges_ends_on_all(watched: Outcomes) -> None:
    for told in watched("stops"):
        assert told["error"].startswith("TrainingDiverged: Rank ")


@pytest.mark.parametrize("name", ["rolled_back", "rolled_back_async", "broken"])
def test_all_go_back_to_a_checkpoint_with_the_servers(watched: Outcomes, name: str) -> None:
    first, second = watched(name)
    assert first["error"] == second["error"] == ""
    assert 1 <= first["rollbacks"] == second["rollbacks"] <= 3
    assert first["values"] == second["values"]
    assert first["finite"]
    assert max(map(abs, first["values"])) < 10.0
    back = [[line.partition("to the state")[2][:12] for line in lines(told, "rolled back")] for told in (first, second)]
    assert back[0] == back[1]

"""Windows of gradients are saved, and gone on with; where training diverges, all ranks do the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.callbacks.window_ranks import BATCHES, BEHIND_VALIDATION, EPOCHS, STOP
from tests.strategies.workers import Outcomes
from tests.support import run_ranks

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("windows")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Outcomes:
    kwargs = {"folder": str(folder / "left")}
    results = run_ranks("tests.callbacks.window_ranks:killed", 2, kwargs=kwargs, timeout=60.0, check=False)
    assert results[1].returncode == -9, results
    return Outcomes("tests.callbacks.window_ranks", folder)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("after_a_kill", 4),
        ("delayed", 4),
        ("compensated", 2),
        ("predicted", 2),
        ("without_delay", None),
        ("of_sizes_by_step", None),
        ("of_sizes_by_noise", None),
        ("of_sizes_by_noise_delayed", None),
    ],
)
def test_what_follows_a_kill_is_equal_to_the_bit(outcomes: Outcomes, name: str, size: int | None) -> None:
    """And saving has changed nothing: the other training has saved at its end only."""
    told = outcomes(name)
    for rank in told:
        assert rank["reason"] == "due"
        assert rank["ranks"] == [0, 1]
        assert BATCHES < rank["first"] <= STOP, "within the second epoch"
        if size is not None:  # the window that was full as the step was taken goes on as it is
            # Or, where that is the last save that was whole in time, what the validation after 10 batches has found.
            assert rank["gathered"] in ([[size, 4.0 * size]] * 2, [[2, 8.0]] * 2)
        assert rank["losses"] == [True] * (BATCHES * EPOCHS - rank["first"]), told
        assert {tensor: value for tensor, value in rank["tensors"].items() if value} == {}
        assert rank["steps"][0] == rank["steps"][1] > 0
    assert told[0]["digest"] == told[1]["digest"]


@pytest.mark.parametrize("name", ["of_sizes_by_noise_between_epochs", "of_sizes_held_at_a_gate"])
def test_what_a_sync_point_has_stepped_with_or_sends_is_told_after_a_resume_as_it_was_before(
    outcomes: Outcomes, name: str
) -> None:
    """How many samples the last mean had, and which rate is for the window that leaves before a batch begins."""
    told = outcomes(name)
    for rank in told:
        assert rank["first"] >= BATCHES
        assert rank["losses"] == [True] * (BATCHES * EPOCHS - rank["first"]), told
        assert {tensor: value for tensor, value in rank["tensors"].items() if value} == {}
        assert rank["steps"][0] == rank["steps"][1]
    assert told[0]["digest"] == told[1]["digest"]


def test_an_epoch_that_is_saved_ahead_of_its_end_has_its_learning_rate_to_the_end(outcomes: Outcomes) -> None:
    told = outcomes("between_epochs")
    for rank in told:
        assert rank["first"] == BATCHES
        assert rank["gathered"] in ([[0, 0.0]] * 2, [[2, 8.0]] * 2), "behind its last step, or ahead of it"
        assert rank["losses"] == [True] * BATCHES, told
        assert {tensor: value for tensor, value in rank["tensors"].items() if value} == {}
        assert rank["steps"][0] == rank["steps"][1]


def test_what_depends_on_time_goes_on_each_from_its_place(outcomes: Outcomes) -> None:
    told = outcomes("until_reduced")
    for rank in told:
        assert rank["ranks"] == [0, 1]
        assert rank["seen"] == BATCHES * EPOCHS - rank["first"], "no batch is lost, none comes twice"
    assert told[0]["digest"] == told[1]["digest"]


def test_a_signal_saves_the_open_window_on_all(outcomes: Outcomes) -> None:
    told = outcomes("preempted")
    for number, rank in enumerate(told):
        assert (rank["code"], rank["reason"], rank["ranks"]) == (75, "preemption", [0, 1])
        assert rank["seen"] == BATCHES * EPOCHS - rank["first"]
        assert rank["steps"][0] == rank["steps"][1]
        assert rank["gathered"][number][0] == rank["first"] - BATCHES > 0, "each from its place"
    assert told[0]["digest"] == told[1]["digest"]


@pytest.mark.parametrize("name", ["preempted_rank_0_slow", "preempted_rank_1_slow"])
def test_what_follows_a_signal_is_equal_to_the_bit_where_each_batch_is_a_window(outcomes: Outcomes, name: str) -> None:
    """All leave with one window each, full and not sent, of the same step; as they do, buffers are averaged."""
    told = outcomes(name)
    for rank in told:
        assert (rank["reason"], rank["ranks"]) == ("preemption", [0, 1])
        assert rank["gathered"] == [[1, 4.0]] * 2
        assert BEHIND_VALIDATION < rank["first"] < BEHIND_VALIDATION + 9
        assert rank["losses"] == [True] * (BATCHES * EPOCHS - rank["first"]), told
        changed = {tensor: value for tensor, value in rank["tensors"].items() if value}
        assert changed.keys() <= {"net.1.running_mean", "net.1.running_var"} and all(x < 1e-5 for x in changed.values())
        assert rank["steps"][0] == rank["steps"][1]
    assert told[0]["digest"] == told[1]["digest"]


def test_a_rank_that_fails_saves_what_it_has_gathered(outcomes: Outcomes) -> None:
    told = outcomes("fails")
    assert {rank["error"] for rank in told} == {"Interrupted", "PeerLost"}
    (saved,) = told[0]["ranks"]
    for rank in told:
        assert rank["reason"] == "exception"
        assert rank["seen"] == BATCHES * EPOCHS - rank["first"]
    assert saved in (0, 1) and told[0]["gathered"][0][1] >= 16.0
    assert told[0]["digest"] == told[1]["digest"]


def lines(told: dict[str, Any], what: str) -> list[str]:
    return [line for line in told["said"] if what in line]


def test_a_window_that_is_not_finite_is_dropped_and_the_other_ranks_counts(outcomes: Outcomes) -> None:
    first, second = outcomes("not_finite")
    assert first["values"] == second["values"]
    assert first["finite"]
    assert first["step"] == second["step"] == 12
    assert [len(lines(told, "its gradients are not finite")) for told in (first, second)] == [0, 1]


@pytest.mark.parametrize("name", ["rolled_back", "broken"])
def test_all_go_back_to_a_checkpoint(outcomes: Outcomes, name: str) -> None:
    first, second = outcomes(name)
    assert first["error"] == second["error"] == ""
    assert 1 <= first["rollbacks"] == second["rollbacks"] <= 3
    assert first["values"] == second["values"]
    assert first["finite"]
    assert [line.partition("rolled back")[2][:30] for line in lines(first, "rolled back")] == [
        line.partition("rolled back")[2][:30] for line in lines(second, "rolled back")
    ]

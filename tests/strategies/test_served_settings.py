"""Servers are told an optimizer's settings once: what would change them behind that is said, or taken up."""

from __future__ import annotations

import pytest

from tests.strategies.problem import batches, distance, flat, joined, train_alone
from tests.strategies.served import BATCHES
from tests.strategies.served_settings import decaying
from tests.strategies.workers import Outcomes

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes("tests.strategies.served_settings", tmp_path_factory.mktemp("served_settings"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cycled_momentum", ["`OneCycleLR`", "momentum", "cycle_momentum=False", "update_on_server=False"]),
        ("one_parameter_in_two_optimizers", ["2 parameters are in two optimizers", "update_on_server=False"]),
        ("group_added_on_servers", ["add_param_group", "frozen ones, too"]),
        ("group_added_beside", ["add_param_group", "frozen ones, too"]),
        ("state_reset_on_servers", ["The state of SGD was changed", "update_on_server=False"]),
    ],
)
def test_what_servers_would_not_hear_of_is_said_on_all_ranks(outcomes: Outcomes, name: str, words: list[str]) -> None:
    for said in outcomes.errors(name):
        assert "ValueError: " in said, said  # of its own, or of the rank that was the first to say it
        assert all(word in said for word in words), said


def test_the_settings_of_a_checkpoint_count_as_in_torch(outcomes: Outcomes) -> None:
    told = outcomes("settings_of_a_checkpoint")
    alone = flat(train_alone(joined(batches(0, BATCHES), batches(1, BATCHES)), epochs=2, optimizer=decaying))
    for rank in told:
        assert distance(rank["values"], alone) < 1e-6


def test_nobody_waits_for_a_step_that_mixed_precision_has_skipped(outcomes: Outcomes) -> None:
    """With two optimizers by hand."""
    told = outcomes("a_step_by_hand_is_skipped")
    assert told[0]["digest"] == told[1]["digest"]


def test_slow_and_fast_workers_have_one_schedule(outcomes: Outcomes) -> None:
    """Its place is the servers' version by the number of workers; behind a sync point it is the same, and goes on
    from a checkpoint."""
    fast, slow = outcomes("one_schedule")
    assert fast["first"]["places"] == [step // 2 for step in range(BATCHES)]
    assert slow["first"]["places"] == [0, *((BATCHES + step) // 2 for step in range(1, BATCHES))]
    for told in (fast, slow):
        assert told["first"]["at_end"] == BATCHES
        assert told["again"]["places"][0] == BATCHES
        assert told["again"]["at_end"] == 2 * BATCHES


def test_lags_and_bytes_are_in_the_metrics(outcomes: Outcomes) -> None:
    fast, slow = (told["first"] for told in outcomes("one_schedule"))
    assert fast["metrics"]["servers/mean_lag"] == 0.0
    assert slow["metrics"]["servers/mean_lag"] == BATCHES / BATCHES, "its first push, after all of the other's"
    for told in (fast, slow):
        metrics = told["metrics"]
        assert told["shown"] == ["servers/lag", "servers/version"]
        assert metrics["servers/lag"] == 0.0
        assert metrics["servers/pushes"] == BATCHES
        assert metrics["servers/bytes"] == 4 * told["numel"] * BATCHES
        assert metrics["servers/pulls"] > BATCHES, "at gates, too"
        assert metrics["servers/pulled_bytes"] == 4 * told["numel"] * metrics["servers/pulls"]

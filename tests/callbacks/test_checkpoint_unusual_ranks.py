"""Replicas that drift save and go on with states and at moments of unusual kinds."""

from __future__ import annotations

import pytest

from tests.callbacks.checkpoint_ranks import BATCHES, EPOCHS
from tests.strategies.workers import Outcomes

pytestmark = pytest.mark.processes

SCENARIOS = "tests.callbacks.unusual_ranks"


@pytest.mark.parametrize(
    "name", ["mixed", "mixed_standing_still", "averaged_state", "compressed", "warmed_up", "weights_averaged"]
)
def test_each_replica_goes_on_from_its_own_parameters(ranks: Outcomes, name: str) -> None:
    told = ranks(name)
    assert [rank["goes_on"] for rank in told] == [True, True]
    assert told[0]["digest"] == told[1]["digest"]


def test_each_replica_goes_on_from_its_own_averages_over_time(ranks: Outcomes) -> None:
    told = ranks("averages_of_each_rank")
    assert told[0]["at_16"] != told[1]["at_16"], "each rank has its own between gates"
    for rank in told:
        assert [rank["saved"], rank["first"]] == [16, 16]
        assert rank["averages"] == {str(step): True for step in range(16, 24)}
        assert set(rank["tensors"].values()) == {0.0}, "the averages are the model at the end"
    assert told[0]["digest"] == told[1]["digest"]


def test_parameters_of_16_bits_are_equal_to_the_bit(ranks: Outcomes) -> None:
    for rank in ranks("mixed_standing_still"):
        assert all(rank["losses"])


def test_who_waits_for_a_validation_goes_on_there(ranks: Outcomes) -> None:
    for places in ranks("saved_while_one_waits_for_a_validation"):
        assert None not in [place for each in places.values() for place in each], "a rank's place in the data is lost"
        assert "validation" in [first for first, _ in places.values()], "rank 0 was saved while it waited"


@pytest.mark.parametrize("name", ["one_has_finished_its_steps", "one_has_finished_more_epochs"])
def test_a_rank_that_has_finished_waits_for_the_others_again(ranks: Outcomes, name: str) -> None:
    first, second = ranks(name)
    assert BATCHES < first["saved"] < 2 * BATCHES
    assert (first["steps"], second["steps"] > 0) == (0, True)
    assert first["digest"] == second["digest"]
    assert first["reason"] == "the end"


def test_saves_go_on_after_a_rollback(ranks: Outcomes) -> None:
    for told in ranks("saves_go_on_after_a_rollback"):
        assert told["rollbacks"] >= 1
        numbers, steps = zip(*told["saves"], strict=True)
        assert list(numbers) == sorted(set(numbers)), "none comes twice"
        assert len(steps) - steps.index(max(steps[:6])) > 4, "it trains for 60 steps more, and saves after every 8"


def test_a_rank_without_data_saves_and_resumes(ranks: Outcomes) -> None:
    for rank, told in enumerate(ranks("one_without_data")):
        assert told["saves"] == 2
        assert told["steps"] == rank * BATCHES * EPOCHS
        assert told["again"] == 0
        assert told["equal"]


def test_ranks_that_step_together_and_are_not_equal_are_refused(ranks: Outcomes) -> None:
    for error in ranks.errors("divided_state"):
        assert "ZeroRedundancyOptimizer" in error

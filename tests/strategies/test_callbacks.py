"""Lightning's own callbacks do on drifting replicas what they do elsewhere, or are refused by name."""

from __future__ import annotations

import pytest

from tests.strategies.workers import Outcomes

SCENARIOS = "tests.strategies.callbacks"


@pytest.mark.parametrize("name", ["lr_finder", "lr_finder_at_epochs"])
def test_training_goes_on_after_a_search_for_a_learning_rate_as_if_there_had_been_none(
    ranks: Outcomes, name: str
) -> None:
    told = ranks(name)
    assert told[0]["found"]["digest"] == told[1]["found"]["digest"]
    for rank in told:
        found, plain = rank["found"], rank["plain"]
        assert found["history"] == plain["history"]
        assert [found[key] for key in ("steps", "rounds", "state")] == [
            plain[key] for key in ("steps", "rounds", "state")
        ]
        assert (plain["steps"], found["global_step"]) == (21, 21)
    if name == "lr_finder":
        assert told[0]["lr"] == told[1]["lr"] != 0.05
    else:
        assert [rank["looked"] for rank in told] == [2, 2]

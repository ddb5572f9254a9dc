"""What is done about lag counts on a real CNN, with real workers: the order of accuracies, far apart."""

from __future__ import annotations

import pytest

from tests.strategies.served_digits import BATCHES, SLOWER, WORKERS
from tests.strategies.workers import Outcomes

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes("tests.strategies.served_digits", tmp_path_factory.mktemp("digits"), nprocs=WORKERS)


def test_the_auto_policy_learns_with_momentum_where_late_gradients_as_they_are_lead_astray(outcomes: Outcomes) -> None:
    """In a simulation with a lag of 3 they come to 0.59 and 0.1; chance is 0.1."""
    auto, none = outcomes("auto"), outcomes("none")
    for told in (auto, none):
        assert len({rank["accuracy"] for rank in told}) == 1, "all hold one model"
        assert [rank["steps"] for rank in told] == [BATCHES] * (WORKERS - 1) + [BATCHES // SLOWER]
    assert auto[0]["accuracy"] > 0.35
    assert none[0]["accuracy"] < auto[0]["accuracy"] - 0.15

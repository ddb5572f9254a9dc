"""Two ranks go on from a safe point as if nothing had happened."""

from __future__ import annotations

import pytest

from tests.resume.ranks import POINTS
from tests.strategies.conftest import ranks as ranks
from tests.strategies.workers import Outcomes

SCENARIOS = "tests.resume.ranks"


@pytest.mark.parametrize("scenario", ["ddp", "ddp_accumulates", "synchronous", "without_overlap"])
def test_two_ranks(scenario: str, ranks: Outcomes) -> None:
    for names in ranks(scenario):
        assert set(names) == set(POINTS)

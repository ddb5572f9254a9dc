"""Two ranks decide alike over Horovod."""

from __future__ import annotations

import pytest

from tests.horovod import horovod_environment, needs_horovod
from tests.strategies.workers import Outcomes

pytestmark = [pytest.mark.processes, needs_horovod]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    with horovod_environment(2) as env:
        return Outcomes("tests.callbacks.horovod_ranks", tmp_path_factory.mktemp("horovod"), env=env)


def test_a_gradient_of_one_rank_is_skipped_on_all(outcomes: Outcomes):
    first, second = outcomes("skips_a_gradient_of_one_rank_on_all")
    assert first["history"] == second["history"]
    assert first["history"][8] == first["history"][7] != first["history"][9]
    assert first["finite"]


def test_learning_rates_are_cut_together(outcomes: Outcomes):
    first, second = outcomes("cuts_learning_rates_together")
    assert first["lr"] == second["lr"] == 0.005
    assert first["history"] == second["history"]

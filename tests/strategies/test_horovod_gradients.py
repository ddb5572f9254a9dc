"""Windows of gradients over a real Horovod: numbers of `test_gradient_windows`, and what a lost rank does."""

from __future__ import annotations

import pytest

from tests.horovod import KINDS, horovod_environment, needs_horovod
from tests.strategies.problem import distance
from tests.strategies.test_failures import survivor_of_two
from tests.strategies.test_gradient_windows import (  # noqa: F401
    EQUAL,
    UNEQUAL,
    reference,
    test_a_rank_without_data_takes_compressed_steps_of_the_others,
    test_a_rank_without_data_takes_the_steps_of_the_others,
    test_a_window_that_is_not_finite_is_dropped_on_all_ranks,
    test_compressed_windows_stay_near_those_that_are_not,
    test_lightnings_checkpoints_hold_the_open_window,
    test_tensors_of_unusual_kinds,
    test_validations_and_epochs_step_with_what_is_in_flight,
    test_windows_as_long_as_a_reduction,
    test_without_delay_windows_are_accumulation_of_ddp,
)
from tests.strategies.workers import Outcomes

pytestmark = [pytest.mark.processes, needs_horovod]
SCENARIOS = (
    "no_delay", "delayed", "steps_and_schedulers", "uneven", "until_reduced", "until_reduced_uneven", "odd_tensors",
    "scaled", "resumed", "compressed", "compressed_without_data",
)  # fmt: skip


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Scenarios of `test_gradient_windows`, where Horovod has started the ranks."""
    folder = tmp_path_factory.mktemp("windows")
    with horovod_environment(2) as env:
        return Outcomes("tests.strategies.gradient_windows", folder, env=env, only=SCENARIOS)


def test_steps_are_those_of_one_process_in_float64(ranks: Outcomes) -> None:
    for name, (where, steps) in (
        ("no_delay", reference(EQUAL, 3, 0, epochs=2)),
        ("delayed", reference(UNEQUAL, 2, 1, epochs=2)),
    ):
        for told in ranks(name):
            assert distance(told["flat"], where) < 1e-5
            assert told["global_step"] == told["steps"] == steps
        assert ranks(name)[0]["digest"] == ranks(name)[1]["digest"]


def test_a_killed_rank_ends_the_other_with_an_error_of_horovods_kind() -> None:
    kwargs = {"batches": [100_000] * 2, "timeouts": {"dead_after": 3.0}, "windows": 2}
    with horovod_environment(2) as env:
        told = survivor_of_two(kwargs, env)
    assert told["error"].startswith(KINDS), told

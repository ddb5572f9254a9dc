"""Lightning's own callbacks beside servers do what they do elsewhere, or are refused by name."""

from __future__ import annotations

import pytest
import torch

from tests.strategies import problem
from tests.strategies.problem import batches, distance, flat, joined, momentum
from tests.strategies.served import BATCHES
from tests.strategies.served_callbacks import BOUND, DECAY, WINDOWS
from tests.strategies.workers import Outcomes

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes("tests.strategies.served_callbacks", tmp_path_factory.mktemp("callbacks"))


def test_an_average_over_time_is_that_of_one_process(outcomes: Outcomes) -> None:
    net, average = problem.network(), torch.empty(0)
    optimizer = momentum(net.parameters())
    for batch in joined(batches(0, BATCHES), batches(1, BATCHES)) * 2:
        optimizer.zero_grad()
        problem.loss_of(net, batch).backward()
        optimizer.step()
        now = torch.tensor(flat(net))
        average = DECAY * average + (1 - DECAY) * now if average.numel() else now
    for told in outcomes("averaged"):
        assert told["step"] == 2 * BATCHES
        assert distance(told["values"], average.tolist()) < 1e-6


def test_an_average_takes_the_models_place_in_validations(outcomes: Outcomes) -> None:
    first, second = outcomes("averaged_with_validations")
    assert first["step"] == second["step"] == BATCHES
    assert first["digest"] == second["digest"]


def test_servers_hear_of_the_average_that_training_ends_with(outcomes: Outcomes) -> None:
    for told in outcomes("averaged_at_the_end"):
        assert distance(told["served"], told["every_step"]) < 1e-6
        assert distance(told["own"], told["every_step"]) < 1e-2, "each worker has a momentum of its own"


def test_the_step_after_the_average_is_with_the_optimizers_state_and_counts(outcomes: Outcomes) -> None:
    for told in outcomes("averaged_at_the_end_with_norms"):
        assert distance(told["served"], told["every_step"]) < 1e-5
        assert told["told"] == {
            "steps": 49, "versions": "49, of 49 pushes of rank 0's", "samples": [5.0 * BATCHES * 4] * 2,
        }  # fmt: skip


@pytest.mark.parametrize("name", ["clipped", "clipped_while_a_push_is_under_way", "clipped_unseen"])
def test_who_writes_to_parameters_that_servers_hold_is_refused(outcomes: Outcomes, name: str) -> None:
    for error in outcomes.errors(name):
        assert "changed beside the optimizer's step" in error
        assert "update_on_server=False" in error


def test_what_is_written_beside_the_workers_own_optimizer_is_pushed(outcomes: Outcomes) -> None:
    for told in outcomes("clipped_and_pushed"):
        assert max(map(abs, told["values"])) <= BOUND * (1 + 1e-6)


def test_windows_by_epoch_are_pushed_as_one(outcomes: Outcomes) -> None:
    net = problem.network()
    optimizer = momentum(net.parameters())
    for size in WINDOWS.values():
        data = joined(batches(0, BATCHES), batches(1, BATCHES))
        for start in range(0, BATCHES, size):
            optimizer.zero_grad()
            for batch in data[start : start + size]:
                (problem.loss_of(net, batch) / size).backward()
            optimizer.step()
    for told in outcomes("accumulated"):
        assert told["step"] == BATCHES + BATCHES // 2
        assert distance(told["values"], flat(net)) < 1e-6


def test_all_stop_at_one_epoch(outcomes: Outcomes) -> None:
    first, second = outcomes("stopped_early")
    assert first["digest"] == second["digest"]
    assert len(first["validations"]) == len(second["validations"]) == 2


def test_what_looks_for_a_batch_size_is_refused(outcomes: Outcomes) -> None:
    for error in outcomes.errors("sizes"):
        assert "`BatchSizeFinder` looks on one device only" in error

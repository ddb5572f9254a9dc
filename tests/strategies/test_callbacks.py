"""Lightning's own callbacks do on drifting replicas what they do elsewhere, or are refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.strategies import problem
from tests.strategies.problem import batches, distance, flat
from tests.strategies.workers import Outcomes

pytestmark = pytest.mark.processes

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


def test_rank_0_alone_ends_a_search_for_a_learning_rate_early(ranks: Outcomes) -> None:
    first, second = ranks("lr_finder_of_one_noisy_rank")
    for name in ("averaging", "gradients", "server"):
        for noisy, steps in ((1, 20), (0, 5)):
            here, there, ddp = first[f"{name} {noisy}"], second[f"{name} {noisy}"], first[f"ddp {noisy}"]
            assert [here[key] for key in ("lr", "loss", "suggestion")] == [
                there[key] for key in ("lr", "loss", "suggestion")
            ]
            assert (here["suggestion"] is None) == (noisy == 0)
            if name == "gradients":
                assert here["lr"] == ddp["lr"]
                assert (here["searched"], here["suggestion"]) == (steps, ddp["suggestion"])
                assert distance(here["loss"], ddp["loss"]) < 1e-5
                assert steps <= there["searched"] <= steps + (noisy == 0)  # the vote takes a batch to arrive


# ---- averages of the model over time ----

Update = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


def ema(average: torch.Tensor, now: torch.Tensor, n: int) -> torch.Tensor:
    return 0.8 * average + 0.2 * now


def mean(average: torch.Tensor, now: torch.Tensor, n: int) -> torch.Tensor:
    return average + (now - average) / (n + 1)


def averages_of_local_sgd(update: Update, ranks: tuple[int, ...] = (0, 1), steps: int = 14) -> list[list[float]]:
    """Plain torch: the average of the replicas' mean after every step, with a round after every third."""
    nets = [problem.network() for _ in ranks]
    steppers = [torch.optim.SGD(net.parameters(), lr=0.05) for net in nets]
    data = [batches(rank, steps) for rank in ranks]
    history, average = [], torch.empty(0)
    for step in range(steps):
        for net, stepper, shard in zip(nets, steppers, data, strict=True):
            stepper.zero_grad()
            problem.loss_of(net, shard[step]).backward()
            stepper.step()
        now = torch.stack([torch.tensor(flat(net)) for net in nets]).mean(0)
        average = now if step == 0 else update(average, now, step)
        history.append(average.tolist())
        if step % 3 == 2:
            for net in nets:
                torch.nn.utils.vector_to_parameters(now.clone(), net.parameters())
    return history


@pytest.mark.parametrize(("name", "update"), [("ema", ema), ("mean_of_all_steps", mean)])
def test_the_average_over_time_is_that_of_the_agreed_model(ranks: Outcomes, name: str, update: Update) -> None:
    told, expected = ranks(name), averages_of_local_sgd(update)
    assert told[0]["digest"] == told[1]["digest"]
    assert told[0]["validated"] == told[1]["validated"]
    for rank in told:
        assert len(rank["validated"]) == 2
        for seen, step in zip(rank["validated"], (6, 12), strict=True):
            assert distance(seen, expected[step - 1]) < 1e-6
        assert distance(rank["flat"], expected[-1]) < 1e-6
        assert distance(rank["saved"], expected[-1]) < 1e-6
        assert rank["n_averaged"] == 14


def test_a_rank_without_data_takes_over_the_others_average(ranks: Outcomes) -> None:
    told, expected = ranks("ema_without_data"), averages_of_local_sgd(ema, ranks=(1,))
    assert told[0]["digest"] == told[1]["digest"]
    for rank in told:
        assert distance(rank["flat"], expected[-1]) < 1e-6
        assert rank["n_averaged"] == 14


def test_averages_begin_with_rank_0s_model(ranks: Outcomes) -> None:
    first, second = ranks("average_of_unlike_starts")
    assert first["validated"] == second["validated"]
    assert len(first["validated"]) == 2


def test_swa_fills_batch_norm_from_the_batches_of_all_ranks(ranks: Outcomes) -> None:
    told = ranks("swa_with_batch_norm")
    data = [x for x, _ in [*batches(0, 4, 3), *batches(1, 6, 5)]]
    mean = torch.stack([x.double().mean(0) for x in data]).mean(0).tolist()
    var = torch.stack([x.double().var(0) for x in data]).mean(0).tolist()
    assert told[0]["digest"] == told[1]["digest"]
    for rank in told:
        assert distance(rank["mean"], mean) < 1e-5
        assert distance(rank["var"], var) < 1e-5
        assert (rank["batches"], rank["momentum"]) == (6, 0.1)


def test_a_spike_on_one_rank_is_raised_on_all(ranks: Outcomes) -> None:
    first, second = ranks("spike")
    for told in (first, second):
        assert told["error"] == "TrainingSpikeException: Training spike detected in batch 12"
        assert told["warnings"] == []
    assert first["digest"] == second["digest"]
    assert first["skip"] == [11, 12]

"""Unequal shards, unequal speeds: nobody waits between sync points, nothing is lost, and sync points hold one model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_async import AsyncAveragingStrategy, DeltaMean
from lightning_async.trainer.namespace import validation_interval
from tests.strategies import problem
from tests.strategies.problem import adam, batches, distance, flat, momentum, train_alone
from tests.strategies.uneven import SHORT, Raises, fit_short
from tests.strategies.workers import Outcomes

pytestmark = pytest.mark.processes

SCENARIOS = "tests.strategies.uneven"


def assert_agreed(told: list[dict]) -> None:
    """All ranks held one model, to the bit, at every validation, at every end of an epoch, and at the end."""
    first, second = told
    for where in ("validations", "epochs", "end", "digest", "samples_by_rank"):
        assert first[where] == second[where], where
    assert first["end"] == first["digest"]


def test_20_and_60_batches_validate_together(ranks: Outcomes) -> None:
    told = ranks("everything")
    assert_agreed(told)
    # the sanity check, and in each epoch the six of rank 1: what rank 0's clock asks for is among them
    assert [len(rank["validations"]) for rank in told] == [1 + 2 * 6] * 2
    assert len(set(told[0]["validations"])) == 1 + 2 * 6


def test_every_sample_counts(ranks: Outcomes) -> None:
    for told in ranks("everything"):
        assert told["samples_by_rank"] == [2 * 20 * 4, 2 * 60 * 4]
    assert [told["steps"] for told in ranks("everything")] == [2 * 20, 2 * 60]
    assert [told["global_step"] for told in ranks("everything")] == [2 * 20, 2 * 60]


def test_metrics_of_a_validation_are_of_all_ranks(ranks: Outcomes) -> None:
    first, second = ranks("everything")
    assert first["metrics"] == second["metrics"]
    sanity, *others = first["metrics"]
    assert sanity["val_count"] == 2 + 6, "one batch of each rank"
    for metrics in others:
        assert metrics["val_count"] == 3 * 2 + 3 * 6
        assert metrics["val_mean_rank"] == 0.5


def test_metrics_of_an_epoch_are_of_all_ranks(ranks: Outcomes) -> None:
    first, second = ranks("everything")
    assert first["epoch_metrics"] == second["epoch_metrics"]
    assert [m["count"] for m in first["epoch_metrics"]] == [80 * 4] * 2


def test_checkpoints_hold_models_that_were_validated(ranks: Outcomes) -> None:
    first, second = ranks("checkpoints")
    assert_agreed([first, second])
    assert first["best"] == second["best"]
    scores = sorted({m["val_loss"] for m in first["metrics"]})
    assert math.isclose(first["best"][1], scores[0], rel_tol=1e-6)
    assert len([name for name in first["saved"] if name.startswith("best/")]) == 2
    assert len([name for name in first["saved"] if name.startswith("each/")]) >= 2
    for name, model in first["saved"].items():
        assert model in first["validations"], name


def test_checkpoints_by_steps_and_by_time_hold_one_model(ranks: Outcomes) -> None:
    first, second = ranks("checkpoints_by_steps_and_time")
    assert_agreed([first, second])
    assert first["digests"] == second["digests"]
    assert first["files"]["steps"] in (3, 4), "every ten steps of the one that is ahead, which has forty"
    assert first["files"]["time"] >= 1
    assert len(first["digests"]) >= first["files"]["steps"] + first["files"]["time"]
    names = {name: f"step={step}" for name, step in first["steps_in_files"].items()}
    assert {name: name.partition("-")[0] for name in names} == names


@pytest.mark.parametrize("kind", ["gradients", "averaging", "servers", "uneven"])
def test_saves_by_steps_wait_for_their_validation(ranks: Outcomes, kind: str) -> None:
    for told in ranks("scored_checkpoints"):
        scores = told[kind]["scores"]
        assert "step=12-score=12" in scores
        assert "step=24-score=24" in scores
        assert not any(name.startswith(("step=12-score=6", "step=24-score=1")) for name in scores)
        assert told[kind]["best"] == "step=24-score=24"


@pytest.mark.parametrize("name", ["default_checkpoint", "default_checkpoint_without_validation"])
def test_default_checkpoint(ranks: Outcomes, name: str) -> None:
    told = ranks(name)
    assert_agreed(told)
    assert len(told[0]["files"]) == 1
    assert told[0]["epoch"] == 2


def test_early_stopping_stops_both_after_the_third_validation(ranks: Outcomes) -> None:
    told = ranks("stops_early")
    assert_agreed(told)
    for rank in told:
        assert len(set(rank["validations"])) == 3, "no rank trains after the third"
        assert len(rank["validations"]) <= 4, "the third model may be seen again, at the end of the epoch"
        assert rank["epoch"] < 3


def test_one_validation_per_epoch(ranks: Outcomes) -> None:
    told = ranks("one_validation_per_epoch")
    assert_agreed(told)
    assert [rank["validations_by_epoch"] for rank in told] == [[1, 2], [1, 2]]
    assert told[0]["validations"] == told[0]["epochs"], "what is validated is the model at the end of the epoch"


def test_one_validation_per_interval(ranks: Outcomes) -> None:
    told = ranks("one_validation_per_interval")
    assert_agreed(told)
    assert [len(rank["validations"]) for rank in told] == [4, 4]


def test_validations_by_the_clock_are_of_all_ranks(ranks: Outcomes) -> None:
    told = ranks("validations_by_time")
    assert_agreed(told)
    first, second = (len(rank["validations"]) for rank in told)
    assert first == second >= 2


def test_an_interval_of_validations_is_batches_or_a_time_also_where_lightning_knows_no_times() -> None:
    assert validation_interval(SimpleNamespace(val_check_interval=10)) == 10
    assert validation_interval(SimpleNamespace(val_check_interval=0.5, _val_check_time_interval=None)) == 0.5
    assert validation_interval(SimpleNamespace(_val_check_time_interval=90.0)) == timedelta(seconds=90)


@pytest.mark.parametrize("name", ["empty_shard", "empty_shard_synchronous"])
def test_an_empty_shard_takes_part_with_weight_zero(ranks: Outcomes, name: str) -> None:
    told = ranks(name)
    assert_agreed(told)
    expected = flat(train_alone(batches(1, 12), epochs=2))
    for rank in told:
        assert distance(rank["flat"], expected) < 1e-6
        assert rank["samples_by_rank"] == [0, 2 * 12 * 4]
        assert len(rank["epochs"]) == 2
    assert [rank["steps"] for rank in told] == [0, 24]


def test_synchronous_steps_go_on_without_a_rank_that_is_through(ranks: Outcomes) -> None:
    told = ranks("synchronous_uneven")
    assert_agreed(told)
    module = train_alone(problem.joined(batches(0, 4), batches(1, 4)))
    expected = flat(train_alone(batches(1, 10)[4:], module=module))
    for rank in told:
        assert distance(rank["flat"], expected) < 1e-6
    assert [rank["steps"] for rank in told] == [4, 10]


@pytest.mark.parametrize("name", ["momentum", "adam", "averaged", "one clock", "pairs"])
def test_a_rank_that_was_out_of_data_goes_on_with_what_the_others_optimizers_remember(
    ranks: Outcomes, name: str
) -> None:
    first, second = (told[name] for told in ranks("synchronous_uneven_state"))
    assert_agreed([first, second])
    pairs = 2 if name == "pairs" else 1
    make = momentum if name in ("momentum", "one clock") else adam
    expected = _in_step(make, [batches(0, 4), batches(1, 10)], pairs, epochs=3)
    for number, where in enumerate(expected):
        epoch, step = divmod(number, 10 // pairs)
        assert distance(second["history"][(number + 1) * pairs - 1], where) < 1e-5
        if step < 4 // pairs:
            at = epoch * 4 + (step + 1) * pairs - 1
            assert first["history"][at] == second["history"][(number + 1) * pairs - 1], "to the bit, at each step"


def _in_step(make: Callable[..., Any], data: Sequence[Any], each: int, epochs: int) -> list[list[float]]:
    """Where one process is after each step, of ``each`` batches of all ranks that have some left; in float64."""
    module = problem.network().double()
    optimizer, seen = make(module.parameters()), []
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8)
    for _ in range(epochs):
        for at in range(0, max(map(len, data)), each):
            taken = [batch for of_rank in data for batch in of_rank[at : at + each]]
            x, y = (torch.cat(parts).double() for parts in zip(*taken, strict=True))
            optimizer.zero_grad()
            problem.loss_of(module, (x, y)).backward()
            optimizer.step()
            scheduler.step()
            seen.append(flat(module))
    return seen


@pytest.mark.parametrize("name", ["synchronous", "windows"])
def test_replicas_that_come_with_momentum_of_their_own_step_together_with_one(ranks: Outcomes, name: str) -> None:
    first, second = (told[name] for told in ranks("in_step_from_apart"))
    assert first["history"] == second["history"]
    assert distance(first["history"][-1], _in_step(momentum, [batches(0, 4), batches(1, 4)], 1, epochs=1)[-1]) < 1e-5


@pytest.mark.parametrize(
    ("name", "epochs", "least"),
    [("early_finisher", 1, 6), ("early_finisher_blocking", 2, 20), ("early_finisher_by_time", 1, 4)],
)
def test_an_early_finisher_answers_rounds(ranks: Outcomes, name: str, epochs: int, least: int) -> None:
    told = ranks(name)
    assert_agreed(told)
    for rank in told:
        assert rank["samples_by_rank"] == [epochs * 3 * 4, epochs * 40 * 4]
        assert rank["rounds"] >= least
        assert rank["failed_rounds"] == 0


def test_max_steps_with_unequal_epochs_and_checkpoints_is_refused_with_the_numbers(ranks: Outcomes) -> None:
    for error in ranks.errors("max_steps_refused"):
        assert error.startswith("ValueError")
        assert all(text in error for text in ("max_steps=120", "[6.0, 2.0]", "[20, 60]", "ModelCheckpoint"))


def test_max_steps_with_unequal_epochs_alone_works(ranks: Outcomes) -> None:
    told = ranks("max_steps_without_epoch_ends")
    assert told[0]["digest"] == told[1]["digest"]
    assert [rank["global_step"] for rank in told] == [70, 70]
    assert told[0]["samples_by_rank"] == [70 * 4, 70 * 4]
    assert any("[4.0, 2.0]" in message for message in told[0]["messages"])


def test_a_slow_replica_does_not_slow_the_other(ranks: Outcomes) -> None:
    """That rank 0 came to its end, while rank 1 took no step, is what let rank 1 go on."""
    told = ranks("drift_canary")
    assert told[0]["digest"] == told[1]["digest"]
    for rank in told:
        assert rank["samples_by_rank"] == [30 * 4, 30 * 4]
        assert rank["failed_rounds"] == 0


def test_a_replica_that_computes_slowly_is_named_and_has_smaller_windows(ranks: Outcomes) -> None:
    fast, slow = ranks("slow_compute")
    assert fast["digest"] == slow["digest"]
    assert fast["samples_by_rank"] == slow["samples_by_rank"] == [480.0, 144.0]
    for told in (fast, slow):
        name, slower, reason, share = told["straggler"]
        assert (name, reason) == ("1", "compute") and slower > 1.5 and share > 0.5
        assert "straggler" in told["said"] and "Rank 1 takes" in told["said"]
    assert fast["sizes"][0] == slow["sizes"][0] == 4  # while nothing is known
    assert max(fast["sizes"]) >= 5 and min(slow["sizes"]) <= 3


def test_a_replica_that_waits_for_its_data_is_named_and_takes_fewer_steps_per_round(ranks: Outcomes) -> None:
    slow, fast = ranks("slow_data")
    assert slow["digest"] == fast["digest"]
    for told in (fast, slow):
        name, slower, reason, share = told["straggler"]
        assert (name, reason) == ("0", "data") and slower > 1.5 and share > 0.5
    assert fast["rounds"] == slow["rounds"] > 36 // 12 + 2  # with 12 steps on both there would be about so many


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("number", "options", "validated"),
    [
        (6, {}, [6, 12]),
        (0, {}, [0, 0]),
        (6, {"val_check_interval": 0.5}, [4, 6, 10, 12]),
        (3, {"val_check_interval": 0.25}, [2, 3, 5, 6]),
        (5, {"val_check_interval": 3}, [3, 5, 8, 10]),
        (6, {"val_check_interval": 3}, [3, 6, 9, 12]),
        (7, {"val_check_interval": 3}, [3, 6, 10, 13]),
        (6, {"check_val_every_n_epoch": 2}, [12]),
        (6, {"check_val_every_n_epoch": None, "val_check_interval": 4}, [4, 8, 12]),
        (6, {"val_check_interval": timedelta(hours=1)}, []),
        (6, {"limit_val_batches": 0}, []),
        (5, {"limit_train_batches": 6}, [5, 10]),
        (8, {}, [8, 16]),
    ],
)
def test_an_epoch_that_is_shorter_than_its_loader_says_is_validated(
    number: int, options: dict[str, Any], validated: list[int]
) -> None:
    data = torch.utils.data.DataLoader(Raises(batches(0, number), 8), batch_size=None)
    told = fit_short(AsyncAveragingStrategy(rule=DeltaMean()), data, devices=1, **options)
    assert told["batches"] == validated
    assert told["rates"] == [0.05, 0.025, 0.0125] if number else [0.05] * 3, "schedulers step with an epoch"
    counts = f"Rank 0: epoch 0 has ended after {number} of {options.get('limit_train_batches', 8)} batches"
    assert [text[: len(counts)] for text in told["warnings"]] == [counts] * (number < 8)


@pytest.mark.usefixtures("alone")
def test_workers_that_raise_stop_iteration_end_an_epoch_as_its_last_batch_does() -> None:
    data = torch.utils.data.DataLoader(Raises(batches(0, 6), 8), batch_size=None, num_workers=2)
    told = fit_short(AsyncAveragingStrategy(rule=DeltaMean()), data, devices=1, val_check_interval=0.5)
    assert told["batches"] == [4, 6, 10, 12]
    assert told["rates"] == [0.05, 0.025, 0.0125]
    assert len(told["warnings"]) == 1


@pytest.mark.usefixtures("alone")
def test_a_stream_without_a_length_may_end_before_its_limit() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(batches(0, 6))

    data = torch.utils.data.DataLoader(Stream(), batch_size=None)
    told = fit_short(AsyncAveragingStrategy(rule=DeltaMean()), data, devices=1, limit_train_batches=8)
    assert told["batches"] == [6, 12]
    assert told["warnings"] == []


@pytest.mark.parametrize("name", SHORT)
def test_short_epochs_are_validated_by_all_ranks(ranks: Outcomes, name: str) -> None:
    """What a full rank's clock has asked for is not asked for again by the clock of a short one."""
    _, interval, other = SHORT[name]
    told = [each[name] for each in ranks("short_epochs")]
    expected = 2 * 2 if interval == 0.5 else 2
    assert [len(each["batches"]) for each in told] == [expected] * 2
    if interval != 7:
        assert [each["batches"][-1] for each in told] == [2 * 6, 2 * other], "at the end of the epoch"
    assert told[0]["models"] == told[1]["models"]
    assert told[0]["digest"] == told[1]["digest"]
    for each, number in zip(told, (6, other), strict=True):
        assert each["rates"] == [0.05, 0.025, 0.0125]
        assert len(each["warnings"]) == (number < 8)


def test_statistics_of_batch_norm_are_those_of_the_newest_data(ranks: Outcomes) -> None:
    """At the end 35 batches of mean 8, of which each counts as much as all before it: nothing else is left."""
    first, second = ranks("statistics")
    assert first == second
    assert len(first) == 7
    for name, (mean, variance, tracked) in first.items():
        assert mean == [8.0] * 4, name
        assert all(0.0 <= each < 1e-6 for each in variance), name
        assert tracked == 80, name

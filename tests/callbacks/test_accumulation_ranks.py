"""Windows of accumulation on two ranks: the mean over the samples of both, and the same windows on both."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_async.algorithms import estimate
from lightning_async.data.partition import Weighted
from tests.callbacks.accumulation_ranks import rows, tokens
from tests.callbacks.problem import Line, values
from tests.strategies.workers import Outcomes

pytestmark = pytest.mark.processes

SCENARIOS = "tests.callbacks.accumulation_ranks"


def by_hand(windows: Sequence[int], linear: bool = False, counts: Any = len, delay: int = 0) -> list[float]:
    """SGD in float64 over the samples of both ranks' batches, each of which ``counts`` as so many; a step may be taken
    when the next window is full."""
    torch.manual_seed(0)
    module = Line().double()
    left = iter(zip(rows(0), rows(1), strict=True))
    flying: list[list[Tensor]] = []

    def step(changes: list[Tensor]) -> None:
        with torch.no_grad():
            for p, change in zip(module.parameters(), changes, strict=True):
                p -= change

    base = sum(float(counts(rows(of)[0])) for of in (0, 1))
    for n in windows:
        batches = [each.double() for _ in range(n) for each in next(left)]
        losses = [float(counts(each)) * (module.layer(each) - 2 * each).square().mean() for each in batches]
        counted = sum(float(counts(each)) for each in batches)
        gradients = torch.autograd.grad(sum(losses) / counted, list(module.parameters()))  # type: ignore[arg-type]
        flying.append([0.1 * (counted / base if linear else 1) * g for g in gradients])
        if len(flying) > delay:
            step(flying.pop(0))
    for each in flying:
        step(each)
    return values(module)


def alike(told: list[Any]) -> dict[str, Any]:
    first, second = told
    assert first["history"] == second["history"] or first["values"] == second["values"]
    assert first["steps"] == second["steps"]
    return first


def test_ddp_has_the_mean_over_the_samples_of_all_ranks(ranks: Outcomes):
    told = alike(ranks("ddp_by_samples"))
    assert told["steps"] == [2, 5, 7]
    assert told["values"] == pytest.approx(by_hand([3, 3, 2], linear=True), rel=1e-5)


def test_rates_under_ddp_are_by_the_first_batches_of_all_ranks(ranks: Outcomes):
    """As those of the engine's: of 6 and 2 samples, where rank 0 alone has 6."""
    assert alike(ranks("ddp_of_unequal_batches"))["rates"] == pytest.approx([0.2, 0.15])


def test_synchronous_steps_of_the_engine_have_the_same_mean(ranks: Outcomes):
    told = alike(ranks("synchronous_by_samples"))
    assert told["steps"] == [2, 5, 7]
    assert told["values"] == pytest.approx(by_hand([3, 3, 2]), rel=1e-5)


def test_replicas_in_step_have_one_rate_by_the_samples_of_all(ranks: Outcomes):
    told = alike(ranks("synchronous_by_number"))
    assert told["rates"] == pytest.approx([0.2, 0.2, 0.2, 0.15])  # 4 and 3 samples, 4 and 1
    assert told["values"] == pytest.approx(by_hand([2, 2, 2, 2], linear=True), rel=1e-5)
    told = alike(ranks("synchronous_by_count"))
    assert told["rates"] == pytest.approx([0.2, 0.225, 0.2, 0.25])
    assert told["values"] == pytest.approx(by_hand([2, 2, 2, 2], linear=True, counts=tokens), rel=1e-5)
    first, second = ranks("synchronous_first")  # then each has its own
    assert first["rates"] == pytest.approx([0.2, 0.2, 0.2, 0.175])
    assert second["rates"] == pytest.approx([0.2, 0.2, 0.2, 0.125])
    assert first["history"][:4] == second["history"][:4] and first["history"][6] != second["history"][6]


def test_replicas_in_step_take_sizes_that_the_first_has_measured(ranks: Outcomes):
    """One window late, as all hear of it with that one's gradients."""
    told = ranks("synchronous_by_noise")
    found = [each["seen"]["seen"]["noise"][1] / each["seen"]["seen"]["noise"][0] for each in told]
    assert found[0] != pytest.approx(found[1], rel=0.1)
    alike(told)
    assert len({b - a for a, b in itertools.pairwise([-1, *told[0]["steps"]])}) > 1
    first = alike(ranks("synchronous_by_communication"))
    assert first["steps"] == [1, 3, 6, 9, 12, 15]  # rank 1 alone would have 4 batches
    assert first["rates"] == pytest.approx([0.2, 0.2, *[0.3] * 4])
    for told in (ranks("synchronous_by_noise"), ranks("synchronous_by_communication")):
        assert told[0]["rates"] == told[1]["rates"] and told[0]["history"] == told[1]["history"]


def test_windows_in_the_background_have_the_sizes_that_the_callback_says(ranks: Outcomes):
    told = alike(ranks("gathered_by_samples"))
    assert told["steps"] == [2, 5, 7]
    assert told["values"] == pytest.approx(by_hand([3, 3, 2], linear=True), rel=1e-5, abs=1e-6)
    told = alike(ranks("gathered_by_schedule"))
    assert told["steps"] == [2, 4, 5, 6, 7]
    assert told["values"] == pytest.approx(by_hand([3, 2, 1, 1, 1], linear=True), rel=1e-5, abs=1e-6)
    told = alike(ranks("gathered_late"))
    assert told["rates"] == pytest.approx([0.3, 0.3, 0.15])  # 12 samples in the last one, which a sync point steps with
    assert told["values"] == pytest.approx(by_hand([3, 3, 2], linear=True, delay=1), rel=1e-5, abs=1e-6)
    told = alike(ranks("gathered_by_count"))
    assert told["values"] == pytest.approx(
        by_hand([2, 2, 2, 2], linear=True, counts=tokens, delay=1), rel=1e-5, abs=1e-6
    )
    told = alike(ranks("gathered_in_two_epochs"))
    assert told["steps"] == [3, 5, 7, 0, 7] and len(told["rates"]) == 4 + 2


def test_windows_in_the_background_may_have_unequal_numbers_of_batches(ranks: Outcomes):
    first, second = ranks("gathered_by_unequal_samples")
    assert (first["steps"], second["steps"]) == ([1, 3, 6, 7], [2, 5, 7])
    assert first["values"] == second["values"]


def test_windows_by_samples_of_equal_batches_are_validated_after_as_many_of_them_on_each_rank(ranks: Outcomes):
    """Behind which batch a slower rank validated depended on time: with other buffers, and in another window."""
    assert ranks("gathered_and_validated") == [[3, 6], [3, 6]]


def test_windows_in_the_background_have_sizes_that_are_measured(ranks: Outcomes):
    """Of the means of all ranks, which are of twice the samples."""
    first, second = ranks("gathered_by_noise")
    for ours, theirs in zip(first, second, strict=True):
        assert (ours["steps"], ours["rates"], ours["values"]) == (theirs["steps"], theirs["rates"], theirs["values"])
        assert len({*ours["rates"]}) > 1
        assert ours["seen"]["probe"]["sizes"] in ([4.0, 16.0], [4.0, 32.0])
    told = alike(ranks("gathered_by_communication"))
    assert told["steps"] == [1, 3, 6, 9, 12, 15]
    assert told["rates"] == pytest.approx([0.2, 0.2, *[0.3] * 4])


def test_servers_have_the_mean_over_the_samples_of_all_workers(ranks: Outcomes):
    told = alike(ranks("served_by_samples"))
    assert told["steps"] == [2, 5, 7]
    assert told["values"] == pytest.approx(by_hand([3, 3, 2]), rel=1e-5)
    told = alike(ranks("served_by_schedule"))
    assert told["steps"] == [2, 4, 5, 6, 7]
    assert told["values"] == pytest.approx(by_hand([3, 2, 1, 1, 1]), rel=1e-5)


def test_workers_that_step_by_themselves_have_rates_of_their_own(ranks: Outcomes):
    for name in ("served_apart", "served_changes"):
        first, second = ranks(name)
        assert first["rates"] == pytest.approx([0.3, 0.3, 0.175])  # 4 and 3 samples, of 4 in a batch
        assert second["rates"] == pytest.approx([0.3, 0.3, 0.125])


def test_servers_refuse_what_workers_cannot_know_in_time(ranks: Outcomes):
    for error in ranks.errors("served_in_step_with_rates"):
        assert "(lr_scaling='linear')` with `ParameterServerStrategy(mode='sync')`" in error
        assert "Leave `lr_scaling` out, or take `AsyncAveragingStrategy(schedule=Synchronous())`" in error
    for error in ranks.errors("served_at_first_with_rates"):
        assert "(lr_scaling='sqrt')` with `ParameterServerStrategy(warmup_steps=2)`" in error
    for error in ranks.errors("served_by_noise"):
        assert "`NoiseScale(maximum=64, minimum=16" in error and "each worker measures by itself" in error


def test_windows_that_change_in_mid_epoch_never_mix(ranks: Outcomes):
    told = alike(ranks("ddp_by_schedule"))
    assert told["steps"] == [2, 4, 5, 6, 7]
    assert told["values"] == pytest.approx(by_hand([3, 2, 1, 1, 1]), rel=1e-5)


def test_ranks_in_lockstep_measure_one_noise_scale_and_decide_alike(ranks: Outcomes):
    told = ranks("ddp_by_noise")
    alike(told)
    assert told[0]["seen"]["seen"] == told[1]["seen"]["seen"]
    # The first window has one batch on each rank: a batch is the small one, both together are the large one.
    torch.manual_seed(0)
    module, gradients = Line().double(), []
    for of in (0, 1):
        data = rows(of)[0].double()
        loss = (module.layer(data) - 2 * data).square().mean()
        found = torch.autograd.grad(loss, list(module.parameters()))
        gradients.append(torch.cat([each.flatten() for each in found]))
    small = sum(float(g.square().sum()) for g in gradients) / 2
    square, trace = estimate(small, float(torch.stack(gradients).mean(0).square().sum()), 4, 8)
    batches = max(1, min(2, round(max(trace / square, 4) / 8)))
    assert told[0]["steps"][:2] == [0, batches]


def test_ranks_in_lockstep_decide_alike_by_times_of_their_own(ranks: Outcomes):
    first, second = ranks("ddp_by_communication")
    assert first["steps"] == second["steps"]
    assert first["steps"][0] == 1
    assert first["history"] == second["history"]


def test_rounds_are_counted_in_windows_and_weighted_by_samples(ranks: Outcomes):
    for told in ranks("asynchronous"):
        assert told["steps"] == [0, 2, 3, 4, 5, 6, 7]
        assert told["rounds"] == 3
    assert [told["samples"] for told in ranks("asynchronous")] == [31.0, 29.0]


def test_ranks_with_different_windows_are_refused(ranks: Outcomes):
    for error in ranks.errors("different_settings"):
        assert error.startswith("SettingsMismatch")
        assert "AdaptiveGradientAccumulation(accumulation_steps=2)" in error
        assert "AdaptiveGradientAccumulation(accumulation_steps=3)" in error


def test_a_target_counts_all_ranks(ranks: Outcomes):
    for error in ranks.errors("a_target_of_other_ranks"):
        assert "multiples of 8 samples, 4 on each of 2 ranks" in error
        assert "Take 8 or 16" in error
    for error in ranks.errors("ddp_in_pieces"):
        assert "(split_on_oom=True)` is for ranks that step by themselves: under `DDPStrategy`" in error


def test_partitions_learn_which_rank_this_is_and_parts_may_be_unequal(ranks: Outcomes):
    first, second = ranks("ddp_has_parts")
    assert (first["seen"], second["seen"]) == (list(range(20)), list(range(20, 40)))
    assert first["steps"] == second["steps"] == [2, 4]
    for error in ranks.errors("ddp_has_unequal_parts"):
        assert error.startswith("ValueError: `PartitionedSampler(partition=Weighted(")
        assert "its parts of 40 samples are unequal (10, 30), and ranks under DDP and Horovod take every step" in error
    first, second = ranks("drifting_has_parts")
    assert sorted(first["seen"] + second["seen"]) == list(range(40))
    assert first["seen"] == Weighted({1: 3.0}).part(40, ["0", "1"], 0, 0).tolist()
    assert (first["steps"], second["steps"]) == ([2], [2, 5, 7])

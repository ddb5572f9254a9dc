"""Windows of accumulation on two ranks: the mean over the samples of both, and the same windows on both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lightning_async.data.partitions import Weighted
from lightning_async.rules.accumulation import estimate
from tests.callbacks.accumulation_ranks import rows
from tests.callbacks.problem import Line, values
from tests.strategies.workers import Outcomes

SCENARIOS = "tests.callbacks.accumulation_ranks"


def by_hand(windows: Sequence[int], linear: bool = False) -> list[float]:
    """SGD in float64 over the samples of both ranks' batches."""
    torch.manual_seed(0)
    module = Line().double()
    left = iter(zip(rows(0), rows(1), strict=True))
    for n in windows:
        data = torch.cat([each for _ in range(n) for each in next(left)]).double()
        gradients = torch.autograd.grad((module.layer(data) - 2 * data).square().mean(), list(module.parameters()))
        with torch.no_grad():
            for p, g in zip(module.parameters(), gradients, strict=True):
                p -= 0.1 * (len(data) / 8 if linear else 1) * g
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


def test_synchronous_steps_of_the_engine_have_the_same_mean(ranks: Outcomes):
    told = alike(ranks("synchronous_by_samples"))
    assert told["steps"] == [2, 5, 7]
    assert told["values"] == pytest.approx(by_hand([3, 3, 2]), rel=1e-5)


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
    for told in ranks("drifting"):
        assert told["steps"] == [0, 2, 3, 4, 5, 6, 7]
        assert told["rounds"] == 3
    assert [told["samples"] for told in ranks("drifting")] == [31.0, 29.0]


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
    first, second = ranks("drifting_has_parts")
    assert sorted(first["seen"] + second["seen"]) == list(range(40))
    assert first["seen"] == Weighted({1: 3.0}).part(40, ["0", "1"], 0, 0).tolist()
    assert (first["steps"], second["steps"]) == ([2], [2, 5, 7])

"""Two ranks decide alike, in lockstep and while they drift."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.strategies.workers import Outcomes

pytestmark = pytest.mark.processes

SCENARIOS = "tests.callbacks.ranks"


def warnings(told: dict[str, Any]) -> list[str]:
    return [line for line in told["said"] if line.startswith("Rank ")]


def test_ddp_skips_a_gradient_of_one_rank_on_all(ranks: Outcomes):
    first, second = ranks("ddp_skips_a_gradient_of_one_rank_on_all")
    assert first["history"] == second["history"]
    assert first["history"][8] == first["history"][7] != first["history"][9]
    assert first["finite"]
    assert "Remedy: skip" in warnings(first)[0]


def test_ddp_cuts_learning_rates_together(ranks: Outcomes):
    first, second = ranks("ddp_cuts_learning_rates_together")
    assert first["lr"] == second["lr"] == 0.005
    assert first["history"] == second["history"]
    assert [line for line in warnings(first) if "Remedy" in line] == []
    assert "Remedy: cut_lr" in " ".join(warnings(second))


def test_ddp_rolls_back_together(ranks: Outcomes):
    first, second = ranks("ddp_rolls_back_together")
    assert first["rolled"] == second["rolled"] == [[24, 20]]
    assert first["history"] == second["history"]
    assert first["finite"]


def test_ddp_stops_together(ranks: Outcomes):
    for told in ranks("ddp_stops_together"):
        assert told["error"].startswith("TrainingDiverged: Rank ")
        assert told["step"] == 6


def test_ddp_notices_losses_that_part(ranks: Outcomes):
    first, second = ranks("ddp_notices_losses_that_part")
    assert "loss_variance is" in warnings(first)[0]
    assert [w.partition(",")[2] for w in warnings(first)] == [w.partition(",")[2] for w in warnings(second)]


def test_a_drifting_replica_skips_alone(ranks: Outcomes):
    first, second = ranks("drifting_skips_alone")
    assert second["history"][8] == second["history"][7]
    assert warnings(first) == []
    assert first["finite"]
    assert second["finite"]
    assert first["values"] == second["values"]


def test_a_drifting_replica_that_is_broken_is_reset_from_the_others_at_once(ranks: Outcomes):
    first, second = ranks("drifting_resets_the_replica_that_is_broken")
    assert second["mended_s"] < 30.0, "it waits for a deadline"
    assert all(math.isfinite(x) for h in first["history"] for x in h)
    assert second["at"] <= 21
    assert first["values"] == second["values"]
    assert second["finite"]


def test_a_drifting_replica_whose_loss_has_gone_off_is_left_out(ranks: Outcomes):
    first, second = ranks("drifting_leaves_out_a_replica_whose_loss_has_gone_off")
    assert max(abs(x) for h in first["history"] for x in h) < 100
    assert "Remedy: reset" in " ".join(warnings(second))
    assert max(map(abs, second["values"])) < 100
    assert first["values"] == second["values"]


def test_drifting_replicas_roll_back_together(ranks: Outcomes):
    first, second = ranks("drifting_rolls_back_together")
    assert not first["error"]
    assert not second["error"]
    assert len(first["rolled"]) == len(second["rolled"]) == 1
    assert first["after"] == second["after"]
    assert len(first["after"]) == 1
    assert first["validated"] == second["validated"] >= 11
    assert first["finite"]
    assert second["finite"]
    assert first["values"] == second["values"]
    assert second["took_s"] < 30.0, "it waits for a deadline"


def test_drifting_replicas_do_more_each_time_and_stop_together(ranks: Outcomes):
    first, second = ranks("drifting_cuts_syncs_and_stops_together")
    assert "TrainingDiverged" in first["error"]
    assert "TrainingDiverged" in second["error"]
    assert first["lr"] == second["lr"] == 0.005
    assert "sync_more 1x, sync 1x, cut_lr 1x, stop 1x" in second["error"]


def test_a_replica_that_has_finished_decides_with_the_others(ranks: Outcomes):
    first, second = ranks("drifting_with_unequal_shards_decides_with_one_that_has_finished")
    assert not first["error"]
    assert not second["error"]
    assert second["finite"]
    assert first["values"] == second["values"]


def test_drifting_replicas_notice_that_they_part(ranks: Outcomes):
    told = [line for each in ranks("drifting_notices_losses_that_part") for line in warnings(each)]
    assert any("loss_variance is" in line for line in told)

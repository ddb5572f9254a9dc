"""Ranks that were started with different settings are refused on all ranks, by name and with both values."""

from __future__ import annotations

import pytest

from tests.strategies.mismatches import STRATEGIES, TRAINERS
from tests.strategies.workers import Outcomes

pytestmark = pytest.mark.processes

SCENARIOS = "tests.strategies.mismatches"

NAMES = {"outer_lr": "rule", "synchronous": "schedule", "warm-up": "schedule", "one compresses": "compression"}
VALUES = {"precision": ("32-true", "bf16-mixed"), "accumulate_grad_batches": ("1", "2")}


@pytest.mark.parametrize("name", [*STRATEGIES, *TRAINERS])
def test_different_settings_are_refused_with_both_values(ranks: Outcomes, name: str) -> None:
    argument = NAMES.get(name, name)
    if name in VALUES:
        first, second = VALUES[name]
    else:
        first, second = (str(values[argument]) for values in {**STRATEGIES, **TRAINERS}[name])
    for rank, told in enumerate(ranks("settings")):
        assert told[name].startswith(f"SettingsMismatch: Rank {rank}: ")
        assert f"`{argument}` is {first} on rank 0, {second} on rank 1." in told[name]


def test_optimizers_that_differ_are_refused_where_all_step_with_the_same_gradients(ranks: Outcomes) -> None:
    for rank, told in enumerate(ranks("optimizers")):
        assert told.pop("kernels") == "done"
        assert all(each.startswith(f"SettingsMismatch: Rank {rank}: ") for each in told.values()), told
        assert "`optimizers` is SGD(lr=0.05, " in told["kind"] and "Adam(lr=0.05, " in told["kind"]
        assert "on rank 0, SGD(lr=0.25, " in told["rate"] and "on rank 0, SGD(lr=0.25, " in told["synchronous"]
        assert (
            " of [4] on rank 0, SGD(lr=0.05, " in told["own rate"]
            and "of [4] with ['lr=0.25'] on rank" in told["own rate"]
        )
        assert "`schedulers` is [] on rank 0, ['StepLR by 1 epoch'] on rank 1." in told["scheduler"]
        assert " of [4] on rank 0, " in told["groups"] and " of [1, 1, 1, 1] on rank 1." in told["groups"]
        assert "`number of optimizers` is 2 on rank 0, 1 on rank 1; `rule` is " in told["number"]
        assert (
            "`rule` is DiLoCo(outer_lr=1.0, " in told["settled"] and ", AdaptiveDiLoCo() on rank 1." in told["settled"]
        )
        assert "`automatic_optimization` is True on rank 0, False on rank 1." in told["manual"]


def test_different_versions_are_refused(ranks: Outcomes) -> None:
    for told in ranks("versions"):
        assert "`version of lightning_async` is " in told["lightning_async"]
        assert ", 99.0.0 on rank 1." in told["lightning_async"]
        assert ", 1.0 on rank 1." in told["torch"]
        assert told["patch of torch"] == "trained"


def test_a_version_that_does_not_compare_settings_is_refused(ranks: Outcomes) -> None:
    first, second = ranks("a_version_without_this_check")
    assert first.startswith("SettingsMismatch: Rank 0: ranks [1] run a version of lightning_async that does not")
    assert second != "trained"


def test_ranks_that_call_different_things_are_refused(ranks: Outcomes) -> None:
    for rank, told in enumerate(ranks("stages")):
        assert told["fit, validate"] == told["validate, fit"] == told["test, predict"] == f"Rank {rank}"
        assert told["validate, validate"] == "done"


def test_a_callback_of_all_ranks_on_one_rank_only_is_refused(ranks: Outcomes) -> None:
    for rank, told in enumerate(ranks("callbacks_of_all_ranks")):
        for stage in ("fit", "validate"):
            assert told[stage].startswith(f"SettingsMismatch: Rank {rank}: ")
            monitor = "DivergenceMonitor(lr_factor=0.5, skip_batches=1)"
            first = [monitor, "EarlyStopping", "ModelCheckpoint", "PeerMemory"]
            assert f"`callbacks of all ranks` is {first} on rank 0, ['EarlyStopping'] on rank 1." in told[stage]


def test_a_validation_on_one_rank_only_is_told_of(ranks: Outcomes) -> None:
    first, _ = ranks("validation_on_one_rank")
    (warning,) = first
    assert "`enable_validation` is True on rank 0, False on rank 1" in warning


def test_addresses_in_memory_are_no_settings(ranks: Outcomes) -> None:
    first, second = ranks("rules_without_a_text_of_their_own")
    assert first["digest"] == second["digest"]


def test_limits_may_differ_and_are_told(ranks: Outcomes) -> None:
    first, second = ranks("usual_settings")
    assert first["digest"] == second["digest"]
    assert [first["samples"], second["samples"]] == [6 * 4, 3 * 4]
    warning, of_optimizers = first["warnings"]
    assert "`limit_train_batches` is 1.0 on rank 0, 3 on rank 1" in warning
    assert "Timer" in warning and "max_epochs" not in warning
    assert "`optimizers` is SGD(lr=0.05, " in of_optimizers and "on rank 0, SGD(lr=0.25, " in of_optimizers
    assert second["warnings"] == []


def test_different_checkpoints_are_refused(ranks: Outcomes) -> None:
    for told in ranks("checkpoints"):
        assert told["same"] == "trained"
        for name, theirs in (
            ("none", "none"),
            ("earlier", "epoch 0, step 4, round "),
            ("another run", "epoch 1, step 8, round "),
        ):
            assert told[name].startswith("SettingsMismatch")
            assert "`ckpt_path` is epoch 1, step 8, round " in told[name]
            assert f" on rank 0, {theirs}" in told[name]

"""Importing the package and running a Trainer leave everything that is not the package's as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.strategies.workers import Outcomes
from tests.support import run_ranks

pytestmark = pytest.mark.processes

SCENARIOS = "tests.strategies.left_as_it_was"

OF_LIGHTNING = {"log", "log_dict", "_hparams", "_last_val_time"}
"""What Lightning leaves behind by itself."""

IMPORT = """
import importlib, json, sys
lightning = importlib.import_module(sys.argv[1])
import torch, torch.distributed, torchmetrics
for name in ("trainer.trainer", "strategies", "strategies.launchers", "callbacks", "loops", "plugins.environments"):
    importlib.import_module(f"{sys.argv[1]}.{name}")

def attributes():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric", "torch", "torchmetrics"):
            for key, value in list(vars(module).items()):
                found[f"{name}.{key}"] = value
                if isinstance(value, type) and value.__module__ == name:
                    found |= {f"{name}.{key}.{k}": v for k, v in vars(value).items() if not k.startswith("_abc")}
    return found

before = attributes()
import lightning_async
after = attributes()
changed = [name for name, value in before.items() if name in after and after[name] is not value]
print(json.dumps([changed, [name for name in before if name not in after], len(before)]))
"""


@pytest.mark.parametrize("namespace", ["lightning.pytorch", "pytorch_lightning"])
def test_importing_the_package_patches_nothing(namespace: str, tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(IMPORT)
    fresh = namespace == "pytorch_lightning"  # a fork has the other one
    (said,) = run_ranks(script, 1, args=[namespace], launched=False, fresh=fresh)
    changed, gone, number = json.loads(said.stdout.splitlines()[-1])
    assert (changed, gone) == ([], [])
    assert number > 5000


def assert_left(told: dict[str, Any]) -> None:
    assert told["after"] == []
    before, after = told["callbacks"]
    assert before == after
    assert told["handlers"] is True
    assert told["zero length"] is False


def test_after_a_run_nothing_is_patched(ranks: Outcomes) -> None:
    for told in ranks("after_a_run"):
        assert_left(told)
        assert len(told["while"]) >= 12, "what is looked for is there while training runs"
        assert {name for names in told["new"].values() for name in names} <= OF_LIGHTNING


def test_after_an_exception_nothing_is_patched(ranks: Outcomes) -> None:
    for told in ranks("after_an_exception"):
        for each in told.values():
            assert_left(each)
        assert len(told["training_step"]["while"]) >= 12


def test_a_compiled_module_keeps_its_mark(ranks: Outcomes) -> None:
    for told in ranks("compiled"):
        assert told == {"validated": [0, 1, 0, 1], "marked": True, "unmarked": True}


@pytest.mark.parametrize(
    "name",
    ["copied_under_averaging", "copied_under_synchronous_steps", "copied_under_gradients", "copied_beside_servers"],
)
def test_what_users_have_can_be_pickled_and_copied_in_mid_fit(ranks: Outcomes, name: str) -> None:
    """A module that keeps a torchmetric in its hyper-parameters has it pickled with every checkpoint."""
    for told in ranks(name):
        assert told["wrong"] == []
        looked_at = {"module", "hyper-parameters", "module.metric", "optimizer 0", "scheduler 0", "train loader"}
        assert looked_at | {"CSVLogger", "ModelCheckpoint", "Timer", "StochasticWeightAveraging"} <= set(told["tried"])
        assert told["saved"] > 0
        assert told["functions"] == [], "whoever loads the metric has it as it is without this package"


def test_the_sync_point_before_synchronous_steps_is_heard_of_like_any_other(ranks: Outcomes) -> None:
    first, second = ranks("back_to_synchronous_steps")
    for told in (first, second):
        assert told["momenta"] == 0, "the model has changed, so the optimizers' state is reset"
        assert told["mean"] == pytest.approx(told["of all batches"], abs=1e-5)
        assert told["asynchronous"] is True
    assert first["mean"] == second["mean"]

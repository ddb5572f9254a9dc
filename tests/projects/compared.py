"""A library's trainings in two fresh processes: under every strategy, beside DDP's.

The module of a library has ``train(strategy)``, which imports the library, trains a small model on data that it makes,
with the callback of `watch` in its Trainer, and returns `tell`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, TypedDict

import pytest
import torch

from tests.support import run_ranks

__all__ = ["STRATEGIES", "TRAINER", "Told", "assert_as_good_as_ddp", "marks", "run", "tell", "train_all", "watch"]

STRATEGIES = {
    "async_averaging": "AsyncAveragingStrategy",
    "async_gradients": "AsyncGradientStrategy",
    "parameter_server": "ParameterServerStrategy",
}
"""What is compared with DDP, by the names that the libraries are given."""

TRAINER: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 2,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""What every library passes on to the Trainer, beside its strategy."""

SHARE = 0.8
"""How much of DDP's gain a strategy must reach at least. Strategies take other steps than DDP: local ones, or more of
them on smaller batches, at the same learning rate. After some dozens of steps the metrics differ by percents."""


class Told(TypedDict):
    """What a rank tells of its training.

    Args:
        before, after: the validation metric on all validation data; less is better.
        samples: on which this rank has trained.
        strategy: the class that the Trainer has used.
        digest: of all parameters at the end.
    """

    before: float
    after: float
    samples: int
    strategy: str
    digest: str


def marks(*libraries: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a library's tests, which are skipped where it is not installed.

    Nothing is imported here: only the ranks import the library.
    """
    missing = [each for each in libraries if importlib.util.find_spec(each) is None]
    reason = f"{', '.join(missing)} not installed: `make projects` installs all"
    return [
        pytest.mark.project,
        pytest.mark.processes,
        pytest.mark.timeout(580),
        pytest.mark.skipif(bool(missing), reason=reason),
    ]


def run(module: str) -> dict[str, Told]:
    """Train under DDP and every strategy on two ranks, and return what both tell of each."""
    results = run_ranks(f"{__name__}:train_all", 2, kwargs={"module": module}, fresh=True, timeout=560)
    told: dict[str, Told] = {}
    for strategy, first in results[0].value.items():
        second = results[1].value[strategy]
        assert first["digest"] == second["digest"], f"{strategy}: the ranks end with different models"
        assert first["after"] == second["after"]
        told[strategy] = Told(**{**first, "samples": first["samples"] + second["samples"]})
    return told


def train_all(module: str) -> dict[str, Told]:
    """Train in this rank under one after the other: the imports take longer than the trainings."""
    train = importlib.import_module(module).train
    return {strategy: train(strategy) for strategy in ("ddp", *STRATEGIES)}


def assert_as_good_as_ddp(trainings: dict[str, Told], strategy: str) -> None:
    """Compare a strategy's training with DDP's, from the same beginning and at equal samples."""
    ddp = trainings["ddp"]
    told = trainings[strategy]
    assert told["strategy"] == STRATEGIES[strategy]
    assert told["before"] == ddp["before"]
    assert told["samples"] == ddp["samples"] > 0
    assert ddp["after"] < 0.8 * ddp["before"], f"DDP has learned too little to be compared with: {ddp}"
    share = (told["before"] - told["after"]) / (ddp["before"] - ddp["after"])
    print(f"{strategy}: {told['before']:.4g} -> {told['after']:.4g}, DDP {ddp['after']:.4g}: {share:.0%} of its gain")
    assert share >= SHARE, f"{strategy} reaches {share:.0%} of DDP's gain: {told}, DDP: {ddp}"


def watch(metric: Callable[[Any], torch.Tensor], size: Callable[[Any], int]) -> tuple[Any, dict[str, Any]]:
    """Return a callback for the Trainer, and what it will have seen.

    Args:
        metric: of a module in evaluation mode, on all validation data.
        size: the number of samples of a batch.
    """
    from lightning_async.trainer.namespace import pl  # not before the library has been imported

    seen: dict[str, Any] = {"metric": metric, "samples": 0}

    class Watch(pl.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            seen["module"] = pl_module
            seen["before"] = _measure(metric, pl_module)
            seen["strategy"] = type(trainer.strategy).__name__

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen["samples"] += size(batch)

    return Watch(), seen


def tell(seen: dict[str, Any]) -> Told:
    """Return what a rank tells once its training has ended."""
    digest = hashlib.sha256()
    for parameter in seen["module"].parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return Told(
        before=seen["before"],
        after=_measure(seen["metric"], seen["module"]),
        samples=seen["samples"],
        strategy=seen["strategy"],
        digest=digest.hexdigest(),
    )


def _measure(metric: Callable[[Any], torch.Tensor], module: Any) -> float:
    training = module.training
    module.eval()
    with torch.no_grad():
        value = metric(module).item()
    module.train(training)
    return value

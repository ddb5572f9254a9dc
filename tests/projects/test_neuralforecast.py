"""neuralforecast: an MLP that makes its Trainer from its keyword arguments, and is of `pytorch_lightning`."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
import torch

from tests.projects.compared import STRATEGIES, TRAINER, Told, assert_as_good_as_ddp, marks, tell, watch

pytestmark = marks("neuralforecast", "pandas")

LENGTH = 60
HORIZON = 4
INPUT = 12


def series(number: int, seed: int) -> torch.Tensor:
    """Return waves of one frequency each, with a phase and a trend of their own, and a little noise."""
    generator = torch.Generator().manual_seed(seed)
    times = torch.arange(LENGTH) * torch.pi / 6
    phases = torch.rand(number, 1, generator=generator) * 6
    trends = torch.randn(number, 1, generator=generator) / 50
    noise = torch.randn(number, LENGTH, generator=generator) / 20
    return torch.sin(times + phases) + trends * torch.arange(LENGTH) + noise


def train(strategy: str) -> Told:
    pl = importlib.import_module(
        "pytorch_lightning"
    )  # before ray.tune, which neuralforecast imports, imports the other
    importlib.import_module("lightning_async")
    neuralforecast = importlib.import_module("neuralforecast")
    models = importlib.import_module("neuralforecast.models")
    pandas = importlib.import_module("pandas")

    os.environ["NIXTLA_ID_AS_COL"] = "1"
    past = series(64, 2)
    inputs = past[:, -INPUT - HORIZON : -HORIZON]
    targets = past[:, -HORIZON:]

    def error(module: Any) -> torch.Tensor:
        batch = {"insample_y": inputs.unsqueeze(-1), "insample_mask": torch.ones_like(inputs).unsqueeze(-1)}
        batch |= {"futr_exog": None, "hist_exog": None, "stat_exog": None}
        return (module(batch).squeeze(-1) - targets).abs().mean()

    pl.seed_everything(1)
    callback, seen = watch(error, lambda batch: len(batch["temporal"]))
    model = models.MLP(
        h=HORIZON, input_size=INPUT, hidden_size=64, num_layers=2, max_steps=60, learning_rate=3e-3, batch_size=8,
        windows_batch_size=32, val_check_steps=30, strategy=strategy, callbacks=[callback], **TRAINER,
    )  # fmt: skip
    values = series(64, 1)
    frame = pandas.DataFrame(
        {
            "unique_id": [number for number in range(64) for _ in range(LENGTH)],
            "ds": [time for _ in range(64) for time in range(LENGTH)],
            "y": values.flatten().tolist(),
        }
    )
    neuralforecast.NeuralForecast(models=[model], freq=1).fit(frame, val_size=HORIZON)
    return tell(seen)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_learns_as_with_ddp(strategy: str, trainings: dict[str, Told]) -> None:
    assert_as_good_as_ddp(trainings, strategy)

"""darts: an RNN that makes its Trainer from `pl_trainer_kwargs`, and is of `pytorch_lightning`."""

from __future__ import annotations

import importlib
from typing import Any

import numpy
import pytest
import torch

from tests.projects.compared import STRATEGIES, TRAINER, Told, assert_as_good_as_ddp, marks, tell, watch

pytestmark = marks("darts")

LENGTH = 32
HORIZON = 4
INPUT = 12


def waves(number: int, seed: int) -> Any:
    """Return waves, each with a phase of its own and a little noise."""
    generator = numpy.random.default_rng(seed)
    phases = generator.uniform(0, 6, (number, 1))
    values = numpy.sin(numpy.arange(LENGTH) * numpy.pi / 6 + phases) + generator.normal(0, 0.05, (number, LENGTH))
    return values.astype(numpy.float32)


def train(strategy: str) -> Told:
    pl = importlib.import_module("pytorch_lightning")
    importlib.import_module("lightning_async")
    darts = importlib.import_module("darts")
    models = importlib.import_module("darts.models")
    inputs = importlib.import_module("darts.utils.data.torch_datasets.utils")

    past = torch.from_numpy(waves(64, 2))[:, -INPUT - HORIZON :]
    given = inputs.PLModuleInput(past_target=past[:, :INPUT, None])

    def error(module: Any) -> torch.Tensor:
        return (module(given).prediction.reshape(64, HORIZON) - past[:, INPUT:]).abs().mean()

    pl.seed_everything(1)
    callback, seen = watch(error, lambda batch: len(batch.past_target))
    model = models.BlockRNNModel(
        input_chunk_length=INPUT, output_chunk_length=HORIZON, model="GRU", hidden_dim=24, batch_size=16, n_epochs=2,
        optimizer_kwargs={"lr": 1e-2}, random_state=1,
        pl_trainer_kwargs={**TRAINER, "strategy": strategy, "callbacks": [callback]},
    )  # fmt: skip
    series = [darts.TimeSeries.from_values(values) for values in waves(64, 1)]
    model.fit(series)
    return tell(seen)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_learns_as_with_ddp(strategy: str, trainings: dict[str, Told]) -> None:
    assert_as_good_as_ddp(trainings, strategy)

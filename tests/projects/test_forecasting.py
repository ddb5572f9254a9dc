"""pytorch-forecasting: a Temporal Fusion Transformer by `TimeSeriesDataSet`, trained by the user's own Trainer."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from tests.projects.compared import STRATEGIES, TRAINER, Told, assert_as_good_as_ddp, marks, tell, watch

pytestmark = marks("pytorch_forecasting", "pandas")

LENGTH = 30


def frame(number: int, seed: int) -> Any:
    """Return a table of waves, each with a phase of its own and a little noise."""
    pandas = importlib.import_module("pandas")
    generator = torch.Generator().manual_seed(seed)
    phases = torch.rand(number, 1, generator=generator) * 6
    values = torch.sin(torch.arange(LENGTH) * torch.pi / 6 + phases)
    values += torch.randn(number, LENGTH, generator=generator) / 20
    return pandas.DataFrame(
        {
            "series": [str(each) for each in range(number) for _ in range(LENGTH)],
            "time": [time for _ in range(number) for time in range(LENGTH)],
            "value": values.flatten().tolist(),
        }
    )


def train(strategy: str) -> Told:
    forecasting = importlib.import_module("pytorch_forecasting")
    data = importlib.import_module("pytorch_forecasting.data")
    pl = importlib.import_module("lightning.pytorch")
    importlib.import_module("lightning_async")

    if strategy == "ddp":  # not all parameters of this model have gradients
        strategy = "ddp_find_unused_parameters_true"
    pl.seed_everything(1)
    training = forecasting.TimeSeriesDataSet(
        frame(48, 1), time_idx="time", target="value", group_ids=["series"], max_encoder_length=12,
        max_prediction_length=4, time_varying_unknown_reals=["value"], target_normalizer=data.EncoderNormalizer(),
    )  # fmt: skip
    validation = forecasting.TimeSeriesDataSet.from_dataset(training, frame(48, 2), predict=True)
    whole, (targets, _) = next(iter(validation.to_dataloader(train=False, batch_size=48)))
    model = forecasting.TemporalFusionTransformer.from_dataset(
        training, hidden_size=8, attention_head_size=1, hidden_continuous_size=4, dropout=0.0, learning_rate=2e-3,
        log_interval=0, optimizer="adam",
    )  # fmt: skip

    def error(module: Any) -> torch.Tensor:
        return (module.to_prediction(module(whole)) - targets).abs().mean()

    callback, seen = watch(error, lambda batch: len(batch[1][0]))
    trainer = pl.Trainer(**TRAINER, strategy=strategy, callbacks=[callback], max_epochs=8)
    trainer.fit(
        model,
        training.to_dataloader(train=True, batch_size=8),
        validation.to_dataloader(train=False, batch_size=16),
    )
    return tell(seen)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_learns_as_with_ddp(strategy: str, trainings: dict[str, Told]) -> None:
    assert_as_good_as_ddp(trainings, strategy)

"""What callbacks and hooks do where an epoch starts, where the epoch was interrupted: nobody calls them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_async.trainer.namespace import pl
from tests.resume.problem import FEATURES, Net, Training, goes_on
from tests.resume.test_loaders import sized

POINTS = ["batch 1:4", "epoch 1:8", "batch 2:1"]


class Backbone(Net):
    """A scheduler that steps by epochs, as Lightning's callbacks ask, and a part that is frozen at first."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = torch.nn.Sequential(torch.nn.Linear(FEATURES, FEATURES), torch.nn.BatchNorm1d(FEATURES))
        self.layers = torch.nn.Sequential(self.backbone, *self.layers)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.01, 0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class Unfreezes(Backbone):
    """By itself, and later than training begins."""

    def on_train_start(self) -> None:
        self.backbone.requires_grad_(False)
        self.backbone[1].eval()

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self.current_epoch == 1:
            self.backbone.requires_grad_(True)
            self.backbone[1].train()
            self.layers[2].eval()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01, 0.9)


class Bar(pl.callbacks.TQDMProgressBar):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)
        bar = self.train_progress_bar
        pl_module.rows.append(("bar", bar.desc, bar.n, bar.total))


def test_how_much_is_accumulated(tmp_path: Path) -> None:
    scheduling = {0: 1, 1: 3, 2: 2}
    callbacks = lambda: [pl.callbacks.GradientAccumulationScheduler(scheduling)]  # noqa: E731
    assert goes_on(Training(sized, callbacks=callbacks), tmp_path, POINTS)


@pytest.mark.filterwarnings("ignore:Swapping scheduler")
def test_averages_of_weights_at_the_end(tmp_path: Path) -> None:
    """Epochs 1 and 2 are averaged; epoch 3 takes no steps and fills BatchNorm's statistics."""
    callbacks = lambda: [pl.callbacks.StochasticWeightAveraging(0.02, swa_epoch_start=2, annealing_epochs=2)]  # noqa: E731
    training = Training(sized, Backbone, callbacks=callbacks)
    points = ["batch 0:4", "batch 1:4", "epoch 1:8", "batch 2:4", "epoch 2:8", "batch 3:4"]
    assert sorted(goes_on(training, tmp_path, points)) == sorted(points)


def test_a_backbone_that_was_unfrozen(tmp_path: Path) -> None:
    callbacks = lambda: [pl.callbacks.BackboneFinetuning(1, train_bn=False)]  # noqa: E731
    assert goes_on(Training(sized, Backbone, callbacks=callbacks), tmp_path, POINTS)


def test_what_is_trained_and_how(tmp_path: Path) -> None:
    training = Training(sized, Unfreezes, trainer={"val_check_interval": 4})
    rows, follow, _ = training.fit(tmp_path, wanted=lambda name: name in ("batch 1:3", "validation 1:4"))
    for point in follow.points:
        again, second, _ = training.fit(tmp_path, point, wanted=lambda name: name == "batch 1:8")
        assert again == rows[len(rows) - len(again) :]
        third, _, _ = training.fit(tmp_path, second.points[0])
        assert third == rows[len(rows) - len(third) :]


def test_what_the_progress_bar_says(tmp_path: Path) -> None:
    training = Training(sized, trainer={"enable_progress_bar": True}, callbacks=lambda: [Bar()])
    assert goes_on(training, tmp_path, ["batch 1:4"])


def test_what_training_has_not_changed_is_as_the_program_says(tmp_path: Path) -> None:
    """It may be another program by then."""

    class Frozen(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers[0].requires_grad_(False)

    rows, follow, _ = Training(sized).fit(tmp_path, wanted=lambda name: name == "batch 1:4")
    assert follow.points[0].state["modes"] == {}
    again, _, _ = Training(sized, Frozen).fit(tmp_path, follow.points[0])
    assert again[0] == rows[len(rows) - len(again)]
    assert again[-1] != rows[-1]

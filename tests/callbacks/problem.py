"""Small trainings that go wrong at one step, and a keeper of good states, in memory, for them to go back to."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

from lightning_async.callbacks.divergence import DivergenceMonitor
from lightning_async.trainer.namespace import pl


class Line(pl.LightningModule):
    """y = 2 x, by least squares.

    Args:
        wrong: what the loss is multiplied by, by step.
        optimizer: of the parameters.
    """

    def __init__(self, wrong: dict[int, float] | None = None, optimizer: Any = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.wrong, self.make = wrong or {}, optimizer or (lambda ps: torch.optim.Adam(ps, lr=0.01))
        self.history: list[list[float]] = []
        self.steps = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.steps += 1
        return (self.layer(batch) - 2 * batch).square().mean() * self.wrong.get(self.steps, 1.0)

    def on_train_batch_end(self, *_: Any) -> None:
        self.history.append(values(self))

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def values(module: Any) -> list[float]:
    return [x for p in module.parameters() for x in p.detach().flatten().tolist()]


def finite(module: Any) -> bool:
    return all(map(math.isfinite, values(module)))


def batches(n: int, seed: int = 0) -> torch.utils.data.DataLoader[Tensor]:
    data = torch.randn(n, 8, 4, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.DataLoader(data, batch_size=None)  # type: ignore[arg-type]


class Keeper(pl.Callback):
    """Keeps a state in memory every ``every`` batches; one is good after ``clean`` batches without a finding."""

    def __init__(self, monitor: DivergenceMonitor, every: int = 5, clean: int = 3) -> None:
        self.monitor, self.every, self.clean = monitor, every, clean
        self.good: tuple[int, Any] | None = None
        self.candidate: tuple[int, Any] | None = None
        self.batch = 0
        self.rolled: list[tuple[int, int]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.batch += 1
        if self.monitor.clean_steps == 0:
            self.candidate = None
        elif self.candidate is not None and self.batch - self.candidate[1]["batch"] >= self.clean:
            self.good, self.candidate = self.candidate, None
        if self.candidate is None and self.batch % self.every == 0 and self.monitor.clean_steps:
            state = {
                "batch": self.batch,
                "model": pl_module.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
            }
            self.candidate = trainer.global_step, copy.deepcopy(state)

    def roll_back(self, trainer: Any) -> int | None:
        if self.good is None:
            return None
        step, state = self.good
        trainer.lightning_module.load_state_dict(state["model"])
        for optimizer, saved in zip(trainer.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(copy.deepcopy(saved))
        self.candidate = None
        self.rolled.append((trainer.global_step, step))
        return step


def trainer(*callbacks: Any, **options: Any) -> Any:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    defaults = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "enable_model_summary": False}
    return pl.Trainer(callbacks=list(callbacks), **(quiet | defaults | options))

"""The workload of gradients in the background: the example's language model, in batches that take real compute.

What is compared is how soon a model is as good as another, so it is judged by text that nobody trains on.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from examples.char_lm import CharData, Windows
from tests.benchmarks.fitting import Work
from tests.benchmarks.measured import Job
from tests.benchmarks.model import CharModule, CharStream, Slot

__all__ = [
    "BEGIN",
    "RATES",
    "SAMPLES",
    "Copies",
    "LanguageModule",
    "Looks",
    "held_out",
    "language",
    "rate_for",
    "rule",
    "training_windows",
]

SAMPLES, CHARS = 4, 128
"""A batch: windows of the text, and characters in each."""
RATES, WARMUP = (2e-3, 1 / 3, 0.5), 20
BEGIN = 120
"""Steps of the model that training begins with."""
HELD_OUT = 64
"""Windows."""


def rule(rates: Sequence[float]) -> str:
    """In words."""
    rate, power, late = rates
    return f"AdamW, rate {rate:g} x batches^{power:.2g}, x {late:g} where gradients are late, half a cosine to a 20th"


def rate_for(rates: Sequence[float], batches: float, late: bool = False) -> float:
    """The learning rate of steps of so many batches on each replica: one rule for all peers, see `Job`."""
    return rates[0] * batches ** rates[1] * (rates[2] if late else 1.0)


@functools.cache
def data() -> CharData:
    return CharData(CHARS)


def training_windows() -> Windows:
    """Wherever they begin."""
    return Windows(data().train_tokens, CHARS, stride=1)


class LanguageModule(CharModule):
    """1.67 million parameters, with the example's optimizer.

    Args:
        slot: of a batch.
        lr: the highest.
        total_steps: of the optimizer, in which the learning rate goes down.
        begin: file with which training begins, and the learning rate is at its highest; None for a new model, whose
            learning rate warms up and stays.
    """

    def __init__(self, slot: Slot, lr: float, total_steps: int, begin: str | None = None) -> None:
        super().__init__(slot, CHARS)
        self.lr, self.total_steps = lr, total_steps
        self.copies: Copies | None = None
        self._begun = None if begin is None else torch.load(begin)
        if self._begun is not None:
            self.load_state_dict(self._begun["model"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, betas=(0.9, 0.95), weight_decay=0.05, fused=True)
        if self._begun is not None:
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": self._begun["optimizer"], "param_groups": groups})
        optimizer.register_step_post_hook(lambda *_: self.slot.finish())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._share)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def forward(self, tokens: Tensor) -> Tensor:
        if self.copies is not None:
            self.copies.begin_step(self)
        return super().forward(tokens)

    def on_after_backward(self) -> None:
        if self.trainer.fit_loop._should_accumulate():  # no step of an optimizer ends the slot
            self.slot.finish()

    def _share(self, step: int) -> float:
        if self._begun is None:
            return min(1.0, (step + 1) / WARMUP)
        return 0.05 + 0.475 * (1 + math.cos(math.pi * min(1.0, step / self.total_steps)))


def language(batches: float = 1.0, late: bool = False) -> Work:
    """``batches``: of each replica in a step; ``late``: its gradients are."""

    def work(job: Job, slot: Slot) -> tuple[CharModule, DataLoader[Any]]:
        stream = CharStream(1000 * job.seed + job.rank, job.seconds, training_windows())
        module = LanguageModule(slot, rate_for(job.rates, batches, late), job.warmup + job.steps, job.begin)
        if job.copies is not None:
            module.copies = Copies(job, Path(job.copies))
        return module, DataLoader(stream, batch_size=SAMPLES, drop_last=True)

    return work


@torch.no_grad()
def held_out(module: nn.Module) -> float:
    """The loss on text that nobody trains on."""
    tokens = data().val_tokens
    windows = Windows(tokens, CHARS, stride=(len(tokens) - CHARS - 1) // HELD_OUT)
    inputs, targets = (torch.stack(each) for each in zip(*(windows[i] for i in range(HELD_OUT)), strict=True))
    parts = zip(inputs.split(16), targets.split(16), strict=True)  # what a cache holds
    losses = [F.cross_entropy(module(x).flatten(0, 1), y.flatten()).item() for x, y in parts]
    return sum(losses) / len(losses)


class Copies:
    """A file of a rank's parameters, to which a module adds those that it begins every so many steps with.

    That is within the slot of a step, which is padded, so no peer is slower for it. Beside the file is another one,
    with a line for each copy: the steps that were taken, and the moment.
    """

    def __init__(self, job: Job, folder: Path) -> None:
        self._numbers, self._values = self.files(folder, job.rank)
        self._first, self._every = job.copy_from, job.copy_every
        self._steps = 0

    @staticmethod
    def files(folder: Path, rank: int) -> tuple[Path, Path]:
        """Steps and moments, and parameters."""
        return folder / f"{rank}.txt", folder / f"{rank}.f32"

    def begin_step(self, module: nn.Module) -> None:
        """The next step of the module begins."""
        if self._steps >= self._first and (self._steps - self._first) % self._every == 0:
            moment = time.monotonic()
            with self._values.open("ab") as values:
                for parameter in module.parameters():
                    values.write(parameter.detach().numpy().data)
            with self._numbers.open("a") as numbers:
                numbers.write(f"{self._steps} {moment}\n")
        self._steps += 1


class Looks(pl.Callback):
    """Keeps the parameters now and then, and judges them once training has ended: that takes none of its time.

    The replicas of a job hold the same parameters, so they take turns.
    """

    def __init__(self, job: Job) -> None:
        self._every_s, self._wait_s = job.look_s * job.num_replicas, job.look_s * job.rank
        self._next: float | None = None
        self._kept: list[tuple[float, list[Tensor]]] = []
        self._module: pl.LightningModule | None = None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now, self._module = time.monotonic(), pl_module
        if self._next is None:
            self._next = now + self._wait_s
        if self._every_s and now >= self._next:
            self._next += self._every_s
            self._kept.append((now, [p.detach().clone() for p in pl_module.parameters()]))

    @torch.no_grad()
    def judge(self) -> list[tuple[float, float]]:
        """Moments, and the held-out loss then. It uses the module up."""
        module = self._module
        assert module is not None
        judged = []
        for moment, kept in self._kept:
            for p, value in zip(module.parameters(), kept, strict=True):
                p.copy_(value)
            judged.append((moment, held_out(module)))
        return judged

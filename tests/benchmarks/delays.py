"""Steps to a loss, by what is done about the delay, without a link: ``python -m tests.benchmarks.delays predicted``.

One process computes what all replicas would, for they hold the same parameters: the mean gradient of all their windows.
Time is virtual: a batch and an exchange take what they are said to. So it tells how good the steps of a scheme are, on
a machine that is busy with something else; `gradients` measures what they cost.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader

from lightning_async import DelayCompensation, WeightPrediction
from lightning_async.algorithms.staleness import GradientCorrection, Prediction
from tests.benchmarks.language import BEGIN, RATES, SAMPLES, LanguageModule, held_out, rate_for, training_windows
from tests.benchmarks.model import CharStream, Slot

SPLIT = 16
"""Samples that are computed at a time."""


class Replicas:
    """All of them, in one.

    Args:
        batches: of one replica in a window.
        lr: the highest learning rate.
        total_steps: of the optimizer, for the schedule.
        begin: see `LanguageModule`.
        replicas: how many there are.
        seed: of the model, and of the batches.
    """

    def __init__(
        self, batches: int, lr: float, total_steps: int, begin: str | None = None, replicas: int = 2, seed: int = 0
    ) -> None:
        torch.manual_seed(seed)
        self.module, self.samples, self.steps = (
            LanguageModule(Slot(), lr, total_steps, begin),
            batches * replicas * SAMPLES,
            0,
        )
        made = self.module.configure_optimizers()
        self.optimizer, self.schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
        self._stream = iter(
            DataLoader(CharStream(1000 * seed + (500 if begin else 0), None, training_windows()), batch_size=None)
        )

    @property
    def parameters(self) -> Tensor:
        return parameters_to_vector(self.module.parameters()).detach()

    @torch.no_grad()
    def put(self, parameters: Tensor) -> None:
        """In their place."""
        vector_to_parameters(parameters.clone(), self.module.parameters())

    def gradient(self) -> Tensor:
        """The mean of a window, flat."""
        self.optimizer.zero_grad()
        left = self.samples
        while left > 0:
            part = min(left, SPLIT)
            inputs, targets = (
                torch.stack(each) for each in zip(*(next(self._stream) for _ in range(part)), strict=True)
            )
            loss = F.cross_entropy(self.module(inputs).flatten(0, 1), targets.flatten())
            (loss * part / self.samples).backward()
            left -= part
        return torch.cat([p.grad.flatten() for p in self.module.parameters() if p.grad is not None])

    def step(self, gradient: Tensor) -> None:
        """The optimizer's, and the schedule's."""
        sizes = [p.numel() for p in self.module.parameters()]
        for p, part in zip(self.module.parameters(), gradient.split(sizes), strict=True):
            p.grad = part.view_as(p).clone()
        self.optimizer.step()
        self.schedule.step()
        self.steps += 1


def begin(path: Path, steps: int, replicas: int, lr: float, seed: int = 0) -> None:
    """Train a model for the others to begin with, for the first steps move far, and it is their number that counts."""
    trained = Replicas(1, lr, steps, replicas=replicas, seed=seed)
    for _ in range(steps):
        trained.step(trained.gradient())
    torch.save({"model": trained.module.state_dict(), "optimizer": trained.optimizer.state_dict()["state"]}, path)


def synchronous(replicas: Replicas) -> Iterator[None]:
    """Each window is waited for."""
    while True:
        replicas.step(replicas.gradient())
        yield


def late(correction: GradientCorrection | Prediction | None) -> Callable[[Replicas], Iterator[None]]:
    """A window is computed while the one before travels."""

    def run(replicas: Replicas) -> Iterator[None]:
        sent, before = replicas.gradient(), None
        yield
        while True:
            now = replicas.parameters
            if isinstance(correction, Prediction) and before is not None:
                correction.predict_(before, now)
                replicas.put(before)
            gathered = replicas.gradient()
            replicas.put(now)
            if isinstance(correction, GradientCorrection) and before is not None:
                correction.correct_(sent, now - before)
            before = now
            replicas.step(sent)
            sent = gathered
            yield

    return run


SCHEMES: dict[str, Callable[[Replicas], Iterator[None]]] = {
    "synchronous": synchronous,
    "late": late(None),
    "compensated": late(DelayCompensation()),
    "predicted": late(WeightPrediction()),
    "predicted by 2": late(WeightPrediction(2.0)),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.delays", description="Steps to a held-out loss.")
    parser.add_argument("scheme", choices=SCHEMES)
    parser.add_argument("--batches", type=int, default=8, help="in a window of a replica")
    parser.add_argument("--lr", type=float, help="the highest (default: by the benchmark's rule)")
    parser.add_argument("--targets", type=float, nargs="+", default=[2.0, 1.9, 1.8, 1.7, 1.6], help="losses")
    parser.add_argument("--batch-ms", type=float, default=60.0)
    parser.add_argument("--exchange-ms", type=float, default=620.0)
    parser.add_argument("--seconds", type=float, default=150.0, help="virtual ones, for which the schedule is made")
    parser.add_argument("--begin-steps", type=int, default=BEGIN, help="of a batch, that are taken before")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    computes, travels = options.batches * options.batch_ms / 1e3, options.exchange_ms / 1e3
    window_s = computes + travels if options.scheme == "synchronous" else max(computes, travels)
    windows = round(options.seconds / window_s)
    lr = options.lr or rate_for(RATES, options.batches, late=options.scheme != "synchronous")
    with tempfile.TemporaryDirectory() as folder:
        begin(path := Path(folder, "begin.pt"), options.begin_steps, replicas=2, lr=RATES[0], seed=options.seed)
        replicas = Replicas(options.batches, lr, windows, str(path), seed=options.seed)
    targets, looked = sorted(options.targets), 0.0
    print(f"{options.scheme}: {windows} windows of {options.batches}, {window_s:.2f} s each, rate {lr:g}", flush=True)
    trained = SCHEMES[options.scheme](replicas)
    for window in range(1, windows + 1):
        next(trained)
        clock = window * window_s
        if clock - looked >= options.seconds / 10 or window == windows:
            looked, loss = clock, held_out(replicas.module)
            while targets and loss <= targets[-1]:
                print(f"loss {targets.pop():g}: {clock:.1f} s, {replicas.steps} steps", flush=True)
            print(f"{clock:.1f} s, {replicas.steps} steps, loss {loss:.3f}", flush=True)


if __name__ == "__main__":
    main()

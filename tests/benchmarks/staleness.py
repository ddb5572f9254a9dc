"""What policies of staleness are worth: ``python -m tests.benchmarks.staleness --out DIR``.

A simulation of events in virtual time, in one process, with the store, policies and optimizers that servers have.
A quarter of the workers takes five times as long for a gradient as the others. Each computes it at what it has pulled,
pushes it when it is done, and pulls; the updates of the others have come between. All policies have the same time, the
same rate and momentum. A run of synchronous steps, which wait for the slowest, stands beside them.

The model is a perceptron of two hidden layers, the task to tell what another one, a fifth of whose answers are wrong,
says of random points.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import os
import random
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_async.algorithms import AdaptiveLr, Bounded, Clipping, GapAware, StalenessPolicy, auto, make_policy
from lightning_async.parameter_server.store import Store
from tests.benchmarks.averaging import termination_as_exception
from tests.benchmarks.report import Target, load_average, machine

MODULE = "tests.benchmarks.staleness"
SGD: tuple[str, dict[str, Any]] = ("SGD", {"lr": 0.035, "momentum": 0.9})
ADAM: tuple[str, dict[str, Any]] = ("Adam", {"lr": 0.01})
SLOWDOWN, SLOW_PART = 5.0, 0.25
INPUTS, HIDDEN, CLASSES, TEACHER, BATCH = 32, 64, 10, 16, 32
WRONG = 0.22
_SHAPES = [(INPUTS, HIDDEN), (HIDDEN,), (HIDDEN, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,)]


class Task:
    """Points, what is said of them, and a model of that as one flat vector."""

    def __init__(self, training: int = 50_000, validation: int = 10_000) -> None:
        teacher = torch.Generator().manual_seed(7)
        first = torch.randn(INPUTS, TEACHER, generator=teacher) / math.sqrt(INPUTS)
        second = torch.randn(TEACHER, CLASSES, generator=teacher)

        def points(count: int, seed: int) -> tuple[Tensor, Tensor]:
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(count, INPUTS, generator=generator)
            right = (torch.tanh(2 * x @ first) @ second).argmax(1)
            wrong = torch.rand(count, generator=generator) < WRONG
            return x, torch.where(wrong, torch.randint(CLASSES, (count,), generator=generator), right)

        self._training, self._validation = points(training, 2), points(validation, 3)

    def start(self) -> Tensor:
        """The first weights."""
        generator = torch.Generator().manual_seed(1)
        drawn = [torch.randn(shape, generator=generator) * (1.4 * shape[0] ** -0.5) for shape in _SHAPES]
        return torch.cat([each.flatten() if each.dim() == 2 else torch.zeros(len(each)) for each in drawn])

    def gradient(self, weights: Tensor, generator: torch.Generator) -> Tensor:
        """Of a batch that is drawn."""
        x, y = self._training
        rows = torch.randint(len(x), (BATCH,), generator=generator)
        weights = weights.clone().requires_grad_()
        return torch.autograd.grad(F.cross_entropy(_forward(weights, x[rows]), y[rows]), weights)[0]

    def accuracy(self, weights: Tensor) -> float:
        """On points that were not trained on."""
        x, y = self._validation
        with torch.no_grad():
            return (_forward(weights, x).argmax(1) == y).float().mean().item()


def _forward(weights: Tensor, x: Tensor) -> Tensor:
    a, b, c, d, e, f = (part.view(shape) for part, shape in zip(weights.split(_SIZES), _SHAPES, strict=True))
    return torch.relu(torch.relu(x @ a + b) @ c + d) @ e + f


_SIZES = [math.prod(shape) for shape in _SHAPES]


@dataclass
class Run:
    """What became of one way of training; times in those of a fast worker's gradient."""

    name: str
    workers: int
    optimizer: str
    times: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    updates: int = 0
    dropped: int = 0
    mean_lag: float = 0.0
    seconds: float = 0.0

    @property
    def accuracy(self) -> float:
        return self.accuracies[-1]


def seconds_each(workers: int) -> list[float]:
    """What a gradient takes each of them."""
    slow = round(SLOW_PART * workers)
    return [SLOWDOWN if worker < slow else 1.0 for worker in range(workers)]


def events(workers: int, until: float, chance: random.Random) -> Iterator[tuple[float, int]]:
    """Who has finished a gradient, and when: in this order, with a tenth of chance in each."""
    each = seconds_each(workers)
    coming = [(each[worker] * chance.uniform(0.2, 1.2), worker) for worker in range(workers)]
    heapq.heapify(coming)
    while coming[0][0] < until:
        now, worker = heapq.heappop(coming)
        yield now, worker
        heapq.heappush(coming, (now + each[worker] * chance.uniform(0.9, 1.1), worker))


def asynchronous(
    name: str,
    task: Task,
    policy: StalenessPolicy,
    optimizer: tuple[str, dict[str, Any]],
    workers: int,
    until: float,
    seed: int,
    looks: int,
) -> Run:
    """Workers that push to a store as they are done."""
    run, generator = Run(name, workers, optimizer[0]), torch.Generator().manual_seed(seed)
    store, began = Store(os.memfd_create("simulated")), time.perf_counter()
    try:
        names = [f"{worker}" for worker in range(workers)]
        store.remember({name: {"life": 1, "push": 0, "clock": 0, "live": True} for name in names})
        store.initialise(task.start(), *optimizer, policy=policy)
        pulled, bases = [task.start() for _ in names], [0] * workers
        numbers = [0] * workers
        for now, worker in events(workers, until, random.Random(seed)):
            _look(run, task, store.params, now, until, looks)
            numbers[worker] += 1
            gradient = task.gradient(pulled[worker], generator)
            store.push(names[worker], numbers[worker], gradient, store.version - bases[worker])
            store.pull(names[worker], pulled[worker])
            bases[worker] = store.version
        _look(run, task, store.params, until, until, looks)
        run.updates, run.dropped, run.mean_lag = store.version, store.lags["dropped"], store.lags["mean"]
    finally:
        store.close()
    run.seconds = time.perf_counter() - began
    return run


def synchronous(
    task: Task, optimizer: tuple[str, dict[str, Any]], workers: int, until: float, seed: int, looks: int
) -> Run:
    """Steps of all together, each as long as the slowest takes."""
    run, generator = Run("synchronous", workers, optimizer[0]), torch.Generator().manual_seed(seed)
    store, began = Store(os.memfd_create("simulated")), time.perf_counter()
    try:
        store.remember({"all": {"life": 1, "push": 0, "clock": 0, "live": True}})
        store.initialise(task.start(), *optimizer)
        for step in range(1, int(until / SLOWDOWN) + 1):
            _look(run, task, store.params, step * SLOWDOWN, until, looks)
            weights = store.params.clone()
            mean = torch.stack([task.gradient(weights, generator) for _ in range(workers)]).mean(0)
            store.apply(mean, {"all": step})
        _look(run, task, store.params, until, until, looks)
        run.updates = store.version
    finally:
        store.close()
    run.seconds = time.perf_counter() - began
    return run


def _look(run: Run, task: Task, weights: Tensor, now: float, until: float, looks: int) -> None:
    if now >= until * (len(run.times) + 1) / looks:
        run.times.append(now)
        run.accuracies.append(task.accuracy(weights))


def policies(workers: int) -> dict[str, tuple[StalenessPolicy, tuple[str, dict[str, Any]]]]:
    """What is compared."""
    names = (
        "none", "gap_aware", "dana", "delay_compensation", "adaptive_delay_compensation", "fedbuff", "rennala",
        "weight_prediction",
    )  # fmt: skip
    return {
        "auto": (auto(*SGD), SGD),
        **{name: (make_policy(name), SGD) for name in names},
        "adaptive_lr": (AdaptiveLr(), SGD),
        "adaptive_lr, inverse": (AdaptiveLr(form="inverse"), SGD),
        "adaptive_lr, sqrt": (AdaptiveLr(form="sqrt"), SGD),
        "bounded": (Bounded(workers), SGD),
        "clipping": (Clipping(), SGD),
        "Adam, auto": (auto(*ADAM), ADAM),
        "Adam, none": (make_policy("none"), ADAM),
        "Adam, gap_aware on gradients": (GapAware("gradient"), ADAM),
    }


QUICK = ("auto", "none")


def targets(runs: Sequence[Run]) -> list[Target]:
    """The lines that must hold: where the plain one has what the issue says of it, the policy that suits has more."""
    found = {(run.workers, run.name): run.accuracy for run in runs}
    lines = []
    for workers in sorted({run.workers for run in runs}):
        about = f"{workers} workers, auto: accuracy, where none has {found[workers, 'none']:.3f}"
        lines.append(Target(about=about, value=found[workers, "auto"], limit=0.57))
    return lines


def table(runs: Sequence[Run]) -> str:
    """All runs, the best ones first."""
    lines = ["| workers | policy | accuracy | updates | mean lag | dropped |", "|---:|---|---:|---:|---:|---:|"]
    for run in sorted(runs, key=lambda run: (run.workers, -run.accuracy)):
        lines.append(
            f"| {run.workers} | {run.name} | {run.accuracy:.1%} | {run.updates} | {run.mean_lag:.1f} | {run.dropped} |"
        )
    return "\n".join(lines)


def plot(runs: Sequence[Run], path: Path) -> None:
    """Accuracy over virtual time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    sizes = sorted({run.workers for run in runs})
    figure, panels = plt.subplots(1, len(sizes), figsize=(6 * len(sizes), 5), sharey=True, squeeze=False)
    for panel, workers in zip(panels[0], sizes, strict=True):
        for run in runs:
            if run.workers == workers:
                width = 2.5 if run.name in ("auto", "none", "synchronous") else 1.0
                panel.plot(run.times, run.accuracies, label=run.name, linewidth=width)
        panel.set(title=f"{workers} workers, a quarter of them 5 times slower", xlabel="time of fast gradients")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("accuracy")
    panels[0][-1].legend(fontsize="x-small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True, help="folder for the table, the numbers and the picture")
    parser.add_argument("--gradients", type=int, default=6000, help="of all workers, about (default: %(default)s)")
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 32], help="(default: %(default)s)")
    parser.add_argument("--policies", nargs="+", help="of those below, and 'synchronous' (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of batches and of chance in time (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the gradients, and two policies")
    parser.add_argument("--strict", action="store_true", help="exit with status 1 where a target is missed")
    options = parser.parse_args(arguments)
    with termination_as_exception():
        command = ["python", "-m", MODULE, *(sys.argv[1:] if arguments is None else arguments)]
        return measure(options, shlex.join(command))


def measure(options: argparse.Namespace, command: str) -> int:
    """All of it; the exit status."""
    task, load, runs = Task(), load_average(), list[Run]()
    gradients = options.gradients // 10 if options.quick else options.gradients
    chosen = options.policies or (QUICK if options.quick else None)
    torch.set_num_threads(1)
    for workers in options.workers:
        until = gradients / sum(1 / each for each in seconds_each(workers))
        for name, (policy, optimizer) in policies(workers).items():
            if chosen is None or name in chosen:
                runs.append(asynchronous(name, task, policy, optimizer, workers, until, options.seed, looks=40))
                print(f"{workers} workers, {name}: {runs[-1].accuracy:.1%}, {runs[-1].seconds:.0f} s", flush=True)
        if chosen is None or "synchronous" in chosen:
            runs.append(synchronous(task, SGD, workers, until, options.seed, looks=40))
    held = targets(runs)
    rates = f"SGD {SGD[1]}, Adam {ADAM[1]}"
    lines = [
        f"# Staleness\n\n- {machine()}",
        f"- load average before (1, 5, 15 min): {load}",
        f"- about {gradients} gradients of {BATCH} points; {rates}; repeat with `{command}`\n",
        table(runs),
        "",
        *[target.line() for target in held],
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "staleness.md").write_text(text)
    (options.out / "staleness.json").write_text(json.dumps([asdict(run) for run in runs], indent=1))
    plot(runs, options.out / "staleness.png")
    return int(options.strict and not all(target.held for target in held))


if __name__ == "__main__":
    sys.exit(main())

"""What runs inside the ranks of these tests, and how a test module asks for it.

Starting a process costs seconds, so a test module names all its scenarios at once: functions of one module of
scenarios that are run one after the other by the same pair of processes. Each is judged by tests of its own.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_async import AsyncAveragingStrategy, DeltaMean, Timeouts
from lightning_async.trainer.namespace import pl
from tests.strategies import problem
from tests.support import Environment, run_ranks

LIMIT_S = 60.0
"""For one scenario. One that hangs shall not take the others with it."""

PATIENT = Timeouts(grace=timedelta(hours=1))
"""For what must come out to the bit: no round goes on without a rank that is given no time, or compiles for long."""

SCENARIOS: dict[str, dict[str, Callable[..., Any]]] = {}


def scenario(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function as something to run in every rank; it may take the path of a folder that all ranks share."""
    SCENARIOS.setdefault(function.__module__, {})[function.__name__] = function
    return function


class Outcomes:
    """What the ranks said about each scenario of a module, or about ``only`` some."""

    def __init__(
        self,
        module: str,
        folder: Path,
        nprocs: int = 2,
        timeout: float = 210.0,
        env: Environment | None = None,
        only: Sequence[str] = (),
    ) -> None:
        self._folder, self._nprocs = folder, nprocs
        kwargs = {
            "module": module,
            "folder": str(folder),
            "only": os.environ.get("ONLY_SCENARIO", ",".join(only)) or None,
        }
        results = run_ranks(
            "tests.strategies.workers:run_scenarios", nprocs, kwargs=kwargs, timeout=timeout, check=False, env=env,
            forks=True,
        )  # fmt: skip
        self._story = "\n".join(map(str, results))

    def folder(self, name: str) -> Path:
        """What all ranks shared in this scenario."""
        return self._folder / name

    def _answers(self, name: str) -> list[dict[str, Any]]:
        files = [self._folder / f"{name}.{rank}.json" for rank in range(self._nprocs)]
        missing = [file.name for file in files if not file.exists()]
        assert not missing, f"no answer to {name} ({missing})\n{self._story}"
        return [json.loads(file.read_text()) for file in files]

    def __call__(self, name: str) -> list[Any]:
        """What each rank returned."""
        answers = self._answers(name)
        errors = [f"--- rank {rank}\n{a['trace']}" for rank, a in enumerate(answers) if "error" in a]
        assert not errors, f"{name} failed\n" + "\n".join(errors)
        return [a["value"] for a in answers]

    def errors(self, name: str) -> list[str]:
        """The error that each rank raised, as "Type: message"; all must have raised one."""
        answers = self._answers(name)
        assert all("error" in a for a in answers), f"{name} should fail on every rank: {answers}"
        return [a["error"] for a in answers]


def _too_long(signum: int, frame: Any) -> None:
    raise TimeoutError(f"the scenario took longer than {LIMIT_S} s")


def run_scenarios(module: str, folder: str, only: str | None = None) -> None:
    """In a rank: run all scenarios of a module, and leave one answer for each in ``folder``."""
    importlib.import_module(module)
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    for name, function in SCENARIOS[module].items():
        if only is not None and name not in only.split(","):
            continue
        shared = Path(folder) / name
        shared.mkdir(exist_ok=True)
        started = time.monotonic()
        signal.signal(signal.SIGALRM, _too_long)
        signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
        try:
            answer = {"value": function(shared) if function.__code__.co_argcount else function()}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-4000:]}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        print(f"{name}: {time.monotonic() - started:.2f} s{' ' + answer.get('error', '')}", flush=True)
        partial = Path(folder) / f"{name}.{rank}.part"
        partial.write_text(json.dumps(answer))
        partial.rename(Path(folder) / f"{name}.{rank}.json")


def rank() -> int:
    return int(os.environ["RANK"])


def shard(numbers: Sequence[int], size: int | Sequence[int] = 4) -> list[problem.Batch]:
    """This rank's batches; one number of batches for each rank."""
    return problem.batches(rank(), numbers[rank()], size if isinstance(size, int) else size[rank()])


def loader(data: Iterable[Any]) -> DataLoader:
    """Batches as they are."""
    return DataLoader(list(data), batch_size=None)  # pyright: ignore[reportArgumentType]


def until_it_has_arrived(module: Any) -> None:
    """Within a step: wait for the round that is under way, so that how many there are is not up to the machine."""
    averager = module.trainer.strategy.averager
    buckets = averager._buckets  # a round that is due does not begin while a header of others' is under way
    averager.sync_points.wait(lambda: buckets.message is None and not buckets.announced)


class Net(pl.LightningModule):
    """`problem.network` with plain SGD.

    Args:
        pause_s: each rank sleeps for so long in every step.
        optimizer: makes the optimizer.
        rounds_arrive: each round arrives within the step after the one that has begun it.
    """

    def __init__(
        self,
        pause_s: Sequence[float] = (0.0, 0.0),
        optimizer: Callable[[Any], torch.optim.Optimizer] = lambda ps: torch.optim.SGD(ps, lr=0.05),
        network: Callable[[], torch.nn.Module] = problem.network,
        rounds_arrive: bool = False,
    ) -> None:
        super().__init__()
        self.net = network()
        self.pause_s, self.rounds_arrive = pause_s, rounds_arrive
        self.make_optimizer = optimizer

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if pause := self.pause_s[rank()]:
            time.sleep(pause)
        if self.rounds_arrive:
            until_it_has_arrived(self)
        return problem.loss_of(self, batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", problem.loss_of(self, batch), sync_dist=True, batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


class Pulls(Net):
    """Takes its batches by itself."""

    def training_step(self, dataloader_iter: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        batch, _, _ = next(dataloader_iter)
        return problem.loss_of(self, batch)


class Some(Net):
    """Steps with every second batch, by whose gradients alone, and leaves out the rest of an epoch from batch 8 on."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 8 else None

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class Recorder(pl.Callback):
    """What a rank's model was, and when."""

    def __init__(self) -> None:
        self.history: list[list[float]] = []
        self.validations: list[str] = []
        self.epochs: list[str] = []
        self.validations_by_epoch: list[int] = []
        self.end: str | None = None
        self.started: list[float] = []
        self.ended: list[float] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.started.append(time.perf_counter())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ended.append(time.perf_counter())
        self.history.append(problem.flat(pl_module))

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.validations.append(problem.digest(pl_module))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.epochs.append(problem.digest(pl_module))
        self.validations_by_epoch.append(len(self.validations))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.end = problem.digest(pl_module)


def make_trainer(strategy: Any = None, *, callbacks: Sequence[Any] = (), **options: Any) -> Any:
    """A quiet trainer of two ranks on the CPU that takes data as it is given."""
    defaults = {
        "accelerator": "cpu",
        "devices": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 1,
    }
    strategy = together() if strategy is None else strategy
    return pl.Trainer(strategy=strategy, callbacks=list(callbacks), **(defaults | options))


def report(trainer: Any, module: Any, recorder: Recorder | None = None) -> dict[str, Any]:
    """What a test may want to know after a fit."""
    summary = trainer.strategy.summary
    told = {
        "flat": problem.flat(module),
        "digest": problem.digest(module),
        "steps": summary.steps,
        "rounds": summary.rounds,
        "synchronous_steps": summary.synchronous_steps,
        "sent_bytes": summary.sent_bytes,
        "failed_rounds": summary.failed_rounds,
        "samples": summary.samples,
        "samples_by_rank": summary.samples_by_rank,
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
    }
    if recorder is not None:
        told |= {
            "history": recorder.history,
            "validations": recorder.validations,
            "epochs": recorder.epochs,
            "validations_by_epoch": recorder.validations_by_epoch,
            "end": recorder.end,
        }
    return told


def together(*args: Any, **options: Any) -> AsyncAveragingStrategy:
    """A strategy whose ranks end together: where one of the two raises, the other one does not go on alone."""
    rule = {} if args else {"rule": DeltaMean()}
    return AsyncAveragingStrategy(*args, **{"min_replicas": 2, "compression": "none", **rule, **options})


def fit(
    strategy: Any, data: Any, module: Any = None, *, val: Any = None, callbacks: Sequence[Any] = (), **options: Any
) -> dict[str, Any]:
    """Train once, and report."""
    module = Net() if module is None else module
    recorder = Recorder()
    trainer = make_trainer(strategy, callbacks=[*callbacks, recorder], **options)
    trainer.fit(module, data, val)
    return report(trainer, module, recorder)


@contextmanager
def logged(*names: str) -> Iterator[list[str]]:
    """Messages of these loggers, and of this package's and Lightning's, while the block runs."""
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Handler()
    loggers = [logging.getLogger(n) for n in ("lightning_async", "lightning.pytorch", "pytorch_lightning", *names)]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield messages
    finally:
        for logger in loggers:
            logger.removeHandler(handler)

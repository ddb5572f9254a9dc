"""Scenarios of what is patched while a Trainer runs, and of sync points within training that others must hear of."""

from __future__ import annotations

import contextlib
import copy
import pickle
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric, MetricCollection

from lightning_async import (
    AsyncAveragingStrategy,
    AsyncGradientStrategy,
    DeltaMean,
    FaultTolerantCheckpoint,
    Mean,
    ParameterServerStrategy,
    Synchronous,
)
from lightning_async.algorithms.schedules import Action, ReplicaClock
from lightning_async.trainer.namespace import pl, pytorch
from tests.strategies import problem
from tests.strategies.workers import Net, fit, loader, make_trainer, rank, scenario, shard, together


class Measured(Net):
    """Has a metric, which is patched for the time of a fit. Ranks fail together: else one hears of the other's end."""

    def __init__(self, fails_at: str, folder: Path) -> None:
        super().__init__()
        self.metric, self.fails_at, self.folder = MeanMetric(), fails_at, folder

    def setup(self, stage: str) -> None:
        self._fail("setup")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            self._fail("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._fail("validation_step")
        self.metric(problem.loss_of(self, batch))
        self.log("loss", self.metric)

    test_step = validation_step

    def _fail(self, where: str) -> None:
        if where == self.fails_at:
            (self.folder / f"{where} {rank()}").touch()
            while not (self.folder / f"{where} {1 - rank()}").exists():  # until `LIMIT_S` at the latest
                time.sleep(0.001)
            raise ValueError("on purpose")


def own_objects(trainer: Any, module: Any) -> Iterator[tuple[str, Any]]:
    """Lightning's and the user's, whose methods are what could be replaced."""
    fit_loop = trainer.fit_loop
    yield "trainer", trainer
    yield "module", module
    yield "signals", trainer._signal_connector
    for name, child in module.named_modules():
        yield f"module.{name}", child
    for name in ("fit_loop", "validate_loop", "test_loop", "predict_loop"):
        yield name, getattr(trainer, name)
    for loop in (fit_loop.epoch_loop, fit_loop.epoch_loop.val_loop, fit_loop.epoch_loop.automatic_optimization):
        yield type(loop).__name__, loop
    for callback in trainer.callbacks:
        yield type(callback).__name__, callback


def patched(trainer: Any, module: Any) -> list[str]:
    """Attributes that hold a function of this package."""
    return [
        f"{where}.{name}"
        for where, owner in own_objects(trainer, module)
        for name, value in vars(owner).items()
        if callable(value) and str(getattr(value, "__module__", "")).startswith("lightning_async")
    ]


class Seen(pl.Callback):
    """What is patched while batches run."""

    def __init__(self) -> None:
        self.patched: list[str] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.patched = patched(trainer, pl_module)


def _run(fails_at: str, folder: Path) -> dict[str, Any]:
    module, seen = Measured(fails_at, folder), Seen()
    spikes = pytorch("callbacks").SpikeDetection(finite_only=False) if hasattr(pl.callbacks, "SpikeDetection") else None
    callbacks = [pl.callbacks.Timer("00:01:00:00"), pl.callbacks.ModelCheckpoint(folder), seen]
    trainer = make_trainer(
        None, callbacks=[*callbacks, *([spikes] if spikes else [])], enable_checkpointing=True, default_root_dir=folder
    )
    data = loader(shard((4, 4)))
    before = [type(callback).__name__ for callback in trainer.callbacks]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    names = {where: set(vars(owner)) for where, owner in own_objects(trainer, module)}
    with contextlib.suppress(ValueError):
        trainer.fit(module, data, data)
    if not fails_at:
        trainer.validate(module, data)
        trainer.test(module, data)
    new = {where: sorted(set(vars(owner)) - names.get(where, set())) for where, owner in own_objects(trainer, module)}
    return {
        "while": seen.patched,
        "after": patched(trainer, module),
        "new": {where: found for where, found in new.items() if found and where != "module"},
        "callbacks": [before, [type(callback).__name__ for callback in trainer.callbacks]],
        "handlers": all(signal.getsignal(number) == handler for number, handler in handlers.items()),
        "zero length": module.allow_zero_length_dataloader_with_multiple_devices,
    }


@scenario
def after_a_run(folder: Path) -> Any:
    return _run("", folder)


@scenario
def after_an_exception(folder: Path) -> Any:
    return {where: _run(where, folder) for where in ("setup", "training_step", "validation_step")}


@scenario
def compiled(folder: Path) -> Any:
    """A module that was compiled is trained, validated with and without being named, and can be uncompiled after."""

    class Quiet(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            validated.append(batch_idx)

    validated: list[int] = []
    module, data = Quiet(), loader(shard((2, 2)))
    trainer = make_trainer(callbacks=[pl.callbacks.ModelCheckpoint(folder)], enable_checkpointing=True)
    trainer.fit(torch.compile(module, backend="eager"), data)  # pyright: ignore[reportArgumentType]
    trainer.validate(module, data)
    trainer.validate(dataloaders=data)
    marked = module._compiler_ctx is not None and trainer.lightning_module._compiler_ctx is not None
    pytorch("utilities.compile").to_uncompiled(trainer.lightning_module)
    return {"validated": validated, "marked": marked, "unmarked": module._compiler_ctx is None}


# ---- back to synchronous steps ----


class ThenSynchronous:
    """Local steps, which make replicas different, and then synchronous ones."""

    def next(self, clock: ReplicaClock) -> Action:
        return Action.LOCAL if clock.step < 4 else Action.GRADIENTS


class Stateful(Net):
    """Momentum, and BatchNorm; notes what the first synchronous step begins with."""

    def __init__(self) -> None:
        super().__init__(
            optimizer=lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
            network=problem.normalised,
        )
        self.begins_with: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 4:  # within the optimizer's step, after its sync point
            state = [s for s in self.trainer.optimizers[0].state.values() if s.get("momentum_buffer") is not None]
            norm: Any = self.net[0]  # pyright: ignore[reportIndexIssue]
            self.begins_with = [len(state), norm.running_mean.tolist(), self.trainer.strategy.world.asynchronous]
        return super().training_step(batch, batch_idx)


@scenario
def back_to_synchronous_steps() -> Any:
    module = Stateful()
    strategy = together(Mean(), ThenSynchronous(), overlap=False, optimizer_state="reset", buffers="recompute")
    data = shard((8, 8))
    fit(strategy, loader(data), module)
    batches = torch.cat([problem.batches(r, 8)[i][0] for r in range(2) for i in range(5)])
    return {
        "momenta": module.begins_with[0],
        "mean": module.begins_with[1],
        "of all batches": batches.mean(0).tolist(),
        "asynchronous": module.begins_with[2],
        "rank": rank(),
    }


# ---- copies in mid-fit ----


class Numbers(Dataset[Any]):
    """A user's dataset, which can say where it stands."""

    def __init__(self) -> None:
        self.data, self.asked = shard((4, 4)), 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        return self.data[index]


class Described(Net):
    """Keeps a metric in its hyper-parameters, as pytorch-forecasting does, and one in a collection."""

    def __init__(self, metric: MeanMetric) -> None:
        super().__init__(network=problem.normalised)
        self.save_hyperparameters()
        self.make_optimizer = torch.optim.Adam
        self.metric, self.more = metric, MetricCollection([MeanMetric()])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.metric(loss.detach())
        self.log("loss", self.metric, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Copies(pl.Callback):
    """Pickles and copies all that is Lightning's or the user's in mid-fit, and notes what went wrong."""

    def __init__(self) -> None:
        self.tried: list[str] = []
        self.wrong: list[str] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 2 or self.tried:
            return
        for where, each in self._objects(trainer, pl_module):
            self.tried.append(where)
            for how in (lambda value: pickle.loads(pickle.dumps(value)), copy.deepcopy, copy.copy):
                try:
                    again = how(each)
                    assert type(again) is type(each)
                    if isinstance(again, MeanMetric):
                        again.update(1.0)
                except Exception as error:
                    self.wrong.append(f"{where}: {type(error).__name__}: {error}")

    def _objects(self, trainer: Any, module: Any) -> Iterator[tuple[str, Any]]:
        yield "module", module
        yield "hyper-parameters", module.hparams
        for name, child in module.named_modules():
            yield f"module.{name}", child
        for name, parameter in module.named_parameters():
            yield f"parameter {name}", parameter
        for i, optimizer in enumerate(trainer.optimizers):
            yield f"optimizer {i}", optimizer
        for i, config in enumerate(trainer.lr_scheduler_configs):
            yield f"scheduler {i}", config.scheduler
        for kind, train in (("train", trainer.train_dataloader), ("val", trainer.val_dataloaders)):
            yield f"{kind} loader", train
            for name in ("dataset", "sampler", "batch_sampler", "collate_fn", "worker_init_fn"):
                yield f"{kind} {name}", getattr(train, name)
        for logger in trainer.loggers:
            yield type(logger).__name__, logger
        for callback in trainer.callbacks:
            if not type(callback).__module__.startswith(("lightning_async", __name__)):
                yield type(callback).__name__, callback


def _copies(strategy: Any, folder: Path, *callbacks: Any) -> dict[str, Any]:
    copies, lightnings = Copies(), pl.callbacks
    trainer = make_trainer(
        strategy,
        callbacks=[
            *callbacks,
            lightnings.ModelCheckpoint(folder / "saved", every_n_train_steps=2, save_top_k=-1),
            lightnings.Timer("00:01:00:00"),
            lightnings.StochasticWeightAveraging(0.01),
            lightnings.EarlyStopping("loss"),
            *([lightnings.SpikeDetection(finite_only=False)] if hasattr(lightnings, "SpikeDetection") else []),
            copies,
        ],
        logger=pytorch("loggers").CSVLogger(str(folder)),
        enable_checkpointing=True,
        default_root_dir=folder,
        max_epochs=2,
    )
    module = Described(MeanMetric())
    trainer.fit(module, DataLoader(Numbers(), batch_size=None), loader(shard((1, 1))))
    saved = [torch.load(file, weights_only=False) for file in sorted(folder.glob("saved/*.ckpt"))]
    functions = {
        name
        for name in ("dist_sync_fn", "distributed_available_fn")
        for each in saved
        if getattr(each["hyper_parameters"]["metric"], name) is not getattr(MeanMetric(), name)
    }
    return {"tried": copies.tried, "wrong": copies.wrong, "saved": len(saved), "functions": sorted(functions)}


@scenario
def copied_under_averaging(folder: Path) -> Any:
    return _copies(AsyncAveragingStrategy(rule=DeltaMean(), min_replicas=1), folder)


@scenario
def copied_under_synchronous_steps(folder: Path) -> Any:
    return _copies(together(schedule=Synchronous()), folder, FaultTolerantCheckpoint(folder / "saves"))


@scenario
def copied_under_gradients(folder: Path) -> Any:
    return _copies(AsyncGradientStrategy(min_replicas=2), folder)


@scenario
def copied_beside_servers(folder: Path) -> Any:
    return _copies(ParameterServerStrategy(), folder)

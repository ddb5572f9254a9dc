"""Scenarios in which the ranks have unequal amounts of data, or unequal speed."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torchmetrics import MeanMetric, SumMetric

from lightning_async import (
    AsyncAveragingStrategy,
    AsyncGradientStrategy,
    BalancedWindows,
    DeltaMean,
    DyLU,
    EveryNSteps,
    EverySeconds,
    Mean,
    ParameterServerStrategy,
    Synchronous,
)
from lightning_async.algorithms.schedules import Pace, straggler
from lightning_async.trainer.namespace import pl
from tests.strategies import problem
from tests.strategies.problem import adam, momentum
from tests.strategies.workers import PATIENT, Net, fit, loader, logged, make_trainer, rank, scenario, shard

SHARDS = (20, 60)


class Measured(Net):
    """A network with torchmetrics over the epoch, in training and in validation."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.count = SumMetric()
        self.val_count = SumMetric()
        self.val_mean_rank = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count.update(float(len(batch[0])))
        self.log("count", self.count, on_step=False, on_epoch=True)
        self.log("train_rank", float(rank()), on_step=False, on_epoch=True, sync_dist=True, batch_size=1)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.val_count.update(float(len(batch[0])))
        self.val_mean_rank.update(float(rank()))
        self.log("val_count", self.val_count)
        self.log("val_mean_rank", self.val_mean_rank)


class Metrics(pl.Callback):
    """What was logged at the end of each epoch and of each validation."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, float]] = []
        self.validations: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.epochs.append({})

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        names = ("val_loss", "val_count", "val_mean_rank")
        self.validations.append({n: float(trainer.callback_metrics[n]) for n in names})

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._take(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._take(trainer)

    def _take(self, trainer: Any) -> None:
        if self.epochs:
            metrics = trainer.callback_metrics
            self.epochs[-1] = {n: float(metrics[n]) for n in ("count", "train_rank") if n in metrics}


@scenario
def everything() -> Any:
    """Early stopping, torchmetrics and sync_dist, validation every ten batches."""
    metrics = Metrics()
    told = fit(
        AsyncAveragingStrategy(rule=DeltaMean(), schedule=EveryNSteps(7)),
        loader(shard(SHARDS)),
        Measured(pause_s=(0.002, 0.002)),
        val=loader(shard((3, 3), (2, 6))),
        callbacks=[metrics, pl.callbacks.EarlyStopping("val_loss", patience=1000)],
        val_check_interval=10,
        max_epochs=2,
        num_sanity_val_steps=1,
    )
    return told | {"metrics": metrics.validations, "epoch_metrics": metrics.epochs}


@scenario
def checkpoints(folder: Path) -> Any:
    """The best two by validation, and one of every validation."""
    best = pl.callbacks.ModelCheckpoint(
        dirpath=folder / "best", monitor="val_loss", save_top_k=2, filename="{step}-{val_loss:.6f}"
    )
    each = pl.callbacks.ModelCheckpoint(dirpath=folder / "each", save_top_k=-1, filename="{epoch}-{step}")
    metrics = Metrics()
    told = fit(
        AsyncAveragingStrategy(rule=DeltaMean(), schedule=EveryNSteps(7)),
        loader(shard(SHARDS)),
        Measured(pause_s=(0.002, 0.002)),
        val=loader(shard((3, 3), (2, 6))),
        callbacks=[metrics, best, each],
        val_check_interval=10,
        max_epochs=2,
        enable_checkpointing=True,
        default_root_dir=folder,
    )
    told["metrics"] = metrics.validations
    told["best"] = [Path(best.best_model_path).name, float(best.best_model_score)]  # pyright: ignore
    if rank() == 0:
        told["saved"] = {}
        for path in sorted([*(folder / "each").glob("*.ckpt"), *(folder / "best").glob("*.ckpt")]):
            module = Measured()
            module.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
            told["saved"][f"{path.parent.name}/{path.name}"] = problem.digest(module)
    return told


class Saves(pl.Callback):
    """The model in every checkpoint, on every rank."""

    def __init__(self) -> None:
        self.digests: list[str] = []

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.digests.append(problem.digest(pl_module))


@scenario
def checkpoints_by_steps_and_time(folder: Path) -> Any:
    """Between sync points: the rank that is ahead calls the other one."""
    by_steps = pl.callbacks.ModelCheckpoint(
        dirpath=folder / "steps",
        every_n_train_steps=10,
        save_top_k=-1,
        filename="{step}",
        save_on_train_epoch_end=False,
    )
    by_time = pl.callbacks.ModelCheckpoint(
        dirpath=folder / "time", train_time_interval=timedelta(seconds=0.15), save_top_k=-1, filename="{step}",
        save_on_train_epoch_end=False,
    )  # fmt: skip
    saves = Saves()
    told = fit(
        AsyncAveragingStrategy(rule=DeltaMean(), schedule=EveryNSteps(7)),
        loader(shard((20, 40))),
        Net(pause_s=(0.01, 0.01)),
        callbacks=[saves, by_steps, by_time],
        enable_checkpointing=True,
        default_root_dir=folder,
    )
    told["digests"] = saves.digests
    told["files"] = {kind: len(list((folder / kind).glob("*.ckpt"))) for kind in ("steps", "time")}
    told["steps_in_files"] = {
        path.stem: torch.load(path, weights_only=True)["global_step"] for path in (folder / "steps").glob("*.ckpt")
    }
    return told


class Scored(Net):
    """Each validation's score is rank 0's number of steps."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", float(self.global_step if rank() == 0 else 0), sync_dist=True, reduce_fx="max")


@scenario
def scored_checkpoints(folder: Path) -> Any:
    """Saves by steps and validations are due with an epoch's last batch, also on one rank while the other goes on."""
    told = {}
    for name, strategy, numbers, every in (
        ("gradients", AsyncGradientStrategy(delay=0), (12, 12), 6),
        ("averaging", AsyncAveragingStrategy(rule=DeltaMean(), schedule=EveryNSteps(5)), (12, 12), 6),
        ("servers", ParameterServerStrategy(), (12, 12), 6),
        ("uneven", AsyncAveragingStrategy(rule=DeltaMean(), schedule=EveryNSteps(5)), (12, 30), 1.0),
    ):
        saves = pl.callbacks.ModelCheckpoint(
            folder / name,
            monitor="score",
            mode="max",
            every_n_train_steps=6,
            save_top_k=-1,
            filename="{step}-{score:.0f}",
        )
        fit(
            strategy, loader(shard(numbers)), Scored(), val=loader(shard((2, 2))), callbacks=[saves], max_epochs=2,
            val_check_interval=every, enable_checkpointing=True,
        )  # fmt: skip
        scores = sorted(each.stem for each in (folder / name).glob("*.ckpt"))
        told[name] = {"scores": scores, "best": Path(saves.best_model_path).stem}
    return told


@scenario
def default_checkpoint(folder: Path) -> Any:
    told = fit(
        AsyncAveragingStrategy(rule=DeltaMean(), schedule=EveryNSteps(7)),
        loader(shard(SHARDS)),
        val=loader(shard((2, 2))),
        enable_checkpointing=True,
        default_root_dir=folder,
        max_epochs=2,
        val_check_interval=10,
    )
    told["files"] = sorted(str(p.relative_to(folder)) for p in folder.rglob("*.ckpt"))
    return told


@scenario
def default_checkpoint_without_validation(folder: Path) -> Any:
    told = fit(None, loader(shard((5, 15))), enable_checkpointing=True, default_root_dir=folder, max_epochs=2)
    told["files"] = sorted(str(p.relative_to(folder)) for p in folder.rglob("*.ckpt"))
    return told


@scenario
def stops_early() -> Any:
    class NoProgress(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", 1.0 + rank(), sync_dist=True)

    return fit(
        AsyncAveragingStrategy(rule=DeltaMean(), schedule=EveryNSteps(7)),
        loader(shard(SHARDS)),
        NoProgress(pause_s=(0.002, 0.002)),
        val=loader(shard((2, 2))),
        callbacks=[pl.callbacks.EarlyStopping("val_loss", patience=2)],
        val_check_interval=10,
        max_epochs=50,
    )


@scenario
def one_validation_per_epoch() -> Any:
    """Equal shards, one rank much slower."""
    return fit(None, loader(shard((8, 8))), Net(pause_s=(0.0, 0.03)), val=loader(shard((2, 2))), max_epochs=2)


@scenario
def one_validation_per_interval() -> Any:
    """Equal shards and equal speeds up to the noise of the machine."""
    return fit(
        None,
        loader(shard((40, 40))),
        Net(pause_s=(0.002, 0.004)),
        val=loader(shard((1, 1))),
        val_check_interval=10,
        max_epochs=1,
    )


@scenario
def validations_by_time() -> Any:
    """Equal shards; which rank's clock asks first is the machine's matter."""
    return fit(
        None,
        loader(shard((30, 30))),
        Net(pause_s=(0.02, 0.02)),
        val=loader(shard((1, 1))),
        val_check_interval=timedelta(seconds=0.1),
        max_epochs=1,
    )


@scenario
def empty_shard() -> Any:
    return fit(
        AsyncAveragingStrategy(rule=DeltaMean(), schedule=EveryNSteps(3)),
        loader(shard((0, 12))),
        val=loader(shard((1, 1))),
        max_epochs=2,
    )


@scenario
def empty_shard_synchronous() -> Any:
    from lightning_async import Synchronous

    return fit(AsyncAveragingStrategy(schedule=Synchronous()), loader(shard((0, 12))), max_epochs=2)


@scenario
def synchronous_uneven() -> Any:
    """The shorter shard's rank contributes zeros once it is through."""
    return fit(AsyncAveragingStrategy(schedule=Synchronous()), loader(shard((4, 10))))


class Scheduled(Net):
    """Its learning rate changes with the batches."""

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8), "interval": "step"}]


@scenario
def synchronous_uneven_state() -> Any:
    """What optimizers remember, and schedulers, beyond the end of an epoch."""
    asked: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
        "momentum": (momentum, {}, {}),
        "adam": (adam, {}, {"val_check_interval": 3}),
        "averaged": (adam, {"optimizer_state": "average"}, {}),
        "one clock": (momentum, {"lr_clock": "global"}, {}),
        "pairs": (adam, {}, {"accumulate_grad_batches": 2}),
    }
    told = {}
    for name, (optimizer, settings, options) in asked.items():
        strategy = AsyncAveragingStrategy(schedule=Synchronous(), timeouts=PATIENT, **settings)
        val = loader(shard((2, 2)))
        told[name] = fit(
            strategy, loader(shard((4, 10))), Scheduled(optimizer=optimizer), val=val, max_epochs=3, **options
        )
    return told


class Apart(pl.Callback):
    """Each rank begins with momentum of its own, as from a checkpoint of replicas that drifted."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for p in pl_module.parameters():
            trainer.optimizers[0].state[p]["momentum_buffer"] = torch.full_like(p, float(rank()))


@scenario
def in_step_from_apart() -> Any:
    strategies = {
        "synchronous": AsyncAveragingStrategy(schedule=Synchronous(), timeouts=PATIENT),
        "windows": AsyncGradientStrategy(1, delay=0, timeouts=PATIENT),
    }
    return {
        name: fit(strategy, loader(shard((4, 4))), Scheduled(optimizer=momentum), callbacks=[Apart()])
        for name, strategy in strategies.items()
    }


@scenario
def early_finisher() -> Any:
    return fit(
        AsyncAveragingStrategy(rule=DeltaMean(), schedule=EveryNSteps(4)),
        loader(shard((3, 40))),
        Net(rounds_arrive=True),
        max_epochs=1,
    )


@scenario
def early_finisher_blocking() -> Any:
    return fit(AsyncAveragingStrategy(Mean(), EveryNSteps(4), overlap=False), loader(shard((3, 40))), max_epochs=2)


@scenario
def early_finisher_by_time() -> Any:
    module = Net(pause_s=(0.0, 0.005), rounds_arrive=True)
    return fit(AsyncAveragingStrategy(rule=DeltaMean(), schedule=EverySeconds(0.02)), loader(shard((3, 40))), module)


@scenario
def max_steps_refused(folder: Path) -> Any:
    return fit(
        None, loader(shard(SHARDS)), enable_checkpointing=True, default_root_dir=folder, max_steps=120, max_epochs=-1
    )


@scenario
def max_steps_without_epoch_ends() -> Any:
    with logged() as messages:
        told = fit(None, loader(shard(SHARDS)), max_steps=70, max_epochs=-1)
    return told | {"messages": [m for m in messages if "epochs" in m]}


@scenario
def drift_canary(folder: Path) -> Any:
    """Rank 1 stands still in its eighth step, behind its first round, until rank 0 has taken all of its own."""
    through = folder / "rank 0 is through"

    class Stuck(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            while rank() == 1 and batch_idx == 7 and not through.exists():  # until `LIMIT_S` at the latest
                time.sleep(0.01)
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if rank() == 0 and batch_idx == 29:
                through.touch()

    strategy = AsyncAveragingStrategy(rule=DeltaMean(), schedule=EveryNSteps(5), timeouts=PATIENT)
    return fit(strategy, loader(shard((30, 30))), Stuck())


class Sizes(Net):
    """Notes how many batches each of its windows has."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.sizes: list[int] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.sizes.append(batch_idx + 1 if self.trainer.strategy.is_update_step else 0)


def told_of_pace(told: Any, summary: Any) -> Any:
    return told | {
        "paces": summary.paces,
        "said": str(summary),
        "straggler": straggler({name: Pace(*pace) for name, pace in summary.paces.items()}),
    }


@scenario
def slow_compute() -> Any:
    """Rank 1 takes much longer for a batch."""
    module = Sizes(pause_s=(0.002, 0.05))
    strategy = AsyncGradientStrategy(BalancedWindows(4), min_replicas=2)
    told = fit(strategy, loader(shard((120, 36))), module)
    steps = [size for size in module.sizes if size]
    return told_of_pace(told, strategy.summary) | {"sizes": [b - a for a, b in itertools.pairwise(steps)]}


class Disk(torch.utils.data.Dataset[Any]):
    def __init__(self, batches: Any, read_s: float) -> None:
        self.batches, self.read_s = batches, read_s

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, i: int) -> Any:
        time.sleep(self.read_s)
        return self.batches[i]


@scenario
def slow_data() -> Any:
    """Rank 0 waits for its data."""
    data = Disk(shard((36, 120)), 0.05 if rank() == 0 else 0.0)
    strategy = AsyncAveragingStrategy(rule=DeltaMean(), schedule=DyLU(12), min_replicas=2)
    told = fit(strategy, torch.utils.data.DataLoader(data, batch_size=None), Net(pause_s=(0.002, 0.002)))
    return told_of_pace(told, strategy.summary)


class Promises(torch.utils.data.IterableDataset[Any]):
    """A stream that says another length than it has."""

    def __init__(self, data: Any, length: int) -> None:
        self.data = data
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        return iter(self.data)


class Raises(torch.utils.data.Dataset[Any]):
    """A dataset that has no such samples, and says so by the wrong exception."""

    def __init__(self, data: Any, length: int) -> None:
        self.data = data
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> Any:
        return self.data[i] if i < len(self.data) else next(iter(()))


class Epochal(Net):
    """Its learning rate is halved with each epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class BatchesBefore(pl.Callback):
    """How many batches this rank has trained on before each validation, and with which learning rates epochs began."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.rates: list[float] = []
        self.models: list[str] = []

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.batches.append(trainer.fit_loop.epoch_loop.batch_progress.total.completed)
        self.models.append(problem.digest(pl_module))

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def fit_short(strategy: Any, data: Any, **options: Any) -> dict[str, Any]:
    """Train for two epochs whose loader says more batches than there are."""
    seen = BatchesBefore()
    module = Epochal()
    trainer = make_trainer(strategy, callbacks=[seen], max_epochs=2, **options)
    with logged() as messages:
        trainer.fit(module, data, loader(problem.batches(0, 1)))
    return {
        "batches": seen.batches,
        "rates": [*seen.rates, trainer.optimizers[0].param_groups[0]["lr"]],
        "models": seen.models,
        "digest": problem.digest(module),
        "warnings": [text for text in messages if "has ended after" in text],
    }


SHORT: dict[str, tuple[Callable[[], Any], float, int]] = {
    "averaging": (lambda: AsyncAveragingStrategy(rule=DeltaMean(), schedule=EveryNSteps(3)), 0.5, 8),
    "averaging, by number": (lambda: AsyncAveragingStrategy(rule=DeltaMean(), schedule=EveryNSteps(3)), 7, 8),
    "synchronous, by number": (lambda: AsyncAveragingStrategy(schedule=Synchronous()), 7, 8),
    "windows": (lambda: AsyncGradientStrategy(2), 0.5, 8),
    "servers": (lambda: ParameterServerStrategy("sync"), 0.5, 8),
}
"""By name: a strategy, the interval of validations, and how many of 8 batches rank 1 has. Rank 0 has 6."""


@scenario
def short_epochs() -> Any:
    told = {}
    for name, (strategy, interval, other) in SHORT.items():
        data = torch.utils.data.DataLoader(Promises(shard((6, other)), 8), batch_size=None)
        told[name] = fit_short(strategy(), data, val_check_interval=interval)
    return told


class Jumps(Net):
    """BatchNorm, whose input is 0 at first and 8 from batch 40 on; no rank is more than four batches ahead.

    Args:
        folder: where ranks say how far they are.
        total: batches of each rank.
        slow: a round takes as long as 40 batches, as on a slow link.
    """

    def __init__(self, folder: Path, total: tuple[int, int], slow: bool) -> None:
        super().__init__(network=lambda: torch.nn.BatchNorm1d(4, momentum=0.5))
        self.folder, self.total, self.slow = folder, total, slow
        self.seen = self.num_slow = 0
        self.more = threading.Condition()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if not self.slow or batch_idx:
            return
        average = self.trainer.strategy.averager.component.average
        move = average.move

        def move_late(exchange: Any) -> None:
            then = self.seen
            with self.more:
                self.more.wait_for(lambda: self.seen >= min(then + 40, self.total[rank()]), timeout=40.0)
            self.num_slow += 1
            move(exchange)

        average.move = move_late

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (self.folder / f"{rank()}").write_bytes(bytes(batch_idx))
        other, deadline = self.folder / f"{1 - rank()}", time.monotonic() + 60.0
        least = min(batch_idx - 4, self.total[1 - rank()] - 1)
        while (other.stat().st_size if other.exists() else -1) < least:
            assert time.monotonic() < deadline, "the other rank does not train"
            time.sleep(0.001)
        loss = self.net(torch.full((4, 4), 8.0 if batch_idx >= 40 else 0.0)).pow(2).mean()
        with self.more:
            self.seen = batch_idx + 1
            self.more.notify_all()
        return loss


STATISTICS: dict[str, tuple[Any, tuple[int, int]]] = {
    "every step": (lambda: AsyncAveragingStrategy(rule=DeltaMean(), schedule=EveryNSteps(1)), (80, 75)),
    "every two steps": (lambda: AsyncAveragingStrategy(rule=DeltaMean(), schedule=EveryNSteps(2)), (80, 80)),
    "every two steps, broadcast": (
        lambda: AsyncAveragingStrategy(rule=DeltaMean(), schedule=EveryNSteps(2), buffers="broadcast"),
        (75, 80),
    ),
    "by default": (AsyncAveragingStrategy, (80, 80)),
    "by default, slow": (AsyncAveragingStrategy, (80, 75)),
    "blocking": (lambda: AsyncAveragingStrategy(rule=DeltaMean(), schedule=EveryNSteps(2), overlap=False), (80, 75)),
    "gradients": (lambda: AsyncGradientStrategy(2), (80, 75)),
}


@scenario
def statistics(folder: Path) -> Any:
    """BatchNorm's statistics at the end, by strategy; some have unequal numbers of batches."""
    told = {}
    for name, (make, total) in STATISTICS.items():
        own = folder / name
        own.mkdir(exist_ok=True)
        module = Jumps(own, total, name.endswith("slow"))
        fit(make(), loader(shard(total)), module)
        norm: Any = module.net
        assert bool(module.num_slow) == module.slow
        told[name] = [norm.running_mean.tolist(), norm.running_var.tolist(), norm.num_batches_tracked.item()]
    return told

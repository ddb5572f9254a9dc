"""Scenarios of windows of gradients, compared with DDP's steps, and with a reference in float64."""

from __future__ import annotations

import csv
import math
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from lightning_async import AsyncGradientStrategy, DelayCompensation, PowerSGD, TopK, WeightPrediction
from lightning_async.trainer.namespace import pl, pytorch
from tests.strategies import problem
from tests.strategies.problem import adam, momentum
from tests.strategies.workers import (
    PATIENT,
    Net,
    Pulls,
    Recorder,
    fit,
    loader,
    logged,
    make_trainer,
    rank,
    report,
    scenario,
    shard,
)


def strategy(*args: Any, **options: Any) -> AsyncGradientStrategy:
    return AsyncGradientStrategy(*args, min_replicas=2, timeouts=PATIENT, **options)


def watch_passes(module: Any) -> list[bool]:
    """Of each backward pass to come, whether gradients of this rank are on their way within it."""
    seen: list[bool] = []

    def see(_: Any) -> None:
        seen.append(module.trainer.strategy._session.step_runner._gradients.in_flight)

    next(module.parameters()).register_hook(see)
    return seen


@scenario
def no_delay() -> Any:
    module = Net(optimizer=momentum)
    seen = watch_passes(module)
    return fit(strategy(3, delay=0), loader(shard((12, 12))), module, max_epochs=2) | {"on_their_way": seen}


@scenario
def modules_entered() -> Any:
    entered: set[str] = set()

    def note(frame: Any, event: str, arg: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.parent.name == "averaging":
            entered.add(path.name)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        fit(strategy(2, delay=1), loader(shard((12, 12))))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return {"entered": sorted(entered)}


class Doubles(Net):
    """Changes gradients behind the backward pass, in a way that leaves no trace."""

    def on_after_backward(self) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad.data *= 2.0


class Doubled(Net):
    """Its gradients are as large from the beginning."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return 2.0 * super().training_step(batch, batch_idx)


@scenario
def changed_behind_the_pass() -> Any:
    told = []
    for kind in (Doubles, Doubled):
        module = kind(optimizer=momentum)
        seen = watch_passes(module)
        told.append([fit(strategy(2, delay=0), loader(shard((4, 4))), module)["digest"], seen])
    return told


@scenario
def ddp() -> Any:
    """The same by Lightning's own strategy."""
    module, plain = Net(optimizer=momentum), pytorch("strategies").DDPStrategy(process_group_backend="gloo")
    make_trainer(plain, max_epochs=2, accumulate_grad_batches=3).fit(module, loader(shard((12, 12))))
    return problem.flat(module)


@scenario
def no_delay_adam_clipped() -> Any:
    """The epoch's last window is shorter, as Lightning's."""
    return fit(
        strategy(3, delay=0), loader(shard((10, 10))), Net(optimizer=adam), max_epochs=2, gradient_clip_val=0.2,
        val=loader(shard((2, 2))), val_check_interval=6,
    )  # fmt: skip


@scenario
def no_delay_unequal_batches() -> Any:
    return fit(strategy(2, delay=0), loader(shard((12, 12), (3, 9))), Net(optimizer=momentum))


@scenario
def delayed() -> Any:
    return fit(strategy(2), loader(shard((12, 12), (3, 9))), Net(optimizer=momentum), max_epochs=2)


@scenario
def compensated() -> Any:
    """With warm-up, and a sync point in mid-epoch, after which nothing is late for a window."""
    correction = DelayCompensation(0.5)
    return fit(
        strategy(2, warmup_steps=1, correction=correction), loader(shard((12, 12))), Net(optimizer=momentum),
        max_epochs=2, val=loader(shard((2, 2))), val_check_interval=6,
    )  # fmt: skip


@scenario
def slow_steps_at_gates() -> Any:
    """Steps take their time, also while all stand at a sync point that makes buffers equal: it opens behind them."""

    class Slow(Net):
        def __init__(self) -> None:
            super().__init__(optimizer=momentum)
            self.register_buffer("seen", torch.zeros(1))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen += 1.0 + rank()
            return super().training_step(batch, batch_idx)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            time.sleep(0.1 * (1 + rank()))

    return fit(
        strategy(4), loader(shard((14, 14))), Slow(), val=loader(shard((2, 2))), val_check_interval=6,
        max_epochs=2,
    )  # fmt: skip


class Watched(Net):
    """Notes after which batch steps were taken, what learning rates were, and which gradients a step sees."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.stepped: list[int] = []
        self.rates: list[float] = []
        self.clipped: list[float] = []
        self.update_steps: list[bool] = []

    def configure_optimizers(self) -> Any:
        optimizer = momentum(self.parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return [optimizer], [{"scheduler": self.schedule, "interval": "step"}]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.clipped.append(sum(float(p.grad.square().sum()) for p in self.parameters()) ** 0.5)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.stepped.append(self.trainer.global_step)
        self.update_steps.append(self.trainer.strategy.is_update_step)


def watch(strategy: Any, data: Any, module: Any = None, **options: Any) -> Any:
    module = module or Watched()
    told = fit(strategy, data, module, **options)
    return told | {
        "stepped": module.stepped, "rates": module.rates, "norms": module.clipped, "is_update": module.update_steps,
        "lr": module.schedule.get_last_lr()[0],
    }  # fmt: skip


@scenario
def steps_and_schedulers() -> Any:
    """Validation in mid-epoch, where windows end; 14 batches, windows of 4."""
    return watch(strategy(4), loader(shard((14, 14))), val=loader(shard((2, 2))), val_check_interval=8, max_epochs=2)


@scenario
def warm() -> Any:
    module = Watched()
    seen = watch_passes(module)
    return watch(strategy(2, warmup_steps=2), loader(shard((12, 12))), module) | {"on_their_way": seen}


@scenario
def limited() -> Any:
    """The third step is the last one; nothing is in flight behind it."""
    return watch(strategy(2), loader(shard((12, 12))), max_epochs=-1, max_steps=3)


@scenario
def uneven() -> Any:
    """Rank 0 has no data for long, and takes every step that rank 1 takes."""
    return watch(strategy(3), loader(shard((4, 13))), val=loader(shard((2, 2))), max_epochs=2, gradient_clip_val=0.2)


@scenario
def pulled() -> Any:
    """The same windows of batches of unequal size."""
    data = loader([problem.batches(rank(), 1, 1 + i % 5, offset=i)[0] for i in range(12)])
    return [fit(strategy(3), data, kind(optimizer=momentum), max_epochs=2) for kind in (Net, Pulls)]


class Scheduled(Net):
    """Notes the learning rate of each step.

    Args:
        make: a scheduler.
        how: it steps.
    """

    def __init__(self, make: Any, **how: Any) -> None:
        super().__init__(optimizer=momentum)
        self.make, self.how = make, how
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = momentum(self.parameters())
        return [optimizer], [{"scheduler": self.make(optimizer), **self.how}]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


def halves(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def never_enough(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1e9)


@scenario
def scheduled(folder: Path) -> Any:
    """By epoch, by a metric and by every eighth batch; rank 0 has less data than rank 1, or none, and scaled losses."""
    told = []
    for i, (make, how, numbers) in enumerate(
        [
            (halves, {"interval": "epoch"}, (4, 12)),
            (halves, {"interval": "epoch"}, (0, 12)),
            (never_enough, {"interval": "epoch", "monitor": "val_loss"}, (0, 12)),
            (halves, {"interval": "step", "frequency": 8}, (5, 12)),
        ]
    ):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # pyright: ignore
        module, path = Scheduled(make, **how), folder / str(i)
        saves = pl.callbacks.ModelCheckpoint(path, every_n_train_steps=4, save_top_k=-1, filename="{step}")
        done = fit(
            strategy(2), loader(shard(numbers)), module, val=loader(shard((2, 2))), max_epochs=2, callbacks=[saves],
            enable_checkpointing=True, plugins=[pytorch("plugins").MixedPrecision("16-mixed", "cpu", scaler)],
        )  # fmt: skip
        loop = module.trainer.fit_loop.epoch_loop
        told.append(
            {"rates": module.rates, "digest": done["digest"], "shown": loop._batches_that_stepped}
            | {"saved": sorted(int(each.stem[5:]) for each in path.iterdir()), "steps": done["global_step"]}
        )
    return told


class Tells(Watched):
    """Logs the number of its batch, from 0 in each epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("batch", float(batch_idx))
        return super().training_step(batch, batch_idx)


@scenario
def told_at_gates(folder: Path) -> Any:
    """Six steps an epoch: each sixth step, with which loggers are due, and the last one are taken at a sync point."""
    told = {}
    for name, every, epochs, begins in (("straight", 6, 2, None), ("resumed", 1, 3, folder / "straight/step=12.ckpt")):
        path, module, log = folder / name, Tells(), pytorch("loggers").CSVLogger(folder, name="log", version=name)
        saves = pl.callbacks.ModelCheckpoint(path, every_n_train_steps=4, save_top_k=-1, filename="{step}")
        trainer = make_trainer(
            strategy(2), callbacks=[saves, pl.callbacks.LearningRateMonitor("step")], max_epochs=epochs, logger=log,
            log_every_n_steps=every, enable_checkpointing=True,
        )  # fmt: skip
        trainer.fit(module, loader(shard((12, 12))), loader(shard((1, 1))), ckpt_path=begins)
        told[name] = {"saved": sorted(int(each.stem[5:]) for each in path.iterdir()), "steps": trainer.global_step}
        if trainer.is_global_zero:
            rows = list(csv.DictReader((folder / "log" / name / "metrics.csv").open()))
            for key in ("batch", "lr-SGD", "val_loss"):
                told[name][key] = [(int(row["step"]), float(row[key])) for row in rows if row.get(key)]
    return told


class Stepping(Net):
    """Notes the model behind each step."""

    def __init__(self) -> None:
        super().__init__(optimizer=momentum)
        self.models: list[list[float]] = []

    def optimizer_step(self, *args: Any, **options: Any) -> None:
        super().optimizer_step(*args, **options)
        self.models.append(problem.flat(self))


class Average(pl.callbacks.WeightAveraging):
    """A user's, which looks at batches, and notes what is validated instead of the model, behind how many steps."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[tuple[int, list[float]]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert len(batch[0]) > 0 and "loss" in outputs and batch_idx >= 0
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_validation_epoch_start(trainer, pl_module)
        self.validated.append((trainer.global_step, problem.flat(pl_module)))


@scenario
def averages_over_time() -> Any:
    """Steps at sync points in mid-epoch, at its end and at the last, on ranks of unequal data, and two in a batch."""
    told, limits = [], {"max_epochs": -1, "max_steps": 3}
    for size, numbers, options in ((4, (14, 14), {"val_check_interval": 8}), (2, (5, 12), {}), (2, (12, 12), limits)):
        module, average = Stepping(), Average()
        done = fit(
            strategy(size), loader(shard(numbers)), module, val=loader(shard((1, 1))), callbacks=[average],
            **{"max_epochs": 2, **options},
        )  # fmt: skip
        kept: Any = average._average_model
        told.append({"models": module.models, "validated": average.validated, "count": int(kept.n_averaged)} | done)
    return told


def one_cycle(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)


@scenario
def ends_too_soon() -> Any:
    """Rank 0's own data is enough for six steps."""
    return fit(strategy(2), loader(shard((5, 13))), Scheduled(one_cycle, interval="step"), max_epochs=2)


@scenario
def watched_by_step() -> Any:
    """What a rank logs in a step is its own."""
    how = {"interval": "step", "monitor": "train_loss", "strict": False}
    return fit(strategy(2), loader(shard((4, 4))), Scheduled(never_enough, **how), max_epochs=2)


@scenario
def epochs_apart() -> Any:
    """To a number of steps, with unequal data: ranks do not meet at the ends of epochs."""
    module = Scheduled(halves, interval="epoch")
    return fit(strategy(2), loader(shard((4, 12))), module, max_epochs=-1, max_steps=14)


@scenario
def until_reduced() -> Any:
    """Rank 1 is slower; no rank waits for the other."""
    return watch(
        strategy("until_reduced"), loader(shard((20, 20), (3, 9))), Watched(pause_s=(0.001, 0.01)), max_epochs=2,
        val=loader(shard((2, 2))),
    )  # fmt: skip


@scenario
def until_reduced_uneven() -> Any:
    """To a number of steps, with unequal data and batches, and validations on rank 0's clock."""
    return watch(
        strategy("until_reduced", warmup_steps=3), loader(shard((7, 11))), max_epochs=-1, max_steps=16,
        val=loader(shard((2, 2))), val_check_interval=5, check_val_every_n_epoch=None,
    )  # fmt: skip


class AnotherNumber(Net):
    """4, then 3: a window that has begun keeps its size."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 5:
            self.trainer.strategy.accumulate = 3


@scenario
def another_number_in_mid_epoch() -> Any:
    class Changes(AnotherNumber, Watched): ...

    return watch(strategy(4, delay=0), loader(shard((14, 14))), Changes())


@scenario
def another_number_with_momentum() -> Any:
    """Without delay, and with it."""
    return [fit(strategy(4, delay), loader(shard((14, 14))), AnotherNumber(optimizer=momentum)) for delay in (0, 1)]


class Odd(Net):
    """A parameter that is never used, a frozen one, one that only rank 1 uses; complex and of 16 bits; BatchNorm."""

    def __init__(self) -> None:
        super().__init__(network=problem.normalised)
        self.unused = torch.nn.Parameter(torch.full((3,), 0.3))
        self.frozen = torch.nn.Parameter(torch.full((2,), 0.7), requires_grad=False)
        self.ones = torch.nn.Parameter(torch.full((2,), 0.5))
        self.waves = torch.nn.Parameter(torch.full((2,), 0.5 + 0.25j))
        self.short = torch.nn.Parameter(torch.full((2,), 0.5, dtype=torch.bfloat16))
        self.missing: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx) + self.waves.abs().square().sum() + self.short.square().sum()
        return loss + self.ones.square().sum() if rank() == 1 and batch_idx % 4 == 1 else loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.missing.append(self.unused.grad is None and self.frozen.grad is None and self.ones.grad is not None)


@scenario
def odd_tensors() -> Any:
    module = Odd()
    told = fit(strategy(4), loader(shard((12, 12))), module, val=loader(shard((2, 2))))
    totals: Any = module.trainer.strategy.summary.totals  # pyright: ignore[reportAttributeAccessIssue]
    return {
        "windows": totals.own, "window_bytes": totals.sent_bytes / totals.own,
        "digest": told["digest"], "steps": told["steps"], "missing": module.missing, "unused": module.unused.tolist(),
        "frozen": module.frozen.tolist(), "ones": module.ones.tolist(), "waves": module.waves.abs().tolist(),
        "short": module.short.tolist(), "counted": int(module.get_buffer("net.0.num_batches_tracked")),
    }  # fmt: skip


class Overflows(Net):
    """Rank 1's third batch overflows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if rank() == 1 and batch_idx == 2 else loss


@scenario
def scaled() -> Any:
    """A window that is not finite is dropped on all ranks alike."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)  # pyright: ignore
    plugin = pytorch("plugins").MixedPrecision("16-mixed", "cpu", scaler)
    module = Overflows(optimizer=momentum)
    told = fit(strategy(2), loader(shard((12, 12))), module, plugins=[plugin], gradient_clip_val=0.5)
    return told | {"scale": scaler.get_scale()}


@scenario
def validated_twice() -> Any:
    """A validation behind which no batch was trained on changes nothing, and a second fit begins anew."""
    recorder, module = Recorder(), Net(optimizer=momentum)
    trainer = make_trainer(strategy(5), callbacks=[recorder], max_epochs=1)
    trainer.fit(module, loader(shard((12, 12))))
    first = report(trainer, module, recorder)
    trainer.validate(module, loader(shard((2, 2))), verbose=False)
    after = problem.digest(module)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(shard((12, 12))))
    return {
        "first": first["digest"], "after": after, "steps": [first["global_step"], trainer.global_step],
        "accumulates": trainer.accumulate_grad_batches, "last": problem.digest(module),
    }  # fmt: skip


class Tuned(Net):
    """Its learning rate is an attribute."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__(optimizer=lambda params: torch.optim.SGD(params, lr=self.lr))
        self.lr = lr


@scenario
def searched(folder: Path) -> Any:
    """The same training, with the rate that was found, once without looking for it; and how DDP looks for it."""
    finder, alike = (pl.callbacks.LearningRateFinder(num_training_steps=20) for _ in range(2))
    module, options = Tuned(), {"max_epochs": 4, "default_root_dir": folder}
    found = fit(strategy(2), loader(shard((12, 12))), module, callbacks=[finder], **options)
    plain = fit(strategy(2), loader(shard((12, 12))), Tuned(module.lr), **options)
    make_trainer("ddp", callbacks=[alike], accumulate_grad_batches=2, **options).fit(Tuned(), loader(shard((12, 12))))
    looked, like_ddp = finder.optimal_lr.results, alike.optimal_lr.results
    return {"found": found, "plain": plain, "lr": module.lr, "looked": looked, "like_ddp": like_ddp}


class Saves(pl.Callback):
    """A checkpoint within a window, at a validation."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.current.ready == 6:
            trainer.save_checkpoint(self.path)


def resumed_with(path: Path, **options: Any) -> Any:
    """Of Lightning's checkpoints: at the end of an epoch, and within a window of which each rank has two batches."""
    data, val = loader(shard((10, 10))), loader(shard((2, 2)))
    straight = fit(strategy(4, **options), data, Net(optimizer=momentum), max_epochs=2, val=val)
    first = make_trainer(strategy(4, **options))
    first.fit(Net(optimizer=momentum), data, val)
    first.save_checkpoint(path)
    module, second = Net(optimizer=momentum), make_trainer(strategy(4, **options), max_epochs=2)
    second.fit(module, data, val, ckpt_path=path)
    make_trainer(strategy(4, **options), callbacks=[Saves(path)], val_check_interval=6).fit(Net(), data, val)
    saved = torch.load(path, weights_only=True)["lightning_async"]["replicas"]
    return {
        "straight": [straight["digest"], straight["global_step"]],
        "resumed": [problem.digest(module), second.global_step],
        "window": [[each["gathered"]["window"][what] for what in ("batches", "samples")] for each in saved],
        "residual": [any(map(torch.any, each["gathered"].get("compression", {}).get("residual", {}).values()))
                     for each in saved],
    }  # fmt: skip


@scenario
def resumed(folder: Path) -> Any:
    return resumed_with(folder / "saved.ckpt")


class SavesBetweenGates(pl.Callback):
    """By hand, at the end of the sixth batch: a window of four is on its way, and two batches are in the next one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 5:
            trainer.save_checkpoint(self.path)


@scenario
def saved_between_gates(folder: Path) -> Any:
    data, told = loader(shard((10, 10))), {}
    for delay in (0, 1):
        path = folder / f"{delay}.ckpt"
        fit(strategy(4, delay), data, Net(optimizer=momentum), callbacks=[SavesBetweenGates(path)])
        module, trainer = Net(optimizer=momentum), make_trainer(strategy(4, delay), max_epochs=2)
        trainer.strategy.barrier()
        with logged() as said:
            trainer.fit(module, data, ckpt_path=path)
        told[delay] = [each for each in said if "windows of gradients" in each]
    return told


COMPRESSIONS: list[Any] = ["bf16", "fp8", "int8", TopK(0.2), PowerSGD(2)]


@scenario
def compressed() -> Any:
    """As ``delayed``; each compression in its turn."""
    data = loader(shard((12, 12), (3, 9)))
    return [
        fit(strategy(2, compression=each), data, Net(optimizer=momentum), max_epochs=2) for each in COMPRESSIONS
    ]  # fmt: skip


@scenario
def compressed_without_data() -> Any:
    """Rank 0 has no data for long: it takes the steps of the others, and what its own messages lacked waits."""
    data = loader(shard((3, 13)))
    return [fit(strategy(2, compression=each), data, max_epochs=2)["digest"] for each in ("int8", "powersgd")]


@scenario
def compressed_and_scaled() -> Any:
    """A window that is not finite."""
    told = []
    for each in ("int8", "topk", "powersgd"):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)  # pyright: ignore
        plugin = pytorch("plugins").MixedPrecision("16-mixed", "cpu", scaler)
        found = fit(strategy(2, compression=each), loader(shard((12, 12))), Overflows(), plugins=[plugin])
        told.append([found["digest"], found["steps"], all(map(math.isfinite, found["flat"]))])
    return told


@scenario
def compressed_and_corrected() -> Any:
    """Late windows are predicted, with and without compression."""
    data, predicted = loader(shard((12, 12))), WeightPrediction()
    return [fit(strategy(2, correction=predicted, compression=each), data, max_epochs=2) for each in ("none", "int8")]


@scenario
def compressed_and_resumed(folder: Path) -> Any:
    return resumed_with(folder / "saved.ckpt", compression="powersgd")

"""Scenarios of windows of gradients, compared with DDP's steps, and with a reference in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_async import AsyncGradientStrategy, DelayCompensation
from lightning_async.trainer.namespace import pl, pytorch
from tests.strategies import problem
from tests.strategies.workers import Net, Recorder, fit, loader, make_trainer, rank, report, scenario, shard


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def strategy(*args: Any, **options: Any) -> AsyncGradientStrategy:
    return AsyncGradientStrategy(*args, min_replicas=2, **options)


@scenario
def no_delay() -> Any:
    return fit(strategy(3, delay=0), loader(shard((12, 12))), Net(optimizer=momentum), max_epochs=2)


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
    """With warm-up, and a gate in mid-epoch, after which nothing is late for a window."""
    correction = DelayCompensation(0.5)
    return fit(
        strategy(2, warmup_steps=1, correction=correction), loader(shard((12, 12))), Net(optimizer=momentum),
        max_epochs=2, val=loader(shard((2, 2))), val_check_interval=6,
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
    return watch(strategy(2, warmup_steps=2), loader(shard((12, 12))))


@scenario
def limited() -> Any:
    """The third step is the last one; nothing is in flight behind it."""
    return watch(strategy(2), loader(shard((12, 12))), max_epochs=-1, max_steps=3)


@scenario
def uneven() -> Any:
    """Rank 0 has no data for long, and takes every step that rank 1 takes."""
    return watch(strategy(3), loader(shard((4, 13))), val=loader(shard((2, 2))), max_epochs=2, gradient_clip_val=0.2)


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


@scenario
def another_number_in_mid_epoch() -> Any:
    """4, then 3: a window that has begun keeps its size."""

    class Changes(Watched):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 5:
                self.trainer.strategy.accumulate = 3

    return watch(strategy(4, delay=0), loader(shard((14, 14))), Changes())


class Odd(Net):
    """A parameter that is never used, a frozen one, one that only rank 1 uses; complex and of 16 bits; BatchNorm."""

    def __init__(self) -> None:
        super().__init__(network=lambda: torch.nn.Sequential(torch.nn.BatchNorm1d(problem.FEATURES), problem.network()))
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
    return {
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


class Saves(pl.Callback):
    """A checkpoint within a window, at a validation."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.current.ready == 6:
            trainer.save_checkpoint(self.path)


@scenario
def resumed(folder: Path) -> Any:
    """Of Lightning's checkpoints: at the end of an epoch, and within a window of which each rank has two batches."""
    data, val, path = loader(shard((10, 10))), loader(shard((2, 2))), folder / "saved.ckpt"
    straight = fit(strategy(4), data, Net(optimizer=momentum), max_epochs=2, val=val)
    first = make_trainer(strategy(4))
    first.fit(Net(optimizer=momentum), data, val)
    first.save_checkpoint(path)
    module, second = Net(optimizer=momentum), make_trainer(strategy(4), max_epochs=2)
    second.fit(module, data, val, ckpt_path=path)
    make_trainer(strategy(4), callbacks=[Saves(path)], val_check_interval=6).fit(Net(), data, val)
    saved = torch.load(path, weights_only=True)["lightning_async"]["replicas"]
    return {
        "straight": [straight["digest"], straight["global_step"]],
        "resumed": [problem.digest(module), second.global_step],
        "window": [[each["gathered"]["window"][what] for what in ("batches", "samples")] for each in saved],
    }

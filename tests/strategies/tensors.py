"""Scenarios of tensors that users freeze, unfreeze, move, assign anew, or spoil."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_async import AsyncAveragingStrategy, DeltaMean, DiLoCo, EveryNSteps, Mean
from lightning_async.algorithms.schedules import Action, ReplicaClock, Schedule
from lightning_async.trainer.namespace import pl
from tests.strategies import problem
from tests.strategies.workers import Net, Recorder, loader, make_trainer, rank, scenario, shard


class Backboned(Net):
    """A frozen backbone and a head; the optimizer gets the backbone when it is unfrozen."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer=optimizer)
        self.backbone, self.head = nn.Sequential(*self.net.children())[:2], [*self.net.children()][2]

    def configure_optimizers(self) -> Any:
        return self.make_optimizer([p for p in self.parameters() if p.requires_grad])


def _fit(module: Any, strategy: AsyncAveragingStrategy, *callbacks: Any, batches: int = 6, **options: Any) -> Any:
    recorder = Recorder()
    trainer = make_trainer(strategy, callbacks=[*callbacks, recorder], **options)
    trainer.fit(module, loader(shard((batches, batches))))
    return trainer, {"epochs": recorder.epochs, "end": recorder.end, "flat": problem.flat(module)}


def _unfreeze(strategy: AsyncAveragingStrategy, optimizer: Any) -> Any:
    finetuning = pl.callbacks.BackboneFinetuning(
        unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.05, should_align=True, train_bn=True
    )
    module = Backboned(optimizer)
    before = problem.flat(module.backbone)
    trainer, found = _fit(module, strategy, finetuning, max_epochs=3)
    return found | {
        "backbone moved by": problem.distance(before, problem.flat(module.backbone)),
        "rounds": trainer.strategy.summary.rounds,
    }


@scenario
def unfreezing_with_a_round_after_every_step() -> Any:
    """As one process on the joined batches."""
    return _unfreeze(
        AsyncAveragingStrategy(Mean(), EveryNSteps(1), overlap=False), lambda ps: torch.optim.SGD(ps, lr=0.05)
    )


@scenario
def unfreezing_under_diloco() -> Any:
    strategy = AsyncAveragingStrategy(DiLoCo(), EveryNSteps(4), compression="none")
    return _unfreeze(strategy, lambda ps: torch.optim.SGD(ps, lr=0.05))


@scenario
def unfreezing_with_averaged_moments() -> Any:
    strategy = AsyncAveragingStrategy(Mean(), EveryNSteps(2), overlap=False, optimizer_state="average")
    return _unfreeze(strategy, lambda ps: torch.optim.Adam(ps, lr=0.05))


class Teacher(Net):
    """Follows a slow copy of itself, and counts in a buffer that it assigns anew."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = problem.network()
        self.teacher.requires_grad_(False)
        self.register_buffer("mean_loss", torch.zeros(()))
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = problem.loss_of(self, batch)
        self.mean_loss = 0.9 * self.mean_loss + 0.1 * loss.detach()
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        for slow, quick in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            slow.data = 0.9 * slow.data + 0.1 * quick.data


@scenario
def a_momentum_teacher() -> Any:
    module = Teacher()
    strategy = AsyncAveragingStrategy(rule=DeltaMean(), schedule=EveryNSteps(100))
    module_digest = problem.digest(module)
    _, found = _fit(module, strategy, batches=10)
    return found | {"start": module_digest, "now": problem.digest(module), "loss": float(module.mean_loss)}


class Spoiled(Net):
    """One gradient of rank 1's is not finite."""

    def on_after_backward(self) -> None:
        if rank() == 1 and self.global_step == 5:
            next(iter(self.net.parameters())).grad.fill_(float("nan"))  # pyright: ignore


@scenario
def one_gradient_that_is_not_finite() -> Any:
    module = Spoiled(optimizer=lambda ps: torch.optim.Adam(ps, lr=0.01))
    trainer, found = _fit(
        module, AsyncAveragingStrategy(rule=DeltaMean(), schedule=EveryNSteps(4), overlap=False), batches=20
    )
    moments = [s["exp_avg"] for s in trainer.optimizers[0].state.values()]
    return found | {
        "moments are finite": all(bool(torch.isfinite(m).all()) for m in moments),
        "moments": sum(float(m.abs().sum()) for m in moments),
        "healed": trainer.strategy.summary.healed,
        "share of work": trainer.strategy.summary.absent_rounds,
    }


class BackAndForth(Schedule):
    """Four local steps, two synchronous ones."""

    def next(self, clock: ReplicaClock) -> Action:
        return Action.GRADIENTS if clock.step % 6 >= 4 else Action.LOCAL


@scenario
def a_schedule_that_goes_back_to_synchronous_steps() -> Any:
    module = Net()
    trainer, found = _fit(module, AsyncAveragingStrategy(rule=DeltaMean(), schedule=BackAndForth()), batches=24)
    return found | {"synchronous": trainer.strategy.summary.synchronous_steps}


class Masked(Net):
    """A mask that is meant to be infinite, and BatchNorm of which one replica's variance is spoiled."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(problem.FEATURES)
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        self.register_buffer("phase", torch.polar(torch.ones(2), torch.tensor([0.5, 1.5])))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if rank() == 0 and batch_idx == 4:
            assert self.norm.running_var is not None
            self.norm.running_var.fill_(torch.nan)


@scenario
def a_variance_that_is_not_finite() -> Any:
    module = Masked()
    trainer, found = _fit(
        module, AsyncAveragingStrategy(rule=DeltaMean(), schedule=EveryNSteps(3), overlap=False), batches=9
    )
    assert module.norm.running_var is not None
    return found | {
        "variance is finite": bool(torch.isfinite(module.norm.running_var).all()),
        "mask": bool((module.mask == torch.full((3, 3), -torch.inf).triu(1)).all()),
        "phase": torch.view_as_real(module.phase).tolist(),  # pyright: ignore
        "healed": trainer.strategy.summary.healed,
    }

"""In-process ranks that train a tiny model: the engine without Lightning, without processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from lightning_async.algorithms import DeltaMean, EveryNSteps
from lightning_async.algorithms.averaging import AveragingRule
from lightning_async.algorithms.schedules import Action, Schedule
from lightning_async.engine.averaging.averager import BackgroundAverager
from lightning_async.engine.averaging.rule_state import AveragerConfig
from lightning_async.engine.control_plane import ControlPlane
from lightning_async.engine.gradients.compression import GradientCompression
from lightning_async.engine.gradients.reduction import SynchronousGradients
from lightning_async.engine.replica import Replica
from lightning_async.engine.shared_state import Arrival, SyncPointKind
from lightning_async.engine.timeouts import Timeouts
from lightning_async.membership.membership import Membership
from tests.comm.simulated import InProcessWorld

DEADLINES = Timeouts(payload=timedelta(seconds=30), grace=timedelta(seconds=60), reform=timedelta(seconds=60))


def bits(x: Tensor) -> Tensor:
    """Equal only where floats are equal to the bit, signs of zeros too."""
    return x.clone().view(torch.int32)


@dataclass
class Rank:
    """One replica: SGD on ``0.5 * |x - goal|^2`` with a goal of its own."""

    averager: BackgroundAverager
    gradients: SynchronousGradients
    module: nn.Module
    goal: float
    lr: float = 0.1

    @property
    def x(self) -> Tensor:
        return self.module.weight.data  # pyright: ignore

    def train(self, steps: int, samples: float = 1.0, each: Callable[[int], None] | None = None) -> None:
        """Take local steps under the schedule."""
        weight: Any = self.module.weight
        for i in range(steps):
            step = self.averager.plan()
            weight.grad = (weight - self.goal).detach()
            if step is Action.GRADIENTS:
                self.gradients.reduce_(samples)
            with torch.no_grad():
                weight -= self.lr * weight.grad
            self.averager.tick(step, samples, lr=self.lr)
            if each is not None:
                each(i)

    def meet(self, sync_point: SyncPointKind = SyncPointKind.TRAIN_END, index: int = 0) -> Arrival:
        return self.averager.sync_points.rendezvous(sync_point, index)


def assemble(
    collectives: Any,
    membership: Membership,
    replica: Replica,
    rule: AveragingRule,
    schedule: Schedule,
    config: AveragerConfig,
    compression: GradientCompression = "none",
    **kwargs: Any,
) -> tuple[BackgroundAverager, SynchronousGradients]:
    """An averager that takes synchronous steps too, as the strategy has it; ``compression`` is of these."""
    control = ControlPlane(collectives, membership, replica, config.timeouts, part_bytes=config.part_bytes, **kwargs)
    membership.on_change = control.wake
    averager = BackgroundAverager(control, rule, schedule, config)
    gradients = SynchronousGradients(
        control, averager.sync_points, averager.count_gradients, averager.ledger.weigh_step
    )
    gradients.compress(compression)
    return averager, gradients


@contextmanager
def rank_of(collectives: Any, store: Any, goal: float, **kwargs: Any) -> Iterator[Rank]:
    """A replica, from start to a clean end."""
    rule: AveragingRule = kwargs.pop("rule", None) or DeltaMean()
    schedule: Schedule = kwargs.pop("schedule", None) or EveryNSteps(4)
    config = AveragerConfig(**{"timeouts": DEADLINES, **kwargs.pop("config", {})})
    numel = kwargs.pop("numel", 8)
    dead_after = kwargs.pop("dead_after", timedelta(seconds=20))
    buffers = kwargs.pop("buffers", "average")
    lr = kwargs.pop("lr", 0.1)
    module = kwargs.pop("module", None)
    assert not kwargs
    if module is None:
        module = nn.Linear(numel, 1, bias=False)
        with torch.no_grad():
            module.weight.fill_(1.0)
    membership = Membership(
        store, collectives.rank, collectives.world_size, interval=timedelta(seconds=0.05), dead_after=dead_after
    )
    membership.start()
    try:
        averager, gradients = assemble(
            collectives, membership, Replica(module, buffers, fragments=config.fragments), rule, schedule, config
        )
        try:
            averager.start()
            yield Rank(averager, gradients, module, goal, lr)
        finally:
            averager.close()
    finally:
        membership.close()


def run(
    world_size: int, body: Callable[[Rank], Any], timeout: float = 150.0, goals: Any = None, **kwargs: Any
) -> list[Any]:
    """Run ``body`` on every rank; its results by rank."""
    world = InProcessWorld(world_size)

    def on_rank(collectives: Any) -> Any:
        goal = goals[collectives.rank] if goals is not None else float(collectives.rank)
        with rank_of(collectives, world.store, goal, **kwargs) as rank:
            return body(rank)

    return world.run(on_rank, timedelta(seconds=timeout))

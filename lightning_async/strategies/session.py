"""One training of this replica among the others: what lives from its first batch to its last."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from lightning_async.comm.membership.generation import Generation
from lightning_async.comm.membership.signing import SECRET
from lightning_async.comm.membership.standing import ENDED, FAILED, Publisher, publish
from lightning_async.engine.averaging.averager import BackgroundAverager
from lightning_async.engine.averaging.batch_norm import recompute_batch_norm
from lightning_async.engine.averaging.config import AveragerConfig
from lightning_async.engine.averaging.optimizer_state import AveragedState, every_tensor, reset
from lightning_async.engine.control import ControlPlane
from lightning_async.engine.gradients.synchronous import SynchronousGradients
from lightning_async.engine.header import Arrival, Gate
from lightning_async.engine.replica import Replica
from lightning_async.engine.totals import Totals
from lightning_async.rules.averaging.protocol import AveragingRule
from lightning_async.rules.pace import Pace
from lightning_async.strategies.saved_state import SavedState, state_of
from lightning_async.strategies.standing import standing_of
from lightning_async.strategies.stepping import Steps, is_scaled
from lightning_async.strategies.survivors import Survivors, started
from lightning_async.trainer.pacing import Pacing
from lightning_async.trainer.patches import rank_zero_info
from lightning_async.transports.transport import Connection, Transport

__all__ = ["Averaged", "Session"]

log = logging.getLogger(__name__)


class Averaged(Steps, Protocol):
    """What a strategy has whose training this is."""

    config: AveragerConfig
    rule: AveragingRule
    survivors: Survivors | None
    host: Any
    num_runs: int
    transport: Transport
    failed: bool
    make_stepping: Callable[..., Any]
    make_totals: Callable[[], Totals] | None
    pacing: Pacing

    def go_on_without(self, names: Sequence[str], rank: int) -> None: ...

    @property
    def bucket_device(self) -> torch.device: ...

    @property
    def fewest(self) -> int: ...

    @property
    def shrinks(self) -> bool: ...

    @property
    def world_size(self) -> int: ...


class Session:
    """Averages in the background while the replica trains; closed by `close`.

    A fit has one, and another one for each time that training begins anew within it.

    Args:
        strategy: its module, its optimizers and its policies.
        connection: of all ranks.
        meet: how a gate that a step needs is opened.
        saved: averaging goes on from there, if it holds anything.
    """

    def __init__(
        self,
        strategy: Averaged,
        connection: Connection,
        meet: Callable[[Gate], Arrival],
        saved: SavedState,
    ) -> None:
        self._strategy, self._connection, self._world = strategy, connection, connection.world
        replica = Replica(strategy.module, strategy.buffers, strategy.bucket_device)
        self._averaged: AveragedState | None = None
        if strategy.optimizer_state_policy == "average":
            self._averaged = state = AveragedState(strategy.optimizers)
            replica.build(state, state.running_means)
        replica.watched = lambda: every_tensor(strategy.optimizers)
        config = strategy.config
        control = ControlPlane(
            connection.root, connection.membership, replica, config.deadlines,
            payload=connection.payload, part_bytes=config.part_bytes, calls=connection.world.calls,
            min_replicas=strategy.fewest, forks=connection.forks,
        )  # fmt: skip
        if control.regroup.possible:
            generation, before = connection.membership.generation, strategy.survivors
            wanted = config.fewest(started(strategy))
            strategy.survivors = Survivors(generation, strategy.num_runs, strategy.fewest, before, wanted)
            if strategy.shrinks:
                strategy.survivors.tell()
            control.regroup.on_loss = self._go_on
        elif strategy.shrinks:
            raise ValueError(
                f"`min_replicas={config.min_replicas}`: {strategy.transport!r} cannot form groups anew, so that the "
                "first rank that is lost ends training. Use `TorchTransport()`, or leave it out: over Horovod, "
                "`fit_elastic` trains on without ranks that are lost."
            )

        def on_change() -> None:
            control.wake()
            self._look()

        connection.membership.on_change = on_change
        self.averager = BackgroundAverager(control, strategy.rule, strategy.schedule, config)
        averager = self.averager
        self.gradients = gradients = SynchronousGradients(
            control, averager.gates, averager.synchronous_step, averager.wing.weigh_step
        )
        gradients.rounds.drops = not is_scaled(strategy)  # a scaler sees them, skips on all ranks, and lowers its scale
        gradients.rounds.on_drop = averager.summary.drop
        self.averager.summary.totals = None if strategy.make_totals is None else strategy.make_totals()
        self._saved = saved
        saved.resume(self.averager, strategy.global_rank, strategy.world_size)
        self.stepping = strategy.make_stepping(strategy, self.averager, gradients, meet)
        self._publisher: Publisher | None = None

    def start(self) -> None:
        """All ranks call this together, with equal replicas."""
        self._connection.open()
        self.averager.start()
        if (store := self._connection.store) is not None:
            strategy, averager, run = self._strategy, self.averager, self._strategy.num_runs
            secret = os.environ.get(SECRET)
            self._publisher = publish(store, lambda: standing_of(averager, strategy.survivors, run), secret)
        if (replica := self._saved.take_replica()) is not None:
            self.averager.marks.part(replica, replica["state_dict"], self._strategy.module)

    def _go_on(self, generation: Generation, why: str) -> None:
        """Ranks are lost: whoever had no room beside them has."""
        survivors = self._strategy.survivors
        assert survivors is not None
        lost = [name for name in survivors.generation.members if name not in generation.members]
        survivors.go_on(generation, why)
        self._strategy.go_on_without(lost, generation.rank)
        self._look()

    def _look(self) -> None:
        if self._strategy.host is not None:
            self._strategy.host.notice()

    def close(self) -> None:
        """Waits for no other rank."""
        self.averager.close()
        self.stepping.close()
        if self._averaged is not None:
            self._averaged.close()
        if self._publisher is not None:
            self._publisher.end(FAILED if self._strategy.failed else ENDED)

    def on_model_changed(self) -> None:
        """A gate has given all replicas another model."""
        strategy = self._strategy
        if strategy.optimizer_state_policy == "reset":
            reset(strategy.optimizers)
        if strategy.buffers == "recompute":
            recompute_batch_norm(strategy.module, list(self.stepping.recent), self._world)

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return state_of(self.averager, self._world)

    def sum_up(self) -> None:
        """All replicas are at the last gate: complete the summary of the run."""
        summary = self.averager.summary
        summary.elapsed_s = time.monotonic() - self.averager.started_at
        summary.samples_by_rank = self._world.gather_objects(summary.samples)
        names = self._world.gather_objects(self.averager.gates.name)
        paces = self._world.gather_objects(list(self._strategy.pacing.mean))
        self.stepping.sum_up()
        summary.paces = {name: Pace(*pace) for name, pace in zip(names, paces, strict=True)}
        if (survivors := self._strategy.survivors) is not None:
            summary.rank, summary.lost = survivors.generation.rank, survivors.lost

    def tell(self) -> None:
        """One summary of the run, on rank 0."""
        summary = self.averager.summary
        rank_zero_info(f"{summary.title}, as rank 0 saw it:\n{summary}")
        if summary.rank == 0 and (advice := summary.advice(self._strategy.schedule)):
            log.warning(advice)

"""What a gate is to Lightning: all ranks wait for one another, and everybody hears that the model has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_async.engine.gates import Gates
from lightning_async.engine.header import Arrival, Gate, Vote
from lightning_async.engine.world import World
from lightning_async.trainer.averaged_models import AveragedModels
from lightning_async.trainer.protocols import Drifting
from lightning_async.trainer.stopping import Stopping

__all__ = ["Meeting", "join_validation"]


class Meeting:
    """The gates of one fit, which all open through here.

    Args:
        strategy: has the gates.
        trainer: is told that training ends, and validates where another rank asks for it.
        stopping: how all ranks leave early.
    """

    def __init__(self, strategy: Drifting, trainer: Any, stopping: Stopping) -> None:
        self._strategy, self._trainer, self._stopping = strategy, trainer, stopping
        self._averaged_models: AveragedModels | None = None
        self.on_model_changed: list[Callable[[], None]] = []
        """Called, on all ranks together, when a gate has given all replicas another model."""
        self.on_met: Callable[[World], None] = lambda world: None
        """The same; not where a step needs a gate, at which those who need it are alone."""
        self.on_called: Callable[[], None] = lambda: None
        """Goes to `Gate.DECIDE`, because another rank has called all together."""

    def begin(self, world: World) -> None:
        """Training begins, or begins anew: the callbacks' averages over time are equal on all ranks."""
        self._averaged_models = AveragedModels(self._trainer, world)
        vars(self._trainer.strategy)["averaged_models"] = self._averaged_models  # for checkpoints

    def rendezvous(self, gate: Gate, index: int = 0) -> None:
        """Wait until every rank is at this gate with the same model; join what others ask for meanwhile."""
        strategy = self._strategy
        strategy.begin_again()
        gates, world = strategy.gates, strategy.world
        if gates is None or world is None or strategy.failed:
            return
        strategy.finish_batch()
        self._stopping.pass_on(gates)  # one that comes within an epoch may stand here before its first batch
        share_averages = self._before_gate()
        while (arrival := gates.rendezvous(gate, index)) is not Arrival.OPEN:
            if arrival is Arrival.STOP:
                self._stopping.leave(gates)
            if arrival is Arrival.DECIDE:
                self.on_called()
                self.rendezvous(gate, index)  # averaging may have begun anew
                return
            join_validation(self._trainer)
            if strategy.gates is not gates:
                self.rendezvous(gate, index)
                return
        self._opened(gates, world, share_averages)
        if gates.moved_at_gate:
            self.on_met(world)

    def within_batch(self, gate: Gate) -> Arrival:
        """Wait at a gate that a step needs. What others ask for instead has to wait for the end of the batch."""
        gates, world = self._strategy.gates, self._strategy.world
        assert gates is not None
        assert world is not None
        share_averages = self._before_gate()
        arrival = gates.rendezvous(gate)
        if arrival is Arrival.OPEN:
            self._opened(gates, world, share_averages)
            world.drifting = True  # the batch goes on
        return arrival

    def _before_gate(self) -> Callable[[], None]:
        assert self._averaged_models is not None
        return self._averaged_models.before_gate()

    def _opened(self, gates: Gates, world: World, share_averages: Callable[[], None]) -> None:
        world.drifting = False
        if Vote.END in gates.agreed:
            self._trainer.should_stop = True
        if gates.moved_at_gate:
            for listener in self.on_model_changed:
                listener()
        share_averages()


def join_validation(trainer: Any) -> None:
    """Validate although this rank's own loops do not come to it now. As in `_TrainingEpochLoop.on_advance_end`."""
    was_training = trainer.training
    first_loop_iter = trainer._logger_connector._first_loop_iter
    trainer.validating = True
    trainer.fit_loop.epoch_loop.val_loop.run()
    trainer.training = was_training
    trainer._logger_connector._first_loop_iter = first_loop_iter

"""What must change in Lightning's loops so that replicas may run at their own pace, and where they meet.

Each patch replaces one method of one object of one Trainer, and is taken back at tear-down.
"""

from __future__ import annotations

from typing import Any

from lightning_async.engine.header import Arrival, Gate
from lightning_async.engine.world import World
from lightning_async.trainer import refusals
from lightning_async.trainer.convening import Convening
from lightning_async.trainer.dealing import Dealing
from lightning_async.trainer.empty_shards import EmptyShards
from lightning_async.trainer.inheritance import Inheritance
from lightning_async.trainer.learning_rates import LearningRates
from lightning_async.trainer.meeting import Meeting
from lightning_async.trainer.metrics import WholeMetrics
from lightning_async.trainer.newcomers import Newcomers
from lightning_async.trainer.patches import Undo, replace, sync_metrics_through, take_back
from lightning_async.trainer.protocols import Drifting
from lightning_async.trainer.revalidation import Revalidation
from lightning_async.trainer.saving import Saving
from lightning_async.trainer.shortage import Shortage
from lightning_async.trainer.step_state import StepState
from lightning_async.trainer.stopping import Stopping
from lightning_async.trainer.succession import Succession
from lightning_async.trainer.validation import Validation

__all__ = ["DriftPatches"]


class DriftPatches:
    """The patches on one Trainer.

    Args:
        strategy: has the gates and hears the votes.
        trainer: its loops, its signal connector, and some of its callbacks are patched.
    """

    def __init__(self, strategy: Drifting, trainer: Any) -> None:
        self._strategy, self._trainer = strategy, trainer
        stopping = Stopping(strategy, trainer)
        self._meeting = Meeting(strategy, trainer, stopping)
        self._rates = LearningRates(strategy, trainer)
        self._inheritance = Inheritance(strategy, trainer, self._rates)
        self._newcomers = Newcomers(strategy, trainer, self._inheritance.epoch, self._rates)
        self._validation = Validation(strategy, trainer, self._meeting, self._inheritance)
        self._saving = saving = Saving(strategy, trainer)
        self._meeting.on_met = StepState(strategy, trainer, self._rates).make_equal
        self._meeting.on_model_changed += [
            self._validation.model_changed,
            saving.model_changed,
            strategy.on_model_changed,
        ]
        convening = Convening(strategy, trainer, self._meeting, saving, strategy.host)
        shortage = Shortage(strategy, trainer, convening, stopping)
        self._succession = Succession(trainer)
        self._parts = (
            stopping, convening, shortage, self._validation, saving, self._rates, EmptyShards(strategy, trainer),
            Dealing(strategy, trainer), self._inheritance, self._newcomers,
            Revalidation(strategy, trainer), WholeMetrics(strategy, trainer), self._succession,
        )  # fmt: skip
        self._undo: list[Undo] = []

    def install(self) -> None:
        """Patch."""
        for part in self._parts:
            for undo in part.install():
                self._undo.append(undo)
        self._undo.append(replace(self._trainer.fit_loop, "on_run_end", self._end_training))
        self._undo.append(lambda: vars(self._trainer.strategy).pop("averaged_models", None))
        self._undo += sync_metrics_through(lambda: self._strategy.world, self._trainer.lightning_module)

    def remove(self) -> None:
        """Take every patch back."""
        take_back(self._undo)

    def begin(self, world: World) -> None:
        """All ranks begin to train.

        Raises:
            ValueError: the ranks have unequal numbers of epochs, and something happens at their ends on all ranks.
        """
        self._validation.gates_epochs = refusals.check_fit(self._trainer, world)
        self._succession.begin(world)
        self._meeting.begin(world)

    def begin_steps(self, world: World) -> None:
        """Replicas are about to take steps: all ranks call this together."""
        self._meeting.on_met(world)

    def for_newcomers(self) -> dict[str, Any]:
        """What a newcomer must know of this fit, see `go_on`."""
        return {
            "gates_epochs": self._validation.gates_epochs,
            "epoch": self._newcomers.told(),
            "succession": self._succession.told(),
        }

    def foresee(self) -> None:
        """See `Newcomers`."""
        self._newcomers.foresee()

    def place(self, name: str, comes: bool = False) -> list[Any]:
        """See `Newcomers`."""
        return self._newcomers.place(name, comes)

    def go_on(self, world: World, name: str, places: list[list[Any]], told: dict[str, Any] | None = None) -> None:
        """The same training goes on in a world of all, with a newcomer: this rank, if it has been ``told``."""
        if told is not None:
            self._validation.gates_epochs = bool(told["gates_epochs"])
            self._succession.take(told["succession"])
        self._meeting.begin(world)
        self._newcomers.deal(name, places, None if told is None else told["epoch"])

    @property
    def has_part(self) -> bool:
        """Whether this rank, which has come within an epoch, takes part in the rest of it."""
        return self._inheritance.epoch.first is not None or self._inheritance.epoch.begins

    def tell_place(self) -> None:
        """What is sent next holds all that this rank has done, the batch under way included."""
        if self._strategy.shrinks and self._strategy.gates is not None:
            self._inheritance.tell_place(self._strategy.gates)

    def follow_schedule(self) -> None:
        """See `LearningRates.follow`."""
        self._rates.follow()

    def start_over(self) -> None:
        """Training begins anew within this fit."""
        self._validation.start_over()
        self._inheritance.start_over()
        self._rates.start_over()

    def within_batch(self, gate: Gate) -> Arrival:
        """See `Meeting.within_batch`."""
        return self._meeting.within_batch(gate)

    def _end_training(self, original: Any) -> Any:
        def on_run_end() -> None:
            self._meeting.rendezvous(Gate.TRAIN_END)
            self._saving.catch_up()
            self._strategy.summarise()
            original()

        return on_run_end

"""A callback calls all replicas together between two gates of theirs: they meet, hold one model, and decide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from lightning_async.engine.gates import Gates
from lightning_async.engine.header import Gate, Vote
from lightning_async.engine.world import World
from lightning_async.trainer.meeting import Meeting
from lightning_async.trainer.patches import Undo, replace, set_for_now
from lightning_async.trainer.protocols import Drifting

__all__ = ["Convened", "Convening", "Saves"]


@runtime_checkable
class Convened(Protocol):
    """A callback that decides with those of all other ranks, while replicas drift."""

    call_together: Callable[[], None] | None
    """Ask all ranks to come to `decide` at their next batch boundary; None while replicas do not drift."""

    def decide(self, world: World) -> bool:
        """All ranks are here and hold one model; whether this has put another one in its place, on all of them."""
        ...


@runtime_checkable
class Saves(Protocol):
    """A callback that saves where all ranks hold one model."""

    call_together: Callable[[], None] | None
    """See `Convened`."""

    def save_together(self, world: World) -> None:
        """All ranks are here and hold one model, which stays as it is."""
        ...


class Convening:
    """Introduces such callbacks to the gates of one fit.

    Args:
        strategy: whose gates these are.
        trainer: its callbacks, and the end of each batch.
        meeting: opens the gates.
        saving: no callback itself, and decides as these do.
        host: takes newcomers in, when all else is decided and there is no other model.
    """

    def __init__(
        self, strategy: Drifting, trainer: Any, meeting: Meeting, saving: Convened, host: Convened | None
    ) -> None:
        self._strategy, self._trainer, self._meeting = strategy, trainer, meeting
        self._saving, self._host = saving, host
        self._called = False
        """By a callback of this rank."""

    def install(self) -> list[Undo]:
        """Patch; returns what takes it back."""
        return [
            *(set_for_now(each, "call_together", self._call) for each in self._callers()),
            set_for_now(self._meeting, "on_called", self.hold),
            replace(self._trainer.fit_loop.epoch_loop, "on_advance_end", self._after_batch),
        ]

    def _convened(self) -> list[Convened]:
        return [self._saving, *(each for each in self._trainer.callbacks if isinstance(each, Convened))]

    def _saves(self) -> list[Saves]:
        return [each for each in self._trainer.callbacks if isinstance(each, Saves)]

    def _callers(self) -> list[Any]:
        return [*self._convened(), *self._saves(), *([self._host] if self._host else [])]

    def _call(self) -> None:
        if not self._strategy.call_with_step():
            self._called = True

    def _after_batch(self, original: Any) -> Any:
        def on_advance_end(data_fetcher: Any) -> None:
            original(data_fetcher)
            gates = self._strategy.gates
            if gates is not None and self.is_called(gates) and self._strategy.between_windows:
                self.hold()

        return on_advance_end

    def is_called(self, gates: Gates) -> bool:
        """Whether somebody has called all ranks together."""
        return self._called or self._strategy.called or Vote.DECIDE in gates.agreed

    def hold(self) -> None:
        """Meet, and decide; what is done to the model outside of averaging begins another training."""
        self._called = False
        self._meeting.rendezvous(Gate.DECIDE)
        world, gates = self._strategy.world, self._strategy.gates
        if world is None or gates is None:
            return
        replaced = [callback.decide(world) for callback in self._convened()]
        if any(replaced) and self._strategy.gates is gates:  # else the checkpoint that was loaded has seen to it
            module = self._trainer.lightning_module
            world.make_equal_([*module.parameters(), *module.buffers()])  # each may have gone back to its own
            self._strategy.start_over()
        elif not any(replaced):
            for callback in self._saves():
                callback.save_together(world)
            if self._host is not None:
                self._host.decide(world)

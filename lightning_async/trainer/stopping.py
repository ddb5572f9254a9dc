"""One rank is told to stop, or to end: all ranks do, from one model.

Lightning 2.6 broadcasts a SIGTERM flag before every batch, which is a hidden lockstep. Here a signal, a time limit or a
spike of the loss is a vote.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from lightning_async.engine.gates import Gates
from lightning_async.engine.header import Gate, Vote
from lightning_async.trainer.namespace import pytorch
from lightning_async.trainer.patches import Undo, callbacks_of, replace, replace_for_users
from lightning_async.trainer.preemption import in_this_process
from lightning_async.trainer.protocols import Drifting
from lightning_async.trainer.spikes import Spikes

__all__ = ["Stopping"]


class Stopping:
    """Patches the signal handler, the end of each batch, and `Timer` and `SpikeDetection`.

    Args:
        strategy: hears the votes.
        trainer: whose they are.
    """

    def __init__(self, strategy: Drifting, trainer: Any) -> None:
        self._strategy, self._trainer = strategy, trainer
        self._spikes = Spikes(trainer, self._vote)
        self._told = False
        """This rank was told to stop where there was nobody to tell yet."""

    def install(self) -> list[Undo]:
        """Patch; returns what takes it back."""
        epoch, signals = self._trainer.fit_loop.epoch_loop, self._trainer._signal_connector
        before = signals._sigterm_notifier_fn
        undo = [
            replace(signals, "_sigterm_notifier_fn", lambda original: in_this_process(self._on_sigterm)),
            replace(epoch, "on_advance_end", self._after_batch),
            *self._spikes.install(),
        ]
        registered = getattr(signal.getsignal(signal.SIGTERM), "signal_handlers", [])
        if before in registered:  # in a rank that comes to others, whose training has begun by then
            registered[registered.index(before)] = signals._sigterm_notifier_fn
        if hasattr(epoch, "_broadcast_sigterm_tensor"):
            undo.append(replace(epoch, "_broadcast_sigterm_tensor", lambda original: lambda: None))
        for timer in callbacks_of(self._trainer, "Timer"):
            undo.append(replace_for_users(timer, "_check_time_remaining", self._time_remaining(timer)))
        return undo

    def pass_on(self, gates: Gates) -> None:
        """Vote, if this rank was told to stop where there was nobody to tell yet."""
        if self._told:
            self._told = False
            gates.request_stop()

    def leave(self, gates: Gates) -> None:
        """A rank was told to stop: all leave from here, with one model."""
        gates.rendezvous(Gate.STOP)
        if self._strategy.world is not None:
            self._strategy.world.drifting = False
            self._spikes.raise_agreed(self._strategy.world)
        self._trainer._signal_connector.received_sigterm = True
        raise pytorch("utilities.exceptions").SIGTERMException

    def _vote(self) -> None:
        if (gates := self._strategy.gates) is not None:
            gates.vote(Vote.STOP)

    def _on_sigterm(self, number: int, frame: Any) -> None:
        gates = self._strategy.gates
        if gates is None:  # before training: Lightning's own flag would end this rank alone
            self._told = True
        else:
            gates.request_stop()

    def _after_batch(self, original: Any) -> Any:
        def on_advance_end(data_fetcher: Any) -> None:
            original(data_fetcher)
            gates = self._strategy.gates
            if gates is None:
                return
            self.pass_on(gates)
            gates.resume()
            if Vote.STOP in gates.agreed:
                self._strategy.finish_batch()
                self.leave(gates)
            if Vote.END in gates.agreed:
                self._trainer.should_stop = True
            elif self._trainer.should_stop:  # on this rank alone: it asks the others
                gates.vote(Vote.END)

        return on_advance_end

    def _time_remaining(self, timer: Any) -> Callable[[Any], Any]:
        """A time limit is checked on this rank's clock; when it is up, all ranks end."""

        def wrap(original: Any) -> Any:
            def check(trainer: Any) -> None:
                gates = self._strategy.gates
                if gates is None:
                    original(trainer)
                elif timer.time_elapsed() >= timer._duration:
                    gates.vote(Vote.END)

            return check

        return wrap

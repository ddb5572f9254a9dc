"""Averaging within one fit: session after session, as training begins anew, or as ranks come back."""

from __future__ import annotations

import logging
import threading
from typing import Any, Protocol

from lightning_async.engine.averaging.report import RunSummary
from lightning_async.engine.world import World
from lightning_async.strategies.saved_state import SavedState
from lightning_async.strategies.session import Averaged, Session
from lightning_async.strategies.survivors import started
from lightning_async.trainer.averaged_models import AveragedModels
from lightning_async.trainer.dealing import Dealing
from lightning_async.trainer.drift import DriftPatches
from lightning_async.trainer.patches import Undo, searches_lr, take_back
from lightning_async.trainer.protocols import Drifting
from lightning_async.trainer.validation import ShortEpochs
from lightning_async.transports.choose import how_to_have_more
from lightning_async.transports.transport import Connection, Transport

__all__ = ["Course", "Fitted"]

log = logging.getLogger(__name__)
_GOODBYE_S = 40.0  # longer than a connection takes to close


class Fitted(Averaged, Protocol):
    """What a strategy has whose fit this is."""

    saved: SavedState
    summary: RunSummary
    alone: str
    transport: Transport

    @property
    def connection(self) -> Connection | None: ...

    def connect_ranks(self) -> None: ...

    def disconnect(self, in_order: bool) -> None: ...

    def tell_alone(self, why: str = "") -> None: ...

    def use(self, connection: Connection, run: int) -> None: ...


class Course:
    """The sessions of one fit, of which there is one at a time, from its first batch to its last.

    Args:
        strategy: has a connection to the other ranks; in a world of one it has none, and there are no sessions.
        trainer: its loops are patched, from `install` to `end`.
    """

    def __init__(self, strategy: Any, trainer: Any) -> None:
        self._strategy: Fitted = strategy
        self._drifting: Drifting = strategy
        self._trainer = trainer
        self.patches = DriftPatches(strategy, trainer)
        self.session: Session | None = None
        self.undo: list[Undo] = []
        """What takes back what was patched, in the order in which it was."""
        self._begins_anew = self._stops = False
        self._goodbyes: list[threading.Thread] = []

    def install(self, world: World | None) -> None:
        """Patch the loops; all ranks call this together. One that is left alone only has to have all of the data."""
        if world is None:
            self.undo += Dealing(self._drifting, self._trainer).install()
            self.undo += ShortEpochs(self._trainer).install()
            return
        self.come()
        AveragedModels(self._trainer, world).make_equal(self._strategy.saved.own)

    def come(self) -> None:
        """The same, of one that comes while the others train, and is told what they have."""
        self.undo.append(self.patches.remove)
        self.patches.install()

    def begin(self) -> None:
        """Let this replica drift, if the others are here to begin with it."""
        strategy, self._begins_anew = self._strategy, False
        connection = strategy.connection
        if connection is None:
            strategy.summary = RunSummary(rank=strategy.global_rank, world_size=strategy.world_size)
            strategy.saved.leave_behind()  # it goes with weights that this training leaves behind
            if (began := started(strategy)) == 1:
                strategy.tell_alone(f"{strategy.alone}. {how_to_have_more(strategy.transport)}")
            else:
                log.warning(
                    "%s: this rank trains on alone, with all of the data: %d of %d were lost before, or have raised "
                    "what the program has caught. `min_replicas=%d` ends training on all ranks instead.",
                    type(strategy).__name__, began - 1, began, began,
                )  # fmt: skip
            return
        self.patches.begin(connection.world)
        self._go_on(connection)
        self.patches.begin_steps(connection.world)

    def start_over(self) -> None:
        """All ranks are here, and the next training begins on a connection of its own."""
        self.stop()
        self._strategy.disconnect(in_order=True)
        self._strategy.connect_ranks()
        self._begins_anew = True
        self.patches.start_over()

    def begin_again(self) -> None:
        """Before a batch or a gate: if a checkpoint was restored during training, average from there."""
        if self._begins_anew:
            self.begin()

    def widen(self, connection: Connection, run: int) -> None:
        """Average over this connection, of more ranks, from where averaging stood as it was stopped."""
        before = self._strategy.connection
        self._strategy.use(connection, run)
        if before is not None:
            connection.world.follow(before.world)
            # Nobody needs it any more, and nobody is to wait until all have heard that
            name = "lightning_async goodbye"
            self._goodbyes.append(threading.Thread(target=before.close, args=(True,), name=name, daemon=True))
            self._goodbyes[-1].start()
        self._go_on(connection)

    def summarise(self) -> None:
        """All replicas are at the last gate."""
        if self.session is not None:
            self.session.sum_up()
            self._strategy.saved.keep(self.session.state())
            if not searches_lr(self._trainer):
                self.session.tell()

    def end(self) -> None:
        """Waits for no other rank; the loops are Lightning's again."""
        take_back(self.undo)
        self.stop()
        while self._goodbyes:
            self._goodbyes.pop().join(_GOODBYE_S)

    def _go_on(self, connection: Connection) -> None:
        strategy = self._strategy
        self.session = Session(strategy, connection, self.patches.within_batch, strategy.saved)
        strategy.summary = self.session.averager.summary
        self.session.start()
        if self._stops:
            self.session.averager.gates.request_stop()
        if strategy.host is not None:
            strategy.host.open(self._trainer)

    def stop(self) -> None:
        """End the session; it does nothing where there is none."""
        if self._strategy.host is not None:
            self._strategy.host.close()
        if (session := self.session) is not None:
            session.close()
            self.session = None
            self._stops = session.averager.gates.stop_requested  # by a signal that nobody else has heard of yet

"""A joining rank: it waits to be taken in by the ranks that train, and goes on from where they are.

The other side of this protocol is `strategies/join`, whose page shows both.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import DistNetworkError, DistStoreError

from lightning_async.engine.collectives import LightningCollectives
from lightning_async.errors import AsyncTrainingError, CollectiveError, StoreLost
from lightning_async.membership.generation import Generation
from lightning_async.membership.join_protocol import JoinBoardWithTimeout
from lightning_async.membership.launcher_channel import came_back
from lightning_async.membership.startup import WaitWithLog
from lightning_async.strategies.join import PATIENCE, JoinConnector, PreparedJoin, digest, release
from lightning_async.strategies.rank_mapping import RankMap, count_run
from lightning_async.trainer.data.join import begin_within_epoch, take_over
from lightning_async.trainer.environment.settings import check_joining, settings_of
from lightning_async.trainer.namespace import in_words, pytorch
from lightning_async.transports.base import Connection
from lightning_async.transports.torch import TorchTransport

if TYPE_CHECKING:
    from lightning_async.strategies.async_strategy import AsyncStrategy

log = logging.getLogger(__name__)
_ANSWER_S = 5.0
_BOARD_LOOK_S = 0.05
_HEAR_S = 0.002  # while the others train, and while they stand and wait
_WAITS = (
    "waiting to be taken in by those who train: do they? If not, start all ranks again. If so, they may be as many as "
    "their `max_replicas` already, or on the way to a sync point"
)


class JoiningRank:
    """A process that was started while others train: it waits to be taken in, and goes on from where they are."""

    def __init__(self, strategy: AsyncStrategy, trainer: Any) -> None:
        self._strategy = strategy
        self._trainer = trainer
        self._number = int(strategy.cluster_environment.started_as)
        self._attempts = 0
        self._refused = (
            f"Rank {self._number} could not be taken in: see what those who train have logged. They go on without."
        )
        self.patience = timedelta(minutes=30)
        """How long to wait for a training to begin, and for its ranks to come to a sync point."""

    def join(self) -> None:
        """Wait to be taken in, and take over what the others have.

        Raises:
            SettingsMismatch, ValueError: what they train is something else, or over another transport.
            SIGTERMException: told to end while waiting.
            CollectiveTimeout: nobody trains, or nobody takes it in, for 30 minutes.
            StoreLost: the store is, also where it only says nothing for `Timeouts(dead_after=)`.
        """
        try:
            self._join()
        except (DistNetworkError, DistStoreError, ConnectionError) as error:
            said = str(error).splitlines()[0].rstrip(".")
            raise StoreLost(
                f"rank {self._number}: while it waited to be taken in, the store failed ({said}). Without it nobody "
                "can be. Start all again from the last checkpoint."
            ) from error

    def _join(self) -> None:
        transport = self._strategy.transport
        if not isinstance(transport, TorchTransport):
            raise ValueError(f"{transport!r} takes nobody in: start all ranks together.")
        dead_after = self._strategy.config.timeouts.dead_after
        door = JoinBoardWithTimeout(
            transport.door(self._strategy.cluster_environment), self._number, dead_after, self._end_if_told
        )
        log.warning("Rank %d comes while others train, and waits to be taken in by them.", self._number)
        while True:
            notice = self._wait(door.read_notice)
            self._compare(notice)
            if self._visit(transport, door, str(notice["room"])):
                return

    def _wait(
        self,
        look: Callable[[], dict[str, Any]],
        worthwhile: Callable[[], bool] = lambda: True,
        look_s: float = _BOARD_LOOK_S,
    ) -> dict[str, Any]:
        """Return what is found, or nothing where it is no longer worthwhile to wait."""
        patience = WaitWithLog(
            self._number, self.patience, self._end_if_told, sleep=lambda seconds: time.sleep(min(seconds, look_s))
        )
        while not (found := look()) and worthwhile():
            patience.wait(lambda: _WAITS)
        return found

    def _end_if_told(self) -> None:
        if self._trainer.received_sigterm:
            raise pytorch("utilities.exceptions").SIGTERMException

    def _compare(self, notice: dict[str, Any]) -> None:
        strategy = self._strategy
        if notice.get("fit") != strategy.num_fits:
            raise ValueError(
                f"Rank {self._number} comes back to fit number {strategy.num_fits} of its script, and the others are "
                f"in number {notice.get('fit')}: where a script fits several times, it can join the first only."
            )
        check_joining(notice.get("settings", {}), settings_of(strategy, self._trainer))
        if notice.get("model") != digest(strategy.module):
            raise ValueError(
                f"Rank {self._number} comes back with another model than those who train have: its parameters or "
                "buffers differ in number, name, shape or type. Build the same model on every rank."
            )

    def _visit(self, transport: TorchTransport, door: JoinBoardWithTimeout, room: str) -> bool:
        """Send heartbeats beside a run until it invites this rank, and go on with it; False where that came to nothing
        before this rank had anything of theirs."""
        strategy = self._strategy
        self._attempts += 1
        joining_rank = f"{self._number}.{came_back()}.{self._attempts}"
        dead_after = strategy.config.timeouts.dead_after
        membership = transport.visit(strategy.cluster_environment, room, joining_rank, dead_after)
        try:
            door.ask(membership.start)
            place = self._wait(
                lambda: door.read_invitation(joining_rank), lambda: door.read_notice().get("room") == room
            )
            ready = self._connect(transport, joining_rank, place, door) if place else None
        finally:
            membership.close()
        state = None if ready is None else self._receive(ready, lambda: door.read_answer(joining_rank))
        if ready is None or state is None:
            return False
        count_run(ready.run)
        config = strategy.config
        size = place["started"]
        began = RankMap(Generation.first(0, size), ready.run, config.survives(size), wanted=config.fewest(size))
        strategy.live_ranks = began.with_joining_ranks(ready.rank, ready.names, ready.run, place["ever"])
        self._take_part(ready, state, lambda: door.read_answer(joining_rank))
        return True

    def _connect(
        self, transport: TorchTransport, joining_rank: str, place: dict[str, Any], door: JoinBoardWithTimeout
    ) -> PreparedJoin | None:
        """Connect with all who train; None where they could not come, and train on."""

        def check() -> None:
            self._end_if_told()
            if door.read_answer(joining_rank):
                raise CollectiveError("one of them could not.")

        fit_sessions = self._strategy.fit_sessions
        rank = int(place["rank"])
        assert fit_sessions is not None
        own = fit_sessions.patches.joiner_data.place(place["names"][rank], comes=True)
        strategy = self._strategy
        timeouts = strategy.config.timeouts
        connector = JoinConnector(transport, strategy.cluster_environment, strategy.root_device, timeouts)
        try:
            return connector.connect(rank, joining_rank, place, check, own=own)
        except StoreLost:
            raise
        except AsyncTrainingError as error:
            log.warning("Rank %d could not be taken in, and waits again: %s", self._number, error)
            return None

    def _receive(self, ready: PreparedJoin, answer: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Receive what rank 0 has, once all stand at a sync point; None where that does not happen, and they train on.

        Raises:
            AsyncTrainingError: they have stood there, and could not.
        """
        connection = ready.connection
        assert ready.pair is not None

        def check() -> None:
            connection.membership.check()
            self._end_if_told()

        world = LightningCollectives(ready.pair, check, self.patience)
        try:
            own = world.hand_over(None)
            of_all = world.hand_over(None)
            return {**own, **of_all, "averaging": {**own["averaging"], **of_all["averaging"]}}
        except BaseException as error:
            release(connection, in_words(error))
            if not isinstance(error, AsyncTrainingError) or isinstance(error, StoreLost):
                raise
            until = time.monotonic() + _ANSWER_S
            if not self._wait(answer, lambda: time.monotonic() < until).get("again", True):
                raise AsyncTrainingError(self._refused) from error
            log.warning("Rank %d could not be taken in, and waits again: %s", self._number, error)
            return None

    def _take_part(self, ready: PreparedJoin, state: dict[str, Any], answer: Callable[[], dict[str, Any]]) -> None:
        strategy = self._strategy
        trainer = self._trainer
        fit_sessions = self._strategy.fit_sessions
        connection = ready.connection
        assert fit_sessions is not None
        try:
            self._hear(connection, answer)
            take_over(trainer, state)
            if trainer.fit_loop.done:
                raise ValueError(
                    f"Rank {self._number} comes to epoch {trainer.current_epoch}, step {trainer.global_step} of the "
                    "others, where its own limits end training. Give it the same `max_epochs` and `max_steps`."
                )
            fit_sessions.come()
            fit_sessions.undo += reversed(begin_within_epoch(trainer, state, lambda: fit_sessions.patches.has_part))
        except BaseException as error:
            release(connection, in_words(error))
            raise
        strategy.take_handed_over(state["strategy"])
        strategy.saved.go_on(state["averaging"])
        fit_sessions.widen(connection, ready.run)
        fit_sessions.patches.go_on(connection.world, ready.name, state["places"], state)
        connection.world.asynchronous = True  # until the end of the epoch, where all meet

    def _hear(self, connection: Connection, answer: Callable[[], dict[str, Any]]) -> None:
        """Wait for the others' word that this rank is one of them.

        Raises:
            AsyncTrainingError: it is not, or they are gone.
        """
        patience = max(PATIENCE, 2 * self._strategy.config.timeouts.dead_after)  # one may be lost as they vote
        until = time.monotonic() + patience.total_seconds()

        def worthwhile() -> bool:
            connection.membership.check()
            return time.monotonic() < until

        if not self._wait(answer, worthwhile, look_s=_HEAR_S).get("admitted"):
            raise AsyncTrainingError(self._refused)

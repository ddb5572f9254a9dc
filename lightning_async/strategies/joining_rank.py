"""A joining rank: it waits to be admitted by the ranks that train, and goes on from their state.

`strategies/join` is the other side of this protocol; its module docstring shows both sides.
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
from lightning_async.strategies.rank_mapping import RankMap, begin_call, count_run, next_call
from lightning_async.trainer.data.join import JoinState
from lightning_async.trainer.environment.settings import TrainerSettings, check_joining
from lightning_async.trainer.namespace import in_words, pytorch
from lightning_async.transports.base import Connection
from lightning_async.transports.torch import TorchTransport

if TYPE_CHECKING:
    from lightning_async.strategies.async_strategy import AsyncStrategy

log = logging.getLogger(__name__)
_ANSWER_S = 5.0
_BOARD_LOOK_S = 0.05
_HEAR_S = 0.002  # shorter than `_BOARD_LOOK_S`, because the others wait at a sync point meanwhile
_WAITS = (
    "waiting to be admitted by the ranks that train. Are there any? If not, start all ranks again. If so, they may be "
    "as many as their `max_replicas` already, or on the way to a sync point"
)


class JoiningRank:
    """A process that was started while others train; it waits to be admitted, and goes on from their state.

    Args:
        strategy: Strategy of this rank, without a connection yet.
        trainer: Trainer of the fit.
    """

    def __init__(self, strategy: AsyncStrategy, trainer: Any) -> None:
        self._strategy = strategy
        self._trainer = trainer
        self._number = int(strategy.cluster_environment.started_as)
        self._attempts = 0
        self._refusal = ""
        self._refused = (
            f"Rank {self._number} could not be admitted: see the logs of the ranks that train. They go on without it."
        )
        self.patience = timedelta(minutes=30)
        """The longest wait until other ranks train, and until they come to a sync point."""

    def join(self) -> None:
        """Wait to be admitted, and take over the state of the other ranks.

        Raises:
            SettingsMismatch: the other ranks train with other settings.
            ValueError: the other ranks have another model; or ranks cannot join over this transport; or this rank's own
                limits would end training at once.
            CallIsOver: the other ranks have finished this fit.
            SIGTERMException: this process received SIGTERM while it waited.
            CollectiveTimeout: for 30 minutes no rank trains, or the ranks that train do not answer.
            StoreLost: the store is lost, or has not answered for `Timeouts(dead_after=)`.
            AsyncTrainingError: the ranks that train have decided not to admit this rank.
        """
        try:
            self._join()
        except (DistNetworkError, DistStoreError, ConnectionError) as error:
            said = str(error).splitlines()[0].rstrip(".")
            raise StoreLost(
                f"rank {self._number}: while it waited to be admitted, the store failed ({said}). Without the store no "
                "rank can join. Start all again from the last checkpoint."
            ) from error

    def _join(self) -> None:
        transport = self._strategy.transport
        if not isinstance(transport, TorchTransport):
            raise ValueError(f"{transport!r} admits no joining ranks: start all ranks together.")
        dead_after = self._strategy.config.timeouts.dead_after
        door = JoinBoardWithTimeout(
            transport.door(self._strategy.cluster_environment), self._number, dead_after, self._end_if_told
        )
        log.warning("Rank %d was started while others train, and waits to be admitted by them.", self._number)
        while True:
            notice = self._wait(lambda: self._read_notice(door))
            self._compare(notice)
            if self._visit(transport, door, str(notice["room"])):
                return

    def _read_notice(self, door: JoinBoardWithTimeout) -> dict[str, Any]:
        """Return the notice of this rank's call of the Trainer; raise `CallIsOver` once that call is over."""
        self._strategy.finished_calls.leave_if_over(door)
        notice = door.read_notice()
        return notice if notice.get("call") == next_call() else {}

    def _wait(
        self,
        look: Callable[[], dict[str, Any]],
        worthwhile: Callable[[], bool] = lambda: True,
        look_s: float = _BOARD_LOOK_S,
    ) -> dict[str, Any]:
        """Wait until the other ranks have written an entry to the store, and return it.

        Args:
            look: Function that reads the entry; it returns an empty dict while there is no entry.
            worthwhile: Function that returns whether the entry may still be written; if not, an empty dict is returned.
                Default: always True.
            look_s: Longest time between two calls of ``look``, in seconds.
        """
        patience = WaitWithLog(
            self._number, self.patience, self._end_if_told, sleep=lambda seconds: time.sleep(min(seconds, look_s))
        )
        while not (found := look()) and worthwhile():
            patience.wait(lambda: _WAITS)
        return found

    def _end_if_told(self) -> None:
        """Raise SIGTERMException if this process has received SIGTERM, which Lightning's handler only records."""
        if self._trainer.received_sigterm:
            raise pytorch("utilities.exceptions").SIGTERMException

    def _compare(self, notice: dict[str, Any]) -> None:
        """Raise an error if this rank's settings or model differ from those in the notice of the other ranks."""
        strategy = self._strategy
        check_joining(notice.get("settings", {}), TrainerSettings(self._trainer).of_fit())
        if notice.get("model") != digest(strategy.module):
            raise ValueError(
                f"Rank {self._number} comes back with another model than those who train have: its parameters or "
                "buffers differ in number, name, shape or type. Build the same model on every rank."
            )

    def _visit(self, transport: TorchTransport, door: JoinBoardWithTimeout, room: str) -> bool:
        """Send heartbeats to the ranks of a run until they invite this rank, then try to join them.

        Args:
            transport: Transport of this rank.
            door: The run's entries in the store for joining ranks.
            room: Prefix of the run's keys in the store.

        Returns:
            Whether this rank has joined; False if the attempt has failed and this rank may try again.
        """
        strategy = self._strategy
        self._attempts += 1
        # A new name for each attempt, because notes of earlier attempts, also in other fits, stay in the store.
        joining_rank = f"{self._number}.{came_back()}.{next_call()}.{self._attempts}"
        dead_after = strategy.config.timeouts.dead_after
        membership = transport.visit(strategy.cluster_environment, room, joining_rank, dead_after)
        try:
            door.ask(membership.start)
            place = self._wait(
                lambda: door.read_invitation(joining_rank), lambda: door.read_notice().get("room") == room
            )
            ready = self._connect(transport, joining_rank, place, door) if place else None
        finally:
            # The new connection has heartbeats of its own; those of the visit end normally.
            membership.close()
        state = None if ready is None else self._receive(ready, lambda: door.read_answer(joining_rank))
        if ready is None or state is None:
            return False
        # This rank has not counted the earlier runs of the others.
        begin_call(next_call())
        count_run(ready.run)
        config = strategy.config
        size = place["started"]
        # As if this rank had been there from the start, so that all ranks count the same lost ranks.
        began = RankMap(Generation.first(0, size), ready.run, config.survives(size), wanted=config.fewest(size))
        strategy.live_ranks = began.with_joining_ranks(ready.rank, ready.names, ready.run, place["ever"])
        self._take_part(ready, state, lambda: door.read_answer(joining_rank))
        return True

    def _connect(
        self, transport: TorchTransport, joining_rank: str, place: dict[str, Any], door: JoinBoardWithTimeout
    ) -> PreparedJoin | None:
        """Connect with all ranks that train.

        If that fails, return None; the other ranks then train on without this rank.
        """

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
            self._tell_refusal(error)
            return None

    def _tell_refusal(self, error: AsyncTrainingError) -> None:
        """Log why this rank is not admitted yet; the same reason is a warning once."""
        level = logging.DEBUG if str(error) == self._refusal else logging.WARNING
        log.log(level, "Rank %d could not be admitted, and waits again: %s", self._number, error)
        self._refusal = str(error)

    def _receive(self, ready: PreparedJoin, answer: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Receive rank 0's state, which rank 0 sends when all ranks have come to a sync point and admit this rank.

        Args:
            ready: The prepared join.
            answer: Function that reads from the store whether the ranks that train have admitted this rank; it is
                called if the state does not arrive.

        Returns:
            The state; None if rank 0 does not send it, and this rank may try again.

        Raises:
            AsyncTrainingError: the ranks have decided at their sync point not to admit this rank.
            StoreLost: the store is lost.
        """
        connection = ready.connection
        assert ready.pair is not None

        def check() -> None:
            connection.membership.check()
            self._end_if_told()

        world = LightningCollectives(ready.pair, check, self.patience)
        try:
            # Two messages: rank 0 packs the first one before the vote, and knows the second one only after it.
            own = world.hand_over(None)
            of_all = world.hand_over(None)
            return {**own, **of_all, "averaging": {**own["averaging"], **of_all["averaging"]}}
        except BaseException as error:
            release(connection, in_words(error))
            if not isinstance(error, AsyncTrainingError) or isinstance(error, StoreLost):
                raise
            # The answer was written before the connection was closed, but may be read a little later.
            until = time.monotonic() + _ANSWER_S
            if not self._wait(answer, lambda: time.monotonic() < until).get("again", True):
                raise AsyncTrainingError(self._refused) from error
            self._tell_refusal(error)
            return None

    def _take_part(self, ready: PreparedJoin, state: dict[str, Any], answer: Callable[[], dict[str, Any]]) -> None:
        """Wait until this rank is admitted, restore the received state, and begin a session with the other ranks."""
        strategy = self._strategy
        trainer = self._trainer
        fit_sessions = self._strategy.fit_sessions
        connection = ready.connection
        assert fit_sessions is not None
        try:
            self._hear(connection, answer)
            JoinState(trainer).restore(state)
            if trainer.fit_loop.done:
                raise ValueError(
                    f"Rank {self._number} comes to epoch {trainer.current_epoch}, step {trainer.global_step} of the "
                    "others, where its own limits end training. Give it the same `max_epochs` and `max_steps`."
                )
            fit_sessions.come()
            fit_sessions.patches.joiner_data.begin_within_epoch(state["logged"])
        except BaseException as error:
            release(connection, in_words(error))
            raise
        strategy.take_handed_over(state["strategy"])
        strategy.saved.go_on(state["averaging"])
        fit_sessions.widen(connection, ready.run)
        fit_sessions.patches.go_on(connection.world, ready.name, state["places"], state)
        connection.world.asynchronous = True  # this rank begins within an epoch; all wait for each other at its end

    def _hear(self, connection: Connection, answer: Callable[[], dict[str, Any]]) -> None:
        """Wait until the other ranks have answered, in the store, that this rank is admitted.

        Args:
            connection: Connection with the other ranks.
            answer: Function that reads their answer from the store; it returns an empty dict while there is no answer.

        Raises:
            AsyncTrainingError: this rank is not admitted, or another rank is lost.
        """
        # Twice the time after which a rank is lost, because a rank may be lost during the vote.
        patience = max(PATIENCE, 2 * self._strategy.config.timeouts.dead_after)
        until = time.monotonic() + patience.total_seconds()

        def worthwhile() -> bool:
            connection.membership.check()
            return time.monotonic() < until

        if not self._wait(answer, worthwhile, look_s=_HEAR_S).get("admitted"):
            raise AsyncTrainingError(self._refused)

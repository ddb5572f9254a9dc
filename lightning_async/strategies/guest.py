"""A process that was started while others train: it waits until they take it in, and goes on from where they are.

What happens between the two is drawn in `host`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError

from lightning_async.comm.launched import came_back
from lightning_async.comm.membership.asking import AskingDoor
from lightning_async.comm.membership.generation import Generation
from lightning_async.comm.membership.start import Patience
from lightning_async.engine.world import World
from lightning_async.errors import AsyncTrainingError, CollectiveError, StoreLost
from lightning_async.strategies.connecting import PATIENCE, Ready, connect, release
from lightning_async.strategies.host import Hosting, digest
from lightning_async.strategies.survivors import Survivors, count_run
from lightning_async.trainer.latecomer import begin_within_epoch, take_over
from lightning_async.trainer.namespace import pytorch
from lightning_async.trainer.patches import in_words
from lightning_async.trainer.settings import check_newcomer, settings_of
from lightning_async.transports.transport import Connection, ElasticTransport

__all__ = ["Guest"]

log = logging.getLogger(__name__)
_LOOK_S, _HEAR_S = 0.05, 0.002  # while the others train, and while they stand and wait
_ANSWER_S = 5.0
_WAITS = (
    "waiting to be taken in by those who train: do they? If not, start all ranks again. If so, they may be as many as "
    "their `max_replicas` already, or on the way to a gate"
)


class Guest:
    """See `join`.

    Args:
        strategy: its own.
        trainer: about to train.
    """

    def __init__(self, strategy: Hosting, trainer: Any) -> None:
        self._strategy, self._trainer = strategy, trainer
        self._number = int(strategy.cluster_environment.started_as)
        self._attempts = 0
        self._refused = (
            f"Rank {self._number} could not be taken in: see what those who train have logged. They go on without."
        )
        self.patience = timedelta(minutes=30)
        """How long to wait for a training to begin, and for its ranks to come to a gate."""

    def join(self) -> None:
        """Wait to be taken in, and take over what the others have.

        Raises:
            SettingsMismatch, ValueError: what they train is something else, or over another transport.
            SIGTERMException: told to end while waiting.
            CollectiveTimeout: nobody trains, or nobody takes it in, for 30 minutes.
            StoreLost: the store is, also where it only says nothing for `Deadlines(dead_after=)`.
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
        if not isinstance(transport, ElasticTransport):
            raise ValueError(f"{transport!r} takes nobody in: start all ranks together.")
        dead_after = self._strategy.config.deadlines.dead_after
        door = AskingDoor(
            transport.door(self._strategy.cluster_environment), self._number, dead_after, self._end_if_told
        )
        log.warning("Rank %d comes while others train, and waits to be taken in by them.", self._number)
        while True:
            notice = self._wait(door.read_notice)
            self._compare(notice)
            if self._visit(transport, door, str(notice["room"])):
                return

    def _wait(
        self, look: Callable[[], dict[str, Any]], worthwhile: Callable[[], bool] = lambda: True, look_s: float = _LOOK_S
    ) -> dict[str, Any]:
        """What is found, or nothing where it is no longer worthwhile to wait."""
        patience = Patience(
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
        check_newcomer(notice.get("settings", {}), settings_of(strategy, self._trainer))
        if notice.get("model") != digest(strategy.module):
            raise ValueError(
                f"Rank {self._number} comes back with another model than those who train have: its parameters or "
                "buffers differ in number, name, shape or type. Build the same model on every rank."
            )

    def _visit(self, transport: ElasticTransport, door: AskingDoor, room: str) -> bool:
        """Beat beside a run until it invites this rank, connect, and go on with it; False where that came to nothing
        before this rank had anything of theirs."""
        strategy, self._attempts = self._strategy, self._attempts + 1
        guest = f"{self._number}.{came_back()}.{self._attempts}"
        dead_after = strategy.config.deadlines.dead_after
        membership = transport.visit(strategy.cluster_environment, room, guest, dead_after)
        try:
            door.ask(membership.start)
            place = self._wait(lambda: door.read_invitation(guest), lambda: door.read_notice().get("room") == room)
            ready = self._connect(guest, place, door) if place else None
        finally:
            membership.close()
        state = None if ready is None else self._receive(ready, lambda: door.read_answer(guest))
        if ready is None or state is None:
            return False
        count_run(ready.run)
        config, size = strategy.config, place["started"]
        began = Survivors(Generation.first(0, size), ready.run, config.survives(size), wanted=config.fewest(size))
        strategy.survivors = began.with_newcomers(ready.rank, ready.names, ready.run, place["ever"])
        self._take_part(ready, state, lambda: door.read_answer(guest))
        return True

    def _connect(self, guest: str, place: dict[str, Any], door: AskingDoor) -> Ready | None:
        """With all who train; None where they could not come, and train on."""

        def check() -> None:
            self._end_if_told()
            if door.read_answer(guest):
                raise CollectiveError("one of them could not.")

        course, rank = self._strategy.course, int(place["rank"])
        assert course is not None
        own = course.patches.place(place["names"][rank], comes=True)
        try:
            return connect(self._strategy, rank, guest, place, check, own=own)
        except StoreLost:
            raise
        except AsyncTrainingError as error:
            log.warning("Rank %d could not be taken in, and waits again: %s", self._number, error)
            return None

    def _receive(self, ready: Ready, answer: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """What rank 0 has, once all stand at a gate; None where it does not come to that, and they train on.

        Raises:
            AsyncTrainingError: they have stood there, and could not.
        """
        connection = ready.connection
        assert ready.pair is not None

        def check() -> None:
            connection.membership.check()
            self._end_if_told()

        world = World(ready.pair, check, self.patience)
        try:
            own, of_all = world.hand_over(None), world.hand_over(None)
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

    def _take_part(self, ready: Ready, state: dict[str, Any], answer: Callable[[], dict[str, Any]]) -> None:
        strategy, trainer, course, connection = self._strategy, self._trainer, self._strategy.course, ready.connection
        assert course is not None
        try:
            self._hear(connection, answer)
            take_over(trainer, state)
            if trainer.fit_loop.done:
                raise ValueError(
                    f"Rank {self._number} comes to epoch {trainer.current_epoch}, step {trainer.global_step} of the "
                    "others, where its own limits end training. Give it the same `max_epochs` and `max_steps`."
                )
            course.come()
            course.undo += reversed(begin_within_epoch(trainer, state, lambda: course.patches.has_part))
        except BaseException as error:
            release(connection, in_words(error))
            raise
        strategy.take_handed_over(state["strategy"])
        strategy.saved.go_on(state["averaging"])
        course.widen(connection, ready.run)
        course.patches.go_on(connection.world, ready.name, state["places"], state)
        connection.world.drifting = True  # until the end of the epoch, where all meet

    def _hear(self, connection: Connection, answer: Callable[[], dict[str, Any]]) -> None:
        """Wait for the others' word that this rank is one of them.

        Raises:
            AsyncTrainingError: it is not, or they are gone.
        """
        patience = max(PATIENCE, 2 * self._strategy.config.deadlines.dead_after)  # one may be lost as they vote
        until = time.monotonic() + patience.total_seconds()

        def worthwhile() -> bool:
            connection.membership.check()
            return time.monotonic() < until

        if not self._wait(answer, worthwhile, look_s=_HEAR_S).get("admitted"):
            raise AsyncTrainingError(self._refused)

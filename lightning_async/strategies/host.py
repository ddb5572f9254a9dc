"""A rank that was lost comes back: those who train take it in at a gate, and go on with it from there.

    those who train                          the newcomer, a process of its own, see `guest`
    pin a notice: which run, which settings
                                             builds its model, compares, waits beside the run as a guest
    see the guest, and rank 0 invites it
    ------ all connect beside the connection that they have, and while they train, see `reception` ------
    all go to a gate, where rank 0 hands its state over
                                             takes it over
    vote over the old connection
        all could: it is closed, and averaging goes on over the new one
                                             hears that, and is one of them
        else: the new one is closed; nothing has happened
                                             hears that, and ends

So whatever becomes of the newcomer meanwhile, those who train go on.
"""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections.abc import Callable
from typing import Any, Protocol

import torch

from lightning_async.comm.membership.door import Door
from lightning_async.engine.averaging.report import RunSummary
from lightning_async.engine.tensors import describe
from lightning_async.engine.world import World
from lightning_async.events import tell
from lightning_async.strategies.connecting import Connected, Ready, release
from lightning_async.strategies.course import Course
from lightning_async.strategies.reception import Reception, for_life, tell_failed
from lightning_async.strategies.saved_state import SavedState, state_of
from lightning_async.strategies.survivors import count_run
from lightning_async.trainer.absent import without_own
from lightning_async.trainer.averaged_models import AveragedModels
from lightning_async.trainer.latecomer import state_for_newcomers
from lightning_async.trainer.patches import in_words
from lightning_async.trainer.settings import settings_of
from lightning_async.transports.transport import ElasticTransport

__all__ = ["Host", "Hosting", "digest"]


class Hosting(Connected, Protocol):
    """What a strategy has to whose training ranks come back."""

    num_fits: int
    num_runs: int
    saved: SavedState
    course: Course | None

    @property
    def module(self) -> Any: ...

    def settings(self) -> dict[str, object]: ...

    def usual_settings(self) -> dict[str, object]: ...


class Host:
    """Takes newcomers in; see `Convened`.

    Args:
        strategy: whose training they come to.
    """

    def __init__(self, strategy: Hosting) -> None:
        self._strategy = strategy
        self.call_together: Callable[[], None] | None = None
        self._door: Door | None = None
        self._reception: Reception | None = None

    def open(self, trainer: Any) -> None:
        """Training begins, or goes on as another run: let it be known."""
        strategy, transport = self._strategy, self._strategy.transport
        connection, survivors = strategy.connection, strategy.survivors
        if not isinstance(transport, ElasticTransport) or connection is None or survivors is None:
            return
        self._door = transport.door(strategy.cluster_environment)
        most = strategy.config.max_replicas or survivors.started
        self._reception = Reception(strategy, self._door, most, self._call)
        if self._speaks:
            self._pin(
                {
                    "room": connection.name,
                    "fit": strategy.num_fits,
                    "settings": settings_of(strategy, trainer),
                    "model": digest(strategy.module),
                }
            )
        self.notice()

    def close(self) -> None:
        """Training ends: it takes nobody in any more."""
        if self._speaks:
            self._pin({})
        if self._reception is not None:
            self._reception.close()
        self._door = self._reception = None

    @property
    def _speaks(self) -> bool:
        """Whether it is this rank that tells newcomers of those that train."""
        survivors = self._strategy.survivors
        return self._door is not None and survivors is not None and survivors.generation.rank == 0

    def _pin(self, notice: dict[str, Any]) -> None:
        assert self._door is not None
        with contextlib.suppress(RuntimeError, OSError):  # the store is gone: the heartbeat says so
            self._door.pin(notice)

    def notice(self) -> None:
        """Something is new among the heartbeats, on whose thread this is called."""
        if (reception := self._reception) is not None:
            reception.look()

    def _call(self) -> None:
        if (call := self.call_together) is not None:
            call()
        if (course := self._strategy.course) is not None:
            course.patches.foresee()

    def decide(self, world: World) -> bool:
        """All are here and hold one model: take in who is ready. Nobody gets another model by it."""
        strategy, course, reception = self._strategy, self._strategy.course, self._reception
        if reception is None or course is None or course.session is None:
            return False
        told = world.gather_objects((reception.offer, bool(strategy.module.trainer.fit_loop.done)))
        guest, ends = told[0]  # for rank 0, and so for whoever is as it is, it may be too late
        if not guest or ends or any(offer != guest for offer, _ in told):
            return False
        averaging = state_of(course.session.averager, world)
        steps = [each["step"] for each in averaging["replicas"]]
        averaging["mean_steps"] = sum(steps) / len(steps)  # the clock of all does not jump as one more comes
        averaging["replicas"].append({**without_own(averaging["replicas"][0]), "summary": RunSummary().state_dict()})
        ready = reception.take()
        try:
            self._take_in(guest, ready, course, averaging, world)
        except BaseException as error:
            if ready is not None and strategy.connection is not ready.connection:
                release(ready.connection, in_words(error))
            raise
        return False

    def _take_in(
        self, guest: str, ready: Ready | None, course: Course, averaging: dict[str, Any], world: World
    ) -> None:
        """All stand and wait: go on with the newcomer, if all can, and else without."""
        strategy, reception = self._strategy, self._reception
        assert reception is not None
        places, why = ([], "it is gone.") if ready is None else self._hand_over(ready, course, averaging)
        all_could = bool(world.reduce(torch.tensor(float(not why)), "min") > 0.0)
        reception.answer(guest, admitted=all_could)
        if ready is None or not all_could:
            why = why or "another rank could not."
            if ready is not None:
                reception.drop(ready, why)
            tell_failed(world.rank, guest, why)
            return
        rank, run = world.rank, count_run(ready.run)
        words = f"Rank {rank}: rank {for_life(guest)} has joined, and {len(ready.names)} replicas train from here."
        tell("joined", logging.WARNING, words, rank=rank, run=run, world_size=len(ready.names))
        strategy.saved.go_on(averaging)
        course.stop()  # from here on nobody is lost by its count
        survivors = strategy.survivors
        assert survivors is not None
        # By names, as one may be lost since it was made.
        strategy.survivors = survivors.with_newcomers(ready.rank, ready.names, run)
        course.widen(ready.connection, run)
        course.patches.go_on(ready.connection.world, ready.name, places)

    def _hand_over(self, ready: Ready, course: Course, averaging: dict[str, Any]) -> tuple[list[list[Any]], str]:
        """Give the newcomer what it needs; where all are once it has that, or why that could not be."""
        trainer, world = self._strategy.module.trainer, ready.connection.world
        try:
            if ready.pair is not None:
                state = {**state_for_newcomers(trainer), **course.patches.for_newcomers(), "averaging": averaging}
                World(ready.pair, ready.connection.membership.check).broadcast(state)
            places = world.gather_objects(course.patches.place(ready.name))
            AveragedModels(trainer, world).make_equal()
        except Exception as error:  # of hooks of the user's, too: who trains goes on
            ready.connection.membership.fail(in_words(error))  # nobody waits for it
            return [], f"{type(error).__name__}: {error}"
        return places, ""


def digest(module: Any) -> int:
    """Of the names, shapes and types of all that replicas share; what is trained of it may change in an epoch."""
    return zlib.crc32(repr([line.rpartition(", ")[0] for line in describe(module)]).encode())

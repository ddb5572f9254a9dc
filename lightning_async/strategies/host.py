"""A rank that was lost comes back: those who train take it in at a gate, and go on with it from there.

    those who train                          the newcomer, a process of its own, see `guest`
    pin a notice: which run, which settings
                                             builds its model, compares, waits beside the run as a guest
    one sees the guest: all go to a gate
    rank 0 invites it to a new run
    all connect, beside the connection that they have; the newcomer takes over rank 0's state
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
from datetime import timedelta
from typing import Any, Protocol

import torch

from lightning_async.comm.membership.door import Door
from lightning_async.engine.averaging.config import AveragerConfig
from lightning_async.engine.averaging.report import RunSummary
from lightning_async.engine.tensors import describe
from lightning_async.engine.world import World
from lightning_async.errors import CollectiveTimeout
from lightning_async.events import tell
from lightning_async.strategies.course import Course
from lightning_async.strategies.saved_state import SavedState, state_of
from lightning_async.strategies.survivors import Survivors, count_run, run_name
from lightning_async.trainer.averaged_models import AveragedModels
from lightning_async.trainer.environments import Survivor
from lightning_async.trainer.latecomer import state_for_newcomers
from lightning_async.trainer.patches import in_words
from lightning_async.trainer.settings import settings_of
from lightning_async.transports.transport import Connection, ElasticTransport, Transport

__all__ = ["PATIENCE", "Host", "Hosting", "connect", "digest"]

PATIENCE = timedelta(seconds=30)
"""How long those who train stand still at most for a newcomer that has said that it is there."""


class Hosting(Protocol):
    """What a strategy has to whose training ranks come back."""

    config: AveragerConfig
    transport: Transport
    survivors: Survivors | None
    num_fits: int
    num_runs: int
    saved: SavedState
    course: Course | None

    @property
    def cluster_environment(self) -> Any: ...

    @property
    def connection(self) -> Connection | None: ...

    @property
    def module(self) -> Any: ...

    @property
    def root_device(self) -> torch.device: ...

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

    def open(self, trainer: Any) -> None:
        """Training begins, or goes on as another run: let it be known."""
        strategy, transport = self._strategy, self._strategy.transport
        if not isinstance(transport, ElasticTransport):
            return
        self._door = transport.door(strategy.cluster_environment)
        if self._speaks:
            self._pin(
                {
                    "run": strategy.num_runs,
                    "fit": strategy.num_fits,
                    "settings": settings_of(strategy, trainer),
                    "model": digest(strategy.module),
                }
            )

    def close(self) -> None:
        """Training ends: it takes nobody in any more."""
        if self._speaks:
            self._pin({})
        self._door = None

    @property
    def _speaks(self) -> bool:
        """Whether it is this rank that tells newcomers of those that train."""
        survivors = self._strategy.survivors
        return self._door is not None and survivors is not None and survivors.generation.rank == 0

    def _pin(self, notice: dict[str, Any]) -> None:
        assert self._door is not None
        with contextlib.suppress(RuntimeError, OSError):  # the store is gone: the heartbeat says so
            self._door.pin(notice)

    def _answer(self, guest: str, admitted: bool) -> None:
        """Without a word a newcomer ends: it is not to train alone what the others train without it."""
        assert self._door is not None
        with contextlib.suppress(RuntimeError, OSError):
            self._door.answer(guest, admitted)

    def notice(self) -> None:
        """Something is new among the heartbeats, on whose thread this is called."""
        if (call := self.call_together) is not None and self._guests():
            call()

    def _guests(self) -> list[str]:
        """Those who wait, and are not taken for one who is there."""
        connection, survivors = self._strategy.connection, self._strategy.survivors
        if connection is None or survivors is None:
            return []
        most = self._strategy.config.max_replicas or survivors.started
        waiting = connection.membership.guests() if survivors.generation.world_size < most else ()
        return [guest for guest in waiting if _for_life(guest) not in survivors.names]

    def decide(self, world: World) -> bool:
        """All are here and hold one model: take in who waits. Nobody gets another model by it."""
        strategy, course, survivors = self._strategy, self._strategy.course, self._strategy.survivors
        ends = bool(strategy.module.trainer.fit_loop.done)  # for rank 0, and so for whoever is as it is: too late
        guest = "" if ends else next(iter(self._guests()), "")  # one by one: what becomes of one is nothing to another
        there = () if survivors is None else survivors.names
        guest, names = world.broadcast((guest, [*there, _for_life(guest)]))
        if not guest or course is None or course.session is None or survivors is None:
            return False
        run = count_run()
        averaging = state_of(course.session.averager, world)
        steps = [each["step"] for each in averaging["replicas"]]
        averaging["mean_steps"] = sum(steps) / len(steps)  # the clock of all does not jump as one more comes
        averaging["replicas"].append(
            {**averaging["replicas"][0], "rule_state": {}, "gathered": None, "summary": RunSummary().state_dict()}
        )
        wider, why = self._prepare(course, run, names, guest, averaging)
        ready = bool(world.reduce(torch.tensor(float(wider is not None)), "min") > 0.0)
        rank, who = survivors.generation.rank, _for_life(guest)
        self._answer(guest, admitted=wider is not None and ready)
        if wider is None or not ready:
            if wider is not None:
                wider.close(in_order=False)
            words = f"Rank {rank}: rank {who} could not be taken in, and training goes on without: {why}"
            tell("join_failed", logging.WARNING, words, rank=rank, run=run)
            return False
        words = f"Rank {rank}: rank {who} has joined, and {len(names)} replicas train from here."
        tell("joined", logging.WARNING, words, rank=rank, run=run, world_size=len(names))
        strategy.saved.go_on(averaging)
        strategy.survivors = survivors.with_newcomers(wider.root.rank, names, run)  # one may be lost since it was made
        course.widen(wider, run)
        course.patches.go_on(wider.world, course.patches.gates_epochs)
        return False

    def _prepare(
        self, course: Course, run: int, names: list[str], guest: str, averaging: dict[str, Any]
    ) -> tuple[Connection | None, str]:
        """A connection with the newcomer, which has what it needs; None, and why, where that could not be."""
        strategy, trainer, wider = self._strategy, self._strategy.module.trainer, None
        connection, door, survivors = strategy.connection, self._door, strategy.survivors
        assert connection is not None
        assert door is not None
        assert survivors is not None
        rank, membership = connection.root.rank, connection.membership

        def check() -> None:
            membership.check()
            if lost := {*names} - {*survivors.names, _for_life(guest)}:
                raise CollectiveTimeout(f"Meanwhile rank(s) {', '.join(lost)} were lost.")
            if guest not in membership.guests() and guest not in membership.left():
                raise CollectiveTimeout(f"{guest} is gone.")

        try:
            if rank == 0:
                there = {"names": names, "started": survivors.started, "ever": sorted(survivors.ever)}
                door.invite(guest, {"run": run, "rank": len(names) - 1, **there})
            wider = connect(strategy, rank, names, run, check)
            state = {}
            if rank == 0:
                state = state_for_newcomers(trainer)
                state |= {"averaging": averaging, "gates_epochs": course.patches.gates_epochs}
            wider.world.broadcast(state)
            wider.open()
            AveragedModels(trainer, wider.world).make_equal()
        except Exception as error:  # of hooks of the user's, too: who trains goes on
            if wider is not None:
                wider.membership.fail(in_words(error))  # nobody waits for it
                wider.close(in_order=False)
            return None, f"{type(error).__name__}: {error}"
        return wider, "another rank could not."


def connect(strategy: Hosting, rank: int, names: list[str], run: int, check: Callable[[], None]) -> Connection:
    """Of those who train, and newcomers, beside what they have; ``check`` raises where somebody does not come."""
    environment, transport = Survivor(strategy.cluster_environment, rank, len(names), ""), strategy.transport
    assert isinstance(transport, ElasticTransport)
    dead_after = strategy.config.deadlines.dead_after
    return transport.widen(environment, strategy.root_device, run_name(run), dead_after, PATIENCE, check)


def digest(module: Any) -> int:
    """Of the names, shapes and types of all that replicas share; what is trained of it may change in an epoch."""
    return zlib.crc32(repr([line.rpartition(", ")[0] for line in describe(module)]).encode())


def _for_life(guest: str) -> str:
    """What a guest was called when it was started."""
    return guest.partition(".")[0]

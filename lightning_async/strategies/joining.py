"""A rank that was lost comes back: those who train take it in at a gate, and go on with it from there.

    those who train                          the newcomer, a process of its own
    pin a notice: which run, which settings
                                             builds its model, compares, waits beside the run as a guest
    one sees the guest: all go to a gate
    rank 0 invites it to a new run
    all connect, beside the connection that they have; the newcomer takes over rank 0's state
    vote over the old connection
        all could: it is closed, and averaging goes on over the new one
        else: the new one is closed; nothing has happened

So whatever becomes of the newcomer meanwhile, those who train go on.
"""

from __future__ import annotations

import contextlib
import logging
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch

from lightning_async.comm.launched import came_back
from lightning_async.comm.membership.door import Door
from lightning_async.comm.membership.generation import Generation
from lightning_async.engine.averaging.averager import BackgroundAverager
from lightning_async.engine.averaging.config import AveragerConfig
from lightning_async.engine.averaging.report import RunSummary
from lightning_async.engine.tensors import describe
from lightning_async.engine.world import World
from lightning_async.errors import AsyncTrainingError, CollectiveTimeout
from lightning_async.strategies.saved_state import SavedState, state_of
from lightning_async.strategies.survivors import Survivors
from lightning_async.trainer.averaged_models import AveragedModels
from lightning_async.trainer.drift import DriftPatches
from lightning_async.trainer.environments import Survivor
from lightning_async.trainer.latecomer import begin_within_epoch, state_for_newcomers, take_over
from lightning_async.trainer.namespace import pytorch
from lightning_async.trainer.patches import Undo, in_words
from lightning_async.trainer.settings import check_newcomer, settings_of
from lightning_async.transports.transport import Connection, ElasticTransport, Transport

__all__ = ["Guest", "Host", "Joined"]

log = logging.getLogger(__name__)
_PATIENCE = timedelta(seconds=30)
_LOOK_S = 0.05


class Joined(Protocol):
    """What a strategy has to whose training ranks come back."""

    config: AveragerConfig
    transport: Transport
    survivors: Survivors | None
    num_fits: int
    saved: SavedState
    patches: DriftPatches | None
    undo: list[Undo]

    @property
    def averager(self) -> BackgroundAverager | None: ...

    @property
    def cluster_environment(self) -> Any: ...

    @property
    def connection(self) -> Connection | None: ...

    @property
    def module(self) -> Any: ...

    @property
    def num_runs(self) -> int: ...

    @property
    def root_device(self) -> torch.device: ...

    def count_run(self, at_least: int = 0) -> int:
        """The number of a new run: higher than that of any before, and than ``at_least``."""
        ...

    def go_on_wider(self, connection: Connection, run: int) -> None:
        """Average over this connection from now on, from where averaging stands."""
        ...


class Host:
    """Takes newcomers in; see `Convened`.

    Args:
        strategy: whose training they come to.
    """

    def __init__(self, strategy: Joined) -> None:
        self._strategy = strategy
        self.call_together: Callable[[], None] | None = None
        self._door: Door | None = None

    def open(self, trainer: Any) -> None:
        """Training begins, or goes on as another run: let it be known."""
        strategy, transport = self._strategy, self._strategy.transport
        if not isinstance(transport, ElasticTransport):
            return
        self._door = transport.door(strategy.cluster_environment)
        if strategy.survivors is None or strategy.survivors.generation.rank != 0:
            return
        with contextlib.suppress(RuntimeError, OSError):  # the store is gone: the heartbeat says so
            self._door.pin(
                {
                    "run": strategy.num_runs,
                    "fit": strategy.num_fits,
                    "settings": settings_of(strategy, trainer),  # pyright: ignore[reportArgumentType]
                    "model": _digest(strategy.module),
                }
            )

    def close(self) -> None:
        """Training ends: it takes nobody in any more."""
        survivors, door, self._door = self._strategy.survivors, self._door, None
        if door is not None and survivors is not None and survivors.generation.rank == 0:
            with contextlib.suppress(RuntimeError, OSError):
                door.pin({})

    def notice(self) -> None:
        """Something is new among the heartbeats, on whose thread this is called."""
        if (call := self.call_together) is not None and self._guests():
            call()

    def _guests(self) -> list[str]:
        """Those who wait, and are not taken for one who is there."""
        connection, survivors = self._strategy.connection, self._strategy.survivors
        if connection is None or survivors is None:
            return []
        return [guest for guest in connection.membership.guests() if _for_life(guest) not in survivors.names]

    def decide(self, world: World) -> bool:
        """All are here and hold one model: take in who waits."""
        strategy, connection = self._strategy, self._strategy.connection
        assert connection is not None
        assert strategy.patches is not None
        survivors = strategy.survivors
        guests = world.broadcast(self._guests())
        if not guests or survivors is None or self._door is None:
            return False
        run, names = strategy.count_run(), [*survivors.names, *map(_for_life, guests)]
        averaging = state_of(self._averager, world)
        blank = {**averaging["replicas"][0], "rule_state": {}, "summary": RunSummary().state_dict()}
        averaging["replicas"] += [blank for _ in guests]
        wider, why = self._prepare(connection, run, names, guests, averaging)
        together = world.reduce(torch.tensor(float(wider is not None)), "min") > 0.0
        if wider is None or not together:
            if wider is not None:
                wider.close(in_order=False)
            log.warning("Rank %d: %s could not be taken in: %s", survivors.generation.rank, ", ".join(names), why)
            return False
        log.warning(
            "Rank %d: rank(s) %s came back, and %d replicas train from here.",
            survivors.generation.rank, ", ".join(map(_for_life, guests)), len(names),
        )  # fmt: skip
        strategy.saved.go_on(averaging)
        strategy.survivors = survivors.with_newcomers(survivors.generation.rank, names, run)
        strategy.go_on_wider(wider, run)
        strategy.patches.go_on(wider.world, strategy.patches.gates_epochs)
        return False

    @property
    def _averager(self) -> BackgroundAverager:
        averager = self._strategy.averager
        assert averager is not None
        return averager

    def _prepare(
        self, connection: Connection, run: int, names: list[str], guests: list[str], averaging: dict[str, Any]
    ) -> tuple[Connection | None, str]:
        """A connection with the newcomers, who have what they need; None, and why, where that could not be."""
        strategy, trainer, rank = self._strategy, self._strategy.module.trainer, connection.root.rank
        membership, wider = connection.membership, None

        def check() -> None:
            membership.check()
            if gone := {*guests} - membership.up() - membership.left():
                raise CollectiveTimeout(f"{', '.join(gone)} is gone.")

        try:
            assert self._door is not None
            if rank == 0:
                for i, guest in enumerate(guests):
                    place = {"run": run, "rank": connection.root.world_size + i, "names": names}
                    self._door.invite(guest, place)
            wider = _connect(strategy, rank, names, run, check)
            state = {}
            if rank == 0:
                assert strategy.patches is not None
                state = state_for_newcomers(trainer)
                state |= {"averaging": averaging, "gates_epochs": strategy.patches.gates_epochs}
            wider.world.broadcast(state)
            AveragedModels(trainer, wider.world).make_equal()
            wider.open()
        except (AsyncTrainingError, RuntimeError, OSError) as error:
            if wider is not None:
                wider.close(in_order=False)
            return None, f"{type(error).__name__}: {error}"
        return wider, "another rank could not"


class Guest:
    """A process that was started while others train; see `join`.

    Args:
        strategy: its own.
        trainer: about to train.
    """

    def __init__(self, strategy: Joined, trainer: Any) -> None:
        self._strategy, self._trainer = strategy, trainer
        self._number = int(strategy.cluster_environment.started_as)
        self._attempts = 0

    def join(self) -> None:
        """Wait to be taken in, and take over what the others have.

        Raises:
            SettingsMismatch, ValueError: what they train is something else.
            SIGTERMException: told to end while waiting.
        """
        strategy, transport = self._strategy, self._strategy.transport
        if not isinstance(transport, ElasticTransport):
            raise ValueError(f"{transport!r} takes nobody in: start all ranks together.")
        door = transport.door(strategy.cluster_environment)
        log.warning("Rank %d was started again, and waits to be taken in by those who train.", self._number)
        while True:
            notice = self._wait(door.read_notice, lambda: True)
            self._compare(notice)
            self._attempts += 1
            guest = f"{self._number}.{came_back()}.{self._attempts}"
            place = self._visit(transport, door, int(notice["run"]), guest)
            if place is not None:
                break
        self._take_part(place)

    def _visit(self, transport: ElasticTransport, door: Door, run: int, guest: str) -> dict[str, Any] | None:
        """Beat beside a run until it invites this rank; None where it is over."""
        strategy = self._strategy
        dead_after = strategy.config.deadlines.dead_after
        membership = transport.visit(strategy.cluster_environment, _name(run), guest, dead_after)
        membership.start()
        try:
            place = self._wait(lambda: door.read_invitation(guest), lambda: door.read_notice().get("run") == run)
            if place:
                self._connect(place)
            return place or None
        finally:
            membership.close()

    def _connect(self, place: dict[str, Any]) -> None:
        strategy, run, rank, names = self._strategy, int(place["run"]), int(place["rank"]), place["names"]
        strategy.count_run(run)
        min_replicas = strategy.config.fewest(strategy.cluster_environment.world_size())
        first = Generation.first(rank, strategy.cluster_environment.world_size())
        strategy.survivors = Survivors(first, run, min_replicas).with_newcomers(rank, names, run)
        self._connection = _connect(strategy, rank, names, run, lambda: None)

    def _take_part(self, place: dict[str, Any]) -> None:
        strategy, trainer, connection, patches = self._strategy, self._trainer, self._connection, self._strategy.patches
        world, run = connection.world, int(place["run"])
        assert patches is not None
        try:
            state: dict[str, Any] = world.broadcast({})
            take_over(trainer, state)
            strategy.undo.append(patches.remove)
            patches.install(world)
            strategy.undo += reversed(begin_within_epoch(trainer, state))
            connection.open()
        except BaseException as error:
            connection.membership.fail(in_words(error))  # nobody waits for it
            connection.close(in_order=False)
            raise
        strategy.saved.go_on(state["averaging"])
        strategy.go_on_wider(connection, run)
        patches.go_on(world, bool(state["gates_epochs"]))
        world.drifting = True  # until the end of the epoch, where all meet

    def _wait(self, look: Callable[[], dict[str, Any]], worthwhile: Callable[[], bool]) -> dict[str, Any]:
        """What is found, or nothing where it is no longer worthwhile to wait."""
        while not (found := look()) and worthwhile():
            if self._trainer.received_sigterm:
                raise pytorch("utilities.exceptions").SIGTERMException
            time.sleep(_LOOK_S)
        return found

    def _compare(self, notice: dict[str, Any]) -> None:
        strategy = self._strategy
        if notice.get("fit") != strategy.num_fits:
            raise ValueError(
                f"Rank {self._number} comes back with its training number {strategy.num_fits}, and the others are at "
                f"number {notice.get('fit')}: it cannot take part in a script that trains several times."
            )
        check_newcomer(notice.get("settings", {}), settings_of(strategy, self._trainer))  # pyright: ignore
        if notice.get("model") != _digest(strategy.module):
            raise ValueError(f"Rank {self._number} comes back with another model than those who train have.")


def _connect(strategy: Joined, rank: int, names: list[str], run: int, check: Callable[[], None]) -> Connection:
    environment = Survivor(strategy.cluster_environment, rank, len(names), "")
    dead_after, transport = strategy.config.deadlines.dead_after, strategy.transport
    assert isinstance(transport, ElasticTransport)
    return transport.widen(environment, strategy.root_device, _name(run), dead_after, _PATIENCE, check)


def _name(run: int) -> str:
    return f"lightning_async/{run}"


def _for_life(guest: str) -> str:
    return guest.partition(".")[0]


def _digest(module: Any) -> int:
    """Of the names, shapes and types of all that replicas share."""
    return zlib.crc32(repr(describe(module)).encode())

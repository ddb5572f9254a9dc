"""Who begins: all workers, or those that have come in time. Who comes later joins them.

each worker                          the first worker
"I have come"     -------------->    counts, until they are enough
begins, or joins  <--------------    "these begin"
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol

from lightning_async.comm.launched import REJOIN
from lightning_async.comm.membership.door import Door
from lightning_async.comm.membership.generation import Generation
from lightning_async.comm.membership.presence import naming_the_stores_host
from lightning_async.comm.membership.start import Patience
from lightning_async.engine.averaging.config import AveragerConfig
from lightning_async.strategies.survivors import Survivors, next_run
from lightning_async.trainer.popen import check_launcher
from lightning_async.transports.transport import ElasticTransport, Transport

__all__ = ["Quorum", "WaitForWorkers", "early_enough", "muster"]

WaitForWorkers = Literal["all"] | int | tuple[int, timedelta]
_PATIENCE = timedelta(minutes=30)


@dataclass(frozen=True)
class Quorum:
    """So many begin once others have had so long to come; None: all do.

    >>> Quorum(2).begins([0, 1], 4, waited_s=0.0), Quorum(2, timedelta(seconds=9)).begins([0, 1], 4, waited_s=8.0)
    (True, False)
    """

    number: int | None = None
    within: timedelta = timedelta(0)

    @classmethod
    def of(cls, owner: str, told: WaitForWorkers) -> Quorum:
        """What ``wait_for_workers`` says.

        Raises:
            TypeError, ValueError: it says nothing that can be.

        >>> Quorum.of("Strategy", (2, timedelta(minutes=1)))
        Quorum(number=2, within=datetime.timedelta(seconds=60))
        """
        shown = f'`{owner}(wait_for_workers={told!r})` must be "all", a number, or (a number, a datetime.timedelta)'
        if told == "all":
            return cls()
        number, within = told if isinstance(told, tuple | list) and len(told) == 2 else (told, timedelta(0))
        if not isinstance(number, int) or isinstance(number, bool) or not isinstance(within, timedelta):
            raise TypeError(f"{shown}.")
        if number < 1 or within < timedelta(0):
            raise ValueError(f"{shown}: at least 1, and no negative time.")
        return cls(number, within)

    @property
    def is_all(self) -> bool:
        return self.number is None

    def check_transport(self, owner: str, transport: Transport) -> None:
        """Raise ValueError where nobody can come later."""
        if not self.is_all and not isinstance(transport, ElasticTransport):
            raise ValueError(
                f"`{owner}(wait_for_workers={self.number})`: over {transport!r} nobody comes later. Use "
                '`TorchTransport()`, or wait for "all".'
            )

    def begins(self, come: list[int], world_size: int, waited_s: float) -> bool:
        """Whether those who have come do."""
        enough = self.number is not None and len(come) >= self.number
        return len(come) == world_size or (enough and waited_s >= self.within.total_seconds())


class Mustered(Protocol):
    """What a strategy has whose workers may come late."""

    config: AveragerConfig
    quorum: Quorum
    roles: Any
    survivors: Survivors | None
    transport: Any

    @property
    def place(self) -> Any: ...

    def come_late(self) -> None: ...


def early_enough(strategy: Mustered, door: Door, rank: int, world_size: int) -> list[int]:
    """The numbers of the workers that begin, once that is decided; all come here, the first one decides.

    Raises:
        CollectiveTimeout: they are too few for 30 minutes.
        AsyncTrainingError: who started this rank has died.
    """
    patience, began, quorum = Patience(rank, _PATIENCE, check_launcher), time.monotonic(), strategy.quorum
    come: list[int] = []

    def what() -> str:
        missing = [other for other in range(world_size) if other not in come]
        return f"waiting for worker(s) {missing} of {world_size}, or until {quorum.number} have come"

    door.write(f"came/{rank}", {"process": os.getpid()})
    while not (decided := door.read("begin")):
        come = [other for other in range(world_size) if other == rank or door.read(f"came/{other}")]
        if rank == 0 and quorum.begins(come, world_size, time.monotonic() - began):
            door.write("begin", {"workers": come})
        else:
            patience.wait(what)
    return [int(number) for number in decided["workers"]]


def muster(strategy: Mustered, owner: str) -> None:
    """Be one of those who begin, or one who comes later.

    Raises:
        ValueError: fewer are to begin than may go on, or more than there are.
    """
    place = strategy.place
    rank, world_size = place.global_rank(), place.world_size()
    _check(strategy, owner, world_size)
    with naming_the_stores_host(rank):
        workers = early_enough(strategy, strategy.transport.early_door(place), rank, world_size)
    if rank not in workers:
        os.environ[REJOIN] = "1"
        strategy.come_late()
    elif len(workers) < world_size:
        run, survives, wanted = next_run(), strategy.config.survives(world_size), strategy.config.fewest(world_size)
        started = Survivors(Generation.first(0, world_size), run, survives, wanted=wanted)
        strategy.survivors = started.begun_by(workers.index(rank), [str(number) for number in workers], run)
        strategy.roles.expects_more = True


def _check(strategy: Mustered, owner: str, world_size: int) -> None:
    number, fewest = strategy.quorum.number, strategy.config.survives(world_size)
    if number is None or fewest <= number <= world_size:
        return
    if number > world_size:
        raise ValueError(f"`{owner}(wait_for_workers={number})`: there are {world_size} workers.")
    raise ValueError(
        f"`{owner}(wait_for_workers={number})`: fewer than {fewest} of {world_size} workers do not go on. Wait for as "
        f"many, or pass `min_replicas={number}`."
    )

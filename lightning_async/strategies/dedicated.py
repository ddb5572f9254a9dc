"""A rank that serves in place of training: from its first run on until the workers have ended."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Any, Protocol

from torch.distributed import DistNetworkError, DistStoreError

from lightning_async.comm.launched import came_back, tell_generation
from lightning_async.comm.membership.door import Door
from lightning_async.comm.membership.presence import naming_the_stores_host
from lightning_async.comm.membership.start import Patience
from lightning_async.engine.averaging.config import AveragerConfig
from lightning_async.engine.server.dedicated import DedicatedServer
from lightning_async.engine.server.quorum import Terms
from lightning_async.engine.server.rendezvous import ROOM, Attendance, Board, guest_name
from lightning_async.engine.server.replacing import Shelving
from lightning_async.errors import CollectiveTimeout
from lightning_async.strategies.muster import Quorum
from lightning_async.strategies.servers import Servers
from lightning_async.trainer.patches import in_words
from lightning_async.transports.transport import Connection

__all__ = ["Served", "attend", "call", "dismiss", "found", "serve"]

log = logging.getLogger(__name__)
_NOBODY_S = 1800.0
_ANSWERS = timedelta(minutes=30)  # as long as ranks wait for each other to start
_beats: dict[int, Any] = {}  # by process: one that others hear, from its first run on


class _Placed(Protocol):
    @property
    def num_servers(self) -> int: ...

    def reached_at(self, environment: Any, num_nodes: int) -> str | None: ...


class Served(Protocol):
    """What a strategy has whose servers are ranks."""

    config: AveragerConfig
    transport: Any
    quorum: Quorum
    server_address: str | None
    snapshots: str | None

    @property
    def roles(self) -> _Placed: ...

    @property
    def connection(self) -> Connection | None: ...

    @property
    def cluster_environment(self) -> Any: ...

    @property
    def global_rank(self) -> int: ...

    @property
    def num_nodes(self) -> int: ...

    @property
    def place(self) -> Any: ...


# ---- workers ----


def call(strategy: Served, run: int, terms: Terms, shelving: Shelving) -> Servers:
    """The servers of a run, with snapshots where ``shelving`` says so: all workers call this together.

    Raises:
        AsyncTrainingError: one cannot serve.
        PeerLost: a worker is lost meanwhile.
        CollectiveTimeout: one has not come within 30 minutes.
    """
    board, rank = Board(strategy.transport.door(strategy.place)), strategy.global_rank
    if rank == 0:
        board.call(run, strategy.roles.num_servers, terms, shelving)
    assert strategy.connection is not None
    patience = Patience(rank, _ANSWERS, strategy.connection.membership.check)
    return found(strategy, run, board.answers(run, strategy.roles.num_servers, patience))


def found(strategy: Served, run: int | None, addresses: Sequence[Mapping[str, Any]]) -> Servers:
    """The servers at these addresses; where they are ranks, called for a run, one that cannot go on says why."""
    if run is None:
        kept = strategy.snapshots is not None
        return Servers(addresses, of_this_run=strategy.server_address is None, come_back=kept)
    board = Board(strategy.transport.door(strategy.place))

    def check(server: int) -> None:
        with suppress(DistNetworkError, DistStoreError, ConnectionError):
            board.check(run, server)

    return Servers(addresses, check=check)


def dismiss(strategy: Served, run: int) -> None:
    """The run is over; the first worker calls this."""
    try:
        Board(strategy.transport.door(strategy.place)).dismiss(run)
    except (DistNetworkError, DistStoreError, ConnectionError) as error:  # they end with the store
        log.warning("Servers were not told that run %d is over: %s", run, error)


def attend(strategy: Served, role: str, number: int) -> Any:
    """Let all know that this process is there, until it ends; what hears of the others."""
    if os.getpid() not in _beats:
        name, dead_after = guest_name(role, number, came_back() or 0), strategy.config.deadlines.dead_after
        beats = strategy.transport.visit(strategy.place, ROOM, name, dead_after)
        beats.start()
        atexit.register(beats.close)  # before the heartbeats end
        Finalize(None, beats.close, exitpriority=0)  # where a fork ends, which calls nothing of atexit's
        _beats[os.getpid()] = beats
    return _beats[os.getpid()]


# ---- servers ----


def serve(strategy: Served, number: int) -> None:
    """Serve until the workers have ended; or until this process is told to end, and nobody needs it.

    Raises:
        AsyncTrainingError: no server can be started.
        PeerLost: the store is lost, while workers train.
        CollectiveTimeout: no worker has come within 30 minutes.
    """
    rank = strategy.place.global_rank()
    with naming_the_stores_host(rank), _told_to_end() as told:
        _serve(strategy, rank, number, told)


def _serve(strategy: Served, rank: int, number: int, told: _Told) -> None:
    host = strategy.roles.reached_at(strategy.cluster_environment, strategy.num_nodes)
    server = DedicatedServer(Board(_door(strategy)), number, host)
    attendance = _attendance(strategy, number)
    tell_generation(0, ())  # it is in none, and is there
    log.info("Rank %d is server %d, and serves until the workers have ended.", rank, number)
    try:
        while not told.times and not attendance.over():
            _check_that_somebody_comes(rank, attendance)
            server.follow()
            server.wait(told.descriptor)
    except (DistNetworkError, DistStoreError, ConnectionError):
        if server.serves:
            server.drain(lambda: told.times > 0, told.descriptor)
            raise
        return  # the first worker has ended, and the store with it
    except BaseException as error:
        server.fail(in_words(error))
        raise
    if told.times:
        server.drain(lambda: told.times > 1, told.descriptor)
    server.end()


def _door(strategy: Served) -> Door:
    """Once all workers have come, or as soon as there is one, where not all need come."""
    transport, place = strategy.transport, strategy.place
    return transport.door(place) if strategy.quorum.is_all else transport.early_door(place)


def _attendance(strategy: Served, number: int) -> Attendance:
    dead_after_s = strategy.config.deadlines.dead_after.total_seconds()
    return Attendance(attend(strategy, "server", number), strategy.place.world_size(), dead_after_s)


def _check_that_somebody_comes(rank: int, attendance: Attendance) -> None:
    if not attendance.came and attendance.silent_s > _NOBODY_S:
        raise CollectiveTimeout(
            f"rank {rank}: no worker has come within {attendance.silent_s:.0f} s. Do all ranks call the Trainer?"
        )


class _Told:
    """How often this process was told to end."""

    def __init__(self) -> None:
        self.descriptor, self._ours = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._ours, False)
        self._times = 0

    @property
    def times(self) -> int:
        """So far; what has made the descriptor readable is read."""
        try:
            while read := os.read(self.descriptor, 64):
                self._times += len(read)
        except BlockingIOError:
            pass
        return self._times

    def tell(self) -> None:
        os.write(self._ours, b".")

    def close(self) -> None:
        os.close(self.descriptor)
        os.close(self._ours)


@contextmanager
def _told_to_end() -> Iterator[_Told]:
    """While SIGTERM and SIGINT tell a process no more than that it is to end when it can."""
    told, before = _Told(), {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                before[number] = signal.signal(number, lambda *_: told.tell())
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        told.close()

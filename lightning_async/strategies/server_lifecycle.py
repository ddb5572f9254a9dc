"""The servers of one training: who starts which, how workers reach them, and how they end."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.util import Finalize
from typing import Any, Literal, Protocol

from torch.distributed import DistNetworkError, DistStoreError

from lightning_async.comm.p2p import CheckedDial, Dial, nobody_listens
from lightning_async.comm.p2p_gloo import dial, look_up_all
from lightning_async.engine.averaging.rule_state import AveragerConfig
from lightning_async.engine.collectives import LightningCollectives
from lightning_async.errors import AsyncTrainingError, CollectiveTimeout, PeerLost
from lightning_async.membership.generation import Generation
from lightning_async.membership.join_protocol import JoinBoard
from lightning_async.membership.launcher_channel import REJOIN, came_back, tell_generation
from lightning_async.membership.startup import WaitWithLog, naming_the_stores_host
from lightning_async.parameter_server.client import forget, tell_over
from lightning_async.parameter_server.consistency import WorkerRules
from lightning_async.parameter_server.discovery import ROOM, Attendance, DedicatedServer, JobBoard, joining_rank_name
from lightning_async.parameter_server.partition import ServerPartition
from lightning_async.parameter_server.process import Guard, ServerProcess, ServerStart, Shelving
from lightning_async.strategies.rank_mapping import RankMap, next_run
from lightning_async.trainer.environment.subprocess_launcher import check_launcher
from lightning_async.trainer.namespace import in_words
from lightning_async.transports.base import Connection, Transport
from lightning_async.transports.torch import TorchTransport

log = logging.getLogger(__name__)


# Who begins: all workers, or those that have come in time. Who comes later joins them.
#
# each worker the first worker "I have come" --------------> counts, until they are enough begins, or joins
# <-------------- "these begin"

WaitForWorkers = Literal["all"] | int | tuple[int, timedelta]
_PATIENCE = timedelta(minutes=30)


@dataclass(frozen=True)
class StartQuorum:
    """So many begin once others have had so long to come; None: all do.

    >>> StartQuorum(2).begins([0, 1], 4, waited_s=0.0)
    True
    >>> StartQuorum(2, timedelta(seconds=9)).begins([0, 1], 4, waited_s=8.0)
    False
    """

    number: int | None = None
    within: timedelta = timedelta(0)

    @classmethod
    def of(cls, owner: str, told: WaitForWorkers) -> StartQuorum:
        """What ``wait_for_workers`` says.

        Raises:
            TypeError, ValueError: it says nothing that can be.

        >>> StartQuorum.of("Strategy", (2, timedelta(minutes=1)))
        StartQuorum(number=2, within=datetime.timedelta(seconds=60))
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
        if not self.is_all and not isinstance(transport, TorchTransport):
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
    quorum: StartQuorum
    roles: Any
    live_ranks: RankMap | None
    transport: Any

    @property
    def place(self) -> Any: ...

    def come_late(self) -> None: ...


def early_enough(strategy: Mustered, door: JoinBoard, rank: int, world_size: int) -> list[int]:
    """The numbers of the workers that begin, once that is decided; all come here, the first one decides.

    Raises:
        CollectiveTimeout: they are too few for 30 minutes.
        AsyncTrainingError: who started this rank has died.
    """
    patience = WaitWithLog(rank, _PATIENCE, check_launcher)
    began = time.monotonic()
    quorum = strategy.quorum
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


def join_or_start(strategy: Mustered, owner: str) -> None:
    """Be one of those who begin, or one who comes later.

    Raises:
        ValueError: fewer are to begin than may go on, or more than there are.
    """
    place = strategy.place
    rank = place.global_rank()
    world_size = place.world_size()
    _check(strategy, owner, world_size)
    with naming_the_stores_host(rank):
        workers = early_enough(strategy, strategy.transport.early_door(place), rank, world_size)
    if rank not in workers:
        os.environ[REJOIN] = "1"
        strategy.come_late()
    elif len(workers) < world_size:
        run = next_run()
        survives = strategy.config.survives(world_size)
        wanted = strategy.config.fewest(world_size)
        started = RankMap(Generation.first(0, world_size), run, survives, wanted=wanted)
        strategy.live_ranks = started.begun_by(workers.index(rank), [str(number) for number in workers], run)
        strategy.roles.expects_more = True


def _check(strategy: Mustered, owner: str, world_size: int) -> None:
    number = strategy.quorum.number
    fewest = strategy.config.survives(world_size)
    if number is None or fewest <= number <= world_size:
        return
    if number > world_size:
        raise ValueError(f"`{owner}(wait_for_workers={number})`: there are {world_size} workers.")
    raise ValueError(
        f"`{owner}(wait_for_workers={number})`: fewer than {fewest} of {world_size} workers do not go on. Wait for as "
        f"many, or pass `min_replicas={number}`."
    )


_LESS = {"max_staleness": " (less the pushes between two pulls)"}
_DRAIN_S = 30.0
_TELL_S = 180.0
_GONE_S = 10.0
_PAUSE_S = 0.2
_BACK_S = 60.0  # whoever has started it sees to it, and reads a folder before anything listens there again


def hosts(num_servers: int, world_size: int) -> list[int]:
    """The rank that starts each server: they are spread evenly.

    >>> hosts(2, 4), hosts(3, 3)
    ([0, 2], [0, 1, 2])
    """
    return [server * world_size // num_servers for server in range(num_servers)]


class Servers:
    """Where they are, and those that this rank has started.

    Args:
        addresses: of all servers, see `reach.dial`; each has all tables.
        own: of this rank, by their numbers. Default: none.
        check: raises where a server, by its number, that cannot be reached will not come back. Default: it may.
        of_this_run: ranks have started them beside themselves, for this training alone. Default: they are others'.
        come_back: in the place of one that is lost another one is started, with a snapshot. Default: in nobody's.
    """

    def __init__(
        self,
        addresses: Sequence[Mapping[str, Any]],
        own: Mapping[int, ServerProcess] | None = None,
        check: Callable[[int], None] | None = None,
        of_this_run: bool = False,
        come_back: bool = False,
    ) -> None:
        self.addresses = [dict(address) for address in addresses]
        self._check = check
        self._own = dict(own or {})
        self._guard: Guard | None = None
        self._of_this_run = of_this_run
        self._come_back = come_back
        self.job = ""
        """What tells this training's workers from those of others that have the same servers."""
        self._closed = False
        self._refused: dict[int, tuple[float, float]] = {}
        """By server: when nobody listened there, first and last."""

    @property
    def own(self) -> list[ServerProcess]:
        """Of this rank."""
        return list(self._own.values())

    @classmethod
    def start(cls, world: LightningCollectives, num_servers: int, how: ServerStart) -> Servers:
        """All ranks call this together.

        Args:
            world: of all ranks.
            num_servers: at least 1.
            how: they are started.

        Raises:
            AsyncTrainingError: the system does not let one start, or a folder of snapshots cannot be written to.
        """
        mine = [server for server, rank in enumerate(hosts(num_servers, world.world_size)) if rank == world.rank]
        own: dict[int, ServerProcess] = {}
        try:
            for server in mine:
                own[server] = how.begin(server)
            told = world.gather_objects([process.address for process in own.values()])
        except BaseException:
            for process in own.values():
                process.close()
            raise
        keeps = how.shelving.folder is not None
        found = cls([at for addresses in told for at in addresses], own, of_this_run=True, come_back=keeps)
        if own and keeps:
            found._guard = Guard(how, found._own)
        return found

    @classmethod
    def at(cls, places: str, worker_rules: WorkerRules) -> Servers:
        """Those that were started on their own.

        Raises:
            ValueError: they treat workers in another way.
            PeerLost: one does not answer.
        """
        addresses = look_up_all(places)
        wanted = worker_rules.plain()
        names = ["mode", "staleness", "warmup_steps", *(["max_staleness"] if worker_rules.mode == "ssp" else [])]
        for number, address in enumerate(addresses):
            waits_for = address["terms"]["num_workers"]
            if worker_rules.in_step(0) and waits_for > worker_rules.num_workers:
                raise ValueError(
                    f"`server_address={places!r}`: server {number} there waits for {waits_for} workers before its "
                    f"first version, and {worker_rules.num_workers} begin. Start it with `--num-workers "
                    f"{worker_rules.num_workers}`, or start more workers."
                )
            for name in names:
                if (theirs := address["terms"][name]) != wanted[name]:
                    raise ValueError(
                        f"`server_address={places!r}`: server {number} there has {name}={theirs!r}, and this training "
                        f"has {wanted[name]!r}{_LESS.get(name, '')}. Start it with `--{name.replace('_', '-')}`, or "
                        "change the training's."
                    )
        found = cls(addresses)
        if worker_rules.num_workers == 1 and worker_rules.mode == "async":  # each is worker 0, and there may be many
            found.job = f"-{secrets.token_hex(4)}"
        return found

    def name_of(self, worker: str) -> str:
        """What servers call a worker of this training."""
        return f"{worker}{self.job}"

    def dials(self, plan: ServerPartition) -> list[Dial]:
        """Memory for talking to them of one table, for the shards of its plan."""
        sizes = zip(self.addresses, plan.sizes, strict=True)
        dials = [dial(address, 4 * size, 4 * size) for address, size in sizes]
        return [CheckedDial(each, partial(self._check_there, server)) for server, each in enumerate(dials)]

    def _check_there(self, server: int, error: PeerLost) -> None:
        if self._check is not None:
            self._check(server)
        # Else somebody has started it elsewhere, and may again. These are listened for as long as they have weights. A
        # worker that was stopped hears first that the others have ended without it.
        if self._of_this_run and nobody_listens(error) and self._refused_for(server):
            raise AsyncTrainingError(
                f"server {server} is gone for good, with its weights: {error} The process that supervised it was "
                "killed (by hand, or by the system for want of memory), or its host was. Start again from the last "
                "checkpoint."
            ) from error

    def _refused_for(self, server: int) -> bool:
        """Whether nobody has listened there for a while, in which another one would have come."""
        now = time.monotonic()
        first, last = self._refused.get(server, (now, now))
        self._refused[server] = (first if now - last < _GONE_S else now), now
        return now - self._refused[server][0] >= (_BACK_S if self._come_back else _GONE_S)

    def forget(self, names: Sequence[str]) -> None:
        """These workers are lost: tell the servers, beside whatever this thread does, and those that are started again
        meanwhile, too: what one has kept says that it is to wait for them."""
        for server in range(len(self.addresses)):
            told = server, [self.name_of(name) for name in names]
            threading.Thread(target=self._forget, args=told, name="lightning_async forgets", daemon=True).start()

    def _forget(self, server: int, names: list[str]) -> None:
        until = time.monotonic() + _TELL_S
        while True:
            called: Any = None
            try:
                called = dial(self.addresses[server], 0, 0)
                forget(called, names)
                return
            except (PeerLost, OSError) as error:
                if self._closed or time.monotonic() > until:
                    log.warning("A server was not told that workers %s are lost: %s", names, error)
                    return
            finally:
                if called is not None:
                    called.close()
            time.sleep(_PAUSE_S)

    def close(self, in_order: bool, tells: bool = False) -> None:
        """End this rank's, once nobody needs them any more; where this rank has failed, others go on with them.

        Args:
            in_order: all have come to the end.
            tells: this rank tells all servers so, of which those need to hear it whose starter has died.
        """
        self._closed = True
        if self._guard is not None:
            self._guard.close()
        own = [process.address for process in self.own]
        others = [address for address in self.addresses if address not in own]
        for address in others if in_order and tells and self._of_this_run else ():
            tell_over(dial(address, 0, 0))
        while self._own:
            _, process = self._own.popitem()
            if in_order:
                process.close(_DRAIN_S)
            else:
                process.leave()


# A rank that serves in place of training: from its first run on until the workers have ended.

_NOBODY_S = 1800.0
_ANSWERS = timedelta(minutes=30)  # as long as ranks wait for each other to start
_beats: dict[int, Any] = {}  # by process: one that others hear, from its first run on


class _Placed(Protocol):
    @property
    def num_servers(self) -> int: ...

    def reached_at(self, environment: Any, num_nodes: int) -> str | None: ...


class ServedByRanks(Protocol):
    """What a strategy has whose servers are ranks."""

    config: AveragerConfig
    transport: Any
    quorum: StartQuorum
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


def call(strategy: ServedByRanks, run: int, worker_rules: WorkerRules, shelving: Shelving) -> Servers:
    """The servers of a run, with snapshots where ``shelving`` says so: all workers call this together.

    Raises:
        AsyncTrainingError: one cannot serve.
        PeerLost: a worker is lost meanwhile.
        CollectiveTimeout: one has not come within 30 minutes.
    """
    board = JobBoard(strategy.transport.door(strategy.place))
    rank = strategy.global_rank
    if rank == 0:
        board.call(run, strategy.roles.num_servers, worker_rules, shelving)
    assert strategy.connection is not None
    patience = WaitWithLog(rank, _ANSWERS, strategy.connection.membership.check)
    return found(strategy, run, board.answers(run, strategy.roles.num_servers, patience))


def found(strategy: ServedByRanks, run: int | None, addresses: Sequence[Mapping[str, Any]]) -> Servers:
    """The servers at these addresses; where they are ranks, called for a run, one that cannot go on says why."""
    if run is None:
        kept = strategy.snapshots is not None
        return Servers(addresses, of_this_run=strategy.server_address is None, come_back=kept)
    board = JobBoard(strategy.transport.door(strategy.place))

    def check(server: int) -> None:
        with suppress(DistNetworkError, DistStoreError, ConnectionError):
            board.check(run, server)

    return Servers(addresses, check=check)


def dismiss(strategy: ServedByRanks, run: int) -> None:
    """The run is over; the first worker calls this."""
    try:
        JobBoard(strategy.transport.door(strategy.place)).dismiss(run)
    except (DistNetworkError, DistStoreError, ConnectionError) as error:  # they end with the store
        log.warning("Servers were not told that run %d is over: %s", run, error)


def register_worker(strategy: ServedByRanks, role: str, number: int) -> Any:
    """Let all know that this process is there, until it ends; what hears of the others."""
    if os.getpid() not in _beats:
        name = joining_rank_name(role, number, came_back() or 0)
        dead_after = strategy.config.timeouts.dead_after
        beats = strategy.transport.visit(strategy.place, ROOM, name, dead_after)
        beats.start()
        atexit.register(beats.close)  # before the heartbeats end
        Finalize(None, beats.close, exitpriority=0)  # where a fork ends, which calls nothing of atexit's
        _beats[os.getpid()] = beats
    return _beats[os.getpid()]


# ---- servers ----


def serve(strategy: ServedByRanks, number: int) -> None:
    """Serve until the workers have ended; or until this process is told to end, and nobody needs it.

    Raises:
        AsyncTrainingError: no server can be started.
        PeerLost: the store is lost, while workers train.
        CollectiveTimeout: no worker has come within 30 minutes.
    """
    rank = strategy.place.global_rank()
    with naming_the_stores_host(rank), _told_to_end() as told:
        _serve(strategy, rank, number, told)


def _serve(strategy: ServedByRanks, rank: int, number: int, told: _Told) -> None:
    host = strategy.roles.reached_at(strategy.cluster_environment, strategy.num_nodes)
    server = DedicatedServer(JobBoard(_door(strategy)), number, host)
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


def _door(strategy: ServedByRanks) -> JoinBoard:
    """Once all workers have come, or as soon as there is one, where not all need come."""
    transport = strategy.transport
    place = strategy.place
    return transport.door(place) if strategy.quorum.is_all else transport.early_door(place)


def _attendance(strategy: ServedByRanks, number: int) -> Attendance:
    dead_after_s = strategy.config.timeouts.dead_after.total_seconds()
    return Attendance(register_worker(strategy, "server", number), strategy.place.world_size(), dead_after_s)


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
    told = _Told()
    before = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                before[number] = signal.signal(number, lambda *_: told.tell())
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        told.close()

"""The servers of one training, from their start to their end.

`StartQuorum` decides with how many workers training begins. `Servers` starts and ends this rank's servers, and connects
with the servers of all ranks. `JobRanks` lets workers and dedicated servers find each other through the job's store.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.util import Finalize
from typing import Any, Literal, cast

from torch.distributed import DistNetworkError, DistStoreError

from lightning_async.comm.p2p import CheckedDial, Dial, nobody_listens
from lightning_async.comm.p2p_gloo import dial, look_up_all
from lightning_async.engine.collectives import LightningCollectives
from lightning_async.errors import AsyncTrainingError, CollectiveTimeout, PeerLost
from lightning_async.membership.join_protocol import JoinBoard
from lightning_async.membership.launcher_channel import came_back, tell_generation
from lightning_async.membership.startup import WaitWithLog, naming_the_stores_host
from lightning_async.parameter_server.client import forget, tell_over
from lightning_async.parameter_server.consistency import WorkerRules
from lightning_async.parameter_server.discovery import ROOM, Attendance, DedicatedServer, JobBoard
from lightning_async.parameter_server.partition import ServerPartition
from lightning_async.parameter_server.process import Guard, ServerProcess, ServerStart
from lightning_async.trainer.namespace import in_words
from lightning_async.transports.base import Transport
from lightning_async.transports.torch import TorchTransport, check_start

log = logging.getLogger(__name__)

WaitForWorkers = Literal["all"] | int | tuple[int, timedelta]
_PATIENCE = timedelta(minutes=30)


@dataclass(frozen=True)
class StartQuorum:
    """The number of workers with which training begins; workers that start later join.

    Args:
        number: Smallest number of workers with which training begins; None (default) for all.
        within: Time for which training waits for all workers; after this time, ``number`` workers are enough. Default
            0: training waits for ``number`` workers only.

    >>> StartQuorum(2).begins([0, 1], 4, waited_s=0.0)
    True
    >>> StartQuorum(2, timedelta(seconds=9)).begins([0, 1], 4, waited_s=8.0)
    False
    """

    number: int | None = None
    within: timedelta = timedelta(0)

    @classmethod
    def of(cls, value: WaitForWorkers) -> StartQuorum:
        """Return the quorum for a value of ``wait_for_workers``.

        Raises:
            TypeError: the value has a wrong type.
            ValueError: the number or the time is out of range.

        >>> StartQuorum.of((2, timedelta(minutes=1)))
        (2, datetime.timedelta(seconds=60))
        """
        shown = (
            f'`ServerOptions(wait_for_workers={value!r})` must be "all", a number, or (a number, a datetime.timedelta)'
        )
        if value == "all":
            return cls()
        number, within = value if isinstance(value, tuple | list) and len(value) == 2 else (value, timedelta(0))
        if not isinstance(number, int) or isinstance(number, bool) or not isinstance(within, timedelta):
            raise TypeError(f"{shown}.")
        if number < 1 or within < timedelta(0):
            raise ValueError(f"{shown}: at least 1, and no negative time.")
        return cls(number, within)

    def __repr__(self) -> str:
        """Return the value of ``wait_for_workers`` as text: ranks compare it, and messages show it."""
        return repr("all" if self.is_all else (self.number, self.within) if self.within else self.number)

    @property
    def is_all(self) -> bool:
        return self.number is None

    def check_transport(self, transport: Transport) -> None:
        """Raise ValueError if training may begin without some workers, but no worker can join over this transport."""
        if not self.is_all and not isinstance(transport, TorchTransport):
            raise ValueError(
                f"`ServerOptions(wait_for_workers={self.number})`: over {transport!r} nobody comes later. Use "
                '`TorchTransport()`, or wait for "all".'
            )

    def check_workers(self, world_size: int, fewest: int) -> None:
        """Raise ValueError if the quorum is larger than the number of workers, or too small for training to go on.

        Args:
            world_size: Number of workers that are started.
            fewest: Smallest number of workers with which training goes on.
        """
        shown = f"`ServerOptions(wait_for_workers={self.number})`"
        if self.number is not None and self.number > world_size:
            raise ValueError(f"{shown}: there are {world_size} workers.")
        if self.number is not None and self.number < fewest:
            raise ValueError(
                f"{shown}: fewer than {fewest} of {world_size} workers do not go on. Wait for as many, or pass "
                f"`min_replicas={self.number}`."
            )

    def begins(self, come: list[int], world_size: int, waited_s: float) -> bool:
        """Return whether training begins now.

        Args:
            come: Numbers of the workers that have started.
            world_size: Number of all workers.
            waited_s: Seconds since the wait began.
        """
        enough = self.number is not None and len(come) >= self.number
        return len(come) == world_size or (enough and waited_s >= self.within.total_seconds())

    def first_workers(self, store: JoinBoard, rank: int, world_size: int) -> list[int]:
        """Wait until worker 0 has decided which workers begin, and return their numbers; all workers call this.

        Raises:
            CollectiveTimeout: too few workers have started within 30 minutes.
            AsyncTrainingError: the process that started this rank has died, or the ranks have different settings, for
                example of ``wait_for_workers``.
        """
        patience = WaitWithLog(rank, _PATIENCE, check_start)
        began = time.monotonic()
        come: list[int] = []

        def what() -> str:
            missing = [other for other in range(world_size) if other not in come]
            return f"waiting for worker(s) {missing} of {world_size}, or until {self.number} have come"

        store.write(f"came/{rank}", {"process": os.getpid()})
        # Only worker 0 decides, and the others read its decision, so that all begin with the same workers.
        while not (decided := store.read("begin")):
            come = [other for other in range(world_size) if other == rank or store.read(f"came/{other}")]
            if rank == 0 and self.begins(come, world_size, time.monotonic() - began):
                store.write("begin", {"workers": come})
            else:
                patience.wait(what)
        return [int(number) for number in decided["workers"]]


_LESS = {"max_staleness": " (less the pushes between two pulls)"}
_DRAIN_S = 30.0
_TELL_S = 180.0
_GONE_S = 10.0
_PAUSE_S = 0.2
_BACK_S = 60.0  # The new server reads its snapshot, which may take long, before it listens.


class Servers:
    """The addresses of the servers of one training, and the server processes that this rank has started.

    Args:
        addresses: Addresses of all servers, see `p2p_gloo.dial`.
        own: Server processes that this rank has started, by number of the server. Default: none.
        check: Function that is called with the number of a server that cannot be reached; it raises an error if the
            server will not come back. Default: nothing is called.
        of_this_run: Whether the workers have started the servers on their own hosts, for this training only. Default
            False.
        come_back: Whether a lost server is replaced by a new one, which loads a snapshot. Default False.
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
        """Suffix of workers' names, where several trainings share the servers."""
        self._closed = False
        self._refused: dict[int, tuple[float, float]] = {}
        """First and last time at which a server's address refused connections, by number of the server."""

    @property
    def own(self) -> list[ServerProcess]:
        return list(self._own.values())

    @classmethod
    def start(cls, world: LightningCollectives, num_servers: int, how: ServerStart) -> Servers:
        """Start servers on the ranks' hosts, spread evenly over the ranks; all ranks call this together.

        Args:
            world: Collectives over all ranks.
            num_servers: Number of servers.
            how: Settings of the servers.

        Raises:
            AsyncTrainingError: a server cannot be started.
        """
        # Servers are spread evenly over ranks.
        mine = [server for server in range(num_servers) if server * world.world_size // num_servers == world.rank]
        own: dict[int, ServerProcess] = {}
        try:
            for server in mine:
                own[server] = how.begin(server)
            gathered = world.gather_objects([process.address for process in own.values()])
        except BaseException:
            # Servers outlive this process if they are not ended here.
            for process in own.values():
                process.close()
            raise
        keeps = how.shelving.folder is not None
        found = cls([at for addresses in gathered for at in addresses], own, of_this_run=True, come_back=keeps)
        # Without snapshots, a server that replaces a lost one would have no weights.
        if own and keeps:
            found._guard = Guard(how, found._own)
        return found

    @classmethod
    def at(cls, places: str, worker_rules: WorkerRules) -> Servers:
        """Return servers that ``lightning-async serve`` has started, after checking that they fit this training.

        Args:
            places: Addresses, as ``"HOST:PORT,HOST:PORT"``.
            worker_rules: Settings by which servers must treat the workers of this training.

        Raises:
            ValueError: a server has other settings, or waits for more workers than there are.
            PeerLost: a server does not answer.
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
        if worker_rules.num_workers == 1 and worker_rules.mode == "async":
            # Several such trainings may share the servers, each with a worker 0; the suffix makes names different.
            found.job = f"-{secrets.token_hex(4)}"
        return found

    def name_of(self, worker: str) -> str:
        """Return the name under which the servers know the worker with the membership name ``worker``."""
        return f"{worker}{self.job}"

    def dials(self, plan: ServerPartition) -> list[Dial]:
        """Return, for one table, the `Dial` of each server: the object that opens channels to the server.

        Its buffers have the size of the server's shard.

        Args:
            plan: Partition of the table into one shard per server.
        """
        sizes = zip(self.addresses, plan.sizes, strict=True)
        dials = [dial(address, 4 * size, 4 * size) for address, size in sizes]
        return [CheckedDial(each, partial(self._check_there, server)) for server, each in enumerate(dials)]

    def _check_there(self, server: int, error: PeerLost) -> None:
        """Raise AsyncTrainingError if a server that cannot be reached is lost for good, together with its weights."""
        if self._check is not None:
            self._check(server)
        # Servers of `lightning-async serve` may be started again. Servers of this training listen as long as they have
        # weights. The wait lets a worker that was paused learn first that the others have ended training without it.
        if self._of_this_run and nobody_listens(error) and self._refused_for(server):
            raise AsyncTrainingError(
                f"server {server} is gone for good, with its weights: {error} The process that supervised it was "
                "killed (by hand, or by the system for want of memory), or its host was. Start again from the last "
                "checkpoint."
            ) from error

    def _refused_for(self, server: int) -> bool:
        """Return whether the server's address has refused connections longer than a new server takes to start."""
        now = time.monotonic()
        first, last = self._refused.get(server, (now, now))
        self._refused[server] = (first if now - last < _GONE_S else now), now
        return now - self._refused[server][0] >= (_BACK_S if self._come_back else _GONE_S)

    def forget(self, names: Sequence[str]) -> None:
        """Tell the servers that these workers are lost, on one thread per server, without waiting for answers.

        A thread repeats its attempt while its server is being started again, because the new server process takes over
        the memory of the old one, in which these workers still count.
        """
        workers = [self.name_of(name) for name in names]
        for server in range(len(self.addresses)):
            thread = threading.Thread(
                target=self._forget, args=(server, workers), name="lightning_async forgets", daemon=True
            )
            thread.start()

    def _forget(self, server: int, names: list[str]) -> None:
        # Tried again and again, because the server may be starting again, and would wait for the lost workers.
        until = time.monotonic() + _TELL_S
        while True:
            try:
                with closing(dial(self.addresses[server], 0, 0)) as dialed:
                    forget(dialed, names)
                return
            except (PeerLost, OSError) as error:
                if self._closed or time.monotonic() > until:
                    log.warning("A server was not told that workers %s are lost: %s", names, error)
                    return
            time.sleep(_PAUSE_S)

    def close(self, in_order: bool, tells: bool = False) -> None:
        """End the servers that this rank has started.

        Args:
            in_order: True: training is over; end the servers once no worker is connected, after 30 s at the latest.
                False: this rank has failed; its servers stay as long as other workers need them.
            tells: Whether to tell the other ranks' servers as well that training is over. If the rank that started a
                server has died, nobody else tells it, and it ends only after a timeout. Default False.
        """
        self._closed = True
        # First the guard, which would replace servers that end.
        if self._guard is not None:
            self._guard.close()
        own = [process.address for process in self.own]
        if in_order and tells and self._of_this_run:
            for address in self.addresses:
                if address not in own:
                    tell_over(dial(address, 0, 0))
        while self._own:
            _, process = self._own.popitem()
            if in_order:
                process.close(_DRAIN_S)
            else:
                process.leave()


_NOBODY_S = 1800.0
_beats: dict[int, Any] = {}  # Heartbeats by process id, since forks inherit this dictionary.


class JobRanks:
    """The access of the workers and the dedicated servers of one job to the store, in which they find each other.

    Args:
        transport: Transport of the workers.
        place: Function that returns this process's environment, with its rank among the live workers.
        dead_after: Time without a heartbeat after which a rank is lost.
    """

    def __init__(self, transport: Transport, place: Callable[[], Any], dead_after: timedelta) -> None:
        self._transport = cast(TorchTransport, transport)
        self._place = place
        self._dead_after = dead_after

    def store(self, early: bool = False) -> JoinBoard:
        """Wait until all workers have come, and return the job's store.

        With ``early``, wait only until the store exists.
        """
        return self._transport.early_door(self._place()) if early else self._transport.door(self._place())

    def register(self, role: str, number: int) -> Any:
        """Begin to send heartbeats, until the process ends, under a name made of the role and the number.

        Returns:
            The `Membership` that sends these heartbeats, and receives those of other processes.
        """
        if os.getpid() not in _beats:
            name = f"{role}-{number}.{came_back() or 0}"
            beats = self._transport.visit(self._place(), ROOM, name, self._dead_after)
            beats.start()
            # `close` tells the others that this process ends in order; without that, they take it for lost.
            atexit.register(beats.close)
            Finalize(None, beats.close, exitpriority=0)  # for processes of multiprocessing, which end without atexit
            _beats[os.getpid()] = beats
        return _beats[os.getpid()]

    def serve(self, number: int, host: str | None, early: bool) -> None:
        """Run a dedicated server until the workers have ended.

        After a first SIGTERM or SIGINT, the server runs only until no worker is connected. After a second signal, it
        ends without waiting for workers.

        Args:
            number: Number of this server.
            host: Address at which other hosts reach this host; None if all ranks are on one host.
            early: Whether training may begin before all workers have started.

        Raises:
            AsyncTrainingError: no server can be started.
            PeerLost: the store is lost while workers train.
            CollectiveTimeout: no worker has started within 30 minutes.
        """
        rank = self._place().global_rank()
        with naming_the_stores_host(rank), _EndSignals() as signals:
            server = DedicatedServer(JobBoard(self.store(early)), number, host)
            beats = self.register("server", number)
            attendance = Attendance(beats, self._place().world_size(), self._dead_after.total_seconds())
            tell_generation(0, ())  # the launcher learns that this rank has started, though it is in no generation
            log.info("Rank %d is server %d, and serves until the workers have ended.", rank, number)
            _follow(server, attendance, signals, rank)


def _follow(server: DedicatedServer, attendance: Attendance, signals: _EndSignals, rank: int) -> None:
    """Start and end servers as the workers ask in the store, until the workers have ended or a signal has come."""
    try:
        while not signals.count and not attendance.over():
            if not attendance.came and attendance.silent_s > _NOBODY_S:
                raise CollectiveTimeout(
                    f"rank {rank}: no worker has come within {attendance.silent_s:.0f} s. Do all ranks call the "
                    "Trainer?"
                )
            if not attendance.came:
                check_start()
            server.follow()
            server.wait(signals.descriptor)
    except (DistNetworkError, DistStoreError, ConnectionError):
        if server.serves:
            # Workers that are still connected may need the weights, for a last checkpoint.
            server.drain(lambda: signals.count > 0, signals.descriptor)
            raise
        return  # no training is under way: worker 0 has ended, and the store with it
    except BaseException as error:
        server.fail(in_words(error))
        raise
    if signals.count:
        # The first signal waits for the workers, a second one does not.
        server.drain(lambda: signals.count > 1, signals.descriptor)
    server.end()


class _EndSignals:
    """A context in which SIGTERM and SIGINT do not end the process, but are counted and make a descriptor readable.

    A wait on the descriptor ends at once when a signal comes, also if the signal came before the wait.
    """

    def __init__(self) -> None:
        self.descriptor, self._ours = os.pipe()
        # Neither a handler with a full pipe nor a reader with an empty one may block.
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._ours, False)
        self._count = 0
        self._before: dict[int, Any] = {}

    @property
    def count(self) -> int:
        """Number of signals so far.

        Reading this also empties the descriptor, so that a poll waits for the next signal.
        """
        try:
            while read := os.read(self.descriptor, 64):
                self._count += len(read)
        except BlockingIOError:
            pass
        return self._count

    def __enter__(self) -> _EndSignals:
        # Python lets only the main thread set signal handlers.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, lambda *_: os.write(self._ours, b"."))
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self.descriptor)
        os.close(self._ours)

"""The start of a job: all ranks find the store and introduce themselves, before anything else is built on it.

`open_store` and `greet` do this, and `WaitWithLog` logs the progress of waits. `Assembly` first finds out whether this
process starts together with all others, or was restarted while the others train on. Through `ProcessHeartbeat`, ranks
that wait for each other between two runs notice processes that have ended.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import ipaddress
import json
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError, DistNetworkError, DistStoreError

from lightning_async._checks import parse_json
from lightning_async._sockets import connects, opening, serves_at
from lightning_async.errors import AsyncTrainingError, CollectiveTimeout, Evicted, PeerLost, StoreLost
from lightning_async.membership.failure_detector import Peer, describe, new_life
from lightning_async.membership.generation import in_order, listed
from lightning_async.membership.join_protocol import JoinBoard
from lightning_async.membership.launcher_channel import listen as listen_for_deaths
from lightning_async.membership.membership import Membership
from lightning_async.membership.signing import Seal
from lightning_async.membership.status import ENDED, FAILED, StatusRecord, read_standings
from lightning_async.membership.store import PrefixStore, Store, base_of, reachable, settle

_log = logging.getLogger(__name__)
_FIRST_WARNING_S = 10.0
_LONGEST_SILENCE_S = 300.0
_PROBE_S = 2.0
# Many clients at once stand in a queue while the server looks up their names.
_CONNECTS = timedelta(seconds=60)
# Seconds for which rank 0 delays an error: its store ends with it, and the other ranks must read the reason first.
_LINGER_S = 1.0
_BACKLOG = 2048
# Seconds for which a port may still be taken by the store of ranks that have ended.
_GOES_S = 3.0
_FIRST = "how"
_OTHERWISE = "how otherwise"


class WaitWithLog:
    """A wait with a deadline that logs which ranks are missing.

    ``check`` is called repeatedly. It raises if the missing ranks cannot come any more. If ``timeout`` is None, only
    this ends the wait.
    """

    def __init__(
        self,
        rank: int,
        timeout: timedelta | None,
        check: Callable[[], None],
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rank = rank
        self._timeout_s = math.inf if timeout is None else timeout.total_seconds()
        self._check = check
        self._now = now
        self._sleep = sleep
        self._started = now()
        self._next_word_s = 0.0
        self._pause_s = 0.002

    def wait(self, what: Callable[[], str]) -> None:
        """Sleep shortly; callers repeat this until what they wait for has happened.

        ``what`` returns a description of what they wait for, for the log and the error. Raises `CollectiveTimeout`
        after the deadline.
        """
        self._check()
        waited_s = self._now() - self._started
        if waited_s >= self._timeout_s:
            raise CollectiveTimeout(f"rank {self._rank}: after {waited_s:.0f} s still {what()}.")
        if waited_s >= self._next_word_s:
            level = logging.WARNING if self._next_word_s else logging.INFO
            left = (
                "there is no deadline"
                if self._timeout_s == math.inf
                else f"giving up in {self._timeout_s - waited_s:.0f} s"
            )
            _log.log(level, "Rank %d: after %.0f s %s; %s.", self._rank, waited_s, what(), left)
            self._next_word_s = max(
                _FIRST_WARNING_S, min(2 * self._next_word_s, self._next_word_s + _LONGEST_SILENCE_S)
            )
        self._sleep(self._pause_s)
        self._pause_s = min(self._pause_s * 1.5, 0.1)


def is_loopback(address: str) -> bool:
    """Return whether an address is of loopback, so that other hosts cannot reach it.

    The result is False for every host name except ``localhost``.
    """
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def open_store(
    address: str, port: int, serve: bool, patience: WaitWithLog, timeout: timedelta = timedelta(minutes=30)
) -> Store:
    """Open the store at an address: as its server if ``serve`` is True, otherwise as a client.

    A server at a loopback address listens on loopback only. Port 0 lets the server choose a free port. A client waits
    for the server by ``patience``. ``timeout`` is the limit of requests that block.

    Raises:
        AsyncTrainingError: The server cannot listen, or a client was given port 0.
        CollectiveTimeout: The server has not answered by the deadline of ``patience``.
    """
    if not serve:
        if port == 0:
            raise AsyncTrainingError(
                f"the store at {address} is to be found by its port, and MASTER_PORT is 0. Export one that is free, "
                "the same on all ranks (`torchrun --standalone` finds one)."
            )
        return _client(address, port, patience, timeout)
    # Listen before torch does, because torch would listen on all addresses.
    with listen(address, port) as server:
        port = server.getsockname()[1]
        listening: Any = {"master_listen_fd": os.dup(server.fileno())}
        serves_at(port)
        with opening(lambda fd: connects(fd, set(), {port})):
            return TCPStore(address, port, None, True, timeout, wait_for_workers=False, **listening)


def listen(address: str, port: int) -> socket.socket:
    """Return a listening socket for a store.

    It listens on loopback only if ``address`` is a loopback address, else on all addresses. Raises AsyncTrainingError
    if the port stays taken for longer than the store of an earlier training needs to close.
    """
    until = time.monotonic() + _GOES_S
    while True:
        try:
            return _listen(address, port)
        except OSError as error:
            # The store of ranks that have just ended may hold the port for a moment.
            if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                raise AsyncTrainingError(
                    f"rank 0: the store cannot listen on {address}, port {port}: {str(error).splitlines()[0]}. Does "
                    "another job use the port? Export another MASTER_PORT, the same on all ranks."
                ) from error
        time.sleep(0.05)


def _listen(address: str, port: int) -> socket.socket:
    if is_loopback(address):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=_BACKLOG)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)


def _client(address: str, port: int, patience: WaitWithLog, timeout: timedelta) -> Store:
    """Return a client of the server at an address, once the server answers.

    torch alone would try for its whole timeout, in C, without handling signals or calling ``patience``. Therefore each
    attempt first opens a plain connection.
    """
    error: Exception | None = None

    def what() -> str:
        said = str(error).split("\n", 1)[0]
        return (
            f"waiting for the store of rank 0 (or of the launcher) at {address}, port {port} ({said}): is that rank "
            "running, and are MASTER_ADDR and MASTER_PORT right"
        )

    while True:
        try:
            socket.create_connection((address, port), _PROBE_S).close()
            within = min(_CONNECTS, timeout)
            with opening(lambda fd: connects(fd, set(), {port}), within):
                store = TCPStore(address, port, None, False, within, wait_for_workers=False)
        except (OSError, DistError) as caught:
            # Rank 0 may start later than this rank, so try again until the deadline.
            error = caught
        else:
            store.set_timeout(timeout)
            return store
        patience.wait(what)


def greet(store: Store, rank: int, world_size: int, job: str, seal: Seal, patience: WaitWithLog) -> None:
    """Wait until all ranks have written a greeting into the store, and check that they belong together.

    They belong together if they were started with the same number of ranks and the same ``job``, the launcher's name of
    the job.

    Raises:
        AsyncTrainingError: Another process has this rank, or ranks differ in the number of ranks or in the job.
        CollectiveTimeout: Ranks, which the error names, are missing.
    """
    room: Any = PrefixStore("lightning_async/start", store)
    seal = seal.within("start")
    me = {"world_size": world_size, "job": job, "who": new_life()}
    first = settle(room, str(rank), json.dumps(me).encode(), seal, _parse) or me
    if first != me:
        raise AsyncTrainingError(
            f"rank {rank} is taken: {first['who']} has it, and goes on without this process ({me['who']}). Were two "
            "processes given the same rank, or do two jobs use one address and port (MASTER_ADDR, MASTER_PORT)?"
        )
    missing = set(range(world_size)) - {rank}
    while missing:
        for other in sorted(missing):
            if not room.check([str(other)]):
                continue
            theirs = _parse(seal.open(str(other), room.get(str(other))))
            if theirs is not None:
                _compare(rank, me, other, theirs)
                missing.discard(other)
        if missing:
            patience.wait(lambda: f"waiting for rank(s) {sorted(missing)} of {world_size}")


class StartAgreement:
    """A check, while ranks start, that all of them were given the same arguments where arguments must be equal.

    Each rank publishes its arguments, and compares them with those of the first rank that has published. A rank calls
    `check` while it waits for the others, because ranks with different arguments wait for each other at different
    places.

    Args:
        store: Store of the job.
        rank: Number of this rank.
        how: This rank's arguments in words, for the comparison and for the error message.
        seal: Signer of the job's messages.

    Raises:
        AsyncTrainingError: This rank's arguments differ from those of the first rank.
    """

    def __init__(self, store: Store, rank: int, how: str, seal: Seal) -> None:
        self._room: Any = PrefixStore("lightning_async/start", store)
        self._seal = seal.within("start")
        self._rank = rank
        mine = f"rank {rank} has {how}"
        first = settle(self._room, _FIRST, mine.encode(), self._seal, lambda value: value.decode(errors="replace"))
        self._first = first or mine
        if not self._first.endswith(f" has {how}"):
            self._room.set(_OTHERWISE, self._seal.sign(_OTHERWISE, mine.encode()))
            self._raise(mine)

    def check(self) -> None:
        """Raise AsyncTrainingError if any rank was given different arguments."""
        room = self._room
        other = self._seal.open(_OTHERWISE, room.get(_OTHERWISE)) if room.check([_OTHERWISE]) else None
        if other is not None:
            self._raise(other.decode(errors="replace"))

    def _raise(self, second: str) -> NoReturn:
        # The store ends with rank 0, and the others must read the reason first.
        time.sleep(_LINGER_S * (self._rank == 0))
        raise AsyncTrainingError(
            f"rank {self._rank}: {self._first}, and {second}. Start all ranks with the same strategy."
        )


def _compare(rank: int, me: dict[str, Any], other: int, theirs: dict[str, Any]) -> None:
    for name, what in (("world_size", "number of ranks there is"), ("job", "job this is")):
        if me[name] != theirs[name]:
            # The store ends with rank 0, and the other rank must read it first.
            time.sleep(_LINGER_S * (rank == 0))
            raise AsyncTrainingError(
                f"rank {rank} ({me['who']}) and rank {other} ({theirs['who']}) differ in what {what}: {me[name]!r} "
                f"and {theirs[name]!r}. Start all ranks with the same `devices` and `num_nodes`, and give each job a "
                "MASTER_PORT of its own."
            )


def _parse(value: bytes | None) -> dict[str, Any] | None:
    said = parse_json(value)
    if not isinstance(said, dict) or said.keys() != {"world_size", "job", "who"}:
        return None
    kinds = {"world_size": int, "job": str, "who": str}
    return said if all(type(said[name]) is kind for name, kind in kinds.items()) else None


AGENTS_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""The environment variable that is "True" if the launcher has the store, which then outlives rank 0."""
_NEXT = "next"
_LOOK_S = 0.5
_GOODBYE = timedelta(seconds=2)


class ProcessRole(NamedTuple):
    """The way in which a process was started.

    ``attempt`` is the number of the common start of all ranks to which the process belongs. ``again`` is 0 if the
    process took part in that start itself; otherwise it is the number of earlier processes of its rank.
    """

    attempt: int
    again: int


class Assembly:
    """The meeting of all ranks of a job, each time that all of them are started.

        assembly/next          the number of the next common start; 0 at first
        assembly/<n>/<rank>    the process that has come to that start, with a count that grows while it waits
        assembly/lives/<rank>  number of processes of this rank so far
        assembly/ended/<rank>  the process of this rank that has ended normally
        status/...             ranks in training, and their members; see `membership.status`

    Each process registers for the start with the number ``next``. When all ranks have registered, the first process
    that sees this increments ``next``, and all begin. If the others are seen to train without this rank, this rank was
    lost: its process joins their training, which began at the previous common start.

    Some ranks may not come because they have ended normally. If this is so for all missing ranks, and this process
    replaces one that has failed, the training is over and cannot be joined. A process concludes this only after
    ``settle``, because in a common restart of all ranks others may start later.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, secret: str | None, settle: timedelta = timedelta(minutes=1)
    ) -> None:
        self._store = store
        self._secret = secret
        self._room: Any = PrefixStore("lightning_async/assembly", store)
        self._seal = Seal(secret, "assembly")
        self._rank = rank
        self._others = set(range(world_size)) - {rank}
        self._life = int(self._room.add(f"lives/{rank}", 1))
        self._waited = 0
        self._first: dict[int, bytes] = {}
        """The values of other ranks when this one came, which processes that have died may have left."""
        self._said: dict[tuple[str, int], float] = {}
        self._looks_at = 0.0
        self._settles_at = time.monotonic() + settle.total_seconds()
        self._pid = os.getpid()

    def end(self) -> None:
        """Publish that this process ends normally, and will not be restarted. Does nothing in a fork of the process."""
        if os.getpid() != self._pid or not reachable(self._store, _GOODBYE):
            return
        # The store may have ended together with the other ranks.
        with contextlib.suppress(RuntimeError):
            base_of(self._store).set_timeout(_GOODBYE)
            key = f"ended/{self._rank}"
            self._room.set(key, self._seal.sign(key, str(self._life).encode()))

    def find(self, patience: WaitWithLog) -> ProcessRole:
        """Wait until all ranks have registered, or until others are seen to train without this rank; return which.

        Raises:
            AsyncTrainingError: All missing ranks have ended normally, so that neither can happen.
            CollectiveTimeout: Neither has happened by the deadline; the error names the missing ranks.
        """
        settle(self._room, _NEXT, b"0", self._seal, bytes)
        number = self._next()
        missing = set(self._others)
        key = f"{number}/{self._rank}"

        def what() -> str:
            here = f"waiting for rank(s) {sorted(missing)} of {len(self._others) + 1} to be started, too"
            return f"{here}, or for those who train to go on without this one"

        while True:
            self._waited += 1
            self._room.set(key, self._seal.sign(key, f"{self._life}.{self._waited}".encode()))
            missing -= self._here(number, missing)
            if not missing:
                mine, then = (self._seal.sign(_NEXT, str(each).encode()) for each in (number, number + 1))
                self._room.compare_set(_NEXT, mine, then)
            if self._next() > number:
                return ProcessRole(number, 0)
            said = self._standings()
            if said is not None:
                self._check_ends(missing)
            running = [each for each in said or () if each.members and each.state not in (ENDED, FAILED)]
            if any(str(self._rank) not in each.members for each in running):
                return ProcessRole(max(number - 1, 0), max(self._life - 1, 1))
            patience.wait(what)

    def _next(self) -> int:
        value = self._seal.open(_NEXT, self._room.get(_NEXT))
        return int(value) if value is not None and value.isdigit() else 0

    def _here(self, number: int, others: Iterable[int]) -> set[int]:
        here = set()
        for rank in others:
            key = f"{number}/{rank}"
            value = self._room.get(key) if self._room.check([key]) else b""
            if value != self._first.setdefault(rank, value) and self._seal.open(key, value) is not None:
                here.add(rank)
        return here

    def _check_ends(self, missing: set[int]) -> None:
        # If this rank had ended in order, too, all ranks are started again.
        if time.monotonic() < self._settles_at or self._has_ended(self._rank, self._life - 1):
            return
        if all(self._has_ended(rank, int(self._room.add(f"lives/{rank}", 0))) for rank in missing):
            raise AsyncTrainingError(
                f"rank {self._rank}: rank(s) {sorted(missing)} have ended their training in order, without this one: "
                "there is nobody to come back to, and no training to go on with. Start all ranks to train again."
            )

    def _has_ended(self, rank: int, life: int) -> bool:
        key = f"ended/{rank}"
        value = self._seal.open(key, self._room.get(key)) if self._room.check([key]) else None
        return life > 0 and value == str(life).encode()

    def _standings(self) -> list[StatusRecord] | None:
        """Return the status records that have changed since the last reading.

        Returns None if the last reading was less than `_LOOK_S` ago: then the store is not read.
        """
        if (now := time.monotonic()) < self._looks_at:
            return None
        self._looks_at = now + _LOOK_S
        told = read_standings(self._store, self._secret)
        before = self._said
        self._said = {(each.host, each.process): each.at for each in told}
        return [each for each in told if before.get((each.host, each.process), each.at) != each.at]


_INTERVAL = timedelta(seconds=1)
# Number of beats within the silence after which a process is lost.
_SEVERAL = 8
# Seconds after which the heartbeats show whether a rank's old process has ended, or a new one of it has joined.
_SETTLES_S = 2.5


class ProcessHeartbeat:
    """The heartbeat of this process from its first run to its end, slower than the heartbeat of each run.

    A rank may compute for hours between two runs: as long as its process lives, the other ranks wait for it. They stop
    waiting if its process has died or ended. ``name`` is the stable id of the rank, which it keeps when ranks are
    renumbered. The constructor raises AsyncTrainingError if another live process has this rank.
    """

    def __init__(self, store: Store, name: str, dead_after: timedelta, start_timeout: timedelta, seal: Seal) -> None:
        self._store = store
        self.name = name
        self._names: tuple[str, ...] = (name,)
        self._joined: frozenset[str] = frozenset()
        self._called: tuple[str, ...] = ()
        """Stable ids of the ranks that have begun the last call of the Trainer together."""
        self._membership = Membership(
            PrefixStore("lightning_async/presence", store), 0, 1, member=name,
            interval=min(_INTERVAL, dead_after / _SEVERAL), dead_after=dead_after, start_timeout=start_timeout,
            fresh=True, seal=seal.within("presence"),
        )  # fmt: skip
        self._membership.start()
        self._pid = os.getpid()
        atexit.register(self._membership.close)
        # A process that ends within the first beats is known by the launcher's report alone.
        hear = self._membership.hear_death
        if (listener := listen_for_deaths(lambda death: hear(str(death.rank), death.process, death.text))) is not None:
            atexit.register(listener.close)

    @property
    def inherited(self) -> bool:
        return os.getpid() != self._pid

    def expect(self, names: tuple[str, ...], joined: frozenset[str] = frozenset()) -> None:
        """Set the stable ids of the ranks without which `check` raises, in rank order.

        Those of ``joined`` have joined since the last call of the Trainer has begun, so they may be new processes.
        """
        self._names = names
        self._joined = joined
        self._called = self._called or names

    def check(self) -> None:
        """Raise `PeerLost`, which names the ranks, if the process of an expected rank is gone. No I/O."""
        gone = {name: peer for name, peer in self._ended(self._joined).items() if name in self._names}
        if not gone:
            return
        left = [name for name, peer in gone.items() if peer.has_left]
        rank = self._names.index(self.name)
        raise PeerLost(
            f"rank {rank}: the process(es) of rank(s) {listed(left)} have ended, while this rank waits for them. "
            "All ranks must make the same calls of the Trainer; see the log of those."
            if len(left) == len(gone)
            else f"rank {rank}: {describe(gone)}",
            tuple(map(self._names.index, gone)),
        )

    def check_others(self) -> None:
        """Raise `PeerLost` if the processes of all other ranks, as far as known, have ended. No I/O."""
        if gone := self._membership.all_ended():
            raise PeerLost(
                f"rank {self.name} waits for others in vain: {describe(gone)}", tuple(map(int, in_order(gone)))
            )

    def _ended(self, joined: Collection[str]) -> dict[str, Peer]:
        """Return the peers whose processes have ended, except those of ``joined`` that new processes have replaced."""
        ended = self._membership.ended()
        return {name: p for name, p in ended.items() if name not in joined or p.lost or not p.restarted}

    def call_roll(self, call: int, names: tuple[str, ...], failed: bool, seal: Seal, timeout: timedelta) -> list[str]:
        """Wait for all ranks whose processes live, and return the stable ids of those that begin this call together.

        An exception that a script catches ends one call of the Trainer on a rank, and not the rank: its process makes
        the next call with the others, whether they have raised, too, or have gone on without it. Ranks may have seen
        different ones of them leave, so they agree in the store. Ranks whose last call has failed come last, because
        the first rank gives its model to all.

        Args:
            call: Number of this call, equal on all ranks.
            names: Stable ids of the ranks that train together as far as this rank knows.
            failed: Whether this rank's last call has ended by an exception, so that ``names`` may be outdated.
            seal: Signer of the job's messages.
            timeout: Deadline.

        Raises:
            PeerLost: The process of a rank in ``names`` has died, and this rank's last call has not failed.
            StoreLost: The store has died.
            CollectiveTimeout: Ranks, which the error names, have not come by the deadline.
            Evicted: The others have begun the call without this rank.
        """
        board = JoinBoard(self._store, seal)
        key = f"roll/{call}"
        awaited = {*self._called, *names}
        joined = self._joined.intersection(names)
        come: dict[str, bool] = {}
        board.write(f"{key}/{self.name}", {"failed": failed, "awaits": sorted(awaited), "joined": sorted(joined)})
        patience = WaitWithLog(int(self.name), timeout, lambda: None)
        began = time.monotonic()
        while not (members := board.read(key).get("members")):
            for name in in_order(awaited - come.keys()):
                if note := board.read(f"{key}/{name}"):
                    come[name] = note.get("failed") is True
                    awaited |= {*map(str, note.get("awaits", ()))}
                    joined |= {*map(str, note.get("joined", ()))}  # a failed rank may not know who has joined since
            dead = self._ended(joined).keys()
            if time.monotonic() - began < _SETTLES_S:
                dead -= joined  # reports of the ends of their old processes may be all that was read so far
            missing = in_order(awaited - come.keys() - dead)
            if time.monotonic() - began > self._membership.dead_after.total_seconds() + _SETTLES_S:
                missing = [name for name in missing if name in names]  # ranks that were lost are not waited for longer
            if not failed and not {*names} <= come.keys() and time.monotonic() - began > _SETTLES_S:
                self.check()
            elif not missing and (failed or {*names} <= come.keys()):
                order = [] if failed else [name for name in names if name in come]
                order += in_order(come.keys() - {*order})
                board.settle(key, {"members": sorted(order, key=come.__getitem__)})
                continue
            words = f"waiting for rank(s) {listed(missing)} to make this call of the Trainer, too"
            patience.wait(lambda words=words: words)
        if self.name not in members:
            raise Evicted(f"rank {self.name}: rank(s) {listed(members)} have begun this call without it.")
        # A member's new process has come, but the report of its old one's end may be all that was read of it so far.
        until = time.monotonic() + _SETTLES_S
        while time.monotonic() < until and any(p.lost for n, p in self._membership.ended().items() if n in members):
            time.sleep(_LOOK_S / 10)
        self._membership.accept_new_processes()
        self._called = tuple(members)
        return members

    def meet(self, name: str, job: str, seal: Seal, timeout: timedelta) -> None:
        """Wait until all expected ranks have come to the run ``name``; log which ones are missing.

        Args:
            name: Name of the run.
            job: The launcher's name of the job.
            seal: Signer of the job's messages.
            timeout: Deadline.

        Raises:
            PeerLost: A process has died.
            StoreLost: The store has died.
            CollectiveTimeout: Ranks are missing at the deadline.
        """
        rank = self._names.index(self.name)
        patience = WaitWithLog(rank, timeout, self.check)
        with naming_the_stores_host(rank):
            greet(PrefixStore(name, self._store), rank, len(self._names), job, seal.within(name), patience)


@contextmanager
def naming_the_stores_host(rank: int) -> Iterator[None]:
    """Replace torch's errors about a failed store, raised in the block, by `StoreLost`.

    `StoreLost` names the store's host, rank 0.
    """
    try:
        yield
    except (DistNetworkError, DistStoreError, ConnectionError) as error:
        # torch names an address only. Users need the rank whose host is gone.
        raise StoreLost(
            f"rank {rank}: while it waited for the others, the store failed ({str(error).splitlines()[0]}). "
            "Its host, rank 0 or the launcher, is gone: see the log of rank 0.",
            () if rank == 0 else (0,),
        ) from error

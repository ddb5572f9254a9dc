"""The start: all ranks find the store, and say who they are, before anything is built on it.

Nobody waits in silence: what is waited for, and until when, is said at once, and then at growing intervals.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import logging
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from lightning_async.comm.membership.roster import new_life
from lightning_async.comm.membership.signing import Seal
from lightning_async.comm.torch.forks import opening, serves_at
from lightning_async.comm.torch.sockets import connects
from lightning_async.errors import AsyncTrainingError, CollectiveTimeout

__all__ = ["Patience", "greet", "is_loopback", "listen", "open_store"]

_log = logging.getLogger(__name__)
_FIRST_WARNING_S, _LONGEST_SILENCE_S = 10.0, 300.0
_PROBE_S = 2.0
_CONNECTS = timedelta(seconds=60)  # many at once stand in a queue while the server looks up their names
_LINGER_S = 1.0
_BACKLOG = 2048
_GOES_S = 3.0


class Patience:
    """A wait with a deadline that says what it is for.

    Args:
        rank: for messages.
        timeout: raise after so long.
        check: called all the time; raises where waiting is in vain.
        now, sleep: for tests.
    """

    def __init__(
        self,
        rank: int,
        timeout: timedelta,
        check: Callable[[], None],
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rank, self._timeout_s, self._check, self._now, self._sleep = (
            rank, timeout.total_seconds(), check, now, sleep,
        )  # fmt: skip
        self._started = now()
        self._next_word_s, self._pause_s = 0.0, 0.002

    def wait(self, what: Callable[[], str]) -> None:
        """Sleep shortly.

        Args:
            what: what is waited for, in words.

        Raises:
            CollectiveTimeout: the deadline has passed.
        """
        self._check()
        waited_s = self._now() - self._started
        if waited_s >= self._timeout_s:
            raise CollectiveTimeout(f"rank {self._rank}: after {waited_s:.0f} s still {what()}.")
        if waited_s >= self._next_word_s:
            level = logging.WARNING if self._next_word_s else logging.INFO
            left = f"giving up in {self._timeout_s - waited_s:.0f} s"
            _log.log(level, "Rank %d: after %.0f s %s; %s.", self._rank, waited_s, what(), left)
            self._next_word_s = max(
                _FIRST_WARNING_S, min(2 * self._next_word_s, self._next_word_s + _LONGEST_SILENCE_S)
            )
        self._sleep(self._pause_s)
        self._pause_s = min(self._pause_s * 1.5, 0.1)


def is_loopback(address: str) -> bool:
    """Whether an address can be reached from its own host only. A name of the host counts as reachable."""
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def open_store(
    address: str, port: int, serve: bool, patience: Patience, timeout: timedelta = timedelta(minutes=30)
) -> Store:
    """The store at an address: its server, or a client of it. A server on loopback listens there only.

    Args:
        port: 0 for one that is free.
        serve: whether this rank has the server.
        timeout: of requests that block.

    Raises:
        AsyncTrainingError: the server cannot listen, or it is not known where it does.
        CollectiveTimeout: nobody answers.
    """
    if not serve:
        if port == 0:
            raise AsyncTrainingError(
                f"the store at {address} is to be found by its port, and MASTER_PORT is 0. Export one that is free, "
                "the same on all ranks (`torchrun --standalone` finds one)."
            )
        return _client(address, port, patience, timeout)
    with listen(address, port) as server:
        port = server.getsockname()[1]
        listening: Any = {"master_listen_fd": os.dup(server.fileno())}
        serves_at(port)
        with opening(lambda fd: connects(fd, set(), {port})):
            return TCPStore(address, port, None, True, timeout, wait_for_workers=False, **listening)


def listen(address: str, port: int) -> socket.socket:
    """What a store answers on: on loopback there only, else wherever this host is reached.

    Raises:
        AsyncTrainingError: the port is taken, for longer than the store of ranks that have ended needs to go.
    """
    until = time.monotonic() + _GOES_S
    while True:
        try:
            return _listen(address, port)
        except OSError as error:
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


def _client(address: str, port: int, patience: Patience, timeout: timedelta) -> Store:
    """A client of the server there, when that answers. Where it goes just as a client connects, torch tries for as long
    as it may, in C, where nobody hears of a signal, or that it is in vain."""
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
            error = caught
        else:
            store.set_timeout(timeout)
            return store
        patience.wait(what)


def greet(store: Store, rank: int, world_size: int, job: str, seal: Seal, patience: Patience) -> None:
    """Meet all ranks in the store, and compare what they take themselves for.

    Args:
        job: what the launcher calls this job, "" where it says nothing.

    Raises:
        AsyncTrainingError: another process has this rank already, which goes on; or ranks differ in the number of
            ranks, or in the job.
        CollectiveTimeout: ranks are missing; names them.
    """
    room: Any = PrefixStore("lightning_async/start", store)
    seal = seal.within("start")
    me = {"world_size": world_size, "job": job, "who": new_life()}
    mine = seal.sign(str(rank), json.dumps(me).encode())
    found = room.compare_set(str(rank), "", mine)
    if found != mine and (other := _parse(seal.open(str(rank), found))) is not None:
        raise AsyncTrainingError(
            f"rank {rank} is taken: {other['who']} has it, and goes on without this process ({me['who']}). Were two "
            "processes given the same rank, or do two jobs use one address and port (MASTER_ADDR, MASTER_PORT)?"
        )
    if found != mine:
        room.set(str(rank), mine)  # a stranger's
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


def _compare(rank: int, me: dict[str, Any], other: int, theirs: dict[str, Any]) -> None:
    for name, what in (("world_size", "number of ranks there is"), ("job", "job this is")):
        if me[name] != theirs[name]:
            time.sleep(_LINGER_S * (rank == 0))  # the store ends with rank 0, and the other has to read it first
            raise AsyncTrainingError(
                f"rank {rank} ({me['who']}) and rank {other} ({theirs['who']}) differ in what {what}: {me[name]!r} "
                f"and {theirs[name]!r}. Start all ranks with the same `devices` and `num_nodes`, and give each job a "
                "MASTER_PORT of its own."
            )


def _parse(value: bytes | None) -> dict[str, Any] | None:
    """What a rank says of itself; None where that is nothing."""
    try:
        said = None if value is None else json.loads(value)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or said.keys() != {"world_size", "job", "who"}:
        return None
    kinds = {"world_size": int, "job": str, "who": str}
    return said if all(type(said[name]) is kind for name, kind in kinds.items()) else None

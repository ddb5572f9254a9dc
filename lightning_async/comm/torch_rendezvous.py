"""Forming groups of torch.distributed: all members meet in a store, and then connect.

Groups are built directly from a store, without the default group, so that any number of them can be formed again under
the next generation. No thread blocks in the store, so that a thread that waits for members can react to deaths.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_async._checks import parse_json
from lightning_async._sockets import connects, listening_port, opening, own_address
from lightning_async.comm import nccl
from lightning_async.comm.collectives import Where
from lightning_async.comm.torch_groups import TorchGroup, sweep
from lightning_async.errors import AsyncTrainingError, CollectiveError, CollectiveTimeout, LinkLost
from lightning_async.membership.signing import Seal
from lightning_async.membership.store import PollingStore, PrefixStore, Store, own_client

_PREFIX = "lightning_async"
_device = threading.Lock()
# Gloo tries to connect so often, each time within its timeout.
_GLOO_TRIES = 4
# Longest time for a connection to a host that can be reached.
_PROBE_S = 3.0


class _Member(NamedTuple):
    """What one member says of itself, while a group is formed.

    Args:
        places: Addresses and ports at which it listens. Default: none.
        unreachable: Ranks to which it could not connect; None if it has not failed to connect.
    """

    places: Sequence[tuple[str, int]] = ()
    unreachable: Sequence[int] | None = None


@dataclass
class MeetingOptions:
    """The settings of the rendezvous of a communicator's members through a store; all forks share one object."""

    seal: Seal = field(default_factory=Seal)  # seal of their messages in the store
    # Raises if a member is lost, so that waiting is in vain; may be set after the communicator was made.
    check: Callable[[], None] = lambda: None
    # Address at which Gloo listens. Default: that of this host's name, or of ``GLOO_SOCKET_IFNAME``.
    host: str | None = None
    # Longest time for two members to connect once both have come.
    connect: timedelta = timedelta(seconds=30)


def form(
    store: Store,
    where: Where,
    backend: str,
    timeout: timedelta,
    device: torch.device | None,
    max_ctas: int,
    cancelled: Callable[[], bool],
    meeting_options: MeetingOptions,
) -> TorchGroup:
    """Form the group that ``where`` names: wait until all members have come, then connect. Never blocks in the store.

    Args:
        store: Store in which members meet.
        where: Name and generation of the communicator.
        backend: ``"gloo"``, ``"nccl"`` or ``"mpi"``.
        timeout: Deadline.
        device: Device on which NCCL connects, if any.
        max_ctas: Number of blocks of the GPU that NCCL may take.
        cancelled: Returns whether to stop.
        meeting_options: Settings for the meeting.

    Raises:
        PeerLost: ``meeting_options.check`` has raised it.
        GenerationChanged: ``meeting_options.check`` has raised it.
        CollectiveTimeout: Not all members came in time; the message names those that are missing.
        CollectiveError: The store cannot be reached, or ``cancelled`` became true.
    """
    if backend == "mpi":
        return TorchGroup(dist.new_group(backend="mpi"), {}, waits=False)
    # Groups of earlier generations that torch has let go meanwhile are freed first.
    sweep()
    try:
        meeting = _GroupRendezvous(store, where, timeout, cancelled, meeting_options)
        if backend == "gloo":
            return _gloo(meeting, meeting_options.host)
        meeting.meet("ready", _Member())
        # NCCL's own threads use the store as long as the group lives, so they get a client of their own.
        client = PrefixStore(meeting.base, own_client(store, timeout))
        return TorchGroup(nccl.connect(client, where, timeout, device, max_ctas), {}, waits=False, aborts=True)
    except AsyncTrainingError:
        raise
    except RuntimeError as error:
        raise CollectiveError(
            f"{where}: forming the group failed: {str(error).rstrip('.')}. A rank died while connecting, or the store "
            "is gone: see the logs of the other ranks."
        ) from error


class _GroupRendezvous:
    """The meeting of the members of a group that is being formed: they wait for each other until the deadline."""

    def __init__(
        self,
        store: Store,
        where: Where,
        timeout: timedelta,
        cancelled: Callable[[], bool],
        meeting_options: MeetingOptions,
    ) -> None:
        self.store = store
        self.where = where
        self._started = time.monotonic()
        self._timeout_s = timeout.total_seconds()
        self._cancelled = cancelled
        self._meeting_options = meeting_options
        self.connect = meeting_options.connect
        self._keys: list[str] = []
        base = f"{_PREFIX}/{where.generation.number}/{where.name}"
        # A counter, because a group of this name may be formed again later, and must not read old addresses then.
        self.base = f"{base}/{store.add(f'{base}/attempt/{where.rank}', 1)}"

    def left(self) -> timedelta:
        """Return the time until the deadline, at least one second."""
        return timedelta(seconds=max(self._started + self._timeout_s - time.monotonic(), 1.0))

    def check(self) -> None:
        """Raise if waiting must end: it was cancelled, a member is lost, or the deadline has passed."""
        if self._cancelled():
            raise CollectiveError(f"{self.where}: forming the group was aborted.")
        self._meeting_options.check()
        elapsed_s = time.monotonic() - self._started
        if elapsed_s >= self._timeout_s:
            missing = [rank for rank, key in enumerate(self._keys) if not self._is_there(key)]
            raise CollectiveTimeout(
                f"{self.where}: forming the group: after {elapsed_s:.1f} s still without rank(s) {missing}. See "
                "the logs of those."
            )

    def view(self, prefix: str = "") -> PollingStore:
        """Return a view of the store with keys under ``prefix``.

        Its waits call `check` repeatedly, which may raise to end them.
        """
        return PollingStore(self.store, prefix, self.check, self._meeting_options.seal)

    def meet(self, phase: str, member: _Member) -> list[_Member]:
        """Write what this member says for a phase into the store, and return what all members say, once they do."""
        self._keys = [f"{self.base}/{phase}/{rank}" for rank in range(self.where.world_size)]
        self.view().set(self._keys[self.where.rank], json.dumps(member).encode())
        self.check()
        return self.view().read(self._keys, self._parse)

    def _is_there(self, key: str) -> bool:
        value = self._meeting_options.seal.open(key, self.store.get(key)) if self.store.check([key]) else None
        return value is not None and self._parse(value) is not None

    def _parse(self, value: bytes) -> _Member | None:
        """Return what a member says; None if a stranger has written something that no member says."""
        member = parse_json(value)
        try:
            places, unreachable = member
            ports = [port for host, port in places if type(host) is str and type(port) is int and 0 < port < 1 << 16]
            ranks = [rank for rank in unreachable or [] if type(rank) is int and 0 <= rank < self.where.world_size]
        except (TypeError, ValueError):
            return None
        valid = isinstance(unreachable, list | None) and len(ports) == len(places) and ranks == (unreachable or [])
        return _Member(list(map(tuple, places)), unreachable) if valid else None


def leaving_ranks(unreachable: Sequence[Collection[int]]) -> tuple[int, ...]:
    """Return the ranks that must leave so that all others reach each other.

    The rank with most broken links leaves first, the last one of several, until no link is broken.

    Args:
        unreachable: For each rank, the ranks to which it could not connect.

    >>> leaving_ranks([[], [2], []])
    (2,)
    >>> leaving_ranks([[1, 2], [0], [0]])
    (0,)
    """
    links = {frozenset((rank, peer)) for rank, peers in enumerate(unreachable) for peer in peers}
    leaving: list[int] = []
    while links:
        leaving.append(max(range(len(unreachable)), key=lambda rank: (sum(rank in link for link in links), rank)))
        links = {link for link in links if leaving[-1] not in link}
    return tuple(sorted(leaving))


def check_connected(where: Where, members: Sequence[_Member], connect: timedelta) -> None:
    """Raise LinkLost if members do not reach each other, or CollectiveError if some have failed otherwise."""
    failed = [rank for rank, member in enumerate(members) if member.unreachable is not None]
    unreachable = [member.unreachable or () for member in members]
    if leaving := leaving_ranks(unreachable):
        links = sorted({tuple(sorted((rank, peer))) for rank in failed for peer in unreachable[rank]})
        addresses = [
            f"rank {rank} ({', '.join(host for host, _ in member.places)})" for rank, member in enumerate(members)
        ]
        pairs = "; ".join(f"{addresses[rank]} and {addresses[peer]}" for rank, peer in links)
        raise LinkLost(
            f"{where}: no connection within {connect.total_seconds():g} s between {pairs}. All reach the store, "
            f"so a link is down, or a firewall is in between. Rank(s) {[*leaving]} leave. Each host must reach all "
            "others at all ports; GLOO_SOCKET_IFNAME names the network to use.",
            leaving,
        )
    if failed:
        raise CollectiveError(f"{where}: rank(s) {failed} failed to connect. See the logs of those.")


def _is_reachable(member: _Member) -> bool:
    for place in member.places:
        try:
            socket.create_connection(place, _PROBE_S).close()
        except ConnectionRefusedError:
            continue  # its host answers
        except OSError:
            return False
    return True


def _gloo(meeting: _GroupRendezvous, host: str | None) -> TorchGroup:
    gloo: Any = dist.ProcessGroupGloo
    where = meeting.where
    options = gloo._Options()
    # One thread at a time: another thread's listening socket would be taken for one of these.
    with _device, opening(lambda fd: listening_port(fd) is not None) as listening:
        options._devices = _devices(host)
        places = [
            (own_address(fd) or "", port) for fd in listening.sockets() if (port := listening_port(fd)) is not None
        ]
    options._threads = len(options._devices)
    members = meeting.meet("ready", _Member(places))
    # Members that have connected wait for those that cannot, so they need time left for that.
    options._timeout = min(meeting.left() / 3, meeting.connect) / _GLOO_TRIES
    # Other threads open sockets, too. Those of this group have one of its listening ports at one of their ends.
    own = {port for _, port in places}
    peers = {port for member in members for _, port in member.places}
    group = failure = unreachable = None
    try:
        with opening(lambda fd: connects(fd, own, peers)) as connections:
            pg = gloo(meeting.view(f"{meeting.base}/"), where.rank, where.world_size, options)
        group = TorchGroup(pg, connections.sockets(), waits=True)
    except Exception as error:
        failure = error
        with ThreadPoolExecutor(16) as pool:
            unreachable = [rank for rank, answers in enumerate(pool.map(_is_reachable, members)) if not answers]
    try:
        # torch returns when this rank has connected. To close now would fail a peer that still connects.
        members = meeting.meet("formed", _Member(places, unreachable))
        check_connected(where, members, meeting.connect)
        assert group is not None
        return group
    except BaseException as error:
        if group is not None:
            group.break_off()
            group.dispose()
        raise error from failure
    finally:
        failure = None  # its traceback holds this frame, and thereby Gloo's threads


def _devices(host: str | None) -> list[Any]:
    gloo: Any = dist.ProcessGroupGloo
    # As torch does, but not lazily: connections that are made later could not be found, and broken off.
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if names:
        return [gloo.create_device(interface=name, lazy_init=False) for name in names]
    if host is not None:
        return [gloo.create_device(hostname=host, lazy_init=False)]
    return [gloo.create_default_device(lazy_init=False)]

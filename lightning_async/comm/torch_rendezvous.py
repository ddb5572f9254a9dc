"""Forming groups of torch.distributed: all members meet in a store, then connect.

Groups are built directly from a store, without the default group, so that any number of them can be formed again under
the next generation. Nobody blocks in the store: who waits for members hears of deaths.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_async._sockets import connects, listening_port, opening
from lightning_async.comm import nccl
from lightning_async.comm.collectives import Where
from lightning_async.comm.torch_groups import TorchGroup, sweep
from lightning_async.errors import AsyncTrainingError, CollectiveError, CollectiveTimeout
from lightning_async.membership.signing import Seal
from lightning_async.membership.store import PollingStore, PrefixStore, Store, own_client

_PREFIX = "lightning_async"
_device = threading.Lock()
Ports = list[int]


@dataclass
class MeetingOptions:
    """The terms on which members meet; one object for a communicator and all its forks."""

    seal: Seal = field(default_factory=Seal)  # of what they tell each other in the store
    # Raises where waiting is in vain, as a member is lost; may be set later than the communicator is made.
    check: Callable[[], None] = lambda: None
    host: str | None = None  # where Gloo listens; by default where this host's name leads to, or ``GLOO_SOCKET_IFNAME``


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
    """Form the group ``where`` names: wait for every member to come, then connect. Never blocks in the store.

    Raises:
        PeerLost, GenerationChanged: what ``meeting_options.check`` raised.
        CollectiveTimeout: not all members came in time; the message names them.
        CollectiveError: the store is out of reach, or ``cancelled`` became true.
    """
    if backend == "mpi":
        return TorchGroup(dist.new_group(backend="mpi"), {}, waits=False)
    sweep()
    try:
        meeting = _GroupRendezvous(store, where, timeout, cancelled, meeting_options)
        if backend == "gloo":
            return _gloo(meeting, meeting_options.host)
        meeting.meet("ready", [])
        # NCCL's own threads use the store for as long as the group lives.
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
    """The members of a group to be, waiting for each other in the store until the deadline."""

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
        self._keys: list[str] = []
        base = f"{_PREFIX}/{where.generation.number}/{where.name}"
        # The same name may be formed again later in the same program; old addresses must not be read then.
        self.base = f"{base}/{store.add(f'{base}/attempt/{where.rank}', 1)}"

    def left(self) -> timedelta:
        return timedelta(seconds=max(self._started + self._timeout_s - time.monotonic(), 1.0))

    def check(self) -> None:
        if self._cancelled():
            raise CollectiveError(f"{self.where}: forming the group was aborted.")
        self._meeting_options.check()
        elapsed_s = time.monotonic() - self._started
        if elapsed_s >= self._timeout_s:
            missing = [rank for rank, key in enumerate(self._keys) if not self.store.check([key])]
            raise CollectiveTimeout(
                f"{self.where}: forming the group: after {elapsed_s:.1f} s still without rank(s) {missing}. See "
                "the logs of those."
            )

    def view(self, prefix: str = "") -> PollingStore:
        return PollingStore(self.store, prefix, self.check, self._meeting_options.seal)

    def say(self, phase: str, ports: Ports | None) -> None:
        self.view().set(f"{self.base}/{phase}/{self.where.rank}", json.dumps({"ports": ports}).encode())

    def meet(self, phase: str, ports: Ports) -> list[Ports | None]:
        self._keys = [f"{self.base}/{phase}/{rank}" for rank in range(self.where.world_size)]
        self.say(phase, ports)
        said = self.view().read(self._keys, _parse)
        return [each["ports"] for each in said]


def _parse(value: bytes) -> dict[str, Ports | None] | None:
    try:
        said = json.loads(value)
        ports = said["ports"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return said if ports is None or (isinstance(ports, list) and all(type(port) is int for port in ports)) else None


def _gloo(meeting: _GroupRendezvous, host: str | None) -> TorchGroup:
    gloo: Any = dist.ProcessGroupGloo
    where = meeting.where
    options = gloo._Options()
    # Or another thread's listening socket would be taken for ours.
    with _device, opening(lambda fd: listening_port(fd) is not None) as listening:
        options._devices = _devices(host)
        ports = [port for fd in listening.sockets() if (port := listening_port(fd)) is not None]
    options._threads = len(options._devices)
    everyones = meeting.meet("ready", ports)
    options._timeout = meeting.left()
    # Other threads open sockets too. Ours have one of our listening ports at this end, or a peer's at the other.
    own = set(ports)
    peers = {port for theirs in everyones for port in theirs or []}
    try:
        with opening(lambda fd: connects(fd, own, peers)) as connections:
            pg = gloo(meeting.view(f"{meeting.base}/"), where.rank, where.world_size, options)
    except Exception:
        meeting.say("formed", None)
        meeting.check()  # torch may have lost the type of what this raised
        raise
    group = TorchGroup(pg, connections.sockets(), waits=True)
    try:
        # Torch returns when this rank has connected. One that closed now would fail a peer that still connects.
        everyones = meeting.meet("formed", ports)
        if failed := [rank for rank, theirs in enumerate(everyones) if theirs is None]:
            raise CollectiveError(f"{where}: rank(s) {failed} failed to connect. See the logs of those.")
    except BaseException:
        group.break_off()
        group.dispose()
        raise
    return group


def _devices(host: str | None) -> list[Any]:
    gloo: Any = dist.ProcessGroupGloo
    # As torch does; lazily made connections could not be found for breaking them off.
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if names:
        return [gloo.create_device(interface=name, lazy_init=False) for name in names]
    if host is not None:
        return [gloo.create_device(hostname=host, lazy_init=False)]
    return [gloo.create_default_device(lazy_init=False)]

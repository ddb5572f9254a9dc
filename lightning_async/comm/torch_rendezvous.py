"""Forming groups of torch.distributed: all members meet in a store, and then connect.

Groups are built directly from a store, without the default group, so that any number of them can be formed again under
the next generation. No thread blocks in the store, so that a thread that waits for members can react to deaths.
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
"""Ports at which a member listens."""


@dataclass
class MeetingOptions:
    """The settings of the rendezvous of a communicator's members through a store; all forks share one object."""

    seal: Seal = field(default_factory=Seal)  # seal of their messages in the store
    # Raises if a member is lost, so that waiting is in vain; may be set after the communicator was made.
    check: Callable[[], None] = lambda: None
    # Address at which Gloo listens. Default: that of this host's name, or of ``GLOO_SOCKET_IFNAME``.
    host: str | None = None


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
        meeting.meet("ready", [])
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
            missing = [rank for rank, key in enumerate(self._keys) if not self.store.check([key])]
            raise CollectiveTimeout(
                f"{self.where}: forming the group: after {elapsed_s:.1f} s still without rank(s) {missing}. See "
                "the logs of those."
            )

    def view(self, prefix: str = "") -> PollingStore:
        """Return a view of the store with keys under ``prefix``.

        Its waits call `check` repeatedly, which may raise to end them.
        """
        return PollingStore(self.store, prefix, self.check, self._meeting_options.seal)

    def say(self, phase: str, ports: Ports | None) -> None:
        """Write this member's ports for a phase into the store; ``ports`` is None if the member has failed."""
        self.view().set(f"{self.base}/{phase}/{self.where.rank}", json.dumps({"ports": ports}).encode())

    def meet(self, phase: str, ports: Ports) -> list[Ports | None]:
        """Write this member's ports for a phase, wait for those of all others, and return the ports of all members."""
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
    # One thread at a time: another thread's listening socket would be taken for one of these.
    with _device, opening(lambda fd: listening_port(fd) is not None) as listening:
        options._devices = _devices(host)
        ports = [port for fd in listening.sockets() if (port := listening_port(fd)) is not None]
    options._threads = len(options._devices)
    everyones = meeting.meet("ready", ports)
    options._timeout = meeting.left()
    # Other threads open sockets, too. Those of this group have one of its listening ports at one of their ends.
    own = set(ports)
    peers = {port for theirs in everyones for port in theirs or []}
    try:
        with opening(lambda fd: connects(fd, own, peers)) as connections:
            pg = gloo(meeting.view(f"{meeting.base}/"), where.rank, where.world_size, options)
    except Exception:
        # The others would otherwise wait for this member until the deadline.
        meeting.say("formed", None)
        meeting.check()  # raises the error of `check` again, whose type torch may have lost
        raise
    group = TorchGroup(pg, connections.sockets(), waits=True)
    try:
        # torch returns when this rank has connected. To close now would fail a peer that still connects.
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
    # As torch does, but not lazily: connections that are made later could not be found, and broken off.
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if names:
        return [gloo.create_device(interface=name, lazy_init=False) for name in names]
    if host is not None:
        return [gloo.create_device(hostname=host, lazy_init=False)]
    return [gloo.create_default_device(lazy_init=False)]

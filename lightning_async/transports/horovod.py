"""Ranks of Horovod: started by horovodrun or mpirun, their bytes moved by Horovod."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore

from lightning_async.comm.horovod.collectives import HorovodCollectives
from lightning_async.comm.horovod.world import HorovodWorld, load
from lightning_async.comm.membership.membership import Membership
from lightning_async.comm.membership.signing import Seal
from lightning_async.comm.membership.start import Patience, open_store
from lightning_async.engine.world import World
from lightning_async.errors import PeerLost
from lightning_async.trainer.environments import HorovodEnvironment
from lightning_async.transports.transport import Connection

__all__ = ["HorovodEngine"]


class HorovodEngine:
    """See `Engine`.

    Args:
        owner: the strategy's name, for messages.
        process_group_backend, start_method: of torch's engine; refused, as they would have no effect.
        gloo_timeout: after which Gloo inside Horovod gives up on a silent peer.

    Raises:
        ValueError: an argument of the other engine.
        ModuleNotFoundError: Horovod is not installed; says how to get it.
    """

    def __init__(
        self, owner: str, process_group_backend: str | None, start_method: str, gloo_timeout: timedelta
    ) -> None:
        for argument, value, default in (
            ("process_group_backend", process_group_backend, None),
            ("start_method", start_method, "popen"),
        ):
            if value != default:
                raise ValueError(
                    f"`{owner}({argument}={value!r})` has no effect with Horovod, whose launcher starts the ranks and "
                    "whose build says what moves bytes: leave it out, or pass `engine='torch'`."
                )
        load()
        self._gloo_timeout = gloo_timeout

    def environment(self, lightnings: Any) -> HorovodEnvironment:
        return HorovodEnvironment()

    def launcher(
        self, strategy: Any, num_processes: int, num_nodes: int, on_death: Callable[[int, int], timedelta]
    ) -> None:
        return None

    def root_device(self, devices: Sequence[torch.device], local_rank: int) -> torch.device:
        """One device for each rank, whatever ``Trainer(devices=)`` says: by the local rank."""
        kind = devices[0].type
        return devices[0] if kind == "cpu" else torch.device(kind, local_rank)

    def bucket_device(self, root_device: torch.device) -> torch.device:
        """On the GPU where Horovod was built with NCCL, else in the host's memory."""
        return root_device if root_device.type == "cuda" and load().nccl_built() else torch.device("cpu")

    def connect(
        self, environment: Any, root_device: torch.device, name: str, dead_after: timedelta | None
    ) -> Connection:
        """See `Engine`. Names are counted by Horovod's world, as ranks may join it that have run nothing yet."""
        world = HorovodWorld.join(environment.launched, self._gloo_timeout)
        root = _collectives(world)
        membership = None
        if dead_after is not None:
            membership = _Membership(world, PrefixStore(root.name, _store(world, root)), root.name, dead_after)
            membership.start()
        return Connection(root, root, membership)

    @contextmanager
    def short_world(self, environment: Any, name: str) -> Iterator[World]:
        root = _collectives(HorovodWorld.join(environment.launched, self._gloo_timeout))
        try:
            yield World(root)
            root.barrier().result()
        finally:
            root.close()


class _Membership(Membership):
    """Heartbeats beside Horovod: who is lost takes Horovod's world along."""

    def __init__(self, world: HorovodWorld, store: Any, name: str, dead_after: timedelta) -> None:
        # The store is no older than Horovod's world.
        seal = Seal.of_job().within(name)
        super().__init__(store, world.rank, world.size, dead_after=dead_after, fresh=True, seal=seal)
        self._horovod = world

    def check(self) -> None:
        try:
            super().check()
        except PeerLost as error:
            self._horovod.poison(error)
            raise self._horovod.lost_type(str(error), error.ranks) from error


def _collectives(world: HorovodWorld) -> HorovodCollectives:
    world.num_runs += 1
    return HorovodCollectives(world, name=f"run{world.num_runs}", timeout=timedelta(days=7))


def _store(world: HorovodWorld, root: HorovodCollectives) -> Any:
    """Horovod's world has one store, on rank 0; its address goes round by Horovod itself."""
    if world.store is None:
        timeout = timedelta(minutes=1)
        patience = Patience(root.rank, timeout, check=lambda: None)
        address = "127.0.0.1" if world.one_host else os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
        if root.rank == 0:
            world.store = open_store(address, 0, True, patience, timeout)
        place = World(root, deadline=timeout).broadcast((address, getattr(world.store, "port", 0)))
        if root.rank != 0:
            world.store = open_store(*place, False, patience, timeout)
    return world.store

"""The transport of Horovod: horovodrun or mpirun starts the ranks, and Horovod moves their bytes.

`HorovodTransport` connects the ranks. `HorovodEnvironment` is the cluster environment that numbers them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore

from lightning_async.engine.collectives import LightningCollectives
from lightning_async.engine.timeouts import Timeouts
from lightning_async.errors import PeerLost
from lightning_async.horovod.collectives import HorovodCollectives, HorovodWorld, load
from lightning_async.membership.membership import Membership
from lightning_async.membership.signing import Seal
from lightning_async.membership.startup import WaitWithLog, open_store
from lightning_async.trainer.environment.environments import ClusterEnvironment, started_by_horovodrun
from lightning_async.transports.base import Connection, Transport, short_world


class HorovodEnvironment(ClusterEnvironment):
    """The environment of Horovod's ranks.

    Ranks and sizes come from Horovod once it is initialised, and from horovodrun's or mpirun's variables before that.
    One process trains on one device, that of its local rank, whatever the Trainer's ``devices`` and ``num_nodes`` are.
    """

    def __init__(self) -> None:
        super().__init__()
        prefixes = ("HOROVOD_", "OMPI_COMM_WORLD_", "PMI_")
        found = next((prefix for prefix in prefixes if f"{prefix}RANK" in os.environ), "")

        def number(name: str, default: int) -> int:
            return int(os.environ.get(found + name, default))

        self._rank = number("RANK", 0)
        self._size = number("SIZE", 1)
        self._local_rank = number("LOCAL_RANK", int(os.environ.get("MPI_LOCALRANKID", self._rank)))
        self._local_size = number("LOCAL_SIZE", int(os.environ.get("MPI_LOCALNRANKS", self._size)))

    @property
    def launched(self) -> int | None:
        """The number of ranks that the launcher started; None under Horovod Elastic, where ranks come and go."""
        return None if "HOROVOD_ELASTIC" in os.environ else self._size

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def own_address(self) -> str:
        """The name of this host: the one that horovodrun uses, or the system's host name."""
        return os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()

    @property
    def main_address(self) -> str:
        raise RuntimeError("Under Horovod there is no torch.distributed: use the strategy's own collectives.")

    @property
    def main_port(self) -> int:
        return int(self.main_address)

    @staticmethod
    def detect() -> bool:
        return started_by_horovodrun()

    def world_size(self) -> int:
        world = HorovodWorld.current(self.launched)
        return self._size if world is None else world.size

    def set_world_size(self, size: int) -> None:
        """Do nothing, because the launcher has set the numbers."""

    def global_rank(self) -> int:
        world = HorovodWorld.current()
        return self._rank if world is None else world.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing, because the launcher has set the rank of this process."""

    def local_rank(self) -> int:
        world = HorovodWorld.current()
        return self._local_rank if world is None else world.local_rank

    def node_rank(self) -> int:
        return self.global_rank() // max(1, self._local_size)

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Do nothing, because the launcher has set the numbers."""


@dataclass(frozen=True, kw_only=True)
class HorovodTransport(Transport):
    """A transport in which Horovod moves the bytes, and horovodrun or mpirun starts the ranks. See `Transport`.

    Args:
        gloo_timeout: Time after which Gloo inside Horovod gives up on a silent peer. In each process, it is set by the
            first transport that initialises Horovod. Default: 30 seconds.

    Raises:
        ValueError: ``gloo_timeout`` is not longer than zero.
        ModuleNotFoundError: Horovod is not installed; the message has the remedy.
    """

    gloo_timeout: timedelta = timedelta(seconds=30)

    def __post_init__(self) -> None:
        if not self.gloo_timeout > timedelta(0):
            raise ValueError(f"`HorovodTransport(gloo_timeout={self.gloo_timeout!r})` must be longer than zero.")
        load()

    def environment(self, lightnings: Any) -> Any:
        return HorovodEnvironment()

    def launcher(
        self, strategy: Any, num_processes: int, num_nodes: int, on_death: Callable[[int, int], timedelta | None]
    ) -> Any:
        return None

    def root_device(self, devices: Sequence[torch.device], local_rank: int) -> torch.device:
        """Return the device of the local rank, whatever ``Trainer(devices=)`` is."""
        kind = devices[0].type
        return devices[0] if kind == "cpu" else torch.device(kind, local_rank)

    def backend_on(self, root_device: torch.device) -> str:
        return "horovod"

    def bucket_device(self, root_device: torch.device) -> torch.device:
        """Return the GPU if Horovod was built with NCCL, else the host's memory."""
        return root_device if root_device.type == "cuda" and load().nccl_built() else torch.device("cpu")

    def connect(self, environment: Any, root_device: torch.device, name: str, timeouts: Timeouts | None) -> Connection:
        """Connect the ranks. Horovod's world numbers the runs, because a joining rank has counted no earlier ones."""
        world = HorovodWorld.join(environment.launched, self.gloo_timeout)
        root = _collectives(world)
        membership = None
        if timeouts is not None:
            membership = _Membership(world, PrefixStore(root.name, _store(world, root)), root.name, timeouts.dead_after)
            membership.start()
        connection = Connection(root, root, membership)
        connection.outlives = not world.another_follows
        return connection

    def short_world(self, environment: Any, name: str) -> AbstractContextManager[LightningCollectives]:
        return short_world(_collectives(HorovodWorld.join(environment.launched, self.gloo_timeout)))


class _Membership(Membership):
    """The membership of Horovod's ranks: when a rank is lost, Horovod's operations fail at once.

    Without this, operations under way would wait for the lost rank until Gloo's timeout.
    """

    def __init__(self, world: HorovodWorld, store: Any, name: str, dead_after: timedelta) -> None:
        # The store is as new as Horovod's world, so its records are fresh.
        seal = Seal.of_job().within(name)
        super().__init__(store, world.rank, world.size, dead_after=dead_after, fresh=True, seal=seal)
        self._horovod = world

    def check(self) -> None:
        try:
            super().check()
        except PeerLost as error:
            # Operations under way would wait for the lost rank until Gloo's timeout.
            self._horovod.poison(error)
            raise self._horovod.lost_type(str(error), error.ranks) from error


def _collectives(world: HorovodWorld) -> HorovodCollectives:
    world.num_runs += 1
    return HorovodCollectives(world, name=f"run{world.num_runs}", timeout=timedelta(days=7))


def _store(world: HorovodWorld, root: HorovodCollectives) -> Any:
    """Return the store of Horovod's world; at its first use, rank 0 opens it and broadcasts its address."""
    if world.store is None:
        timeout = timedelta(minutes=1)
        patience = WaitWithLog(root.rank, timeout, check=lambda: None)
        address = "127.0.0.1" if world.one_host else os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
        if root.rank == 0:
            world.store = open_store(address, 0, True, patience, timeout)
        place = LightningCollectives(root, deadline=timeout).broadcast((address, getattr(world.store, "port", 0)))
        if root.rank != 0:
            world.store = open_store(*place, False, patience, timeout)
    return world.store

"""Ranks of torch.distributed, whoever started them; Lightning starts them where nobody did."""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_async.arguments import check_choice
from lightning_async.comm.launched import came_back
from lightning_async.comm.membership.assembly import Found
from lightning_async.comm.membership.door import Door
from lightning_async.comm.membership.membership import Membership
from lightning_async.comm.membership.presence import Presence, naming_the_stores_host
from lightning_async.comm.membership.signing import Seal
from lightning_async.comm.membership.start import Patience, greet
from lightning_async.comm.torch import nccl
from lightning_async.comm.torch.collectives import TorchCollectives
from lightning_async.comm.torch.forming import Terms
from lightning_async.comm.torch.groups import keep_for_good
from lightning_async.comm.torch.staged import StagedCollectives
from lightning_async.engine.world import World
from lightning_async.trainer.environments import MPIRunEnvironment
from lightning_async.trainer.namespace import fabric
from lightning_async.trainer.popen import ProcessLauncher, ScriptLauncher
from lightning_async.transports.job_store import (
    START_TIMEOUT,
    assemble,
    host_of,
    open_early,
    renew,
    store_of,
    store_process,
)
from lightning_async.transports.transport import Connection, Transport, short_world

__all__ = ["StartMethod", "TorchTransport"]

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
_FORM_TIMEOUT = timedelta(minutes=5)
_DEAD_AFTER = timedelta(minutes=1)  # between the runs of strategies that have no heartbeats
_INTERFACE = "GLOO_SOCKET_IFNAME"
_FIRST_BEAT = timedelta(seconds=30)  # of a rank that has just been met
_presences: list[Presence] = []  # of this process: one, from its first run on


@dataclass(frozen=True, kw_only=True)
class TorchTransport(Transport):
    """torch.distributed moves the bytes; torchrun, SLURM, mpirun or Lightning starts the ranks. See `Transport`.

    Args:
        backend: "gloo", "nccl" or "mpi", for payloads; everything small goes over Gloo (MPI: over MPI). Default: "nccl"
            on CUDA, else "gloo".
        start: how Lightning starts the other ranks where no launcher did: "popen" (default) runs the script again;
            "spawn", "fork" and "forkserver" suit notebooks.

    Raises:
        ValueError: an unknown backend or way to start, or a backend that this torch was built without.
    """

    backend: str | None = None
    start: StartMethod = "popen"

    def __post_init__(self) -> None:
        owner = type(self).__name__
        check_choice(owner, "backend", self.backend, (None, "gloo", "nccl", "mpi"))
        check_choice(owner, "start", self.start, get_args(StartMethod))
        available = {"mpi": dist.is_mpi_available, "nccl": dist.is_nccl_available}
        if self.backend in available and not available[self.backend]():
            raise ValueError(
                f"`{owner}(backend={self.backend!r})`: this build of torch ({torch.__version__}) has none. Leave it "
                "out, or install a torch that has it."
            )

    def environment(self, lightnings: Any) -> Any:
        """Lightning's own choice, except under a launcher that it does not know."""
        own = fabric("plugins.environments").LightningEnvironment
        return MPIRunEnvironment() if type(lightnings) is own and MPIRunEnvironment.detect() else lightnings

    def launcher(
        self, strategy: Any, num_processes: int, num_nodes: int, on_death: Callable[[int, int], timedelta | None]
    ) -> Any:
        if self.start == "popen":
            return ScriptLauncher(strategy.cluster_environment, num_processes, num_nodes, on_death)
        return ProcessLauncher(strategy, self.start)

    def root_device(self, devices: Sequence[torch.device], local_rank: int) -> torch.device:
        return devices[local_rank]

    def backend_on(self, root_device: torch.device) -> str:
        return self.backend or ("nccl" if root_device.type == "cuda" else "gloo")

    def bucket_device(self, root_device: torch.device) -> torch.device:
        """On the GPU, so that all arithmetic is; in the host's memory for MPI."""
        on_gpu = root_device.type == "cuda" and self.backend_on(root_device) in ("nccl", "gloo")
        return root_device if on_gpu else torch.device("cpu")

    def connect(
        self,
        environment: Any,
        root_device: torch.device,
        name: str,
        dead_after: timedelta | None,
        elastic: bool = False,
    ) -> Connection:
        with naming_the_stores_host(environment.global_rank()):
            _join_default_group(environment, self.backend_on(root_device), elastic)
            presence = _meet(environment, name, dead_after)
            return self._connect(environment, root_device, name, dead_after, START_TIMEOUT, elastic, presence.check)

    def widen(
        self,
        environment: Any,
        root_device: torch.device,
        name: str,
        dead_after: timedelta,
        timeout: timedelta,
        check: Callable[[], None],
    ) -> Connection:
        rank, seal, job = environment.global_rank(), Seal.of_job().within(name), getattr(environment, "job", "")
        room = distributed_c10d.PrefixStore(name, store_of(environment, rank))
        greet(room, rank, environment.world_size(), job, seal, Patience(rank, timeout, check))
        return self._connect(environment, root_device, name, dead_after, timeout, True, check)

    def assemble(self, environment: Any) -> Found:
        """See `ElasticTransport`."""
        return assemble(environment)

    def early_door(self, environment: Any) -> Door:
        """See `ElasticTransport`."""
        return Door(open_early(environment), Seal.of_job())

    def door(self, environment: Any) -> Door:
        return Door(store_of(environment, environment.global_rank()), Seal.of_job())

    def visit(self, environment: Any, name: str, guest: str, dead_after: timedelta) -> Membership:
        store = distributed_c10d.PrefixStore(name, store_of(environment, environment.global_rank()))
        seal = Seal.of_job().within(name)
        return Membership(store, 0, 1, member=guest, visits=True, dead_after=dead_after, fresh=True, seal=seal)

    def _connect(
        self,
        environment: Any,
        root_device: torch.device,
        name: str,
        dead_after: timedelta | None,
        timeout: timedelta,
        elastic: bool,
        check: Callable[[], None],
    ) -> Connection:
        """Communicators of ranks that have met; ``check`` tells of those that are gone where no heartbeats do."""
        backend = self.backend_on(root_device)
        if backend == "nccl":
            nccl.set_variables()
        rank, world_size, seal = environment.global_rank(), environment.world_size(), Seal.of_job().within(name)
        store = distributed_c10d.PrefixStore(name, store_of(environment, rank))
        terms, form_timeout = Terms(seal, check, host_of(environment)), min(_FORM_TIMEOUT, timeout)
        small = "mpi" if backend == "mpi" else "gloo"
        root = TorchCollectives(
            store, rank, world_size, backend=small, timeout=timedelta(days=7), form_timeout=form_timeout, terms=terms
        )
        payload: Any = root
        if self.bucket_device(root_device).type == "cuda":
            payload = TorchCollectives(
                store, rank, world_size, backend=backend, name="device", device=root_device,
                form_timeout=form_timeout, terms=terms,
            )  # fmt: skip
            payload = StagedCollectives(payload, root_device) if backend == "gloo" else payload
        membership = None
        if dead_after is not None:
            # The store is no older than the job, and all ranks have met in it.
            membership = Membership(
                store, rank, world_size, dead_after=dead_after, start_timeout=max(dead_after, _FIRST_BEAT),
                elastic=elastic, fresh=True, readmit=False, seal=seal,
            )  # fmt: skip
            membership.start()
            terms.check = membership.check
        connection = Connection(root, payload, membership, store, name)
        if elastic and (process := store_process()) is not None:  # all have met: who is lost is known without it
            process.outlive()
            connection.on_end = process.follow
        return connection

    def short_world(self, environment: Any, name: str) -> AbstractContextManager[World]:
        rank, presence = environment.global_rank(), _meet(environment, name, None)
        root = TorchCollectives(
            distributed_c10d.PrefixStore(name, store_of(environment, rank)),
            rank,
            environment.world_size(),
            timeout=START_TIMEOUT,
            form_timeout=START_TIMEOUT,
            terms=Terms(Seal.of_job().within(name), presence.check, host_of(environment)),
        )
        return short_world(root, presence.check)


def _meet(environment: Any, name: str, dead_after: timedelta | None) -> Presence:
    """Wait for all ranks to come to a run, however late they are, while their processes live."""
    rank, world_size, seal = environment.global_rank(), environment.world_size(), Seal.of_job()
    room = getattr(environment, "room", "lightning_async")
    if _presences and not _presences[0].inherited and _presences[0].room != room:  # ranks were lost, or have joined
        _presences.pop().close()
    if not _presences or _presences[0].inherited:
        store, patience = store_of(environment, rank), dead_after or _DEAD_AFTER
        _presences[:] = [Presence(store, rank, world_size, patience, START_TIMEOUT, seal, room)]
    _presences[0].meet(name, getattr(environment, "job", ""), seal, START_TIMEOUT)
    return _presences[0]


def _join_default_group(environment: Any, backend: str, elastic: bool) -> None:
    """Torch's default group, for code of the user's that expects one; this package forms its own beside it.

    Who comes back is in none: the group of those that began cannot grow.

    Args:
        elastic: the others may go on without rank 0, and so the store does.
    """
    if dist.is_initialized() or came_back() is not None:
        return
    if backend == "nccl":
        nccl.set_variables()
    renew()
    store = None if backend == "mpi" else store_of(environment, environment.global_rank(), elastic)
    with _gloo_at(host_of(environment)):
        connect = fabric("utilities.distributed")._init_dist_connection
        connect(environment, backend, timeout=START_TIMEOUT, store=store)
    if backend != "nccl":  # for NCCL Lightning does the same; without it some exits abort
        atexit.register(_leave_default_group, os.getpid())


def _leave_default_group(pid: int) -> None:
    if not dist.is_available() or not dist.is_initialized():
        return
    if os.getpid() == pid:
        dist.destroy_process_group()
    else:  # a fork, in which the threads of its parent's group and store are not
        keep_for_good(dist.group.WORLD)
        keep_for_good(store_of(None, 0))


@contextmanager
def _gloo_at(host: str | None) -> Iterator[None]:
    """While torch makes a group of its own, its Gloo is to listen on loopback only, if ``host`` is there."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if host is None or not names or _INTERFACE in os.environ:
        yield
        return
    os.environ[_INTERFACE] = names[0]
    try:
        yield
    finally:
        del os.environ[_INTERFACE]

"""What one run holds open: process groups, heartbeats, and Lightning's collectives over all ranks."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_async.comm.rendezvous import Membership
from lightning_async.comm.torch import TorchCollectives
from lightning_async.namespace import fabric
from lightning_async.strategies.world import World

__all__ = ["Connection", "check_backend", "join_default_group", "short_world"]

log = logging.getLogger(__name__)


def check_backend(backend: str | None) -> None:
    """Refuse a backend that this torch was built without."""
    available = {"mpi": dist.is_mpi_available, "nccl": dist.is_nccl_available}
    if backend in available and not available[backend]():
        raise ValueError(
            f"`process_group_backend={backend!r}`: this build of torch ({torch.__version__}) has none. "
            "Leave it out, or install a torch that has it."
        )


def join_default_group(environment: Any, backend: str, timeout: timedelta) -> None:
    """Torch's default group, for code of the user's that expects one; this package forms its own beside it."""
    if dist.is_initialized():
        return
    fabric("utilities.distributed")._init_dist_connection(environment, backend, timeout=timeout)
    if backend != "nccl":  # for NCCL Lightning does the same; without it some exits abort
        atexit.register(_leave_default_group)


def _leave_default_group() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _store(environment: Any, rank: int, timeout: timedelta) -> Any:
    """The default group's store; MPI's group has none, there rank 0 opens one."""
    if dist.get_backend() == "mpi":
        return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            environment.main_address, environment.main_port, is_master=rank == 0, timeout=timeout
        )
    return distributed_c10d._get_default_store()


class Connection:
    """Opened by the constructor, closed by `close`.

    Args:
        environment: says who this rank is, and where rank 0 is.
        backend: "gloo", "nccl" or "mpi", for payloads; everything small goes over Gloo (MPI: over MPI).
        device: of the buckets.
        name: differs between the runs of one process.
        dead_after: a rank without a heartbeat for so long is lost.
        timeout: for forming groups.
    """

    def __init__(
        self,
        environment: Any,
        backend: str,
        device: torch.device,
        name: str,
        dead_after: timedelta,
        timeout: timedelta = timedelta(minutes=5),
    ) -> None:
        self.rank, self.world_size = environment.global_rank(), environment.world_size()
        store = distributed_c10d.PrefixStore(name, _store(environment, self.rank, timeout))
        small = "mpi" if backend == "mpi" else "gloo"
        self.root = TorchCollectives(
            store, self.rank, self.world_size, backend=small, name="world", timeout=timedelta(days=7)
        )
        self.payload = self.root
        if backend == "nccl":
            self.payload = TorchCollectives(
                store, self.rank, self.world_size, backend=backend, name="device", device=device
            )
        self._roots = [self.root] if self.payload is self.root else [self.root, self.payload]
        self.membership = Membership(store, self.rank, self.world_size, dead_after=dead_after)
        self.membership.start()
        self.world = World(self.root, self.membership.check)

    def open(self) -> None:
        """Form all groups now, those forked off too, rather than each at its first use."""
        for root in self._roots:
            root.open()

    def close(self, in_order: bool) -> None:
        """Release everything; with ``in_order``, first wait shortly until no rank needs the groups any more."""
        if in_order:
            try:
                self.root.barrier().result(timedelta(seconds=30))
            except Exception as error:
                log.warning("Rank %d: the last barrier failed: %s", self.rank, error)
        self.membership.close()
        for root in self._roots:
            root.close()


@contextmanager
def short_world(environment: Any, name: str) -> Iterator[World]:
    """Collectives over all ranks for one operation outside of a run; all ranks call it with the same name."""
    rank, timeout = environment.global_rank(), timedelta(minutes=30)
    root = TorchCollectives(
        distributed_c10d.PrefixStore(name, _store(environment, rank, timeout)),
        rank,
        environment.world_size(),
        name="world",
        timeout=timeout,
        form_timeout=timeout,
    )
    try:
        yield World(root)
        root.barrier().result()
    finally:
        root.close()

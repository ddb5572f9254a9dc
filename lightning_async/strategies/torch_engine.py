"""Ranks of torch.distributed, whoever started them; Lightning starts them where nobody did."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_async.comm import nccl
from lightning_async.comm.rendezvous import Membership
from lightning_async.comm.staged import StagedCollectives
from lightning_async.comm.torch import TorchCollectives
from lightning_async.namespace import fabric, pytorch
from lightning_async.strategies.checks import check_choice
from lightning_async.strategies.connection import Connection
from lightning_async.strategies.environments import MPIRunEnvironment
from lightning_async.strategies.launcher import ScriptLauncher
from lightning_async.strategies.world import World

__all__ = ["StartMethod", "TorchEngine"]

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
_FORM_TIMEOUT = timedelta(minutes=5)


class TorchEngine:
    """See `Engine`.

    Args:
        owner: the strategy's name, for messages.
        process_group_backend: "gloo", "nccl" or "mpi", for payloads; everything small goes over Gloo (MPI: over MPI).
            Default: "nccl" on CUDA, else "gloo".
        start_method: how Lightning starts the other ranks where no launcher did.

    Raises:
        ValueError: an unknown backend or start method, or a backend that this torch was built without.
    """

    def __init__(self, owner: str, process_group_backend: str | None, start_method: StartMethod) -> None:
        check_choice(owner, "process_group_backend", process_group_backend, (None, "gloo", "nccl", "mpi"))
        check_choice(owner, "start_method", start_method, get_args(StartMethod))
        available = {"mpi": dist.is_mpi_available, "nccl": dist.is_nccl_available}
        if process_group_backend in available and not available[process_group_backend]():
            raise ValueError(
                f"`process_group_backend={process_group_backend!r}`: this build of torch ({torch.__version__}) has "
                "none. Leave it out, or install a torch that has it."
            )
        self._backend, self._start_method = process_group_backend, start_method

    def environment(self, lightnings: Any) -> Any:
        """Lightning's own choice, except under a launcher that it does not know."""
        own = fabric("plugins.environments").LightningEnvironment
        return MPIRunEnvironment() if type(lightnings) is own and MPIRunEnvironment.detect() else lightnings

    def launcher(
        self, strategy: Any, num_processes: int, num_nodes: int, on_death: Callable[[int, int], timedelta]
    ) -> Any:
        if self._start_method == "popen":
            return ScriptLauncher(strategy.cluster_environment, num_processes, num_nodes, on_death)
        launcher = pytorch("strategies.launchers.multiprocessing")._MultiProcessingLauncher
        return launcher(strategy, start_method=self._start_method)

    def root_device(self, devices: Sequence[torch.device], local_rank: int) -> torch.device:
        return devices[local_rank]

    def backend(self, root_device: torch.device) -> str:
        """What moves payloads."""
        return self._backend or ("nccl" if root_device.type == "cuda" else "gloo")

    def bucket_device(self, root_device: torch.device) -> torch.device:
        """On the GPU, so that all arithmetic is; in the host's memory for MPI."""
        on_gpu = root_device.type == "cuda" and self.backend(root_device) in ("nccl", "gloo")
        return root_device if on_gpu else torch.device("cpu")

    def connect(
        self, environment: Any, root_device: torch.device, name: str, dead_after: timedelta | None
    ) -> Connection:
        backend = self.backend(root_device)
        if backend == "nccl":
            nccl.set_variables()
        _join_default_group(environment, backend, timedelta(minutes=30))
        rank, world_size = environment.global_rank(), environment.world_size()
        store = distributed_c10d.PrefixStore(name, _store(environment, rank, _FORM_TIMEOUT))
        small = "mpi" if backend == "mpi" else "gloo"
        root = TorchCollectives(store, rank, world_size, backend=small, timeout=timedelta(days=7))
        payload: Any = root
        if self.bucket_device(root_device).type == "cuda":
            payload = TorchCollectives(store, rank, world_size, backend=backend, name="device", device=root_device)
            payload = StagedCollectives(payload, root_device) if backend == "gloo" else payload
        membership = None
        if dead_after is not None:
            membership = Membership(store, rank, world_size, dead_after=dead_after)
            membership.start()
        return Connection(root, payload, membership)

    @contextmanager
    def short_world(self, environment: Any, name: str) -> Iterator[World]:
        rank, timeout = environment.global_rank(), timedelta(minutes=30)
        root = TorchCollectives(
            distributed_c10d.PrefixStore(name, _store(environment, rank, timeout)),
            rank,
            environment.world_size(),
            timeout=timeout,
            form_timeout=timeout,
        )
        try:
            yield World(root)
            root.barrier().result()
        finally:
            root.close()


def _join_default_group(environment: Any, backend: str, timeout: timedelta) -> None:
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

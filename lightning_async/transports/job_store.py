"""The store of all ranks of torch.distributed, for all runs of a process: where it is, and who serves it."""

from __future__ import annotations

import atexit
import os
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_async.comm.launched import attempt, came_back
from lightning_async.comm.membership.assembly import AGENTS_STORE, Assembly, Found
from lightning_async.comm.membership.signing import SECRET, Seal
from lightning_async.comm.membership.start import Patience, greet, is_loopback, listen, open_store
from lightning_async.comm.membership.store_process import StoreProcess
from lightning_async.trainer.error_file import ended_in_order
from lightning_async.trainer.namespace import fabric
from lightning_async.trainer.patches import rank_zero_info
from lightning_async.trainer.popen import check_launcher

__all__ = ["START_TIMEOUT", "assemble", "host_of", "open_early", "renew", "store_of", "store_process"]

START_TIMEOUT = timedelta(minutes=30)
_stores: list[Any] = []  # of this process: one, from its first run on
_processes: list[StoreProcess] = []  # of this process: the one that serves, where it is rank 0
_early: list[Any] = []  # the store, where it is open and no group is yet
_assembled: list[Any] = []  # what the ranks have assembled in: another that came in its place would know nothing of it


def store_of(environment: Any, rank: int, apart: bool = False) -> Any:
    """The store below the default group, which MPI's has not.

    A rank that comes back is in no default group, and finds the store that the others have met in.

    Args:
        environment: of the ranks that are to meet there, as it is opened.
        rank: this one.
        apart: rank 0's is in a process of its own.
    """
    if not _stores and dist.is_initialized() and dist.get_backend() != "mpi":  # somebody else has made the group
        return distributed_c10d._get_default_store()
    if not _stores:
        store = _open_store(environment, rank, apart)
        if came_back() is None:
            greet(store, rank, environment.world_size(), _job(environment), Seal.of_job(), _patience(rank))
        _stores.append(store)
    return _stores[0]


def assemble(environment: Any) -> Found:
    """Whether this rank begins with all or comes back to others, as the launcher's store says, see `Assembly`."""
    rank, address = environment.global_rank(), _address(environment)
    patience = _patience(rank)
    store = open_store(address, environment.main_port, False, patience)
    assembly = Assembly(store, rank, environment.world_size(), os.environ.get(SECRET))
    found = assembly.find(patience)
    _assembled[:] = [store]
    atexit.register(_say_how_it_ends, assembly)
    return found


def _say_how_it_ends(assembly: Assembly) -> None:
    """The process exits: in order, unless an exception has ended a run or ends the script."""
    if ended_in_order() and not hasattr(sys, "last_value"):
        assembly.end()


def open_early(environment: Any) -> Any:
    """The same, before anybody has met there: it is not decided yet who begins. Rank 0's is in a process of its own."""
    if not _stores:
        _stores.append(_open_store(environment, environment.global_rank(), apart=True))
        _early[:] = _stores
    return _stores[0]


def renew() -> None:
    """Another default group is to be formed, above a store of its own."""
    if not _early:
        _stores.clear()
        while _processes:
            _processes.pop().close()
    _early.clear()


def store_process() -> StoreProcess | None:
    """That serves the store, where this process has started one."""
    return _processes[0] if _processes else None


def host_of(environment: Any) -> str | None:
    """Where Gloo is to listen: on loopback where all ranks find rank 0 there; else as Gloo does."""
    address = _address(environment)
    return {"localhost": "127.0.0.1"}.get(address, address) if is_loopback(address) else None


def _open_store(environment: Any, rank: int, apart: bool) -> Any:
    address, seal = _address(environment), Seal.of_job()
    launcher_serves = os.environ.get(AGENTS_STORE) == "True"  # torchrun's agent
    elsewhere = launcher_serves or came_back() is not None
    serves, port = rank == 0 and not elsewhere, environment.main_port
    if serves and apart:
        with listen(address, port) as listening:
            port = listening.getsockname()[1]
            _processes.append(StoreProcess(listening))
    store = _assembled[0] if _assembled else open_store(address, port, serves and not apart, _patience(rank))
    if launcher_serves:  # it may outlive the ranks, and start them again
        store = distributed_c10d.PrefixStore(f"lightning_async/attempt{attempt()}", store)
    if not is_loopback(address) and not seal.signs:
        rank_zero_info(
            f"The ranks' records in the store at {address} are not signed: whoever reaches it can speak for a rank. "
            f"Export the same {SECRET} on all hosts, see docs/security.md."
        )
    return store


def _patience(rank: int) -> Patience:
    return Patience(rank, START_TIMEOUT, check_launcher)


def _job(environment: Any) -> str:
    return getattr(environment, "job", "")


def _address(environment: Any) -> str:
    """Where rank 0 is: on loopback where the launcher says that there is one host."""
    slurm = fabric("plugins.environments").SLURMEnvironment
    launchers = getattr(environment, "launchers", environment)
    one_host = isinstance(launchers, slurm) and os.environ.get("SLURM_NNODES") == "1"
    return "127.0.0.1" if one_host else environment.main_address

"""The transport of torch.distributed, whose ranks any launcher starts, or Lightning."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import resource
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_async._checks import check_choice
from lightning_async.comm import nccl
from lightning_async.comm.default_group import DefaultGroup, Numbering, default_group
from lightning_async.comm.gpu_staging import StagedCollectives
from lightning_async.comm.torch_collectives import TorchCollectives
from lightning_async.comm.torch_groups import keep_for_good
from lightning_async.comm.torch_rendezvous import MeetingOptions
from lightning_async.engine.collectives import LightningCollectives
from lightning_async.engine.timeouts import Timeouts
from lightning_async.membership.join_protocol import JoinBoard
from lightning_async.membership.launcher_channel import attempt, came_back
from lightning_async.membership.membership import Membership
from lightning_async.membership.signing import SECRET, Seal
from lightning_async.membership.startup import (
    AGENTS_STORE,
    Assembly,
    ProcessHeartbeat,
    ProcessRole,
    StartAgreement,
    WaitWithLog,
    greet,
    is_loopback,
    listen,
    naming_the_stores_host,
    open_store,
)
from lightning_async.membership.store_process import StoreProcess
from lightning_async.trainer.environment.environments import MPIRunEnvironment
from lightning_async.trainer.environment.subprocess_launcher import (
    ProcessLauncher,
    ScriptLauncher,
    check_launcher,
    ended_in_order,
)
from lightning_async.trainer.namespace import fabric, rank_zero_info
from lightning_async.transports.base import Connection, Transport, short_world

log = logging.getLogger(__name__)
START_TIMEOUT = timedelta(minutes=30)
# The store of this process, from its first run on.
_stores: list[Any] = []
# The process that serves the store, on rank 0.
_processes: list[StoreProcess] = []
# The store, while it is open and no group exists yet.
_early: list[Any] = []
# The agreement of ranks on settings for the start; empty once all have started.
_agreed: list[StartAgreement] = []
# The store of the assembly. A new store at its address would not know who has come.
_assembled: list[Any] = []


def store_of(environment: Any, rank: int, apart: bool = False) -> Any:
    """Return the store of the job, in which all ranks meet.

    If the user's program has formed torch's default group, this is the group's store (except for MPI, which has no
    store). Otherwise the first call opens a store: rank 0 serves it, or with ``apart`` a separate process of rank 0,
    unless torchrun serves one. A rank that was started again after a failure connects to the existing store.
    """
    # The user's program has formed the default group.
    if not _stores and dist.is_initialized() and default_group() is None and dist.get_backend() != "mpi":
        return distributed_c10d._get_default_store()
    if not _stores:
        _stores.append(_open_store(environment, rank, apart))
        _agree(environment, rank, "wait_for_workers='all'")
        if came_back() is None:
            greet(_stores[0], rank, environment.world_size(), _job(environment), Seal.of_job(), _patience(rank))
    return _stores[0]


def _agree(environment: Any, rank: int, waits: str) -> None:
    if came_back() is None:
        num_serving = getattr(environment, "launchers", environment).world_size() - environment.world_size()
        placement = f"placement='dedicated', num_servers={num_serving}" if num_serving else "placement='colocated'"
        _agreed[:] = [StartAgreement(_stores[0], rank, f"`{placement}` and `{waits}`", Seal.of_job())]


def check_start() -> None:
    """Raise AsyncTrainingError if this rank's launcher has died, or if ranks have different settings."""
    check_launcher()
    for agreement in _agreed:
        agreement.check()


def start_is_over() -> None:
    """Note that all ranks have started; a rank with other settings that starts later fails without stopping them."""
    _agreed.clear()


def assemble(environment: Any) -> ProcessRole:
    """Wait for the other ranks in the launcher's store, and return in which role this rank starts.

    Either all ranks start together, or this rank was started again while the others continued; see `Assembly`.
    """
    rank = environment.global_rank()
    address = _address(environment)
    patience = _patience(rank)
    store = open_store(address, environment.main_port, False, patience)
    assembly = Assembly(store, rank, environment.world_size(), os.environ.get(SECRET))
    found = assembly.find(patience)
    _assembled[:] = [store]
    atexit.register(_say_how_it_ends, assembly)
    return found


def _say_how_it_ends(assembly: Assembly) -> None:
    """Publish that this process ends normally, unless an exception has ended a run or the script; called at exit."""
    if ended_in_order() and not hasattr(sys, "last_value"):
        assembly.end()


def host_of(environment: Any) -> str | None:
    """Return the address on which Gloo must listen, if all ranks are on this host; else None."""
    address = _address(environment)
    return {"localhost": "127.0.0.1"}.get(address, address) if is_loopback(address) else None


def _open_store(environment: Any, rank: int, apart: bool) -> Any:
    address = _address(environment)
    seal = Seal.of_job()
    # torchrun's agent serves a store.
    launcher_serves = os.environ.get(AGENTS_STORE) == "True"
    elsewhere = launcher_serves or came_back() is not None
    serves = rank == 0 and not elsewhere
    port = environment.main_port
    if serves and apart:
        with listen(address, port) as listening:
            port = listening.getsockname()[1]
            _processes.append(StoreProcess(listening))
    store = _assembled[0] if _assembled else open_store(address, port, serves and not apart, _patience(rank))
    # The launcher's store may outlive the ranks, which are then started again.
    if launcher_serves:
        store = distributed_c10d.PrefixStore(f"lightning_async/attempt{attempt()}", store)
    if not is_loopback(address) and not seal.signs:
        rank_zero_info(
            f"The ranks' records in the store at {address} are not signed: anybody who reaches it can speak for a "
            f"rank. Export the same {SECRET} on all hosts, see docs/how-to/security.md."
        )
    return store


def _patience(rank: int) -> WaitWithLog:
    return WaitWithLog(rank, START_TIMEOUT, check_start)


def _job(environment: Any) -> str:
    return getattr(environment, "job", "")


def _address(environment: Any) -> str:
    slurm = fabric("plugins.environments").SLURMEnvironment
    launchers = getattr(environment, "launchers", environment)
    one_host = isinstance(launchers, slurm) and os.environ.get("SLURM_NNODES") == "1"
    return "127.0.0.1" if one_host else environment.main_address


StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
# Time without a heartbeat after which a process counts as dead, for strategies that set no such time.
_DEAD_AFTER = timedelta(minutes=1)
# Time for the first heartbeat of a rank that has just been met.
_FIRST_BEAT = timedelta(seconds=30)
_OPEN_FILES = 8  # that a rank needs for its connections to each rank; 5.5 were measured with 2 and 4 ranks
# The heartbeat of this process, from its first run on.
_presences: list[ProcessHeartbeat] = []


@dataclass(frozen=True, kw_only=True)
class TorchTransport(Transport):
    """A transport in which torch.distributed moves the bytes. See `Transport`.

    torchrun, SLURM, mpirun or Lightning starts the ranks.

    Args:
        backend: Backend of payloads: "gloo", "nccl" or "mpi". Messages of CPU tensors, such as headers, use MPI if this
            is "mpi", else Gloo. Default: "nccl" on CUDA, else "gloo".
        start: Way in which Lightning starts the other ranks if no launcher did: "popen" (default) runs the script
            again; "spawn", "fork" and "forkserver" suit notebooks.

    Raises:
        ValueError: The backend or the way to start is unknown, or this torch was built without the backend.
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
        own = fabric("plugins.environments").LightningEnvironment
        return MPIRunEnvironment() if type(lightnings) is own and MPIRunEnvironment.detect() else lightnings

    def launcher(
        self, strategy: Any, num_processes: int, num_nodes: int, on_death: Callable[[int, int], timedelta | None]
    ) -> Any:
        if self.start == "popen":
            return ScriptLauncher(strategy.cluster_environment, num_processes, num_nodes, on_death, strategy.run_call)
        return ProcessLauncher(strategy, self.start)

    def root_device(self, devices: Sequence[torch.device], local_rank: int) -> torch.device:
        if local_rank >= len(devices):
            raise ValueError(
                f"`Trainer(devices={len(devices)})` is the number of ranks of each host, but local rank {local_rank} "
                "was started. Pass as many `devices` as ranks are started on each host."
            )
        return devices[local_rank]

    def backend_on(self, root_device: torch.device) -> str:
        return self.backend or ("nccl" if root_device.type == "cuda" else "gloo")

    def bucket_device(self, root_device: torch.device) -> torch.device:
        """Return the replica's GPU, so that all arithmetic runs there; the CPU without a GPU, or for MPI."""
        on_gpu = root_device.type == "cuda" and self.backend_on(root_device) in ("nccl", "gloo")
        return root_device if on_gpu else torch.device("cpu")

    def connect(
        self,
        environment: Any,
        root_device: torch.device,
        name: str,
        timeouts: Timeouts | None,
        elastic: bool = False,
    ) -> Connection:
        """Connect as `Transport` describes; with ``elastic``, the membership can also admit joining ranks."""
        with naming_the_stores_host(environment.global_rank()):
            _join_default_group(environment, root_device, self.backend_on(root_device), elastic)
            presence = _meet(environment, name, None if timeouts is None else timeouts.dead_after)
            return self._connect(environment, root_device, name, timeouts, START_TIMEOUT, elastic, presence.check)

    def number_joining_rank(self, environment: Any, root_device: torch.device, world_size: int) -> None:
        """Make torch's default group on a joining rank, which has the last number of all until it is admitted."""
        backend = self.backend_on(root_device)
        if backend != "mpi" and not dist.is_initialized():
            numbering = Numbering(min(environment.global_rank(), world_size - 1), world_size, None)
            _install_default_group(environment, root_device, backend, numbering)

    def widen(
        self,
        environment: Any,
        root_device: torch.device,
        name: str,
        timeouts: Timeouts,
        timeout: timedelta,
        check: Callable[[], None],
    ) -> Connection:
        """Connect the ranks of a running training and joining ranks, for a run ``name`` that continues the training.

        ``timeout`` is the time within which all these ranks must call this. ``check`` raises if one of them will not.
        """
        rank = environment.global_rank()
        seal = Seal.of_job().within(name)
        room = distributed_c10d.PrefixStore(name, store_of(environment, rank))
        greet(room, rank, environment.world_size(), _job(environment), seal, WaitWithLog(rank, timeout, check))
        return self._connect(environment, root_device, name, timeouts, timeout, True, check)

    def assemble(self, environment: Any) -> ProcessRole:
        """Meet the other ranks in the launcher's store, and return the role in which this process starts.

        If the launcher's store outlives ranks, this is called before anything else. See the function `assemble`.
        """
        return assemble(environment)

    def call_roll(self, environment: Any, call: int, failed: bool) -> list[str]:
        """Return the stable ids of the ranks that begin a call of the Trainer; see `ProcessHeartbeat.call_roll`."""
        presence = _presence_of(environment)
        everyone = tuple(map(str, range(environment.world_size())))
        names = getattr(environment, "names", everyone)
        presence.expect(names, getattr(environment, "joined", frozenset()))
        return presence.call_roll(call, names, failed, Seal.of_job(), START_TIMEOUT)

    def check_others(self, environment: Any, dead_after: timedelta) -> None:
        """Raise `PeerLost` if the processes of all other ranks have ended; see `ProcessHeartbeat.check_others`."""
        _presence_of(environment, dead_after).check_others()

    def early_door(self, environment: Any) -> JoinBoard:
        """Return the board on which joining ranks ask to join, without waiting until all ranks have started.

        Call this instead of `door` while it is not decided yet which ranks begin the training.
        """
        # The store must outlive rank 0, so rank 0 keeps it in a process of its own.
        if not _stores:
            _stores.append(_open_store(environment, environment.global_rank(), apart=True))
            _early[:] = _stores
            _agree(environment, environment.global_rank(), "wait_for_workers=<a number>")
        return JoinBoard(_stores[0], Seal.of_job())

    def door(self, environment: Any) -> JoinBoard:
        """Return the board on which joining ranks ask to be admitted."""
        return JoinBoard(store_of(environment, environment.global_rank()), Seal.of_job())

    def visit(self, environment: Any, name: str, joining_rank: str, dead_after: timedelta) -> Membership:
        """Return a membership, not started yet, for a process that is not one of the ranks of run ``name``.

        With it, the process exchanges heartbeats with the ranks of the run, under the name ``joining_rank``.
        """
        store = distributed_c10d.PrefixStore(name, store_of(environment, environment.global_rank()))
        seal = Seal.of_job().within(name)
        # Before this process joins, so that the others never take its predecessor's end for its own.
        _presence_of(environment, dead_after)
        return Membership(store, 0, 1, member=joining_rank, visits=True, dead_after=dead_after, fresh=True, seal=seal)

    def _connect(
        self,
        environment: Any,
        root_device: torch.device,
        name: str,
        timeouts: Timeouts | None,
        timeout: timedelta,
        elastic: bool,
        check: Callable[[], None],
    ) -> Connection:
        """Open the communicators and the membership of ranks that have met in the store.

        Until heartbeats begin, ``check`` is called while ranks wait, and raises if a rank is lost.
        """
        backend = self.backend_on(root_device)
        if backend == "nccl":
            nccl.set_variables()
        rank = environment.global_rank()
        world_size = environment.world_size()
        check_descriptors(rank, world_size)
        seal = Seal.of_job().within(name)
        store = distributed_c10d.PrefixStore(name, store_of(environment, rank))
        limits = timeouts or Timeouts()
        meeting_options = MeetingOptions(seal, check, host_of(environment), limits.dead_after)
        form_timeout = min(limits.reform, timeout)
        small = "mpi" if backend == "mpi" else "gloo"
        root = TorchCollectives(
            store, rank, world_size, backend=small, timeout=timedelta(days=7), form_timeout=form_timeout,
            meeting_options=meeting_options,
        )  # fmt: skip
        payload: Any = root
        if self.bucket_device(root_device).type == "cuda":
            payload = TorchCollectives(
                store, rank, world_size, backend=backend, name="device", device=root_device,
                form_timeout=form_timeout, meeting_options=meeting_options,
            )  # fmt: skip
            payload = StagedCollectives(payload, root_device) if backend == "gloo" else payload
        membership = None
        if timeouts is not None:
            dead_after = timeouts.dead_after
            # The store is as new as the job, and all ranks have met in it, so its records are fresh.
            membership = Membership(
                store, rank, world_size, dead_after=dead_after, start_timeout=max(dead_after, _FIRST_BEAT),
                elastic=elastic, fresh=True, readmit=False, seal=seal,
            )  # fmt: skip
            membership.start()
            meeting_options.check = membership.check
        connection = Connection(root, payload, membership, store, name)
        # All ranks have met, so each of them learns of lost ranks without rank 0, whose store must now survive it.
        if elastic and _processes:
            _processes[0].outlive()
            connection.on_end = _processes[0].follow
        return connection

    def short_world(self, environment: Any, name: str) -> AbstractContextManager[LightningCollectives]:
        rank = environment.global_rank()
        presence = _meet(environment, name, None)
        store = distributed_c10d.PrefixStore(name, store_of(environment, rank))
        meeting_options = MeetingOptions(Seal.of_job().within(name), presence.check, host_of(environment))
        root = TorchCollectives(
            store, rank, environment.world_size(), timeout=START_TIMEOUT, form_timeout=START_TIMEOUT,
            meeting_options=meeting_options,
        )  # fmt: skip
        return short_world(root, presence.check)


def _presence_of(environment: Any, dead_after: timedelta | None = None) -> ProcessHeartbeat:
    """Return the heartbeat of this process, which begins with the first call."""
    if not _presences or _presences[0].inherited:
        started = getattr(environment, "launchers", environment)
        store = store_of(environment, environment.global_rank())
        name = str(started.global_rank())
        _presences[:] = [ProcessHeartbeat(store, name, dead_after or _DEAD_AFTER, START_TIMEOUT, Seal.of_job())]
    return _presences[0]


def _meet(environment: Any, name: str, dead_after: timedelta | None) -> ProcessHeartbeat:
    """Wait until all ranks have come to the run ``name``, however late they are, as long as their processes live."""
    presence = _presence_of(environment, dead_after)
    everyone = tuple(map(str, range(environment.world_size())))
    presence.expect(getattr(environment, "names", everyone), getattr(environment, "joined", frozenset()))
    presence.meet(name, _job(environment), Seal.of_job(), START_TIMEOUT)
    return presence


def _join_default_group(environment: Any, root_device: torch.device, backend: str, elastic: bool) -> None:
    """Make torch's default group for the user's code; this package itself uses other groups.

    If the user's program has formed a default group, it stays as it is. With ``elastic`` the other ranks may continue
    without rank 0, so a separate process serves the store.
    """
    if dist.is_initialized():
        return
    # The default group is formed in a store of its own.
    if not _early:
        _stores.clear()
        _agreed.clear()
        while _processes:
            _processes.pop().close()
    _early.clear()
    if backend == "mpi":
        connect = fabric("utilities.distributed")._init_dist_connection
        connect(environment, backend, timeout=START_TIMEOUT)
    else:
        store_of(environment, environment.global_rank(), elastic)
        numbering = Numbering(environment.global_rank(), environment.world_size(), (0, 0))
        _install_default_group(environment, root_device, backend, numbering)
    check_start()


def _install_default_group(environment: Any, root_device: torch.device, backend: str, numbering: Numbering) -> None:
    rank = environment.global_rank()
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    log.info("Rank %d of %d: torch's default group is over %s.", rank, environment.world_size(), backend)
    store = partial(store_of, environment, rank)
    DefaultGroup(store, numbering, backend, root_device, host_of(environment)).install()
    # Without this, some exits abort.
    atexit.register(_leave_default_group, os.getpid())


def _leave_default_group(pid: int) -> None:
    if not dist.is_available() or not dist.is_initialized():
        return
    if os.getpid() == pid:
        dist.destroy_process_group()
    # This is a fork without its parent's threads, on which destroying the group or store relies.
    else:
        keep_for_good(dist.group.WORLD)
        keep_for_good(store_of(None, 0))


def check_descriptors(rank: int, world_size: int) -> None:
    """Raise ValueError if this process may open too few files for its connections: Gloo would abort it later."""
    with contextlib.suppress(OSError):  # not every system has /proc
        num_open = len(os.listdir("/proc/self/fd"))
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = _OPEN_FILES * world_size
        if 0 <= limit < num_open + needed:
            raise ValueError(
                f"Rank {rank}: this process may have {limit} open files, {num_open} are open, and connections of "
                f"{world_size} ranks need about {needed} more. Raise the limit before the start: `ulimit -n 1024`."
            )

"""Cluster environments, and the stable ids of ranks.

The environments are for ``mpirun``, for ``horovodrun``, and for ranks that got new numbers after others were lost.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, NamedTuple

from lightning_async.trainer.namespace import fabric
from lightning_async.trainer.strategy_view import view_of

ClusterEnvironment: Any = fabric("plugins.environments").ClusterEnvironment

_VARIABLES = (
    ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_CROSS_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_NODE_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "PMI_NODE_RANK"),
)
_LOCAL_SIZES = ("HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy")


class MPIRunEnvironment(ClusterEnvironment):
    """The environment of ranks that ``mpirun`` (Open MPI, MPICH, Intel MPI) or ``horovodrun`` has started.

    It needs no mpi4py. It also fits ranks that ``horovodrun`` has started if they do not communicate by Horovod. The
    address of rank 0 is ``MASTER_ADDR``, or this host if all ranks run on it. The port is ``MASTER_PORT``, or derived
    from the job's id, so that jobs on one host use different ports. MPICH's mpirun sets no id; its process on this host
    then identifies the job.

    Raises:
        RuntimeError: The ranks are on several hosts without ``MASTER_ADDR``, or there is neither a port nor an id from
            which to derive it.
    """

    def __init__(self) -> None:
        super().__init__()
        names = next((names for names in _VARIABLES if names[0] in os.environ), None)
        if names is None:
            raise RuntimeError(
                "`MPIRunEnvironment()` found none of the variables of mpirun and horovodrun (OMPI_COMM_WORLD_RANK, "
                "PMI_RANK, HOROVOD_RANK)."
            )
        self._rank = int(os.environ[names[0]])
        self._size = int(os.environ[names[1]])
        self._local_rank = int(os.environ.get(names[2], self._rank))
        sizes = (os.environ.get(name) for name in _LOCAL_SIZES)
        self._local_size = int(next(filter(None, sizes), self._size))

    @staticmethod
    def detect() -> bool:
        """Return whether mpirun or horovodrun started this process, and no other launcher such as torchrun or srun."""
        return any(n[0] in os.environ for n in _VARIABLES) and not os.environ.keys() & {"RANK", "SLURM_PROCID"}

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        if "MASTER_ADDR" in os.environ:
            return os.environ["MASTER_ADDR"]
        if self._local_size != self._size:
            raise RuntimeError(
                f"mpirun started {self._size} ranks on several hosts ({self._local_size} here): export MASTER_ADDR, "
                "the address of rank 0's host (`mpirun -x MASTER_ADDR=...`)."
            )
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        if "MASTER_PORT" in os.environ:
            return int(os.environ["MASTER_PORT"])
        if not self.job:
            raise RuntimeError(
                "This mpirun says nothing by which its jobs could be told apart, and is not among the parents of this "
                "process: export MASTER_PORT, a port of rank 0's host that is free (`mpirun -genv MASTER_PORT ...`)."
            )
        return 20000 + int.from_bytes(hashlib.sha256(self.job.encode()).digest()[:2], "big") % 10000

    @property
    def job(self) -> str:
        """The id of this job: from the launcher's variables, or else made from mpirun's process on this host.

        It is "" if neither is found, or if the variables are missing and the ranks are on several hosts.
        """
        if "HOROVOD_GLOO_RENDEZVOUS_PORT" in os.environ:
            return "horovodrun {HOROVOD_GLOO_RENDEZVOUS_ADDR} {HOROVOD_GLOO_RENDEZVOUS_PORT}".format_map(os.environ)
        found = (os.environ.get(name) for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID"))
        return next(filter(None, found), "") or (_launcher_above() if self._local_size == self._size else "")

    def world_size(self) -> int:
        return self._size

    def set_world_size(self, size: int) -> None:
        """Do nothing, because mpirun has set the number."""

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing, because mpirun has set the number."""

    def local_rank(self) -> int:
        return self._local_rank

    def node_rank(self) -> int:
        return self._rank // max(1, self._local_size)

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise ValueError if the Trainer's numbers of devices and nodes do not match mpirun's."""
        if num_devices * num_nodes != self._size:
            raise ValueError(
                f"`Trainer(devices={num_devices}, num_nodes={num_nodes})` asks for {num_devices * num_nodes} ranks; "
                f"mpirun started {self._size}: set `devices` to {self._local_size} and `num_nodes` to "
                f"{self._size // max(1, self._local_size)}."
            )


def _launcher_above() -> str:
    """Return an id of the process that started all ranks of this host; "" if no known launcher is found."""
    pid = os.getpid()
    found = ""
    while pid > 1:
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            # The process is in another namespace, or has ended.
            break
        name, _, rest = text.partition("(")[2].rpartition(")")
        fields = rest.split()
        if name in _LAUNCHERS:
            # The start time makes the id unique, because process ids are reused.
            found = f"{name} {pid} since {fields[19]}"
        pid = int(fields[1])
    return found


def started_by_horovodrun() -> bool:
    return "HOROVOD_RANK" in os.environ and "HOROVOD_SIZE" in os.environ


class _Renumbered:
    """A cluster ``environment`` with another rank for this process; everything else is passed through."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment

    @property
    def launchers(self) -> Any:
        """The environment that the launcher has set up, with the ranks' original numbers."""
        return getattr(self._environment, "launchers", self._environment)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)


class RenumberedEnvironment(_Renumbered):
    """The environment of a rank after a reconfiguration, with its new rank and world size.

    ``names`` are the stable ids of the live ranks, in rank order. Those of ``joined`` have joined since the present
    call of the Trainer has begun.
    """

    def __init__(
        self, environment: Any, rank: int, names: tuple[str, ...], joined: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(environment)
        self._rank = rank
        self.names = names
        self.joined = joined

    def global_rank(self) -> int:
        return self._rank

    def world_size(self) -> int:
        return len(self.names)


class JoiningEnvironment(_Renumbered):
    """The environment of a joining rank.

    Until the live ranks have admitted it, the joining rank has the highest rank, because rank 0 is a live rank.
    """

    @property
    def started_as(self) -> int:
        return self._environment.global_rank()

    def global_rank(self) -> int:
        return self._environment.world_size() - 1

    def world_size(self) -> int:
        return self._environment.world_size()


class StableIds(NamedTuple):
    """The stable ids of ranks in checkpoints: each rank's number at its start, which never changes.

    Args:
        mine: Id of this rank.
        left: Ids of all live ranks, in the sequence of their current ranks.
        started: One more than the largest id that a rank has ever had.
        lost: Ids of the lost ranks.
    """

    mine: int
    left: tuple[int, ...]
    started: int
    lost: frozenset[int] = frozenset()


NOBODY = StableIds(-1, (0,), 1)
"""The ids for a reader that takes no part in training."""


def names_of(trainer: Any) -> StableIds:
    """Return the stable ids of the Trainer's ranks; the current ranks if no rank can be lost."""
    strategy = view_of(trainer.strategy)
    live_ranks = strategy.live_ranks
    if strategy.joining:
        others = frozenset(range(trainer.world_size))
        return StableIds(strategy.cluster_environment.started_as, (), trainer.world_size, others)
    if live_ranks is None:
        return StableIds(trainer.global_rank, tuple(range(trainer.world_size)), trainer.world_size)
    generation = live_ranks.generation
    left = tuple(map(int, live_ranks.names))
    ever = live_ranks.ever
    return StableIds(int(live_ranks.called(generation.name)), left, 1 + max(ever), ever.difference(left))

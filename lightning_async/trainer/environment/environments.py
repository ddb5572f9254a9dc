"""Cluster environments that Lightning does not know: ranks that ``mpirun`` or ``horovodrun`` started."""

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
    """Ranks started by ``mpirun`` (Open MPI, MPICH, Intel MPI), read from its variables; needs no mpi4py. Also by
    ``horovodrun``, where torch moves their bytes.

    The address of rank 0 is ``MASTER_ADDR``, or this host where all ranks run on one. The port is
    ``MASTER_PORT``, or derived from the job's id, so that jobs on one host do not meet. Where mpirun gives none, as
    MPICH's, mpirun's own process on this host stands for the job.

    Raises:
        RuntimeError: ranks on several hosts without ``MASTER_ADDR``; neither a port, nor what it could be derived from.
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
        """Whether mpirun started this process and nothing else (torchrun, srun) says so too."""
        return (
            any(n[0] in os.environ for n in _VARIABLES)
            and "RANK" not in os.environ
            and "SLURM_PROCID" not in os.environ
        )

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
        """What tells this job apart from others; "" where nothing does."""
        if "HOROVOD_GLOO_RENDEZVOUS_PORT" in os.environ:
            return "horovodrun {HOROVOD_GLOO_RENDEZVOUS_ADDR} {HOROVOD_GLOO_RENDEZVOUS_PORT}".format_map(os.environ)
        found = (os.environ.get(name) for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID"))
        return next(filter(None, found), "") or (_launcher_above() if self._local_size == self._size else "")

    def world_size(self) -> int:
        return self._size

    def set_world_size(self, size: int) -> None:
        """Nothing: mpirun has decided."""

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        """Nothing: mpirun has decided."""

    def local_rank(self) -> int:
        return self._local_rank

    def node_rank(self) -> int:
        return self._rank // max(1, self._local_size)

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Compare the Trainer's numbers with mpirun's."""
        if num_devices * num_nodes != self._size:
            raise ValueError(
                f"`Trainer(devices={num_devices}, num_nodes={num_nodes})` asks for {num_devices * num_nodes} ranks; "
                f"mpirun started {self._size}: set `devices` to {self._local_size} and `num_nodes` to "
                f"{self._size // max(1, self._local_size)}."
            )


def _launcher_above() -> str:
    """The process among this one's parents that started all ranks of this host; "" where none is known as such."""
    pid = os.getpid()
    found = ""
    while pid > 1:
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            break
        name, _, rest = text.partition("(")[2].rpartition(")")
        fields = rest.split()
        if name in _LAUNCHERS:
            found = f"{name} {pid} since {fields[19]}"  # numbers of processes come again
        pid = int(fields[1])
    return found


def started_by_horovodrun() -> bool:
    """Return whether horovodrun has started this process."""
    return "HOROVOD_RANK" in os.environ and "HOROVOD_SIZE" in os.environ


class _Renumbered:
    """A cluster environment in which this rank's number is another one; all else is as it was.

    Args:
        environment: the one that the ranks were started in.
    """

    def __init__(self, environment: Any) -> None:
        self._environment = environment

    @property
    def launchers(self) -> Any:
        """The one that the ranks were started in."""
        return getattr(self._environment, "launchers", self._environment)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)


class RenumberedEnvironment(_Renumbered):
    """Ranks are lost, or came back: those who are there are numbered anew.

    Args:
        environment: the one that the ranks were started in.
        rank, world_size: this rank's number now, and how many there are.
        room: where those who are there meet from now on; differs from that of others before.
    """

    def __init__(self, environment: Any, rank: int, world_size: int, room: str) -> None:
        super().__init__(environment)
        self._rank = rank
        self._world_size = world_size
        self.room = room

    def global_rank(self) -> int:
        return self._rank

    def world_size(self) -> int:
        return self._world_size


class JoiningEnvironment(_Renumbered):
    """The others train already, and one of them is rank 0: whatever this one was, it comes last."""

    @property
    def started_as(self) -> int:
        """The number that this rank was started with."""
        return self._environment.global_rank()

    def global_rank(self) -> int:
        return self._environment.world_size() - 1

    def world_size(self) -> int:
        return self._environment.world_size()


# What ranks are called in checkpoints: the numbers that they were started with, which stay where others are
# lost.


class StableIds(NamedTuple):
    """Of the ranks of a run, as things stand.

    Args:
        mine: this rank's.
        left: of all that are left, in order.
        started: how many there were at first; where more came since, their names are below this number.
        lost: of those without which training goes on.
    """

    mine: int
    left: tuple[int, ...]
    started: int
    lost: frozenset[int] = frozenset()


NOBODY = StableIds(-1, (0,), 1)
"""One who takes no part in training, and only reads."""


def names_of(trainer: Any) -> StableIds:
    """Numbers, where nobody can be lost.

    Args:
        trainer: its strategy may have `RankMap`.
    """
    live_ranks = view_of(trainer.strategy).live_ranks
    if is_joining(trainer.strategy):
        others = frozenset(range(trainer.world_size))
        return StableIds(trainer.strategy.cluster_environment.started_as, (), trainer.world_size, others)
    if live_ranks is None:
        return StableIds(trainer.global_rank, tuple(range(trainer.world_size)), trainer.world_size)
    generation = live_ranks.generation
    left = tuple(map(int, live_ranks.names))
    ever = live_ranks.ever
    return StableIds(int(live_ranks.called(generation.name)), left, 1 + max(ever), ever.difference(left))


def is_joining(strategy: Any) -> bool:
    """Whether this rank was started while others train, and is not among them yet."""
    return (
        isinstance(getattr(strategy, "cluster_environment", None), JoiningEnvironment) and strategy.live_ranks is None
    )

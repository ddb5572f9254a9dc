"""The cluster environment of ranks whose collectives are Horovod's."""

from __future__ import annotations

import os
import socket

from lightning_async.comm.horovod.world import HorovodWorld
from lightning_async.trainer.environments import ClusterEnvironment, started_by_horovodrun

__all__ = ["HorovodEnvironment"]


class HorovodEnvironment(ClusterEnvironment):
    """Ranks of Horovod: from Horovod itself once it is initialised, before from horovodrun's or mpirun's variables.

    One process trains on one device, that of its local rank, whatever the Trainer's ``devices`` and ``num_nodes`` say.
    """

    def __init__(self) -> None:
        super().__init__()
        prefixes = ("HOROVOD_", "OMPI_COMM_WORLD_", "PMI_")
        found = next((prefix for prefix in prefixes if f"{prefix}RANK" in os.environ), "")

        def number(name: str, default: int) -> int:
            return int(os.environ.get(found + name, default))

        self._rank, self._size = number("RANK", 0), number("SIZE", 1)
        self._local_rank = number("LOCAL_RANK", int(os.environ.get("MPI_LOCALRANKID", self._rank)))
        self._local_size = number("LOCAL_SIZE", int(os.environ.get("MPI_LOCALNRANKS", self._size)))

    @property
    def launched(self) -> int | None:
        """How many ranks the launcher started; None under Horovod Elastic, where they come and go."""
        return None if "HOROVOD_ELASTIC" in os.environ else self._size

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def own_address(self) -> str:
        """This host, as the launcher calls it."""
        return os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()

    @property
    def main_address(self) -> str:
        raise RuntimeError("Under Horovod there is no torch.distributed: use the strategy's own collectives.")

    @property
    def main_port(self) -> int:
        return int(self.main_address)

    @staticmethod
    def detect() -> bool:
        """Whether horovodrun has started this process."""
        return started_by_horovodrun()

    def world_size(self) -> int:
        world = HorovodWorld.current(self.launched)
        return self._size if world is None else world.size

    def set_world_size(self, size: int) -> None:
        """Nothing: the launcher has decided."""

    def global_rank(self) -> int:
        world = HorovodWorld.current()
        return self._rank if world is None else world.rank

    def set_global_rank(self, rank: int) -> None:
        """Nothing: the launcher has decided."""

    def local_rank(self) -> int:
        world = HorovodWorld.current()
        return self._local_rank if world is None else world.local_rank

    def node_rank(self) -> int:
        return self.global_rank() // max(1, self._local_size)

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Nothing: the launcher has decided."""

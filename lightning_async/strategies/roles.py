"""Which ranks are replicas."""

from __future__ import annotations

from typing import Any, Protocol

from lightning_async.transports.transport import Transport

__all__ = ["AllTrain", "Roles"]


class Roles(Protocol):
    """Of the ranks of one strategy."""

    @property
    def num_serving(self) -> int:
        """So many of those that were started as ranks, the last ones, are no replicas."""
        ...

    def check_transport(self, transport: Transport) -> None:
        """Raise ValueError where not all ranks can be replicas, and this one asks for that."""
        ...

    def check_ranks(self, started: int) -> None:
        """Raise ValueError where that leaves no replica."""
        ...

    def is_alone(self, world_size: int) -> bool:
        """Whether a replica, of so many, needs nobody."""
        ...

    def take_part(self, strategy: Any) -> None:
        """Come back, to train; else do what this rank is there for, and end the process."""
        ...


class AllTrain:
    """All ranks are replicas."""

    num_serving = 0

    def check_transport(self, transport: Transport) -> None: ...

    def check_ranks(self, started: int) -> None: ...

    def is_alone(self, world_size: int) -> bool:
        return world_size == 1

    def take_part(self, strategy: Any) -> None: ...

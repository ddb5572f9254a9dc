"""Horovod Elastic: run, and run again with whoever is there, from what all ranks have committed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Generic, TypeVar

from lightning_async.comm.horovod.world import HorovodWorld

__all__ = ["Committed", "run_elastic"]

T = TypeVar("T")
C = TypeVar("C")


class Committed(Generic[C]):
    """What all ranks go back to when ranks are lost, and what ranks that join begin with.

    Attributes:
        value: what was committed last; to be left as it is.
    """

    def __init__(self, value: C) -> None:
        self.value = value
        self._check: Callable[[], None] = lambda: None

    def commit(self, value: C) -> None:
        """Replace the value; all ranks do at the same point.

        Raises:
            HostsUpdatedInterrupt: hosts have come or are to go: leave, for a world with them.
        """
        self.value = value
        self._check()


def run_elastic(
    train: Callable[[], T], committed: Committed[C], broadcast: Callable[[Any], Any], gloo_timeout: timedelta
) -> T:
    """Call ``train`` until it returns; after a lost rank, and with every change of hosts, in a new world.

    Args:
        train: sees to it that all ranks go on from one commit; must leave Horovod's errors alone.
        committed: what it goes on from.
        broadcast: rank 0's object to all ranks.
        gloo_timeout: see `HorovodWorld.join`.
    """
    elastic: Any = importlib.import_module("horovod.common.elastic")
    HorovodWorld.join(gloo_timeout=gloo_timeout)

    class State(elastic.State):
        """`Committed`, as Horovod wants to see it. What is committed is saved."""

        def __init__(self) -> None:
            super().__init__(bcast_object=broadcast, get_rank=lambda: HorovodWorld.join().rank)

        def save(self) -> None:
            """Done by `Committed.commit`."""

        def restore(self) -> None:
            """The committed value is what it was."""

        def reset(self) -> None:
            """Nothing here belongs to the old world."""

        def sync(self) -> None:
            """``train`` begins with that, where hosts were only lost as well."""

    state = State()
    committed._check = state.check_host_updates

    def in_a_new_world() -> None:
        HorovodWorld.leave()
        HorovodWorld.join(gloo_timeout=gloo_timeout)

    def in_this_world(_: State) -> T:
        world = HorovodWorld.join()
        world.another_follows = True
        try:
            return train()
        finally:
            world.another_follows = False

    return elastic.run_fn(in_this_world, in_a_new_world)(state)

"""That a rank's process lives, for as long as it does: by this, ranks wait for each other between two runs."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError

from lightning_async.comm.membership.generation import in_order, listed
from lightning_async.comm.membership.membership import Membership
from lightning_async.comm.membership.signing import Seal
from lightning_async.comm.membership.start import Patience, greet
from lightning_async.comm.membership.stores import PrefixStore, Store
from lightning_async.errors import PeerLost

__all__ = ["Presence", "naming_the_stores_host"]

_INTERVAL = timedelta(seconds=1)
_SEVERAL = 8  # beats within the silence after which a process is lost


class Presence:
    """This process's heartbeat beside those of its runs, slower, from its first run to its end.

    A rank may compute for hours between two runs: its process lives, and the others wait. One whose process has died,
    or ended, comes to no run any more.

    Args:
        store: of all ranks, no older than the job.
        rank, world_size: of this rank.
        dead_after: a process without a heartbeat for so long is lost.
        start_timeout: the same before its first run.
        seal: of the records.
        room: where the records lie in the store: another one for ranks that have other numbers.

    Raises:
        AsyncTrainingError: another process lives under this rank.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        dead_after: timedelta,
        start_timeout: timedelta,
        seal: Seal,
        room: str = "lightning_async",
    ) -> None:
        self._store, self._rank, self._world_size, self.room = store, rank, world_size, room
        self._membership = Membership(
            PrefixStore(f"{room}/presence", store), rank, world_size,
            interval=min(_INTERVAL, dead_after / _SEVERAL), dead_after=dead_after, start_timeout=start_timeout,
            fresh=True, seal=seal.within("presence"),
        )  # fmt: skip
        self._membership.start()
        self._pid = os.getpid()
        atexit.register(self._membership.close)

    @property
    def inherited(self) -> bool:
        """Whether this is a fork of the process that it speaks for."""
        return os.getpid() != self._pid

    def close(self) -> None:
        """This process lives on, elsewhere."""
        atexit.unregister(self._membership.close)
        self._membership.close()

    def check(self) -> None:
        """Raise if a process is gone. No I/O.

        Raises:
            PeerLost: names the ranks.
        """
        self._membership.check()
        if left := in_order(self._membership.left()):
            raise PeerLost(
                f"rank {self._rank}: the process(es) of rank(s) {listed(left)} have ended, while this rank waits for "
                "them. All ranks must make the same calls of the Trainer; see the log of those.",
                tuple(map(self._membership.generation.rank_of, left)),
            )

    def meet(self, name: str, job: str, seal: Seal, timeout: timedelta) -> None:
        """Wait until all ranks have come to the run ``name``, as long as they live; says what it waits for.

        Raises:
            PeerLost: a process is gone, or the store.
            CollectiveTimeout: ranks live, but did not come; names them.
        """
        patience = Patience(self._rank, timeout, self.check)
        with naming_the_stores_host(self._rank):
            greet(PrefixStore(name, self._store), self._rank, self._world_size, job, seal.within(name), patience)


@contextmanager
def naming_the_stores_host(rank: int) -> Iterator[None]:
    """Where the store fails, that rank 0 is gone is the cause, and is said.

    Raises:
        PeerLost: in place of what torch raised.
    """
    try:
        yield
    except (DistNetworkError, DistStoreError, ConnectionError) as error:
        raise PeerLost(
            f"rank {rank}: while it waited for the others, the store failed ({str(error).splitlines()[0]}). "
            "Its host, rank 0 or the launcher, is gone: see the log of rank 0.",
            () if rank == 0 else (0,),
        ) from error

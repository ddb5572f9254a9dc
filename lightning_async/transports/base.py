"""The connection of all ranks during one run, and the interface of transports that open it."""

from __future__ import annotations

import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from lightning_async.comm.collectives import Collectives
from lightning_async.engine.collectives import LightningCollectives
from lightning_async.engine.timeouts import Timeouts
from lightning_async.membership.generation import in_order
from lightning_async.membership.launcher_channel import Death, Listener, listen
from lightning_async.membership.membership import Membership
from lightning_async.membership.store import Store

log = logging.getLogger(__name__)


# Seconds to wait for the reason of a broken connection, which the heartbeat learns soon.
_HEARSAY_S = 2.0
# Seconds for which rank 0 keeps the store after a failure, so that the others can read the reason.
_OUTLIVES_S = 5.0


class Connection:
    """The communicators, membership and Lightning's collectives over all ranks for one run, until `close`.

    Args:
        root: Communicator for CPU tensors.
        payload: Communicator for the buckets; may be ``root``.
        membership: Membership, already started; None if the transport itself notices lost ranks.
        store: Store of this run, if there is one.
        name: Prefix of this run's keys in the job's store, if there is a store.
    """

    def __init__(
        self,
        root: Collectives,
        payload: Collectives,
        membership: Membership | None,
        store: Store | None = None,
        name: str = "",
    ) -> None:
        self.store = store
        self.name = name
        self.forks: tuple[Collectives, Collectives] | None = None
        """Forks for headers and payloads, see `forks_of`, if they were formed in advance."""
        self.root = root
        self.payload = payload
        self._membership = membership
        # Whether `close` waits after a failure on rank 0, so that the others can read the reason in its store.
        self.outlives = True
        self._roots = [root] if payload is root else [root, payload]
        # Function that is called when all ranks have ended this run in order.
        self.on_end: Callable[[], None] = lambda: None
        self._listener: Listener | None = None
        self._name_of: Callable[[int], str] = str
        lightning = root.fork("lightning")
        self._pid = os.getpid()
        if membership is None:
            self.world = LightningCollectives(lightning)
        else:
            self.world = LightningCollectives(
                lightning, membership.check, blame=membership.dead_after + timedelta(seconds=1),
                behind=partial(membership.behind, "call"),
            )  # fmt: skip

    @property
    def membership(self) -> Membership:
        assert self._membership is not None
        return self._membership

    def hear_deaths(self, name_of: Callable[[int], str]) -> None:
        """Listen to the launcher's reports of deaths, so that a dead peer counts as lost without a timeout.

        If no launcher that sends such reports has started this rank, this does nothing. ``name_of`` returns a peer's
        stable rank id, given the rank with which it was started; it raises ValueError for a rank outside of this run.
        """
        self._name_of = name_of
        if (membership := self._membership) is None or self._listener is not None:
            return

        def hear(death: Death) -> None:
            # The dead rank may be outside of this run, and then has no stable rank id here.
            with suppress(ValueError):
                membership.hear_death(self._name_of(death.rank), death.process, death.text)

        self._listener = listen(hear)

    def report_death(self, rank: int, text: str) -> None:
        """Publish that the process that was started as ``rank`` has died; ``text`` says how. See `hear_deaths`."""
        try:
            self.membership.report_death(self._name_of(rank), text)
        # If this fails, the others notice the death by missing heartbeats.
        except Exception as error:
            log.warning("The others could not be informed that rank %d has died: %s", rank, error)

    def open(self) -> None:
        for root in self._roots:
            root.open()

    def close(self, in_order: bool) -> None:
        """Close the groups and the membership.

        With ``in_order``, which says that this rank's run has not failed, first wait up to 30 seconds until all ranks
        have ended the run, because closing the groups makes pending operations of other ranks fail. In a fork of the
        process that made the connection, this does nothing, because everything belongs to the parent.
        """
        if os.getpid() != self._pid:
            return
        if self._listener is not None:
            self._listener.close()
        if in_order:
            try:
                # Closing a group that another rank still uses would make that rank's operation fail.
                self.root.barrier().result(timedelta(seconds=30))
            except Exception as error:
                in_order = False
                log.warning("Rank %d has ended its run; another rank has not: %s.", self.root.rank, self._why(error))
        if self._membership is not None:
            if not in_order and self.root.rank == 0 and self.outlives:
                self._outlive_the_others(self._membership)
            self._membership.close()
        for root in self._roots:
            root.close()
        if in_order:
            self.on_end()

    def _outlive_the_others(self, membership: Membership) -> None:
        """Leave the membership after a failure, and wait until all other ranks have left or are lost.

        The wait ends after `_OUTLIVES_S` at the latest. Meanwhile the other ranks can read the reason of the failure in
        the store, which may be a part of this process.
        """
        membership.leave()
        until = time.monotonic() + _OUTLIVES_S
        others = {*membership.generation.members} - {membership.generation.name}
        while others - membership.left() - {*membership.lost()} and time.monotonic() < until:
            time.sleep(0.02)

    def _why(self, error: Exception) -> str:
        """Return why another rank ended abnormally, as its heartbeats tell; the name of ``error`` if they do not."""
        until = time.monotonic() + _HEARSAY_S
        while self._membership is not None and time.monotonic() < until:
            # The members only: joining ranks may leave, too.
            left = self._membership.left().intersection(self._membership.generation.members)
            gone = in_order({*self._membership.lost(), *left})
            if gone:
                return self._membership.why(gone).splitlines()[0].rstrip(".")
            time.sleep(0.05)
        return f"its connection ended ({type(error).__name__}); see the logs of the other ranks"


@contextmanager
def short_world(root: Collectives, check: Callable[[], None] = lambda: None) -> Iterator[LightningCollectives]:
    """Yield Lightning's collectives over the communicator ``root`` for one operation, and close ``root`` afterwards.

    It is closed when all ranks are done. ``check`` is called while ranks wait, and raises if a rank is lost.
    """
    try:
        yield LightningCollectives(root, check)
        # Another rank may still wait for this rank's part of the operation.
        root.barrier().result()
    finally:
        root.close()


class Transport(ABC):
    """A base of transports, which decide who starts the ranks and what moves their bytes.

    A transport is an immutable value. Whatever it opens for a run belongs to a `Connection`, so two strategies may
    share a transport.
    """

    @abstractmethod
    def environment(self, lightnings: Any) -> Any:
        """Return the cluster environment, given the one that Lightning has chosen."""

    @abstractmethod
    def launcher(
        self, strategy: Any, num_processes: int, num_nodes: int, on_death: Callable[[int, int], timedelta | None]
    ) -> Any:
        """Return the launcher that starts the other ranks of this host; None if they are started already."""

    @abstractmethod
    def root_device(self, devices: Sequence[torch.device], local_rank: int) -> torch.device:
        """Return the device of the replica."""

    @abstractmethod
    def backend_on(self, root_device: torch.device) -> str:
        """Return the name of the backend that moves payloads of replicas on this device; it is equal on all ranks."""

    @abstractmethod
    def bucket_device(self, root_device: torch.device) -> torch.device:
        """Return the device of the buckets."""

    @abstractmethod
    def connect(self, environment: Any, root_device: torch.device, name: str, timeouts: Timeouts | None) -> Connection:
        """Connect all ranks for a run.

        Args:
            environment: Cluster environment, which has the rank and the world size.
            root_device: Device of the replica.
            name: Name of the run, which differs between the runs of one process.
            timeouts: Time limits of waits; None for no heartbeats.
        """

    @abstractmethod
    def short_world(self, environment: Any, name: str) -> AbstractContextManager[LightningCollectives]:
        """Open collectives over all ranks for one operation outside of a run. All ranks pass the same name."""

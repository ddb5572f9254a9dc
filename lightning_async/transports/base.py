"""The connection that one run holds open, and what a transport must offer for it."""

from __future__ import annotations

import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch

from lightning_async.comm.collectives import Collectives
from lightning_async.engine.collectives import LightningCollectives
from lightning_async.membership.generation import in_order
from lightning_async.membership.launcher_channel import Death, Listener, listen
from lightning_async.membership.membership import Membership
from lightning_async.membership.store import Store

log = logging.getLogger(__name__)


_HEARSAY_S = 2.0
_OUTLIVES_S = 5.0


class Connection:
    """Communicators, heartbeats, and Lightning's collectives over all ranks; closed by `close`.

    ``root`` is for CPU tensors, ``payload`` for the buckets; they may be one. ``membership`` is started; None where the
    transport alone tells who is gone. ``name`` is that of what is kept in the store of all ranks, if there is one.
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
        """For headers and payloads, see `forks_of`, where they were formed before anybody needs them."""
        self.root = root
        self.payload = payload
        self._membership = membership
        self.outlives = True  # where the others fail, too, this rank's store waits for them to hear why
        self._roots = [root] if payload is root else [root, payload]
        self.on_end: Callable[[], None] = lambda: None  # called when all have ended this run in order
        self._listener: Listener | None = None
        self._name_of: Callable[[int], str] = str
        lightning = root.fork("lightning")
        self._pid = os.getpid()
        if membership is None:
            self.world = LightningCollectives(lightning)
        else:
            self.world = LightningCollectives(
                lightning, membership.check, blame=membership.dead_after + timedelta(seconds=1)
            )

    @property
    def membership(self) -> Membership:
        assert self._membership is not None
        return self._membership

    def hear_deaths(self, name_of: Callable[[int], str]) -> None:
        """Have the launcher report deaths, where it has started this rank: such a peer is lost at once.

        ``name_of`` says what a rank is called here, by the number that it was started with, or raises ValueError.
        """
        self._name_of = name_of
        if (membership := self._membership) is None or self._listener is not None:
            return

        def hear(death: Death) -> None:
            with suppress(ValueError):
                membership.hear_death(self._name_of(death.rank), death.process, death.text)

        self._listener = listen(hear)

    def report_death(self, rank: int, text: str) -> None:
        """Tell all that the process of the rank that was started with this number has ended, see `hear_deaths`."""
        try:
            self.membership.report_death(self._name_of(rank), text)
        except Exception as error:  # then the others find out by its silence
            log.warning("The others could not be told that rank %d died: %s", rank, error)

    def open(self) -> None:
        for root in self._roots:
            root.open()

    def close(self, in_order: bool) -> None:
        """Release everything; with ``in_order``, first wait shortly until no rank needs the groups any more.

        In a fork of the process that made it this does nothing: all of it is the parent's.
        """
        if os.getpid() != self._pid:
            return
        if self._listener is not None:
            self._listener.close()
        if in_order:
            try:
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
        membership.leave()
        until = time.monotonic() + _OUTLIVES_S
        others = {*membership.generation.members} - {membership.generation.name}
        while others - membership.left() - {*membership.lost()} and time.monotonic() < until:
            time.sleep(0.02)

    def _why(self, error: Exception) -> str:
        until = time.monotonic() + _HEARSAY_S
        while self._membership is not None and time.monotonic() < until:
            left = self._membership.left().intersection(self._membership.generation.members)  # not who visits
            gone = in_order({*self._membership.lost(), *left})
            if gone:
                return self._membership.why(gone).splitlines()[0].rstrip(".")
            time.sleep(0.05)
        return f"its connection ended ({type(error).__name__}); see the logs of the other ranks"


@contextmanager
def short_world(root: Collectives, check: Callable[[], None] = lambda: None) -> Iterator[LightningCollectives]:
    """Lightning's collectives over ``root`` for one operation: closed when all ranks are done with it."""
    try:
        yield LightningCollectives(root, check)
        root.barrier().result()
    finally:
        root.close()


class Transport(ABC):
    """The choice of who starts the ranks, and what moves their bytes: torch.distributed or Horovod.

    A transport is a value: what it opens belongs to the `Connection`, so two strategies may share one.
    """

    @abstractmethod
    def environment(self, lightnings: Any) -> Any:
        """Return the cluster environment, given the one that Lightning has chosen."""

    @abstractmethod
    def launcher(
        self, strategy: Any, num_processes: int, num_nodes: int, on_death: Callable[[int, int], timedelta | None]
    ) -> Any:
        """Return what starts the other ranks of this host; None where that is done."""

    @abstractmethod
    def root_device(self, devices: Sequence[torch.device], local_rank: int) -> torch.device:
        """Return the device of the replica."""

    @abstractmethod
    def backend_on(self, root_device: torch.device) -> str:
        """Return the name of what moves payloads of replicas on such a device; equal on all ranks."""

    @abstractmethod
    def bucket_device(self, root_device: torch.device) -> torch.device:
        """Return the device of the buckets."""

    @abstractmethod
    def connect(
        self, environment: Any, root_device: torch.device, name: str, dead_after: timedelta | None
    ) -> Connection:
        """Join all ranks for a run.

        Args:
            environment: says who this rank is.
            root_device: of the replica.
            name: differs between the runs of one process.
            dead_after: a rank without a heartbeat for so long is lost; None for no heartbeats.
        """

    @abstractmethod
    def short_world(self, environment: Any, name: str) -> AbstractContextManager[LightningCollectives]:
        """Open collectives over all ranks for one operation outside of a run; all call it with the same name."""

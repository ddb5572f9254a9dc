"""After a failure: meet all ranks again, in groups of a new generation."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

from torch import Tensor

from lightning_async.comm.membership.generation import listed
from lightning_async.comm.membership.membership import Membership
from lightning_async.comm.protocols import Collectives, ElasticCollectives, Pending
from lightning_async.engine.averaging.config import AveragerConfig
from lightning_async.engine.averaging.mailbox import Mailbox
from lightning_async.engine.averaging.waiting import Closed, Waiter
from lightning_async.engine.calls import Calls
from lightning_async.engine.header import Gate
from lightning_async.errors import CollectiveTimeout, PeerLost

__all__ = ["Regroup"]

_SLICE = timedelta(seconds=1)


class Regroup:
    """Forms the groups anew, with all ranks or not at all.

    Args:
        roots: the root communicators: for CPU tensors, and for payloads, which may be the same.
        header: a fork of the first, over which ranks compare their calls in the new groups.
        membership: knows who lives, and which generation is next.
        mailbox: says when the engine closes.
        waiter: waits for the operations.
        calls: of the training thread, which go on in the new groups.
        config: how long to wait for the others.
        now: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        roots: tuple[Collectives, Collectives],
        header: Collectives,
        membership: Membership,
        mailbox: Mailbox,
        waiter: Waiter,
        calls: Calls | None,
        config: AveragerConfig,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        first, second = roots
        distinct = [first] if second is first else [first, second]
        self._roots = [root for root in distinct if isinstance(root, ElasticCollectives)]
        self.possible = len(self._roots) == len(distinct)
        """False where the transport cannot: then the first failure is the last."""
        self._rank = first.rank
        self._membership, self._mailbox = membership, mailbox
        self._header, self._waiter, self._calls = header, waiter, calls
        self._deadlines, self._now = config.deadlines, now

    def __call__(self, round_id: int) -> int:
        """The new generation, once all ranks are in it and their training threads' calls go on there.

        Raises:
            PeerLost: names the ranks that are lost.
            CollectiveError: not everybody came, or the groups could not be formed.
            Closed: the engine closes.
        """
        started, members = self._now(), self._membership.generation.members
        if self._calls is not None:
            self._calls.suspend()
        while True:
            if self._mailbox.closing:
                raise Closed
            try:
                generation = self._membership.next_generation(_SLICE)
                break
            except CollectiveTimeout:
                if self._now() - started > self._deadlines.reform.total_seconds():
                    raise
        missing = [name for name in members if name not in generation.members]
        if missing:
            self._end_without(missing, round_id)
        for root in self._roots:
            root.reconfigure(generation)
        self._mailbox.trouble = None
        if self._calls is not None:
            self._calls.settle(
                lambda row: self._result(self._header.all_gather(row)),
                lambda data, source: self._result(self._header.broadcast(data, source)),
            )
        return generation.number

    def _result(self, pending: Pending[Tensor]) -> Tensor:
        return self._waiter.result(pending, self._deadlines.payload)

    def close(self) -> None:
        """The engine ends: from now on nothing is formed anew."""
        if self._calls is not None:
            self._calls.abandon()

    def _end_without(self, missing: list[str], round_id: int) -> NoReturn:
        """Some ranks are not in the next generation: no round comes any more."""
        box, left = self._mailbox, self._membership.left()
        with box.changed:
            if box.gate in (Gate.TRAIN_END, Gate.STOP) and left.issuperset(missing):
                # Nobody leaves in order but through the last gate, whose answer this rank has lost.
                box.open_gate(box.gate, self._now())
                raise Closed
        missing = [rank for rank in missing if rank not in left] or missing  # those that left may have lost a peer too
        raise PeerLost(
            f"Rank {self._rank}: lost in round {round_id}: {self._membership.why(missing)}. Training ends here; see "
            f"the logs of rank(s) {listed(missing)} and resume from the last checkpoint.",
            tuple(map(int, missing)),  # of the first generation, which all of these were in
        )

"""After a failure: meet all ranks again, or those that are left, in groups of a new generation."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from datetime import timedelta

from torch import Tensor

from lightning_async.comm.membership.generation import Generation, listed
from lightning_async.comm.membership.membership import Membership
from lightning_async.comm.protocols import Collectives, ElasticCollectives
from lightning_async.engine.calls import Calls
from lightning_async.engine.deadlines import Deadlines
from lightning_async.engine.header import Gate
from lightning_async.engine.mailbox import Mailbox
from lightning_async.engine.transfer import Closed, Transfer
from lightning_async.errors import (
    START_AGAIN,
    CollectiveError,
    CollectiveTimeout,
    Evicted,
    GenerationChanged,
    PeerLost,
    StoreLost,
)
from lightning_async.events import tell

__all__ = ["Regroup"]

_SLICE = timedelta(seconds=1)
_HEARSAY_S, _BEAT_S = 2.0, 0.1


class Regroup:
    """Forms the groups anew, with all ranks that live, as long as these are enough.

    Args:
        roots: the root communicators: for CPU tensors, and for payloads, which may be the same.
        membership: knows who lives, and which generation is next.
        mailbox: says when the engine closes.
        transfer: by which ranks compare their calls in the new groups.
        calls: of the training thread, which go on in the new groups.
        deadlines: how long to wait for the others.
        min_replicas: fewer ranks do not go on. Default: all that there are.
        now: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        roots: tuple[Collectives, Collectives],
        membership: Membership,
        mailbox: Mailbox,
        transfer: Transfer,
        calls: Calls | None,
        deadlines: Deadlines,
        min_replicas: int | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        first, second = roots
        distinct = [first] if second is first else [first, second]
        self._roots = [root for root in distinct if isinstance(root, ElasticCollectives)]
        self.possible = len(self._roots) == len(distinct)
        """False where the transport cannot: then the first failure is the last."""
        self._membership, self._mailbox = membership, mailbox
        self._transfer, self._calls = transfer, calls
        self._deadlines, self._now = deadlines, now
        self._min_replicas = membership.generation.world_size if min_replicas is None else min_replicas
        self.on_loss: Callable[[Generation, str], None] = lambda generation, why: None
        """Called with a new generation, and with why others are not in it, once its groups are formed."""
        self._may_lose = self._min_replicas < membership.generation.world_size
        if self._may_lose:
            membership.keep(self._min_replicas)
        self._lost: list[str] = []
        """Why ranks are not in the generation that is being formed."""
        self.attempts = 0
        """Failures in a row."""

    def survives(self, error: PeerLost) -> bool:
        """Whether enough ranks are left to go on without those that are lost."""
        left = self._membership.generation.world_size - len(self._membership.lost())
        return self.possible and not isinstance(error, (StoreLost, Evicted)) and left >= self._min_replicas

    def after(self, error: PeerLost | CollectiveError) -> int:
        """Try until all ranks that live have met again; the number of the generation in which they have.

        Raises:
            PeerLost: names the ranks that are lost, and without which nobody goes on.
            Evicted: the others have gone on without this rank.
            CollectiveError: too many attempts have failed.
            Closed: the engine closes.
        """
        box = self._mailbox
        box.failed += 1
        while True:
            if isinstance(error, PeerLost):
                if not self.survives(error):
                    if isinstance(error, Evicted):  # the error itself is the line that people read
                        tell("evicted", logging.INFO, str(error), rank=self._transfer.rank)
                    raise error
            else:
                self._count(error)
                if self._may_lose and not isinstance(error, (CollectiveTimeout, GenerationChanged)):
                    self._membership.suspect()
            rank, round_id = self._transfer.rank, box.next_exchange
            words = f"Rank {rank}: round {round_id} failed: {error}"
            tell("round_failed", logging.INFO, words, rank=rank, round=round_id)
            try:
                generation = self._meet()
            except (PeerLost, CollectiveError) as again:
                error = again
                box.failed += not isinstance(error, PeerLost)
                continue
            tell(
                "regrouped", logging.WARNING,
                f"Rank {rank}: round {round_id} failed and is repeated by re-formed groups (number {generation}); no "
                f"weight has changed. {str(error).replace(START_AGAIN, '')}",
                rank=self._transfer.rank, round=round_id, generation=generation,
                world_size=self._transfer.small.world_size,
            )  # fmt: skip
            return generation

    def _count(self, error: CollectiveError) -> None:
        self.attempts += 1
        if self.attempts >= self._deadlines.attempts:
            raise CollectiveError(
                f"Rank {self._transfer.rank}: round {self._mailbox.next_exchange} failed {self.attempts} times in a "
                f"row; the last time: {error} If the network is slow, raise `Deadlines(payload=...)`."
            ) from error

    def _meet(self) -> int:
        """The new generation, once all ranks are in it and their training threads' calls go on there."""
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
            self._go_on_without(missing)
        for root in self._roots:
            root.reconfigure(generation)
        self._mailbox.trouble = None
        if self._lost:  # before the training thread goes on, by numbers that are others now
            self.on_loss(generation, "; ".join(self._lost))
            self._lost = []
        if self._calls is not None:
            self._calls.settle(self._transfer.gather, self._from, generation.number)
        return generation.number

    def _from(self, data: Tensor, source: int) -> Tensor:
        return self._transfer.result(self._transfer.small.broadcast(data, source))

    def look_for_the_cause(self) -> None:
        """Where nothing can be formed anew: wait shortly for the heartbeats to tell who has failed.

        Raises:
            PeerLost: names the rank, which has said why.
        """
        until = self._now() + _HEARSAY_S
        while self._now() < until and not self._mailbox.closing:
            self._membership.check()
            with self._mailbox.changed:
                self._mailbox.changed.wait(_BEAT_S)

    def close(self) -> None:
        """The engine ends: from now on nothing is formed anew."""
        if self._calls is not None:
            self._calls.abandon()

    def _go_on_without(self, missing: list[str]) -> None:
        """Some ranks are not in the next generation.

        Raises:
            Closed: they left through the last gate.
            PeerLost: too few are left: no round comes any more.
        """
        box, left, generation = self._mailbox, self._membership.left(), self._membership.generation
        with box.changed:
            if box.gate in (Gate.TRAIN_END, Gate.STOP) and left.issuperset(missing):
                # Nobody leaves in order but through the last gate, whose answer this rank has lost.
                box.open_gate(box.gate, self._now())
                raise Closed
            box.last_clock = math.nan  # the sum of other ranks' steps: what comes next is no longer equal with it
            box.saved += 1  # a rank that has failed may have saved alone, by the number that came next
        if generation.world_size >= self._min_replicas:
            self._lost.append(self._membership.why(missing))
            return
        missing = [rank for rank in missing if rank not in left] or missing  # those that left may have lost a peer too
        raise PeerLost(
            f"Rank {self._transfer.rank} ends: {self._membership.why(missing)}. See the log of rank(s) "
            f"{listed(missing)}{START_AGAIN}.",
            tuple(map(int, missing)),  # of the first generation, which all of these were in
        )

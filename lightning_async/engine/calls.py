"""Numbered collective calls of the training thread, which outlive the groups that they began in.

The engine may form all groups anew at any time, and then a call is broken off that some ranks have their answer to and
others have not. So calls are numbered, and each rank keeps its last answers. After every re-forming the ranks compare
numbers: who is ahead hands its answers over, and the others take them; where none is, all repeat the call.

    usable --(the engine begins to form groups)--> forming --(the ranks have compared)--> usable
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_async.comm.frames import decode, encode
from lightning_async.comm.protocols import Collectives, Pending
from lightning_async.errors import AsyncTrainingError, CollectiveError, CollectiveTimeout, PeerLost

__all__ = ["Calls", "Recovery"]

_BEAT = timedelta(seconds=0.2)
_KEPT = 3
"""Answers: a broadcast's source may be done while others have yet to hear of the call before."""


class Recovery(NamedTuple):
    """What an engine does about a call that failed."""

    report: Callable[[PeerLost | CollectiveError], None]
    """Has the groups formed anew, because of this error."""
    check: Callable[[], None]
    """Raises if the engine has failed itself."""
    survives: Callable[[PeerLost], bool]
    """Whether the others go on without the ranks that are lost: then groups are formed anew, too."""


class Answer(NamedTuple):
    """Of one call, the same on all ranks that have it."""

    value: Tensor | None
    generation: int
    """In which all ranks have answered."""
    world_size: int


class Calls:
    """Calls over all ranks, one at a time and in the same order everywhere, whose answers are equal on all ranks.

    Args:
        collectives: a communicator of their own, for CPU tensors.
        check: raises if a peer was lost; called while waiting.
        deadline: for each call.
        blame: after a failure without an engine, how long it may take until a dead rank is known.
    """

    def __init__(
        self,
        collectives: Collectives,
        check: Callable[[], None],
        deadline: timedelta,
        blame: timedelta = timedelta(seconds=3),
    ) -> None:
        self._collectives, self._check, self._deadline, self._blame = collectives, check, deadline, blame
        self.recovery: Recovery | None = None
        """Set while an engine runs that can form groups anew."""
        self._changed = threading.Condition()
        self._begun = self._done = 0
        self._answers: dict[int, Answer] = {}
        """The last ones, by number."""
        self.last = Answer(None, 0, collectives.world_size)
        """What the last call returned."""
        self._seen: set[int] = set()
        self._forming = False
        self._formed = self.generation = 0
        """How often groups were formed anew, and the number of the generation that they are of."""
        self._ranks = {0: collectives.rank}
        """This rank's number, by generation."""

    # ---- the training thread ----

    def __call__(self, what: str, start: Callable[[Collectives], Pending[Any]]) -> Any:
        """The answer to one call.

        Args:
            what: names the call, for messages.
            start: begins it; called again where it must be repeated, so it leaves its tensors as they are.

        Raises:
            PeerLost: names the rank that is gone.
            CollectiveTimeout, CollectiveError: it did not come to an end, and no rank is to blame.
        """
        started = time.monotonic()
        with self._changed:
            self._begun += 1
        while True:
            formed = self._usable(started)
            if self._done >= self._begun:
                return self._returned(self._answers[self._begun])
            try:
                value = self._wait(start(self._collectives), started)
            except (PeerLost, CollectiveError) as error:
                self._explain(what, error, started, formed)
                continue
            with self._changed:
                if not self._forming and self._formed == formed:
                    answer = Answer(_copy(value), self.generation, self._collectives.world_size)
                    self._keep({self._begun: answer})
                    return self._returned(answer)
                # The groups go: an answer that the others were not told of does not count.

    def wait(self, what: str, pending: Pending[Any]) -> None:
        """Wait for an operation that is no call: nobody keeps its answer, and nobody repeats it.

        Args:
            what: names it, for messages.
            pending: it, over the same collectives.

        Raises:
            PeerLost, CollectiveTimeout, CollectiveError: as a call does.
        """
        started, formed = time.monotonic(), self._formed
        try:
            self._wait(pending, started)
        except (PeerLost, CollectiveError) as error:
            self._explain(what, error, started, formed)
            raise

    @contextmanager
    def recorded(self) -> Iterator[set[int]]:
        """The generations in which the calls made within were answered; they count for what this is within, too."""
        outer, self._seen = self._seen, set()
        try:
            yield self._seen
        finally:
            outer |= self._seen
            self._seen = outer

    def rank_then(self) -> int:
        """This rank's number among those that have answered the last call."""
        return self._ranks[self.last.generation]

    def _returned(self, answer: Answer) -> Any:
        self.last = answer
        self._seen.add(answer.generation)
        return _copy(answer.value)

    def _keep(self, answers: dict[int, Answer]) -> None:
        """Under the lock."""
        self._answers.update(answers)
        self._done = max(self._answers)
        for number in [number for number in self._answers if number <= self._done - _KEPT]:
            del self._answers[number]

    def _usable(self, started: float) -> int:
        """Wait until the groups are usable; how often they were formed."""
        recovery = self.recovery
        with self._changed:
            while self._forming:
                self._changed.wait(_BEAT.total_seconds())
                self._recheck(recovery, started)
            return self._formed

    def _recheck(self, recovery: Recovery | None, started: float) -> None:
        if recovery is not None:  # also one that is abandoned by now: its engine's failure is the cause
            recovery.check()
        if time.monotonic() - started > self._deadline.total_seconds():
            raise CollectiveTimeout(f"rank {self._collectives.rank}: no answer within {self._deadline}.")

    def _wait(self, pending: Pending[Any], started: float) -> Any:
        while not pending.wait(_BEAT) and time.monotonic() - started < self._deadline.total_seconds():
            self._check()
        return pending.result(timedelta(0))

    def _explain(self, what: str, error: PeerLost | CollectiveError, started: float, formed: int) -> None:
        """Find the cause of a failure: raise it where nobody goes on without the rank; else the call is repeated."""
        recovery = self.recovery
        if isinstance(error, PeerLost) and (recovery is None or not recovery.survives(error)):
            raise error
        if recovery is not None and not isinstance(error, CollectiveTimeout):
            with self._changed:
                if self._formed == formed and not self._forming:
                    recovery.report(error)
                while self._formed == formed and self.recovery is not None:
                    self._changed.wait(_BEAT.total_seconds())
                    self._recheck(recovery, started)
            recovery.check()
            return
        until = time.monotonic() + self._blame.total_seconds()  # a peer's connections close before its death is known
        while time.monotonic() < until:
            try:
                self._check()
            except PeerLost:
                raise
            except CollectiveError:
                pass
            time.sleep(_BEAT.total_seconds())
        raise type(error)(
            f"Rank {self._collectives.rank}: {what} failed {time.monotonic() - started:.1f} s after it began, and no "
            f"rank is known to be lost. {error}"
        ) from error

    # ---- the engine's thread ----

    def suspend(self) -> None:
        """The groups are about to be formed anew: what is under way now does not count any more."""
        with self._changed:
            self._forming = True
            self._changed.notify_all()

    def abandon(self) -> None:
        """The engine ends: calls that fail from now on are not repeated."""
        with self._changed:
            self.recovery, self._forming = None, False
            self._changed.notify_all()

    def settle(
        self, gather: Callable[[Tensor], Tensor], broadcast: Callable[[Tensor, int], Tensor], generation: int
    ) -> None:
        """All ranks' engines compare their calls, and those that are ahead hand over what they know.

        Args:
            generation: its number.
            gather: of every rank's row, over the new groups.
            broadcast: from one rank.

        Raises:
            CollectiveError: the groups failed again.
            AsyncTrainingError: ranks are further apart than they can be if they run the same program.
        """
        with self._changed:
            done, answer = self._done, encode([[number, *each] for number, each in self._answers.items()])
        table = gather(torch.tensor([done, answer.numel()]))
        counts = table[:, 0].tolist()
        newest = max(counts)
        if min(counts) < newest - _KEPT:
            raise AsyncTrainingError(f"The ranks have the answers to {counts} calls: they are too far apart.")
        if min(counts) < newest:
            source = counts.index(newest)
            data = answer if done == newest else torch.empty(int(table[source, 1]), dtype=torch.uint8)
            data = broadcast(data, source)
            if done < newest:
                with self._changed:
                    self._keep({number: Answer(*each) for number, *each in decode(data)})
        with self._changed:
            self._forming, self._formed, self.generation = False, self._formed + 1, generation
            self._ranks[generation] = self._collectives.rank
            self._changed.notify_all()


def _copy(answer: Any) -> Any:
    """What callers do to an answer is not to reach others."""
    return answer.clone() if isinstance(answer, Tensor) else answer

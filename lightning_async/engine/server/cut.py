"""One version of all servers: no push is seen on one of them and absent on another.

    a worker                    its servers
    hold  ------------------>   no push is applied from now on
          <------------------   the last push of each worker that is applied here
    pull, at the cut: the   ->  of what waits, those pushes are applied that are in the cut; once all are, the weights,
    latest of all answers       and the hold is over

A push that one server has applied is on its way to the others, or its worker is gone: then nothing more of it will
come, and what has come counts. Whoever holds does so for a limited time, and only as long as it is connected; where
that was too short, it asks again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_async.engine.server.quorum import Workers
from lightning_async.engine.server.remembered import said
from lightning_async.errors import ChannelTimeout

__all__ = ["Cut", "Cuts", "applied_by", "from_plain", "latest", "missing", "plain", "pull"]

_HOLD_S, _LONGEST_HOLD_S = 1.0, 30.0

Cut = Mapping[tuple[str, str], int]
"""Of each worker, by its name and its client's own: the number of its last push."""


def applied_by(workers: Workers) -> Cut:
    """What a server has applied.

    >>> applied_by({"a": {"client": "3f", "push": 4}, "b": {"client": "9c", "push": 1, "said": 2}})
    {('a', '3f'): 4, ('b', '9c'): 2}
    """
    return {(name, told["client"]): said(told) for name, told in workers.items()}


def latest(cuts: Iterable[Cut]) -> Cut:
    """What has to be applied everywhere, as it is somewhere.

    >>> latest([{("a", "3f"): 4}, {("a", "3f"): 5, ("b", "9c"): 1}])
    {('a', '3f'): 5, ('b', '9c'): 1}
    """
    found: dict[tuple[str, str], int] = {}
    for cut in cuts:
        for worker, number in cut.items():
            found[worker] = max(number, found.get(worker, 0))
    return found


def plain(cut: Cut) -> list[list[Any]]:
    """In JSON's terms."""
    return [[*worker, number] for worker, number in cut.items()]


def from_plain(told: Sequence[Sequence[Any]]) -> Cut:
    """What `plain` was given."""
    return {(name, client): number for name, client, number in told}


@dataclass
class _Hold:
    until: float
    cut: Cut | None = None


class Cuts:
    """Those who hold one server; used under its lock.

    Args:
        now: seconds. Default: the system's clock.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._holds: dict[str, _Hold] = {}

    def hold(self, worker: str, limit_s: float) -> None:
        """No push is applied until this worker has pulled, or for so many seconds."""
        self._holds[worker] = _Hold(self._now() + limit_s)

    def wants(self, worker: str, cut: Cut) -> None:
        """It is to have these pushes."""
        if (hold := self._holds.get(worker)) is not None:
            hold.cut = cut

    def release(self, worker: str) -> None:
        """It has pulled, or begins anew."""
        self._holds.pop(worker, None)

    def holds(self, worker: str) -> bool:
        """Whether its hold has lasted until now."""
        hold = self._holds.get(worker)
        return hold is not None and self._now() < hold.until

    def allow(self, pushes: Mapping[str, int], workers: Workers, connected: Collection[str]) -> bool:
        """Whether these pushes, by their workers' names, may be applied now."""
        if not self._holds:
            return True
        for holder in [name for name in self._holds if name not in connected or not self.holds(name)]:
            self.release(holder)
        wanted = [hold.cut for hold in self._holds.values()]
        return all(
            cut is not None and number <= cut.get((name, workers[name]["client"]), 0)
            for cut in wanted
            for name, number in pushes.items()
            if name in workers
        )


def missing(cut: Cut, workers: Workers) -> bool:
    """Whether a push is yet to come here; none does of those who are gone for good.

    >>> told = {"a": {"client": "3f", "push": 4}}
    >>> missing({("a", "3f"): 5}, told), missing({("a", "3f"): 4, ("b", "9c"): 7, ("a", "1d"): 9}, told)
    (True, False)
    """
    here = applied_by(workers)
    return any(number > here[worker] for worker, number in cut.items() if worker in here)


def pull(
    ask: Callable[[Mapping[str, Any]], list[dict[str, Any]]],
    field: str | None,
    timeout_s: float,
    worker: str,
) -> list[dict[str, Any]]:
    """On a worker's side: have all servers' weights, of one cut; what they say to that.

    Args:
        ask: all servers, and hear all answers.
        field: to have in their place. None: nothing is.
        timeout_s: for all of it.
        worker: who asks.

    Raises:
        ChannelTimeout: a push has come to some servers only, and its worker is not known to be gone.
    """
    limit_s, until = _HOLD_S, time.monotonic() + timeout_s
    while True:
        began = time.monotonic()
        held = ask({"do": "hold", "limit_s": limit_s})
        wanted = plain(latest(from_plain(each["cut"]) for each in held))
        replies = ask({"do": "pull", "field": field, "cut": wanted})
        if not any(reply["again"] for reply in replies):
            return replies
        now = time.monotonic()
        if now >= until:
            raise ChannelTimeout(
                f"worker {worker!r}: its {len(replies)} servers have not come to one version for {timeout_s:.1f} s: a "
                "push has come to some of them only. See the other workers' logs."
            )
        limit_s = min(2 * limit_s, _LONGEST_HOLD_S)
        time.sleep(min(now - began, until - now))  # for as long as others have had to wait

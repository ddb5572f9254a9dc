"""Rules that say which worker waits for which, and pulls that get one version from all servers.

`WorkerRules` say how a server treats its workers. The pure functions `live`, `round_due` and `awaited` apply them.

A consistent `pull` has two requests. With the first one, the worker asks all servers to hold: they apply no more
pushes, and each answers with the number of the last push of each worker that it has applied. The cut is, for each
worker, the highest number in any answer. With the second one, the worker pulls at the cut: a server applies waiting
pushes that belong to the cut, sends the weights once all pushes of the cut are applied, and ends the hold.

A push has one part for each server. If one server has applied its part, the other parts are on their way, and the pull
waits for them. If the worker that made the push has died, the other parts may never arrive. The pull stops waiting for
them once the servers have forgotten this worker, and then contains only the parts that were applied.

A hold ends after a time limit, or with the connection of the worker that pulls. If the limit was too short, the worker
repeats both requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_async._checks import check_choice, check_int, check_real
from lightning_async.algorithms.staleness import AUTO, NoCorrection, StalenessPolicy, described, make_policy
from lightning_async.errors import ChannelTimeout
from lightning_async.parameter_server.store import said

Workers = Mapping[str, Mapping[str, Any]]
"""Workers' entries in a store's record, by name, see `store.Record`."""
NOT_YET_JOINED = "workers that have not joined yet"
Cut = Mapping[tuple[str, str], int]
"""Number of each worker's last push, by the worker's name and its client's id."""
# First limit of a hold; each further attempt of the same pull doubles it.
_HOLD_S = 1.0
_LONGEST_HOLD_S = 30.0


@dataclass(frozen=True, kw_only=True)
class WorkerRules:
    """Rules by which a server treats its workers.

    Args:
        mode: ``"async"`` (default): each push is applied as it comes. ``"sync"``: one push of each worker is applied at
            a time, as their mean, weighted by samples. ``"ssp"``: pushes are applied as they come, but a worker that is
            more than ``max_staleness`` pushes ahead of the slowest one waits.
        num_workers: Number of workers that must join before the first round of ``"sync"``. Default: 1.
        max_staleness: Number of pushes that a worker may be ahead in ``"ssp"``. Default: 3.
        warmup_steps: Number of updates at the beginning that are made as in ``"sync"``, whatever the mode. Default: 0.
        dead_after_s: Seconds after which servers evict a worker that sends no requests, or does not connect again.
            Default: 60.
        staleness: Policy for late pushes, its short name, or ``"auto"``, see `algorithms.staleness`; not for
            ``"sync"``. Default: ``"none"``.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range.

    Source: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", 2013.
    """

    mode: str = "async"
    num_workers: int = 1
    max_staleness: int = 3
    warmup_steps: int = 0
    dead_after_s: float = 60.0
    staleness: str | StalenessPolicy | Mapping[str, Any] = "none"

    def __post_init__(self) -> None:
        check_choice("WorkerRules", "mode", self.mode, ("async", "sync", "ssp"))
        check_int(self, "num_workers", at_least=1)
        check_int(self, "max_staleness", at_least=0)
        check_int(self, "warmup_steps", at_least=0)
        check_real(self, "dead_after_s", above=0)
        stated = stated_staleness(self.staleness)
        if self.mode == "sync" and stated not in (AUTO, described(NoCorrection())):
            raise ValueError(
                f"`WorkerRules(staleness={self.staleness!r})`: pushes of mode='sync' are not late: take 'none'."
            )

    def in_step(self, version: int, warmup_steps: int | None = None) -> bool:
        """Return whether the next update combines one push of each worker.

        Args:
            version: Number of updates so far.
            warmup_steps: Number of warm-up steps in place of the rules' own. Default: None, the rules' own.

        >>> rules = WorkerRules(warmup_steps=2)
        >>> rules.in_step(1), rules.in_step(2), rules.in_step(1, 1)
        (True, False, False)
        """
        return self.mode == "sync" or version < (self.warmup_steps if warmup_steps is None else warmup_steps)

    def policy(self, optimizer: str, arguments: Mapping[str, Any]) -> StalenessPolicy:
        """Return the staleness policy for pushes to the optimizer with this name and these arguments."""
        return NoCorrection() if self.mode == "sync" else make_policy(self.staleness, optimizer, arguments)

    def plain(self) -> dict[str, Any]:
        """Return the rules as a dict of JSON values."""
        return {**vars(self), "staleness": stated_staleness(self.staleness)}


def stated_staleness(staleness: str | StalenessPolicy | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    """Return a staleness policy as JSON values; ``"auto"`` and None are returned unchanged.

    >>> stated_staleness("bounded")
    {'policy': 'Bounded', 'arguments': {'max_staleness': 16}}
    """
    if staleness is None:
        return None
    return AUTO if staleness == AUTO else described(make_policy(staleness))


def live(workers: Workers, sync_point: int = 0) -> set[str]:
    """Return the names of the live workers for which a push waits.

    A push does not wait for a worker that rests at ``sync_point`` or a later one.

    Args:
        workers: The server's entry of each worker; ``rests`` is the sync point at which the worker rests, or -1.
        sync_point: Number of sync points that the pushing worker has passed. Default: 0.

    >>> workers = {"a": {"live": True, "rests": -1}, "b": {"live": True, "rests": 2}}
    >>> live(workers, 2), sorted(live(workers, 3))
    ({'a'}, ['a', 'b'])
    """
    return {name for name, entry in workers.items() if entry["live"] and entry["rests"] < sync_point}


def round_due(
    worker_rules: WorkerRules, version: int, workers: Workers, waiting: Collection[str], sync_point: int = 0
) -> bool:
    """Return whether to apply the waiting pushes: whether every live worker has pushed, or rests at ``sync_point``.

    Before the first update, `num_workers` workers must also have joined.

    Args:
        worker_rules: Rules of the server.
        version: Version of the weights; 0 before the first update.
        workers: The server's entry of each worker; ``rests`` is the sync point at which the worker rests, or -1.
        waiting: Names of the workers whose pushes wait.
        sync_point: Number of sync points that the workers of these pushes have passed. Default: 0.

    >>> entry = {"live": True, "rests": -1}
    >>> two = WorkerRules(mode="sync", num_workers=2)
    >>> round_due(two, 0, {"a": entry}, ["a"]), round_due(two, 0, {"a": entry, "b": entry}, ["a", "b"])
    (False, True)
    >>> round_due(two, 1, {"a": entry, "b": {"live": False}}, ["a"])
    True
    """
    come = version > 0 or len(workers) >= worker_rules.num_workers
    return bool(waiting) and live(workers, sync_point) <= set(waiting) and come


def awaited(
    worker_rules: WorkerRules, workers: Workers, waiting: Collection[str], worker: str, number: int, sync_point: int = 0
) -> set[str]:
    """Return the names of the workers that a worker has to wait for after its push; empty if the worker may continue.

    Args:
        worker_rules: Rules of the server.
        workers: The server's entry of each worker; ``push`` is the number of its last push, ``clock`` its progress in
            pushes, ``rests`` the sync point at which it rests, or -1.
        waiting: Names of the workers whose pushes wait to be applied together.
        worker: Name of the worker that has pushed.
        number: Number of its push.
        sync_point: Number of sync points that the worker has passed. Default: 0.

    >>> fast = {"live": True, "rests": -1, "push": 5, "clock": 5}
    >>> slow = {"live": True, "rests": -1, "push": 1, "clock": 1}
    >>> awaited(WorkerRules(mode="ssp", max_staleness=3), {"a": fast, "b": slow}, [], "a", 5)
    {'b'}
    >>> awaited(WorkerRules(mode="ssp", max_staleness=4), {"a": fast, "b": slow}, [], "a", 5)
    set()
    """
    if workers[worker]["push"] < number:  # the push waits in a round
        return (live(workers, sync_point) - set(waiting)) or {NOT_YET_JOINED}
    if worker_rules.mode == "ssp":
        least = workers[worker]["clock"] - worker_rules.max_staleness
        return {name for name in live(workers, sync_point) - {worker} if workers[name]["clock"] < least}
    return set()


def applied_by(workers: Workers) -> Cut:
    """Return, for each worker, the number of its last push that this server has applied.

    After a server has lost its memory, ``said`` is the number of the last push that the worker knew was applied before
    the loss. It counts as applied.

    >>> applied_by({"a": {"client": "3f", "push": 4}, "b": {"client": "9c", "push": 1, "said": 2}})
    {('a', '3f'): 4, ('b', '9c'): 2}
    """
    return {(name, entry["client"]): said(entry) for name, entry in workers.items()}


def plain(cut: Cut) -> list[list[Any]]:
    """Return a cut (the number of each worker's last push) as a list of JSON values."""
    return [[*worker, number] for worker, number in cut.items()]


def from_plain(cut: Sequence[Sequence[Any]]) -> Cut:
    return {(name, client): number for name, client, number in cut}


@dataclass
class _Hold:
    until: float
    cut: Cut | None = None


class ConsistentReads:
    """The consistent pulls that are under way on one server.

    A worker that pulls holds the server: until it has its weights, the server applies only pushes that belong to the
    cut of this pull. The caller of each method holds the server's lock.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._holds: dict[str, _Hold] = {}

    def hold(self, worker: str, limit_s: float) -> None:
        """Keep the server from applying pushes until this worker has pulled, or ``limit_s`` seconds have passed."""
        self._holds[worker] = _Hold(self._now() + limit_s)

    def wants(self, worker: str, cut: Cut) -> None:
        """Record the cut that a worker's pull must contain; the worker's hold then lets pushes of this cut through."""
        # The hold may have ended before the worker's second request came.
        if (hold := self._holds.get(worker)) is not None:
            hold.cut = cut

    def release(self, worker: str) -> None:
        self._holds.pop(worker, None)

    def holds(self, worker: str) -> bool:
        """Return whether this worker still keeps the server from applying pushes; its time to do so is limited."""
        hold = self._holds.get(worker)
        return hold is not None and self._now() < hold.until

    def allow(self, pushes: Mapping[str, int], workers: Workers, connected: Collection[str]) -> bool:
        """Return whether these pushes may be applied now: whether they belong to the cut of every pull under way.

        A pull whose cut is not known yet allows no push. Removes holds whose time is over, and holds of workers that
        are not connected.

        Args:
            pushes: Number of the push, by the name of the worker that made it.
            workers: The server's entry of each worker.
            connected: Names of connected workers.
        """
        if not self._holds:
            return True
        # A worker that is gone would otherwise keep pushes back for as long as its hold lasts.
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
    """Return whether some push of the cut has not been applied yet.

    A push does not count if the server has forgotten its worker, or if the worker has been started again since.

    Args:
        cut: Number of each worker's last push that must be applied, by the worker's name and its client's id.
        workers: The server's entry of each worker.

    >>> workers = {"a": {"client": "3f", "push": 4}}
    >>> missing({("a", "3f"): 5}, workers), missing({("a", "3f"): 4, ("b", "9c"): 7, ("a", "1d"): 9}, workers)
    (True, False)
    """
    here = applied_by(workers)
    return any(number > here[worker] for worker, number in cut.items() if worker in here)


def pull(
    ask: Callable[[Mapping[str, Any]], list[dict[str, Any]]], field: str | None, timeout_s: float, worker: str
) -> list[dict[str, Any]]:
    """Pull weights that contain the same pushes on all servers.

    Args:
        ask: Function that sends a request to all servers, and returns their replies.
        field: Field of the servers' state to pull in place of the weights. Default: None, the weights.
        timeout_s: Seconds within which all servers must reach one version.
        worker: Name of the worker, for messages.

    Returns:
        The reply of each server.

    Raises:
        ChannelTimeout: A push has reached only some of the servers in time. The worker that made it may have died, or
            may only be slow.
    """
    limit_s = _HOLD_S
    until = time.monotonic() + timeout_s
    while True:
        began = time.monotonic()
        # All servers hold before the first one is asked to pull: the cut needs the answers of all.
        held = ask({"do": "hold", "limit_s": limit_s})
        latest: dict[tuple[str, str], int] = {}
        for reply in held:
            for pusher, number in from_plain(reply["cut"]).items():
                # The highest number: a push that one server has applied can only be waited for, not taken back.
                latest[pusher] = max(number, latest.get(pusher, 0))
        replies = ask({"do": "pull", "field": field, "cut": plain(latest)})
        if not any(reply["again"] for reply in replies):
            return replies
        now = time.monotonic()
        if now >= until:
            raise ChannelTimeout(
                f"worker {worker!r}: its {len(replies)} servers have not come to one version for {timeout_s:.1f} s: a "
                "push has come to some of them only. See the other workers' logs."
            )
        # The hold was too short for a push that is on its way.
        limit_s = min(2 * limit_s, _LONGEST_HOLD_S)
        # Others had to wait during the hold: give them as much time before the next one.
        time.sleep(min(now - began, until - now))

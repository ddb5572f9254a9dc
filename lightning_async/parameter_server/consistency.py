"""Rules that say which worker waits for which.

`WorkerRules` say how a server treats its workers. The pure functions `live`, `round_due` and `awaited` apply them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_async._checks import check_choice, check_int, check_real
from lightning_async.algorithms.staleness import AUTO, NoCorrection, StalenessPolicy, described, make_policy

Workers = Mapping[str, Mapping[str, Any]]
"""Workers' entries in a store's record, by name, see `store.Record`."""
NOT_YET_JOINED = "workers that have not joined yet"


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

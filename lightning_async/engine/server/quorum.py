"""Who waits for whom on a server: the terms, and what follows from them, as pure functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_async.arguments import check_choice, check_int, check_real
from lightning_async.rules.staleness.choose import AUTO, described, make_policy
from lightning_async.rules.staleness.protocol import StalenessPolicy, Uncorrected

__all__ = ["NEWCOMERS", "Terms", "Workers", "awaited", "live", "round_due", "told_staleness"]

Workers = Mapping[str, Mapping[str, Any]]
"""What a store remembers: of each name its ``life``, the ``push`` that was applied last, its ``clock``, whether it
is ``live``, waited for by others, and the gate that it ``rests`` at: until others are beyond, nobody waits for it."""
NEWCOMERS = "newcomers"
"""Stands for those that are yet to come."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """How a server treats its workers.

    Args:
        mode: ``"async"``: each push is applied as it comes. ``"sync"``: one of each worker at a time, as their mean,
            weighted by samples. ``"ssp"``: as they come, and nobody goes on who is more than ``max_staleness`` pushes
            ahead of the slowest. Default: ``"async"``.
        num_workers: that are waited for before the first round of ``"sync"``. Default: 1.
        max_staleness: pushes. Default: 3.
        warmup_steps: versions at first that are made as in ``"sync"``, in the other modes. Default: 0.
        dead_after_s: seconds for which others wait for a worker that says nothing, before they go on without it; also
            for one that does not come back to a server that was started again. Default: 60.
        staleness: what is done about pushes that are late: a policy, its short name, or ``"auto"``, see
            `rules.staleness`. Pushes of ``"sync"`` are not late, and take none. Default: ``"none"``.

    Raises:
        TypeError, ValueError: an argument is out of range.

    Source: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", 2013.
    """

    mode: str = "async"
    num_workers: int = 1
    max_staleness: int = 3
    warmup_steps: int = 0
    dead_after_s: float = 60.0
    staleness: str | StalenessPolicy | Mapping[str, Any] = "none"

    def __post_init__(self) -> None:
        check_choice("Terms", "mode", self.mode, ("async", "sync", "ssp"))
        check_int(self, "num_workers", at_least=1)
        check_int(self, "max_staleness", at_least=0)
        check_int(self, "warmup_steps", at_least=0)
        check_real(self, "dead_after_s", above=0)
        told = told_staleness(self.staleness)
        if self.mode == "sync" and told not in (AUTO, described(Uncorrected())):
            raise ValueError(f"`Terms(staleness={self.staleness!r})`: pushes of mode='sync' are not late: take 'none'.")

    def in_step(self, version: int, warmup_steps: int | None = None) -> bool:
        """Whether the next version is made of a push of each worker.

        Args:
            version: of the weights.
            warmup_steps: of these weights, where a training has gone on with them. Default: all.

        >>> Terms(warmup_steps=2).in_step(1), Terms(warmup_steps=2).in_step(2), Terms(warmup_steps=2).in_step(1, 1)
        (True, False, False)
        """
        return self.mode == "sync" or version < (self.warmup_steps if warmup_steps is None else warmup_steps)

    def policy(self, optimizer: str, arguments: Mapping[str, Any]) -> StalenessPolicy:
        """The policy, for a server's optimizer."""
        return Uncorrected() if self.mode == "sync" else make_policy(self.staleness, optimizer, arguments)

    def plain(self) -> dict[str, Any]:
        """In JSON's terms."""
        return {**vars(self), "staleness": told_staleness(self.staleness)}


def told_staleness(staleness: str | StalenessPolicy | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    """A policy in JSON's terms; ``"auto"``, and none, as they are.

    >>> told_staleness("bounded")
    {'policy': 'Bounded', 'arguments': {'max_staleness': 16}}
    """
    if staleness is None or staleness == AUTO:
        return None if staleness is None else AUTO
    return described(make_policy(staleness))


def live(workers: Workers, gate: int = 0) -> set[str]:
    """Those that others wait for who come from beyond so many gates.

    >>> told = {"a": {"live": True, "rests": -1}, "b": {"live": True, "rests": 2}}
    >>> live(told, 2), sorted(live(told, 3))
    ({'a'}, ['a', 'b'])
    """
    return {name for name, told in workers.items() if told["live"] and told["rests"] < gate}


def round_due(terms: Terms, version: int, workers: Workers, waiting: Collection[str], gate: int = 0) -> bool:
    """Whether the pushes that wait are to be applied: they are of all that live, and enough have come once.

    >>> told = {"live": True, "rests": -1}
    >>> two = Terms(mode="sync", num_workers=2)
    >>> round_due(two, 0, {"a": told}, ["a"]), round_due(two, 0, {"a": told, "b": told}, ["a", "b"])
    (False, True)
    >>> round_due(two, 1, {"a": told, "b": {"live": False}}, ["a"])
    True
    """
    come = version > 0 or len(workers) >= terms.num_workers
    return bool(waiting) and live(workers, gate) <= set(waiting) and come


def awaited(
    terms: Terms, workers: Workers, waiting: Collection[str], worker: str, number: int, gate: int = 0
) -> set[str]:
    """Whom a worker waits for that has pushed; nobody, where it may go on.

    >>> fast = {"live": True, "rests": -1, "push": 5, "clock": 5}
    >>> slow = {"live": True, "rests": -1, "push": 1, "clock": 1}
    >>> awaited(Terms(mode="ssp", max_staleness=3), {"a": fast, "b": slow}, [], "a", 5)
    {'b'}
    >>> awaited(Terms(mode="ssp", max_staleness=4), {"a": fast, "b": slow}, [], "a", 5)
    set()
    """
    if workers[worker]["push"] < number:  # it waits in a round
        return (live(workers, gate) - set(waiting)) or {NEWCOMERS}
    if terms.mode == "ssp":
        least = workers[worker]["clock"] - terms.max_staleness
        return {name for name in live(workers, gate) - {worker} if workers[name]["clock"] < least}
    return set()

"""Before anything else: does this process begin together with all, or come back to others who train? The store says.

    assembly/next           the number of the next start of all; 0 at first
    assembly/<n>/<rank>     who has come to that start, and counts up there as long as it waits
    assembly/lives/<rank>   how many processes of this rank have come
    assembly/ended/<rank>   which of these has ended in order
    status/...              who trains, and with whom: see `standing`

Each process comes to the next start. When all are there whoever sees it first counts ``next`` on, and they begin. Where
others train meanwhile, and this rank is not one of them, it is a rank that was lost: it joins that training, which
began with the start before. So nobody who starts processes again need know whether the others still train. Where all
others have ended in order, and this rank has not, there is nothing to come back to, and nobody to begin with.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple

from lightning_async.comm.membership.signing import Seal
from lightning_async.comm.membership.standing import ENDED, FAILED, Standing, read_standings
from lightning_async.comm.membership.start import Patience
from lightning_async.comm.membership.stores import PrefixStore, Store, base_of, reachable
from lightning_async.errors import AsyncTrainingError

__all__ = ["AGENTS_STORE", "Assembly", "Found"]

AGENTS_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""The environment variable that is "True" where whoever starts the ranks has the store, which outlives rank 0."""
_NEXT = "next"
_LOOK_S = 0.5
_GOODBYE = timedelta(seconds=2)


class Found(NamedTuple):
    """What a process is.

    Args:
        attempt: which start of all it is of.
        again: how often this rank was started before, where it comes back; 0 where it begins with all.
    """

    attempt: int
    again: int


class Assembly:
    """All ranks of a job, each time that all are started.

    Args:
        store: of the job, which outlives the ranks.
        rank, world_size: of this process.
        secret: of the job.
        settle: where all are started again, others may take so long longer than this one.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        secret: str | None,
        settle: timedelta = timedelta(minutes=1),
    ) -> None:
        self._store, self._secret = store, secret
        self._room: Any = PrefixStore("lightning_async/assembly", store)
        self._seal = Seal(secret, "assembly")
        self._rank, self._others = rank, set(range(world_size)) - {rank}
        self._life, self._waited = int(self._room.add(f"lives/{rank}", 1)), 0
        self._first: dict[int, bytes] = {}
        """Of the others, what lay there when this one came: a process that has died may have left it."""
        self._said: dict[tuple[str, int], float] = {}
        self._looks_at, self._settles_at = 0.0, time.monotonic() + settle.total_seconds()
        self._pid = os.getpid()

    def end(self) -> None:
        """This process ends in order: it will not be started again, and trains no more. Not for its forks."""
        if os.getpid() != self._pid or not reachable(self._store, _GOODBYE):
            return
        with contextlib.suppress(RuntimeError):  # it went with the others
            base_of(self._store).set_timeout(_GOODBYE)
            key = f"ended/{self._rank}"
            self._room.set(key, self._seal.sign(key, str(self._life).encode()))

    def find(self, patience: Patience) -> Found:
        """Wait until all have come, or others are seen to train without this rank.

        Raises:
            AsyncTrainingError: neither will be: all others that are missing have ended in order.
            CollectiveTimeout: neither is so; names those that are missing.
        """
        first = self._seal.sign(_NEXT, b"0")
        if self._seal.open(_NEXT, self._room.compare_set(_NEXT, "", first)) is None:  # a stranger's
            self._room.set(_NEXT, first)
        number, missing = self._next(), set(self._others)

        def what() -> str:
            here = f"waiting for rank(s) {sorted(missing)} of {len(self._others) + 1} to be started, too"
            return f"{here}, or for those who train to go on without this one"

        while True:
            self._come(number)
            missing -= self._here(number, missing)
            if not missing:
                self._count_on(number)
            if self._next() > number:
                return Found(number, 0)
            said = self._standings()
            if said is not None:
                self._check_ends(missing)
            if self._train_without(said or []):
                return Found(max(number - 1, 0), max(self._life - 1, 1))
            patience.wait(what)

    def _next(self) -> int:
        value = self._seal.open(_NEXT, self._room.get(_NEXT))
        return int(value) if value is not None and value.isdigit() else 0

    def _count_on(self, number: int) -> None:
        mine, then = (self._seal.sign(_NEXT, str(each).encode()) for each in (number, number + 1))
        self._room.compare_set(_NEXT, mine, then)

    def _come(self, number: int) -> None:
        self._waited += 1
        key = f"{number}/{self._rank}"
        self._room.set(key, self._seal.sign(key, f"{self._life}.{self._waited}".encode()))

    def _here(self, number: int, others: Iterable[int]) -> set[int]:
        """Those that wait, too."""
        here = set()
        for rank in others:
            key = f"{number}/{rank}"
            value = self._room.get(key) if self._room.check([key]) else b""
            if value != self._first.setdefault(rank, value) and self._seal.open(key, value) is not None:
                here.add(rank)
        return here

    def _check_ends(self, missing: set[int]) -> None:
        """
        Raises:
            AsyncTrainingError: nobody who is missing comes any more.
        """
        if time.monotonic() < self._settles_at or self._has_ended(self._rank, self._life - 1):
            return  # where this rank had ended in order, too, all are started anew
        if all(self._has_ended(rank, int(self._room.add(f"lives/{rank}", 0))) for rank in missing):
            raise AsyncTrainingError(
                f"rank {self._rank}: rank(s) {sorted(missing)} have ended their training in order, without this one: "
                "there is nobody to come back to, and no training to go on with. Start all ranks to train again."
            )

    def _has_ended(self, rank: int, life: int) -> bool:
        """Whether that process of this rank, the last one, has ended in order."""
        key = f"ended/{rank}"
        value = self._seal.open(key, self._room.get(key)) if self._room.check([key]) else None
        return life > 0 and value == str(life).encode()

    def _standings(self) -> list[Standing] | None:
        """What was said since this was last asked; None where it is too soon to ask again."""
        if (now := time.monotonic()) < self._looks_at:
            return None
        self._looks_at = now + _LOOK_S
        told = read_standings(self._store, self._secret)
        before, self._said = self._said, {(each.host, each.process): each.at for each in told}
        return [each for each in told if before.get((each.host, each.process), each.at) != each.at]

    def _train_without(self, said: Iterable[Standing]) -> bool:
        me = str(self._rank)
        return any(each.members and me not in each.members and each.state not in (ENDED, FAILED) for each in said)

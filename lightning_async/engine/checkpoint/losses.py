"""Ranks are lost, and with them their parts of saves under way: nobody waits for what does not come any more.

What a rank had handed over its writer brings, though the rank is dead. For what it had not, the first of the ranks that
are left says that it has failed, and the rank that commits hears of it as of any other failure:

    open --- the lost ranks' writers bring their parts ---> committed, as if nobody were lost
    open --- none of them writes, or begins to soon ---> given up: said in their names, deleted where they are the first
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from lightning_async.engine.checkpoint.claim import has_writer
from lightning_async.engine.checkpoint.store import MANIFEST, CheckpointStore

__all__ = ["Losses", "bury"]

SOON_S = 5.0
"""A writer that lives may have been given a part that it has yet to begin; that of a rank that is stopped never was."""
_LOOK_S = 0.05
_KEPT = 16  # saves, of which the older have been committed or given up long ago
_WHY = "it was lost before its part was written"


@dataclass
class _Open:
    """A save that others take part in."""

    number: int
    temporary: str
    final: str
    ranks: Collection[int]
    gone: frozenset[int] = frozenset()
    """Of these, who was lost since; one that comes back brings nothing of it."""
    mine: bool = True
    """This rank's own part is still being written."""
    since: float | None = None
    """When a rank that takes part was first found to be lost."""
    known: bool = False
    """What has become of it, or will without this rank."""
    given_up: bool = False


class Losses:
    """The saves of one rank in which others take part. `look` is called on one thread, all else on another.

    Args:
        store: the checkpoints.
        rank: this one.
        now: a clock, in seconds.
    """

    def __init__(self, store: CheckpointStore, rank: int, now: Callable[[], float] = time.monotonic) -> None:
        self._store, self._rank, self._now = store, rank, now
        self._open: dict[int, _Open] = {}

    def begin(self, number: int, step: int, run: str, ranks: Collection[int]) -> None:
        """This rank hands over its part of a save."""
        store = self._store
        self._open[number] = _Open(number, store.temporary(number, step, run), store.final(number, step), ranks)
        for old in sorted(self._open)[:-_KEPT]:
            del self._open[old]

    def written(self, number: int, committed: bool, failed: bool = False) -> bool:
        """This rank has heard what became of its part; whether the save was given up, as others are lost.

        One that has ``failed`` is, where a rank that takes part is lost: that one may have said so as it left.
        """
        save = self._open.get(number)
        if save is None:
            return False
        save.mine = False
        save.given_up |= failed and bool(save.gone)
        if committed:
            del self._open[number]
        return save.given_up and not committed

    def concerned(self, lost: Collection[int]) -> bool:
        """Whether it is for this rank to find out what becomes of a save in which ranks that are ``lost`` take part."""
        for save in self._open.values() if lost else ():
            save.gone |= frozenset(lost).intersection(save.ranks)
        return any(self._is_mine(save) for save in self._open.values())

    def look(self) -> None:
        """Give up what will not come. Waits for nothing, but for the file system."""
        for save in list(self._open.values()):
            if self._is_mine(save):
                save.since = self._now() if save.since is None else save.since
                save.known = self._settle(save, sorted(save.gone))

    def given_up(self) -> list[int]:
        """Numbers of those that are, whose part of this rank is done with; each once."""
        numbers = [save.number for save in self._open.values() if save.given_up and not save.mine]
        for number in numbers:
            del self._open[number]
        return numbers

    def _is_mine(self, save: _Open) -> bool:
        left = [rank for rank in save.ranks if rank not in save.gone]
        return not save.known and len(left) < len(save.ranks) and self._rank == min(left)

    def _settle(self, save: _Open, gone: list[int]) -> bool:
        """Whether it is known what becomes of a save, of whose ranks some are ``gone``."""
        store, temporary = self._store, save.temporary
        if store.files.exists(f"{save.final}/{MANIFEST}"):
            return True
        if not (names := store.files.names(temporary)):
            return not save.mine  # it was committed, and deleted since; or this rank's own writer has yet to begin
        silent, _ = store.heard(temporary, gone)
        if any(self._may_come(save, rank, names) for rank in silent):
            return False
        silent, failed = store.heard(temporary, gone)  # they may have been about to end
        save.given_up = save.given_up or bool(silent)
        for rank in silent:
            store.give_up(temporary, rank, _WHY)
        return (first := min(save.ranks)) not in gone or self._without_the_first(save, first, first in silent + failed)

    def _may_come(self, save: _Open, rank: int, names: list[str]) -> bool:
        begun = any(name.startswith(f"rank-{rank}.") for name in names)
        soon = save.since is not None and self._now() - save.since < SOON_S
        return (begun or soon) and has_writer(self._store, rank)

    def _without_the_first(self, save: _Open, first: int, failed: bool) -> bool:
        """The same where nobody is left to commit but that one's writer, which outlives it."""
        if not failed and has_writer(self._store, first):
            return False
        if self._store.files.exists(f"{save.final}/{MANIFEST}"):
            return True
        save.given_up = True
        if self._store.heard(save.temporary, save.ranks)[0]:
            return failed  # then the last of the others to be ready deletes it
        self._store.discard(save.temporary)
        return True


def bury(store: CheckpointStore, rank: int, timeout_s: float) -> None:
    """A rank comes back, as another process: what its earlier life had begun to write is done, or nobody waits for it.

    Args:
        store: the checkpoints.
        rank: its name for life.
        timeout_s: how long its earlier life's writer may take.
    """
    until = time.monotonic() + timeout_s
    while has_writer(store, rank) and time.monotonic() < until:
        time.sleep(_LOOK_S)
    for temporary in store.unfinished():
        begun = any(name.startswith(f"rank-{rank}.") for name in store.files.names(temporary))
        if begun and store.heard(temporary, [rank])[0]:
            store.give_up(temporary, rank, _WHY)

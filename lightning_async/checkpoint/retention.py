"""Which checkpoints go, and what becomes of saves whose ranks are lost.

`RetentionThread` deletes what a policy does not keep, but never a checkpoint that may still be needed, see `doomed`.
`LostParts` sees that nobody waits for what does not come any more:

    open --- the lost ranks' writers bring their parts ---> committed, as if nobody were lost
    open --- none of them writes, or begins to soon ---> given up: said in their names, deleted where they are the first
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from lightning_async.algorithms.checkpoint_policies import KeepPolicy, Saved
from lightning_async.checkpoint.store import MANIFEST, CheckpointEntry, CheckpointStore
from lightning_async.checkpoint.writer_process import has_writer
from lightning_async.errors import CheckpointError

log = logging.getLogger(__name__)

SOON_S = 5.0
"""A writer that lives may have been given a part that it has yet to begin; that of a rank that is stopped never was."""
_LOOK_S = 0.05
_KEPT = 16  # saves, of which the older have been committed or given up long ago
_WHY = "it was lost before its part was written"


class RetentionThread:
    """A thread that deletes old checkpoints and marks good ones, one after the other; both take longer than a step."""

    def __init__(self, store: CheckpointStore, keep: KeepPolicy, resumed_from: int | None = None) -> None:
        self.resumed_from = resumed_from
        self.awaited: set[int] = set()
        """Numbers of those that may be marked as good yet; they stay."""
        self._store = store
        self._keep = keep
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def prune(self) -> None:
        """Delete, on the thread, what is not kept as things stand now. Raises what the policy raised before."""
        resumed_from = self.resumed_from
        awaited = frozenset(self.awaited)
        self.ask(lambda: prune(self._store, self._keep, resumed_from, awaited))

    def promote(self, number: int) -> None:
        self.ask(lambda: self._store.promote(self._entry(number)))

    def give_up(self, temporary: str, rank: int, why: str, ranks: Collection[int] = ()) -> None:
        """Tell others, of these ``ranks``, that nothing will come of a rank's part of a save."""

        def give_up() -> None:
            self._store.give_up(temporary, rank, why)
            if ranks:
                self._store.discard_if_hopeless(temporary, ranks)

        self.ask(give_up)

    def flush(self, timeout_s: float) -> bool:
        done = threading.Event()
        self.ask(done.set)
        return done.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def _entry(self, number: int) -> CheckpointEntry:
        for entry in self._store.entries(number):
            return entry
        raise CheckpointError(f"There is no checkpoint of number {number} in {self._store.dirpath}.")

    def ask(self, task: Callable[[], object]) -> None:
        """Have the thread do something. Raises what a policy has raised before."""
        error = self._error
        self._error = None
        if error is not None:
            raise error
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="lightning_async-keeper", daemon=True)
            self._thread.start()
        self._tasks.put(task)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except (CheckpointError, OSError) as error:
                log.warning("Old checkpoints in %s could not be seen to: %s", self._store.dirpath, error)
            except Exception as error:
                self._error = error


def prune(
    store: CheckpointStore, keep: KeepPolicy, resumed_from: int | None = None, awaited: Collection[int] = ()
) -> list[CheckpointEntry]:
    gone = doomed(store.entries(), keep, resumed_from, awaited)
    for entry in gone:
        store.remove(entry)
    return gone


def doomed(
    entries: Sequence[CheckpointEntry], keep: KeepPolicy, resumed_from: int | None = None, awaited: Collection[int] = ()
) -> list[CheckpointEntry]:
    """Return what ``keep`` does not keep, the oldest first.

    The newest, the last good one, the one resumed from and those that may be marked as good yet stay, and so does what
    cannot be read: whether that is of no more use is for `recovery` to find out.
    """
    all_ = saved(entries)
    kept = keep.keep(all_) | {resumed_from, *awaited}
    kept |= {max((each.number for each in some), default=None) for some in (all_, [each for each in all_ if each.good])}
    return [entry for entry in reversed(entries) if entry.manifest and entry.number not in kept]


def saved(entries: Sequence[CheckpointEntry]) -> list[Saved]:
    return [Saved(entry.number, entry.step, entry.manifest.metrics, entry.good) for entry in entries if entry.manifest]


class LostParts:
    """The saves of one rank in which others take part, where ranks are lost with their parts.

    What a rank had handed over its writer brings, though the rank is dead. For what it had not, the first live rank
    says that it has failed, as any other failure. `look` is called on one thread, all else on another.
    """

    def __init__(self, store: CheckpointStore, rank: int, now: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._rank = rank
        self._now = now
        self._open: dict[int, _Open] = {}

    def begin(self, number: int, step: int, run: str, ranks: Collection[int]) -> None:
        store = self._store
        self._open[number] = _Open(number, store.temporary(number, step, run), store.final(number, step), ranks)
        for old in sorted(self._open)[:-_KEPT]:
            del self._open[old]

    def written(self, number: int, committed: bool, failed: bool = False) -> bool:
        """Note what became of this rank's part; return whether the save was given up, as others are lost.

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
        """Return whether this rank has to find out what becomes of a save in which ``lost`` ranks take part."""
        for save in self._open.values() if lost else ():
            save.gone |= frozenset(lost).intersection(save.ranks)
        return any(self._is_mine(save) for save in self._open.values())

    def look(self) -> None:
        for save in list(self._open.values()):
            if self._is_mine(save):
                save.since = self._now() if save.since is None else save.since
                save.known = self._settle(save, sorted(save.gone))

    def given_up(self) -> list[int]:
        """Return the numbers of saves that are given up, and whose part of this rank is done with; each once."""
        numbers = [save.number for save in self._open.values() if save.given_up and not save.mine]
        for number in numbers:
            del self._open[number]
        return numbers

    def _is_mine(self, save: _Open) -> bool:
        left = [rank for rank in save.ranks if rank not in save.gone]
        return not save.known and len(left) < len(save.ranks) and self._rank == min(left)

    def _settle(self, save: _Open, gone: list[int]) -> bool:
        """Settle a save, of whose ranks some are ``gone``; return whether it is known what becomes of it."""
        store = self._store
        temporary = save.temporary
        if store.files.exists(f"{save.final}/{MANIFEST}"):
            return True
        if not (names := store.files.names(temporary)):
            return not save.mine  # it was committed, and deleted since; or this rank's own writer has yet to begin
        silent, _ = store.silent_and_failed(temporary, gone)
        if any(self._may_come(save, rank, names) for rank in silent):
            return False
        silent, failed = store.silent_and_failed(temporary, gone)  # they may have been about to end
        save.given_up = save.given_up or bool(silent)
        for rank in silent:
            store.give_up(temporary, rank, _WHY)
        return (first := min(save.ranks)) not in gone or self._without_the_first(save, first, first in silent + failed)

    def _may_come(self, save: _Open, rank: int, names: list[str]) -> bool:
        begun = any(name.startswith(f"rank-{rank}.") for name in names)
        soon = save.since is not None and self._now() - save.since < SOON_S
        return (begun or soon) and bool(has_writer(self._store, rank))

    def _without_the_first(self, save: _Open, first: int, failed: bool) -> bool:
        """Settle a save that nobody is left to commit but the first rank's writer, which outlives it."""
        if not failed and has_writer(self._store, first):
            return False
        if self._store.files.exists(f"{save.final}/{MANIFEST}"):
            return True
        save.given_up = True
        if self._store.silent_and_failed(save.temporary, save.ranks)[0]:
            return failed  # then the last of the others to be ready deletes it
        self._store.discard(save.temporary)
        return True


@dataclass
class _Open:
    number: int
    temporary: str
    final: str
    ranks: Collection[int]
    gone: frozenset[int] = frozenset()
    """Ranks that were lost since; one that comes back brings nothing of it."""
    mine: bool = True
    since: float | None = None
    known: bool = False
    given_up: bool = False


def abandon_saves_of(store: CheckpointStore, rank: int, timeout_s: float) -> None:
    """Finish what the earlier life of a rank that comes back had begun to write, or have nobody wait for it."""
    until = time.monotonic() + timeout_s
    while has_writer(store, rank) and time.monotonic() < until:
        time.sleep(_LOOK_S)
    for temporary in store.unfinished():
        begun = any(name.startswith(f"rank-{rank}.") for name in store.files.names(temporary))
        if begun and store.silent_and_failed(temporary, [rank])[0]:
            store.give_up(temporary, rank, _WHY)

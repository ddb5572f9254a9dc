"""Deletion of old checkpoints, and the end of saves whose ranks are lost.

`RetentionThread` deletes checkpoints that a policy does not keep, but none that may still be needed, see `doomed`.
`LostParts` sees to it that no rank waits for a part that will never come:

    open --- the writer processes of lost ranks still write their parts ---> committed, as if no rank were lost
    open --- no process will write a lost rank's part ---> given up: reported as failed in the lost rank's name
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
"""Seconds in which the writer of a lost rank may begin a part; the rank may have handed it over just before."""
# Seconds between two looks whether a writer has ended.
_LOOK_S = 0.05
_KEPT = 16  # number of saves to remember; older ones have been committed or given up long ago
_WHY = "it was lost before its part was written"


class RetentionThread:
    """A thread that deletes old checkpoints and marks good ones, because either takes longer than a training step.

    Args:
        store: The checkpoints.
        keep: Policy that says which checkpoints to keep.
        resumed_from: Number of the checkpoint that training was resumed from, which stays. Default: None.
    """

    def __init__(self, store: CheckpointStore, keep: KeepPolicy, resumed_from: int | None = None) -> None:
        self.resumed_from = resumed_from
        self.awaited: set[int] = set()
        """Numbers of checkpoints that may still be marked as good; they stay."""
        self._store = store
        self._keep = keep
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def prune(self) -> None:
        """Delete, on the thread, checkpoints that the policy does not keep. Raises an earlier error of the policy."""
        # Copied here, because the training thread may change both before the task runs.
        resumed_from = self.resumed_from
        awaited = frozenset(self.awaited)
        self.ask(lambda: prune(self._store, self._keep, resumed_from, awaited))

    def promote(self, number: int) -> None:
        """Mark the checkpoint of this number as good, on the thread."""
        self.ask(lambda: self._store.promote(self._entry(number)))

    def give_up(self, temporary: str, rank: int, why: str, ranks: Collection[int] = ()) -> None:
        """Write, on the thread, that no part of this rank will come, so that no other rank waits for it.

        Args:
            temporary: Folder of the save.
            rank: The rank.
            why: Reason, for the other ranks.
            ranks: Ranks that take part in the save. If given, the folder is deleted once all have answered and the
                first one has failed. Default: none.
        """

        def give_up() -> None:
            self._store.give_up(temporary, rank, why)
            if ranks:
                self._store.discard_if_hopeless(temporary, ranks)

        self.ask(give_up)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all tasks so far are done, or the time is over; return whether they are done."""
        done = threading.Event()
        self.ask(done.set)
        return done.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """End the thread after its tasks; return whether it has ended in time."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join(timeout_s)
            # A task that waits for a slow file system is left to end by itself: the thread is a daemon.
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def _entry(self, number: int) -> CheckpointEntry:
        for entry in self._store.entries(number):
            return entry
        raise CheckpointError(f"There is no checkpoint of number {number} in {self._store.dirpath}.")

    def ask(self, task: Callable[[], object]) -> None:
        """Run a task on the thread. Raises an earlier error of the policy."""
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
                log.warning("Old checkpoints in %s could not be deleted or marked: %s", self._store.dirpath, error)
            except Exception as error:
                # An error of the policy is the user's, so the training thread raises it at its next call.
                self._error = error


def prune(
    store: CheckpointStore, keep: KeepPolicy, resumed_from: int | None = None, awaited: Collection[int] = ()
) -> list[CheckpointEntry]:
    """Delete the checkpoints that `doomed` returns, and return them."""
    gone = doomed(store.entries(), keep, resumed_from, awaited)
    for entry in gone:
        store.remove(entry)
    return gone


def doomed(
    entries: Sequence[CheckpointEntry], keep: KeepPolicy, resumed_from: int | None = None, awaited: Collection[int] = ()
) -> list[CheckpointEntry]:
    """Return the checkpoints that ``keep`` does not keep, the oldest first.

    These stay in any case: the newest, the last good one, the one resumed from, those that may still be marked as good,
    and those that cannot be read, because `recovery` decides about them.

    Args:
        entries: All checkpoints, the newest first.
        keep: Policy that says which checkpoints to keep.
        resumed_from: Number of the checkpoint that training was resumed from. Default: None.
        awaited: Numbers of checkpoints that may still be marked as good. Default: none.
    """
    all_ = saved(entries)
    kept = keep.keep(all_) | {resumed_from, *awaited}
    # Whatever the policy says: without the newest and the last good one, recovery has nothing to choose from.
    kept |= {max((each.number for each in some), default=None) for some in (all_, [each for each in all_ if each.good])}
    return [entry for entry in reversed(entries) if entry.manifest and entry.number not in kept]


def saved(entries: Sequence[CheckpointEntry]) -> list[Saved]:
    """Return the readable checkpoints in the form in which policies see them."""
    return [Saved(entry.number, entry.step, entry.manifest.metrics, entry.good) for entry in entries if entry.manifest]


class LostParts:
    """The unfinished saves that one rank shares with other ranks, some of which may be lost.

    The writer process of a lost rank outlives it, and still writes a part that was handed over to it. For each other
    part of a lost rank, the lowest live rank of the save reports a failure in the lost rank's name. `look` runs on one
    thread, and all other methods on another.

    Args:
        store: The checkpoints.
        rank: This rank.
        now: Clock, in seconds. Default: `time.monotonic`.
    """

    def __init__(self, store: CheckpointStore, rank: int, now: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._rank = rank
        self._now = now
        self._open: dict[int, _Open] = {}

    def begin(self, number: int, step: int, run: str, ranks: Collection[int]) -> None:
        """Note that this rank takes part in a save."""
        store = self._store
        self._open[number] = _Open(number, store.temporary(number, step, run), store.final(number, step), ranks)
        for old in sorted(self._open)[:-_KEPT]:
            del self._open[old]

    def written(self, number: int, committed: bool, failed: bool = False) -> bool:
        """Note the result of this rank's part; return whether the save was given up because ranks are lost.

        Args:
            number: Number of the save.
            committed: Whether this rank has committed it.
            failed: Whether this rank's part has failed. If a rank of the save is lost, the save then counts as given
                up, because a failure that the lost rank reported as it left may be the reason.
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
        """Note lost ranks; return whether this rank must settle a save in which they take part.

        The lowest live rank of such a save must settle it.
        """
        for save in self._open.values() if lost else ():
            # Kept for good: a lost rank that comes back has no part of this save.
            save.gone |= frozenset(lost).intersection(save.ranks)
        return any(self._is_mine(save) for save in self._open.values())

    def look(self) -> None:
        """Settle the saves of lost ranks: report each part that no process will write as failed."""
        for save in list(self._open.values()):
            if self._is_mine(save):
                save.since = self._now() if save.since is None else save.since
                save.known = self._settle(save, sorted(save.gone))

    def given_up(self) -> list[int]:
        """Return the numbers, each once, of saves that were given up and in which this rank's own part has ended."""
        numbers = [save.number for save in self._open.values() if save.given_up and not save.mine]
        for number in numbers:
            del self._open[number]
        return numbers

    def _is_mine(self, save: _Open) -> bool:
        left = [rank for rank in save.ranks if rank not in save.gone]
        return not save.known and len(left) < len(save.ranks) and self._rank == min(left)

    def _settle(self, save: _Open, gone: list[int]) -> bool:
        """Report the parts that ranks ``gone`` will not write as failed; return whether the save is settled."""
        store = self._store
        temporary = save.temporary
        # The first rank's writer has committed it in spite of the loss.
        if store.files.exists(f"{save.final}/{MANIFEST}"):
            return True
        if not (names := store.files.names(temporary)):
            return not save.mine  # committed and deleted since; or this rank's own writer has not begun yet
        silent, _ = store.silent_and_failed(temporary, gone)
        if any(self._may_come(save, rank, names) for rank in silent):
            return False
        # Asked again: a writer that lived a moment ago may have written its part and ended in between.
        silent, failed = store.silent_and_failed(temporary, gone)
        # Parts that were reported as failed let the save fail as usual; only silence has to be settled here.
        save.given_up = save.given_up or bool(silent)
        for rank in silent:
            store.give_up(temporary, rank, _WHY)
        return (first := min(save.ranks)) not in gone or self._without_the_first(save, first, first in silent + failed)

    def _may_come(self, save: _Open, rank: int, names: list[str]) -> bool:
        begun = any(name.startswith(f"rank-{rank}.") for name in names)
        soon = save.since is not None and self._now() - save.since < SOON_S
        return (begun or soon) and bool(has_writer(self._store, rank))

    def _without_the_first(self, save: _Open, first: int, failed: bool) -> bool:
        """Settle a save whose first rank is lost; return whether it is settled.

        Only the writer process of the first rank, which outlives that rank, could still commit the save.
        """
        if not failed and has_writer(self._store, first):
            return False
        if self._store.files.exists(f"{save.final}/{MANIFEST}"):
            return True
        save.given_up = True
        if self._store.silent_and_failed(save.temporary, save.ranks)[0]:
            return failed  # then the last of the other ranks to be ready deletes the folder
        self._store.discard(save.temporary)
        return True


@dataclass
class _Open:
    """A save that is neither committed nor given up yet, as far as this rank knows."""

    number: int
    temporary: str
    final: str
    ranks: Collection[int]
    gone: frozenset[int] = frozenset()
    """Ranks that were lost since; a rank that comes back has no part of this save."""
    mine: bool = True
    since: float | None = None
    known: bool = False
    given_up: bool = False


def abandon_saves_of(store: CheckpointStore, rank: int, timeout_s: float) -> None:
    """Wait for the writer of a returning rank's earlier life; report the parts that it has not written as failed.

    Args:
        store: The checkpoints.
        rank: The rank that comes back.
        timeout_s: Longest wait for that writer, in seconds.
    """
    until = time.monotonic() + timeout_s
    # A part that is still being written may complete a checkpoint.
    while has_writer(store, rank) and time.monotonic() < until:
        time.sleep(_LOOK_S)
    for temporary in store.unfinished():
        begun = any(name.startswith(f"rank-{rank}.") for name in store.files.names(temporary))
        if begun and store.silent_and_failed(temporary, [rank])[0]:
            store.give_up(temporary, rank, _WHY)

"""Deletion of old checkpoints, and handling of saves in which a rank was lost.

`RetentionThread` deletes checkpoints that the user's policy does not keep, except those that may still be needed, see
`doomed`. `LostParts` keeps ranks from waiting for a part of a save that no process will write. A save with a lost rank
ends in one of two ways:

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
"""Seconds for which a lost rank's writer process may still begin a part that the rank passed to it before its end."""
# Seconds between two looks whether a writer has ended.
_LOOK_S = 0.05
_KEPT = 16  # number of saves to remember; older ones have been committed or given up long ago
_WHY = "it was lost before its part was written"


class RetentionThread:
    """A thread that deletes old checkpoints and marks good ones, because either takes longer than a training step.

    Args:
        store: The checkpoints.
        keep: Retention policy: it says which checkpoints to keep.
        resumed_from: Number of the checkpoint from which training was resumed; this checkpoint is never deleted.
            Default: None.
    """

    def __init__(self, store: CheckpointStore, keep: KeepPolicy, resumed_from: int | None = None) -> None:
        self.resumed_from = resumed_from
        self.awaited: set[int] = set()
        """Numbers of checkpoints that may still be marked as good. They are not deleted."""
        self._store = store
        self._keep = keep
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def prune(self) -> None:
        """Delete, on the thread, the checkpoints that the retention policy does not keep. Raises the error of `ask`."""
        # Copied here, because the training thread may change both before the task runs.
        resumed_from = self.resumed_from
        awaited = frozenset(self.awaited)
        self.ask(lambda: prune(self._store, self._keep, resumed_from, awaited))

    def promote(self, number: int) -> None:
        """Mark the checkpoint with this number as good, on the thread. Raises the error of `ask`."""
        self.ask(lambda: self._store.promote(self._entry(number)))

    def give_up(self, temporary: str, rank: int, why: str, ranks: Collection[int] = ()) -> None:
        """Report, on the thread, that a rank will not write its part of a save. Then no other rank waits for the part.

        Args:
            temporary: Folder of the unfinished save.
            rank: The rank that will not write its part.
            why: Reason, for the other ranks.
            ranks: Ranks of the save. If given, the folder is deleted if the lowest of these ranks has reported a
                failure, and each other one has written its part or reported a failure. Default: none.

        Raises the error of `ask`.
        """

        def give_up() -> None:
            self._store.give_up(temporary, rank, why)
            if ranks:
                self._store.discard_if_hopeless(temporary, ranks)

        self.ask(give_up)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all queued tasks are done, for at most ``timeout_s`` seconds; return whether they are done.

        Raises the error of `ask`.
        """
        done = threading.Event()
        self.ask(done.set)
        return done.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """End the thread after its queued tasks; return whether it has ended within ``timeout_s`` seconds."""
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
        """Queue a task for the thread.

        If the retention policy has raised an error in an earlier task, raise that error once, after the new task is
        queued.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="lightning_async-keeper", daemon=True)
            self._thread.start()
        error = self._error
        self._error = None
        # In any case: other ranks may wait for what the task reports.
        self._tasks.put(task)
        if error is not None:
            raise error

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except (CheckpointError, OSError) as error:
                log.warning("Old checkpoints in %s could not be deleted or marked: %s", self._store.dirpath, error)
            except Exception as error:
                # An error of the policy is the user's, so the training thread raises it at its next call.
                self._error = self._error or error


def prune(
    store: CheckpointStore, keep: KeepPolicy, resumed_from: int | None = None, awaited: Collection[int] = ()
) -> list[CheckpointEntry]:
    """Delete the checkpoints that the policy does not keep, and return them; see `doomed` for the arguments."""
    gone = doomed(store.entries(), keep, resumed_from, awaited)
    for entry in gone:
        store.remove(entry)
    return gone


def doomed(
    entries: Sequence[CheckpointEntry], keep: KeepPolicy, resumed_from: int | None = None, awaited: Collection[int] = ()
) -> list[CheckpointEntry]:
    """Return the checkpoints to delete, the oldest first: those that the policy ``keep`` does not keep.

    Some checkpoints are never returned: the newest one, the newest good one, the one from which training was resumed,
    and those that may still be marked as good. Unreadable checkpoints are not returned either, because `recovery`
    decides about them.

    Args:
        entries: All checkpoints, the newest first.
        keep: Retention policy: it says which checkpoints to keep.
        resumed_from: Number of the checkpoint from which training was resumed. Default: None.
        awaited: Numbers of checkpoints that may still be marked as good. Default: none.
    """
    all_ = saved(entries)
    kept = keep.keep(all_) | {resumed_from, *awaited}
    # Whatever the policy says: without the newest and the last good one, recovery has nothing to choose from.
    kept |= {max((each.number for each in some), default=None) for some in (all_, [each for each in all_ if each.good])}
    return [entry for entry in reversed(entries) if entry.manifest and entry.number not in kept]


def saved(entries: Sequence[CheckpointEntry]) -> list[Saved]:
    """Return the checkpoints with a readable manifest, in the form that retention policies expect."""
    return [Saved(entry.number, entry.step, entry.manifest.metrics, entry.good) for entry in entries if entry.manifest]


class LostParts:
    """The unfinished saves of one rank, watched for parts that lost ranks will not write.

    The writer process of a lost rank outlives the rank. It still writes a part that was handed over to it. For each
    other part of a lost rank, the lowest live rank of the save reports a failure in the lost rank's name. This decides
    the outcome of the save: it is committed, or given up.

    `look` runs on the retention thread, and all other methods on the training thread.

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
        """Start to watch a save in which this rank takes part.

        Args:
            number: Number of the save.
            step: Number of optimizer steps taken.
            run: Name of the run.
            ranks: Ranks of the save.
        """
        store = self._store
        self._open[number] = _Open(number, store.temporary(number, step, run), store.final(number, step), ranks)
        for old in sorted(self._open)[:-_KEPT]:
            del self._open[old]

    def written(self, number: int, committed: bool, failed: bool = False) -> bool:
        """Record the result of this rank's part; return whether the save was given up because a rank of it is lost.

        Args:
            number: Number of the save.
            committed: Whether this rank has committed the save.
            failed: Whether this rank's part has failed. If a rank of the save is lost, the cause may be a failure that
                the lost rank reported before it ended. The save then counts as given up, not as failed.
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
        """Record that the ranks ``lost`` are lost; return whether this rank must decide the outcome of a save.

        The lowest live rank of a save with a lost rank decides, in `look`, whether the save is given up.
        """
        for save in self._open.values() if lost else ():
            # Never removed: a lost rank that comes back has no part of this save.
            save.gone |= frozenset(lost).intersection(save.ranks)
        return any(self._is_mine(save) for save in self._open.values())

    def look(self) -> None:
        """Report as failed each part of a lost rank that no process will write.

        This concerns the saves for which this rank decides the outcome. If the outcome of a save stays open, the next
        call examines the save again. Call this repeatedly while `concerned` returns True.
        """
        for save in list(self._open.values()):
            if self._is_mine(save):
                save.since = self._now() if save.since is None else save.since
                save.known = self._settle(save, sorted(save.gone))

    def given_up(self) -> list[int]:
        """Return the numbers of the abandoned saves for which this rank's own part is finished: written, or failed.

        Each number is returned by one call only: that call forgets the save.
        """
        numbers = [save.number for save in self._open.values() if save.given_up and not save.mine]
        for number in numbers:
            del self._open[number]
        return numbers

    def _is_mine(self, save: _Open) -> bool:
        left = [rank for rank in save.ranks if rank not in save.gone]
        return not save.known and len(left) < len(save.ranks) and self._rank == min(left)

    def _settle(self, save: _Open, gone: list[int]) -> bool:
        """Report as failed the parts that the lost ranks ``gone`` will not write.

        Return whether the outcome of the save is decided. If not, this must be called again later.
        """
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
        """Give up a save whose first rank is lost, unless that rank's writer process may still commit the save.

        ``failed`` says whether the first rank's part is reported as failed. Return whether the outcome of the save is
        decided.
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
    """Ranks of the save that were lost since it began. A rank that comes back has no part of this save."""
    mine: bool = True
    since: float | None = None
    known: bool = False
    given_up: bool = False


def abandon_saves_of(store: CheckpointStore, rank: int, timeout_s: float) -> None:
    """Report as failed the parts that a returning rank began to write before its restart and will not complete.

    Wait first for the writer process of the rank's earlier process, which may still complete a part.

    Args:
        store: The checkpoints.
        rank: The rank that has returned.
        timeout_s: Longest wait for that writer process, in seconds.
    """
    until = time.monotonic() + timeout_s
    # A part that is still being written may complete a checkpoint.
    while has_writer(store, rank) and time.monotonic() < until:
        time.sleep(_LOOK_S)
    for temporary in store.unfinished():
        begun = any(name.startswith(f"rank-{rank}.") for name in store.files.names(temporary))
        if begun and store.silent_and_failed(temporary, [rank])[0]:
            store.give_up(temporary, rank, _WHY)

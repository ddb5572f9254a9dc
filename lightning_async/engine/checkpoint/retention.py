"""Which checkpoints go: those that a policy does not keep, but never one that may still be needed."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Collection, Sequence

from lightning_async.engine.checkpoint.losses import Losses
from lightning_async.engine.checkpoint.store import CheckpointStore, Entry
from lightning_async.errors import CheckpointError
from lightning_async.rules.saving.keep import KeepPolicy, Saved

__all__ = ["Keeper", "doomed", "prune", "saved"]

log = logging.getLogger(__name__)


def saved(entries: Sequence[Entry]) -> list[Saved]:
    """Those that can be read, as policies see them."""
    return [Saved(entry.number, entry.step, entry.manifest.metrics, entry.good) for entry in entries if entry.manifest]


def doomed(
    entries: Sequence[Entry], keep: KeepPolicy, resumed_from: int | None = None, awaited: Collection[int] = ()
) -> list[Entry]:
    """What ``keep`` does not keep, the oldest first.

    The newest, the last good one and the one resumed from stay, and so does what cannot be read: whether that is of no
    more use is for `recovery` to find out.

    Args:
        entries: all that the store has.
        keep: the policy.
        resumed_from: number of the checkpoint that training began from. Default: none.
        awaited: numbers of those that may be marked as good yet. Default: none.
    """
    all_ = saved(entries)
    kept = keep.keep(all_) | {resumed_from, *awaited}
    kept |= {max((each.number for each in some), default=None) for some in (all_, [each for each in all_ if each.good])}
    return [entry for entry in reversed(entries) if entry.manifest and entry.number not in kept]


def prune(
    store: CheckpointStore, keep: KeepPolicy, resumed_from: int | None = None, awaited: Collection[int] = ()
) -> list[Entry]:
    """Delete what is doomed, and say what that was."""
    gone = doomed(store.entries(), keep, resumed_from, awaited)
    for entry in gone:
        store.remove(entry)
    return gone


class Keeper:
    """Deletes old checkpoints and marks good ones on a thread of its own: to delete gigabytes takes longer than a step.

    One thing after the other, so that what is marked is not deleted meanwhile.

    Args:
        store: the checkpoints.
        keep: the policy.
        resumed_from: number of the checkpoint that training began from. Default: none.
    """

    def __init__(self, store: CheckpointStore, keep: KeepPolicy, resumed_from: int | None = None) -> None:
        self.resumed_from = resumed_from
        self.awaited: set[int] = set()
        """Numbers of those that may be marked as good yet; they stay."""
        self._store, self._keep = store, keep
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def prune(self) -> None:
        """Have deleted what is not to be kept as things stand now. Raises what the policy has raised before."""
        resumed_from, awaited = self.resumed_from, frozenset(self.awaited)
        self._ask(lambda: prune(self._store, self._keep, resumed_from, awaited))

    def promote(self, number: int) -> None:
        """Have a checkpoint marked as good."""
        self._ask(lambda: self._store.promote(self._entry(number)))

    def give_up(self, temporary: str, rank: int, why: str, ranks: Collection[int] = ()) -> None:
        """Have the others, of these ``ranks``, told that nothing will come of a rank's part of a save."""

        def give_up() -> None:
            self._store.give_up(temporary, rank, why)
            if ranks:
                self._store.discard_if_hopeless(temporary, ranks)

        self._ask(give_up)

    def look(self, losses: Losses) -> None:
        """Have found out what becomes of saves in which ranks take part that are ``lost``."""
        self._ask(losses.look)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was asked for is done; whether it is."""
        done = threading.Event()
        self._ask(done.set)
        return done.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Wait for what was asked for, and end; whether it has ended. What is left is cleaned by a later run."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def _entry(self, number: int) -> Entry:
        for entry in self._store.entries(number):
            return entry
        raise CheckpointError(f"There is no checkpoint of number {number} in {self._store.dirpath}.")

    def _ask(self, task: Callable[[], object]) -> None:
        error, self._error = self._error, None
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

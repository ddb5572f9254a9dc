"""The saves of one rank: passing them to the writer, counting failures, deleting old checkpoints, measuring costs."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_async.algorithms import KeepPolicy
from lightning_async.checkpoint.retention import LostParts, RetentionThread
from lightning_async.checkpoint.store import CheckpointStore
from lightning_async.checkpoint.writer import Result, SaveBusy, SaveJob, Writer
from lightning_async.errors import CheckpointError
from lightning_async.events import tell

log = logging.getLogger(__name__)

# Seconds after which a save takes unusually long.
PATIENCE_S = 600.0
# Seconds after which a wait is logged.
_QUIET_S = 5.0
# Longest wait between two looks at a save that is awaited.
_BEAT_S = 0.2


class Saver:
    """A manager of all saves of one rank.

    Args:
        store: The checkpoints.
        rank: This rank.
        run: Name of this run, which is a part of the names of unfinished checkpoints; the same on all ranks.
        keep: Retention policy: it says which checkpoints to keep. The rank that has committed a checkpoint applies it.
        resumed_from: Number of the checkpoint from which training was resumed; this checkpoint is never deleted.
            Default: None.
        good_after: Number of steps without a divergence alarm after which a checkpoint is marked as good. Default:
            None, no checkpoint is marked.
        buffers: Number of buffers for copies of the state, see `Writer`. Default: 2.
        max_failures: Number of failed saves in a row after which `poll` raises an error, which ends training. Default:
            3.
        pickles: Whether objects are saved as pickles. Default: False.
        lost: Function that returns the ranks that are lost while training continues without them. Default: no rank is
            lost.
        on_save: Function that is called before each save. Default: does nothing.
        now: Clock, in seconds. Default: `time.monotonic`.
    """

    def __init__(
        self,
        store: CheckpointStore,
        rank: int,
        run: str,
        keep: KeepPolicy,
        *,
        resumed_from: int | None = None,
        good_after: int | None = None,
        buffers: int = 2,
        max_failures: int = 3,
        pickles: bool = False,
        lost: Callable[[], Collection[int]] = tuple,
        on_save: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.costs = Costs()
        self.pickles = pickles
        self._rank = rank
        self._run = run
        self._good_after = good_after
        self._max_failures = max_failures
        self._now = now
        self._store = store
        self._retention = RetentionThread(store, keep, resumed_from)
        self._steps = 0
        self._begun_at: dict[int, int] = {}
        """For each save that may still be marked as good, by its number: this rank's step when the save began."""
        self._shared: dict[int, int] = {}
        """For each save with other ranks whose result is not known yet, by its number: the step of the save."""
        self.gave_up = False
        """Whether a save was given up because of lost ranks, so that a save is due again. The coordinator resets it."""
        self._losses = LostParts(store, rank, now)
        self._lost = lost
        self._on_save = on_save
        self._looked_at = -math.inf
        self._alone = -1
        self._writer = Writer(store.dirpath, rank, buffers, pickles=pickles)
        self._usual = Usual(now())
        self._last_error = ""
        self._warn_after_s = PATIENCE_S

    def start(self) -> None:
        self._writer.start()

    @property
    def busy(self) -> bool:
        """Whether a save is being written, or memory for one is being allocated."""
        return self._writer.busy

    def save(
        self,
        number: int,
        step: int,
        ranks: Sequence[int],
        shared: Any,
        own: Any,
        manifest: Mapping[str, Any],
        queue: bool = False,
    ) -> None:
        """Copy the state, and pass the copy to the writer process; the state may change once this returns.

        A save that cannot begin counts as failed, and raises no error, except with ``queue``. See `poll` for the
        consequences of failures.

        Args:
            number: Number of the save.
            step: Number of optimizer steps taken.
            ranks: Ranks that take part in the save.
            shared: State that is equal on all ranks.
            own: State of this rank.
            manifest: Further fields of the `Manifest`.
            queue: Whether the copy may begin while an earlier save is being written. Default: False, wait first until
                no save is being written, for at most `PATIENCE_S` seconds.

        Raises:
            SaveBusy: ``queue`` is True, and no buffer is free.
        """
        started = self._now()
        # The writer does one save at a time: wait for the one that it is writing.
        if not queue:
            self.wait(PATIENCE_S)
        self._on_save()
        job = SaveJob(number, step, self._run, tuple(ranks), shared, own, manifest)
        self.costs.saves += 1
        self._begun_at[number] = self._steps
        if len(ranks) > 1:
            self._shared[number] = step
            self._losses.begin(number, step, self._run, ranks)
        try:
            self._writer.save(job, queue)
        except (CheckpointError, TypeError, ValueError) as error:  # a state may hold new objects during training
            if len(ranks) > 1:
                self.give_up(number, step, str(error), ranks)
            if queue and isinstance(error, SaveBusy):
                raise
            self._take_result(Result(number, 0.0, error=f"rank {self._rank}: save {number} {error}"))
        self.costs.stalled_s += self._now() - started
        # The time of the copy is counted above, and must not count as a slow step, too.
        self._usual.last = self._now()

    def save_alone(
        self, number: int, step: int, shared: Any, own: Any, manifest: Mapping[str, Any], patience_s: float
    ) -> bool:
        """Save a checkpoint that consists of this rank's part only, unless another rank has begun the same save.

        Args:
            number: Number of the save.
            step: Number of optimizer steps taken.
            shared: State that is equal on all ranks.
            own: State of this rank.
            manifest: Further fields of the `Manifest`.
            patience_s: Longest wait for an earlier save that is being written, in seconds.

        Returns:
            False if another rank has begun this save before, else True.

        Raises:
            SaveBusy: No buffer is free after the wait.
        """
        # Only one copy is wanted: all live ranks that hold this state try to save it.
        if self._store.begun(number, self._run):
            return False
        self._on_save()
        job = SaveJob(number, step, f"{self._run}-{self._rank}", (self._rank,), shared, own, manifest)
        self.costs.saves += 1
        self._begun_at[number] = self._steps
        self._alone = number
        try:
            self._writer.save(job, queue=True)
        # A save that is being written may take the buffers; there is time for it, but not without end.
        except SaveBusy:
            self.wait(patience_s)
            self._writer.save(job, queue=True)
        return True

    def give_up(self, number: int, step: int, why: str, ranks: Sequence[int] = ()) -> None:
        """Report to the other ranks that this rank will not write its part of a save, so that they do not wait for it.

        Args:
            number: Number of the save.
            step: Number of optimizer steps taken.
            why: Reason, for the other ranks.
            ranks: Ranks of the save; see `RetentionThread.give_up`. Default: none.
        """
        self._retention.give_up(self._store.temporary(number, step, self._run), self._rank, why, ranks)

    def reserve(self, step: int, ranks: Sequence[int], shared: Any, own: Any) -> None:
        """Allocate the memory for saves now, before the first one; raise TypeError if the state cannot be saved."""
        self._writer.reserve(SaveJob(1, step, self._run, tuple(ranks), shared, own))

    def expect(self, step: int, ranks: Sequence[int], shared: Any, own: Any, more: int = 0) -> None:
        """Allocate memory in the background for a state that has grown, for example after the optimizers' first step.

        Args:
            step: Number of optimizer steps taken.
            ranks: Ranks that take part in saves.
            shared: State that is equal on all ranks.
            own: State of this rank.
            more: Number of bytes that later saves need in addition to this state. Default: 0.
        """
        self._writer.expect(SaveJob(1, step, self._run, tuple(ranks), shared, own), more)

    def step(self, harmless: int | None = None) -> None:
        """Count a training step. If a save is in progress, add to `costs` by how much longer than usual the step took.

        Args:
            harmless: Number of consecutive steps without a divergence alarm, up to and including this step. Default:
                None, nothing watches for divergence.
        """
        self._steps += 1
        if harmless is not None:
            self._promote(harmless)
        self.costs.slowed_s += self._usual.step(self._now(), self.busy)

    def poll(self) -> None:
        """Process the results of saves that have ended, without waiting; log a warning if a save takes very long.

        Raises:
            CheckpointError: ``max_failures`` saves in a row have failed.
        """
        for result in self._writer.poll():
            self._take_result(result)
        self._look()
        if self.costs.failed_in_a_row >= self._max_failures:
            raise CheckpointError(
                f"Rank {self._rank}: {self.costs.failed_in_a_row} saves in a row have failed, the last one with: "
                f"{self._last_error.rstrip('.')}. Training ends here rather than go on without checkpoints: make room, "
                "or pass another `dirpath`, and start again; it resumes from the newest checkpoint that is whole."
            )
        waited_s = self._writer.waited_s
        # A new save, or none: the next warning is due after the whole time again.
        if waited_s < PATIENCE_S:
            self._warn_after_s = PATIENCE_S
        elif waited_s >= self._warn_after_s:
            self._warn_after_s = waited_s + PATIENCE_S
            log.warning(
                "Rank %d: a checkpoint has been under way for %.0f s (process %s); none is begun meanwhile. See "
                "whether that process lives, and what its disk does.", self._rank, waited_s, self._writer.pid,
            )  # fmt: skip

    def wait(self, timeout_s: float, settled: bool = False) -> bool:
        """Wait until this rank's writer process has written all saves; log a warning if that takes long.

        Args:
            timeout_s: Longest wait, in seconds. After it, this returns without an error.
            settled: Whether to wait, too, for saves of lost ranks for which this rank decides the outcome, until each
                is committed or given up; see `LostParts`. Default: False.

        Returns:
            Whether this rank's writer process has written all saves. ``settled`` does not change this result.
        """
        if not self._settled_within(min(timeout_s, _QUIET_S), settled) and timeout_s > _QUIET_S:
            log.warning(
                "Rank %d: a checkpoint is still being written (process %s); waiting %.0f s more at most.",
                self._rank, self._writer.pid, timeout_s - _QUIET_S,
            )  # fmt: skip
            self._settled_within(timeout_s - _QUIET_S, settled)
        return not self._writer.busy

    def is_committed(self, number: int) -> bool:
        """Return whether the save with this number is complete, so that it can be loaded as a checkpoint."""
        return any(entry.manifest is not None for entry in self._store.entries(number))

    def flush(self, timeout_s: float) -> None:
        """Wait until saves are written, and then until old checkpoints are deleted.

        Both together take at most ``timeout_s`` seconds. A timeout raises no error.
        """
        until = self._now() + timeout_s
        self.wait(timeout_s)
        self._retention.flush(max(0.0, until - self._now()))

    def close(self, timeout_s: float) -> None:
        """Wait for the last save, then end the writer process and the retention thread.

        All waits together take at most about ``timeout_s`` seconds. What is not done then goes on by itself.
        """
        until = self._now() + timeout_s
        self.wait(timeout_s)
        for result in self._writer.close(max(0.0, until - self._now())):
            self._take_result(result)
        self._retention.close(max(0.0, until - self._now()))

    def _settled_within(self, timeout_s: float, settled: bool) -> bool:
        """Wait for at most ``timeout_s`` seconds, without a warning; return whether the wait has succeeded.

        See `wait` for the condition and for ``settled``.
        """
        until = self._now() + timeout_s
        while True:
            for result in self._writer.wait(max(0.0, min(_BEAT_S, until - self._now()))):
                self._take_result(result)
            self._look()
            if not self._writer.busy and not (settled and self._losses.concerned(self._lost())):
                return True
            if self._now() >= until:
                return False
            # `wait` returns at once then, and only the parts of lost ranks are awaited.
            if not self._writer.busy:
                time.sleep(_BEAT_S / 4)

    def _look(self) -> None:
        for number in self._losses.given_up():
            self.gave_up = True
            log.warning("Rank %d: save %d is given up: a rank is lost whose part was yet to come.", self._rank, number)
        now = self._now()
        if now - self._looked_at >= _BEAT_S / 2 and self._losses.concerned(self._lost()):
            self._looked_at = now
            self._retention.ask(self._losses.look)

    def _take_result(self, result: Result) -> None:
        costs = self.costs
        step = self._shared.pop(result.number, None)
        if result.lost and result.error is not None and step is not None:
            # The writer died without telling the other ranks, which would wait until their deadline.
            self.give_up(result.number, step, result.error)
        # A rank that has left may have reported a failure, which is why this save failed: note lost ranks first.
        self._losses.concerned(self._lost())
        if self._losses.written(result.number, result.committed, result.error is not None):
            self._begun_at.pop(result.number, None)
            return
        if result.error is not None:
            if result.number == self._alone and any(each.number == self._alone for each in self._store.entries()):
                return  # another rank was quicker
            costs.failed += 1
            costs.failed_in_a_row += 1
            self._last_error = result.error
            self._begun_at.pop(result.number, None)
            goes_on = "" if result.number == self._alone else "; training goes on"
            words = f"A checkpoint could not be saved{goes_on}. {result.error}"
            tell("save_failed", logging.ERROR, words, rank=self._rank, number=result.number)
            return
        costs.failed_in_a_row = 0
        costs.committed += 1
        if result.committed:
            words = f"Rank {self._rank}: checkpoint {result.number} is committed."
            tell("saved", logging.INFO, words, rank=self._rank, number=result.number)
            if self._good_after is not None:
                self._retention.awaited.add(result.number)
            self._retention.prune()
        else:
            self._begun_at.pop(result.number, None)

    def _promote(self, harmless: int) -> None:
        """Mark as good each checkpoint that was followed by ``good_after`` steps without a divergence alarm.

        A checkpoint that was followed by an alarm earlier is never marked. ``harmless`` is the number of consecutive
        steps without an alarm.
        """
        for number in sorted(self._retention.awaited):
            after = self._steps - self._begun_at[number]
            good = self._good_after is not None and after >= self._good_after
            if harmless >= after and not good:
                continue
            self._retention.awaited.discard(number)
            del self._begun_at[number]
            if harmless >= after:
                self._retention.promote(number)
                self._retention.prune()


@dataclass
class Costs:
    """The cost of the saves of one rank so far.

    Args:
        saves: Number of saves.
        committed: Number of saves that have succeeded.
        failed: Number of saves that have failed.
        stalled_s: Seconds for which training has waited for saves.
        slowed_s: Seconds by which steps during saves took longer than usual.
        failed_in_a_row: Number of failed saves since the last one that succeeded.
    """

    saves: int = 0
    committed: int = 0
    failed: int = 0
    stalled_s: float = 0.0
    slowed_s: float = 0.0
    failed_in_a_row: int = field(default=0, repr=False)

    @property
    def of_one(self) -> float | None:
        """The mean number of seconds that one save has cost training; None before the first result."""
        done = self.committed + self.failed
        return (self.stalled_s + self.slowed_s) / self.saves if done else None


class Usual:
    """A measurement of the usual duration of a training step, to find the steps that a save has slowed down.

    The attribute ``last`` is the time of the last step's end. ``now`` is the present time, in seconds.
    """

    def __init__(self, now: float) -> None:
        self.last = now
        self._usual_s = 0.0

    def step(self, now: float, writing: bool) -> float:
        """Count a step that has just ended; return by how many seconds a save has slowed it down.

        Args:
            now: Present time, in seconds.
            writing: Whether a save is being written.

        Returns:
            The seconds by which the step was longer than usual; 0.0 if ``writing`` is False, or if no usual duration is
            known.
        """
        took = now - self.last
        self.last = now
        # Steps during a save do not count for the usual time.
        if writing and self._usual_s:
            return max(0.0, took - self._usual_s)
        self._usual_s = 0.9 * self._usual_s + 0.1 * took if self._usual_s else took
        return 0.0

"""The checkpoints of one fit: found and verified before it, saved during it, complete after it.

Which one to go on from is for `trainer.recovery`; when to save, and how ranks agree on it, for `trainer.saves`; what
there is to save, for `trainer.whole_state` and `trainer.resume`; how it comes to the disk, for `engine.checkpoint`.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from lightning_async.engine.checkpoint.claim import Claim
from lightning_async.engine.checkpoint.saver import PATIENCE_S, Saver
from lightning_async.engine.checkpoint.store import CheckpointStore
from lightning_async.engine.world import World
from lightning_async.errors import AsyncTrainingError, CheckpointError, Evicted, SettingsMismatch
from lightning_async.trainer.checkpoint_io import DirectoryIO
from lightning_async.trainer.due import Settings
from lightning_async.trainer.names import Names, names_of
from lightning_async.trainer.namespace import pytorch
from lightning_async.trainer.patches import Undo, in_words, replace, searches_lr, set_for_now
from lightning_async.trainer.preemption import Preemption
from lightning_async.trainer.recovery import Recovery, gather
from lightning_async.trainer.resume import Resume
from lightning_async.trainer.saves import FAILED_S, Together
from lightning_async.trainer.saves_apart import Apart
from lightning_async.trainer.whole_state import ALIKE, collect, left_out, put_back, whole

__all__ = ["Checkpointing"]

log = logging.getLogger(__name__)
T = TypeVar("T")

_MEETING = re.compile(r"\.[0-9a-f]{12}-\d+")


class Checkpointing:
    """Checkpoints of one fit. All ranks do the same in the same order; closed by `close`.

    Args:
        trainer: in `setup`, when its ranks have met.
        settings: what the user has asked for.
    """

    def __init__(self, trainer: Any, settings: Settings) -> None:
        self._trainer, self._settings = trainer, settings
        self.store = CheckpointStore(settings.dirpath)
        self.resume = Resume(trainer)
        self._gather = partial(gather, trainer)
        self._recovery = Recovery(trainer, settings, self.store, self.resume)
        self.saver: Saver | None = None
        self._pace: Together | Apart | None = None
        self._preempted = Preemption(trainer)
        self._undo: list[Undo] = []
        self._run, self._number = "", 0
        self._first_step, self._expected = 0, False
        """Whether there is memory for the state that optimizers have when they have stepped."""
        self._claim: Claim | None = None
        self._left = self._names.left
        self._group: list[int] = []
        """The ranks that see this rank's directory."""
        self._patience_s = PATIENCE_S
        self._watcher: Any = None
        """Knows for how many steps nothing was out of bounds."""

    # ---- before training ----

    def install(self) -> None:
        """Before anything is restored: have checkpoints read, and in a fit found and, at batch boundaries, written."""
        trainer, strategy = self._trainer, self._trainer.strategy
        self._undo.append(replace(strategy, "teardown", self._tear_down))
        self._undo.append(
            set_for_now(strategy, "_checkpoint_io", DirectoryIO(strategy.checkpoint_io, self._recovery.load))
        )
        if trainer.state.fn != "fit" or trainer.fast_dev_run:
            return
        self._undo += self.resume.install()
        self.resume.on_boundary = self._boundary
        self._undo += [
            replace(trainer.fit_loop, "run", self._run_fit),
            replace(trainer._checkpoint_connector, "resume_start", self._resume_start),
            replace(trainer._checkpoint_connector, "resume_end", self._recovery.end),
            replace(strategy, "on_train_start", self._begin),
            *self._preempted.install(),
        ]

    def _resume_start(self, original: Any) -> Any:
        def resume_start(checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
            if self._claim is None:  # a search for a learning rate ends with a call of this, too
                self._take_directory()
            original(checkpoint_path or self._recovery.choose(), *args, **kwargs)

        return resume_start

    def _take_directory(self) -> None:
        """Before anything in it is chosen or put into quarantine: it is ours, and what was handed over is there.

        Raises:
            SettingsMismatch: the ranks were given different ones, and would not do the same.
            CheckpointError: another program trains into it, or nothing can be written there.
        """
        runs, everyones = zip(*self._gather([uuid.uuid4().hex[:12], self._settings.compared()]), strict=True)
        if len(set(everyones)) > 1:
            raise SettingsMismatch(f"The ranks have different settings for checkpoints: {sorted(set(everyones))}.")
        self._run = runs[0]
        self._claim = Claim(self.store, self._run)
        self._claim.take(self._gather)
        self._claim.wait(self._gather)

    def start(self) -> None:
        """Training begins: agree on numbers, start the writer, and have its memory.

        Raises:
            OSError: nothing can be written into the directory.
        """
        trainer, settings = self._trainer, self._settings
        if trainer.fast_dev_run or searches_lr(trainer):
            return
        number = max(self._gather(self.store.next_number()))
        self._group, rank = self._meet(), self._names.mine
        if rank == self._group[0]:
            try:
                self.store.clean(self._run)
            except OSError as error:  # somebody else's, perhaps: that is no reason not to train
                log.warning("Rank %d: what was left unfinished cannot be deleted: %s", rank, error)
        for problem in self.resume.problems():
            log.warning("Rank %d: this training cannot be resumed exactly: %s", rank, problem)
        if names := left_out(trainer.lightning_module, trainer.datamodule):
            log.warning("Hyper-parameters that checkpoints do not hold, as reading them would execute code: %s.", names)
        resumed = self._recovery.entry
        self._watcher = next((c for c in trainer.callbacks if hasattr(c, "clean_steps")), None)
        self.saver = Saver(
            self.store, rank, self._run, settings.keep, resumed_from=resumed and resumed.number,
            good_after=settings.good_after if self._watcher else None,
            buffers=settings.buffers, max_failures=settings.max_failures, lost=lambda: self._names.lost,
        )  # fmt: skip
        self.saver.start()
        self._number = number - 1

    def _begin(self, original: Any) -> Any:
        def on_train_start() -> None:
            """Of the strategy, which lets replicas drift from here on; called after the callbacks'."""
            original()
            trainer = self._trainer
            if self.saver is not None:
                apart = getattr(trainer.strategy, "averager", None) is not None
                shared, own = collect(trainer, ALIKE)  # what cannot be saved is named now, and memory is there
                self.saver.reserve(trainer.global_step, self._group, shared, own)
                self._first_step = trainer.global_step
                common = trainer, self.saver, self._settings, self._number, self._group
                self._pace = Apart(*common, self.resume) if apart else Together(*common)
                self._undo.append(self.resume.points.whereabouts.follow())
                self.resume.points.keeps = apart or self._settings.on_exception

        return on_train_start

    def _meet(self) -> list[int]:
        """The ranks that see this rank's directory: each of them leaves a file there that the others look for.

        Raises:
            OSError: nothing can be written there.
        """
        files, strategy = self.store.files, self._trainer.strategy
        rank = self._names.mine
        path = f"{self.store.dirpath}/.{self._run}-{rank}"
        files.write(path, [b""])
        try:
            strategy.barrier("files are there")
            prefix = f".{self._run}-"
            seen = sorted(int(n.removeprefix(prefix)) for n in files.names(self.store.dirpath) if n.startswith(prefix))
            strategy.barrier("files were seen")
        finally:
            files.unlink(path)
        if rank == seen[0]:  # what a program that was killed just here has left
            for name in files.names(self.store.dirpath):
                if _MEETING.fullmatch(name) and not name.startswith(prefix):
                    files.unlink(f"{self.store.dirpath}/{name}")
        return seen

    # ---- during training ----

    def _boundary(self) -> None:
        """A safe point of this rank's, see `Resume`."""
        self._recovery.got_on = True
        if self.saver is None or self._pace is None:
            return
        if self.resume.where == "batch":
            self.saver.step(None if self._watcher is None else self._watcher.clean_steps)
            if not self._expected and self._trainer.global_step > self._first_step:
                self._expected = True
                self._pace.expect(self.resume)
        self.saver.poll()
        if self._claim is not None and self._names.left != self._left:
            self._left = self._names.left
            self._claim.keep()
        self._pace.boundary(self.resume, self._preempted)

    def roll_back(self) -> int | None:
        """Put the newest good checkpoint's model, optimizers and schedulers in place, on all ranks, which call this
        together; the data goes on. Its step; None where there is none."""
        if self.saver is None:
            return None
        self.saver.flush(PATIENCE_S)
        self._trainer.strategy.barrier("what was asked for is marked and deleted")
        try:
            entry = self._in_one_generation(lambda: self._recovery.find("last_good"))
        except CheckpointError as error:
            log.warning("Rank %d cannot go back: %s", self._names.mine, error)
            return None
        if entry is None:
            return None
        checkpoint, _ = whole(self.store, entry, self._names)
        put_back(self._trainer, checkpoint)
        return entry.step

    def end(self) -> None:
        """Training is over, on all ranks."""
        if self._pace is not None:
            self._pace.end()

    def _run_fit(self, original: Any) -> Any:
        def run() -> None:
            try:
                original()
            except BaseException as exception:
                self._save_what_was(exception)
                raise

        return run

    def _save_what_was(self, exception: BaseException) -> None:
        """Training has ended by an exception, which the user shall see, whatever becomes of this; waits for nobody."""
        in_order = pytorch("utilities.exceptions").SIGTERMException | CheckpointError
        if isinstance(exception, Evicted):  # the others train on, and save
            self._pace = None
        if self._pace is None or not self._settings.on_exception or isinstance(exception, in_order):
            return
        try:
            if self._pace.fail(self.resume, exception):
                log.warning("Rank %d saves what was trained until this: %s", self._names.mine, in_words(exception))
        except Exception as error:
            rank = self._names.mine
            log.error("Rank %d: what was trained until this exception cannot be saved: %r", rank, error)

    def fail(self, exception: BaseException) -> None:
        """Training is over, by an exception; replicas that drift have met if that is a signal's."""
        preempted = isinstance(exception, pytorch("utilities.exceptions").SIGTERMException)
        self._patience_s = PATIENCE_S if preempted else FAILED_S
        self._recovery.explain(exception)
        if preempted and isinstance(self._pace, Apart):
            try:
                self._pace.end("preemption")
            except AsyncTrainingError as error:  # the signal's own exception goes on
                log.error("Rank %d: there is no checkpoint of this moment: %s", self._names.mine, error)

    def _tear_down(self, original: Any) -> Any:
        def teardown() -> None:
            """Of the strategy, however training has ended: what it has patched since is taken back first."""
            try:
                original()
            finally:
                self.close()

        return teardown

    def close(self) -> None:
        """Wait for what is being written. Idempotent."""
        while self._undo:
            self._undo.pop()()
        if self._pace is not None:
            self._pace.give_up()
        saver, self.saver = self.saver, None
        pace, self._pace = self._pace, None
        try:
            if saver is not None:
                saver.close(self._patience_s)
            if pace is not None:
                pace.close()
        finally:
            if self._claim is not None:
                self._claim.release()

    # ---- ranks ----

    @property
    def _names(self) -> Names:
        return names_of(self._trainer)

    def _in_one_generation(self, operation: Callable[[], T]) -> T:
        """By answers of the same ranks, where some may be lost meanwhile."""
        world = getattr(self._trainer.strategy, "world", None)
        return world.in_one_generation(operation) if isinstance(world, World) else operation()

"""The checkpoints of one fit: recovery before the fit, saves during the fit, and the lock on the directory."""

from __future__ import annotations

import logging
import os
import re
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from lightning_async.checkpoint.retention import abandon_saves_of
from lightning_async.checkpoint.saver import PATIENCE_S, Saver
from lightning_async.checkpoint.store import CheckpointStore
from lightning_async.checkpoint.writer_process import DirectoryLock
from lightning_async.engine.shared_state import SyncPointKind
from lightning_async.errors import (
    AsyncTrainingError,
    CheckpointError,
    CollectiveError,
    Evicted,
    PeerLost,
    SettingsMismatch,
)
from lightning_async.trainer.checkpoint.checkpoint_recovery import CheckpointRecovery, DirectoryIO, WrittenFiles
from lightning_async.trainer.checkpoint.checkpoint_state import ALIKE, TrainerState, left_out, whole
from lightning_async.trainer.checkpoint.resume import Resume
from lightning_async.trainer.checkpoint.safe_points import StepPhase
from lightning_async.trainer.checkpoint.save_timing import Settings
from lightning_async.trainer.checkpoint.saves import (
    FAILED_S,
    AsyncSaves,
    LockstepSaves,
    SaveCoordinator,
    SavedFit,
    ServerSaves,
)
from lightning_async.trainer.data.epoch_data import report_failure
from lightning_async.trainer.environment.environments import StableIds, names_of
from lightning_async.trainer.environment.settings import check_saved
from lightning_async.trainer.loops.loggers import continue_files
from lightning_async.trainer.loops.preemption import TRY_AGAIN, Preemption
from lightning_async.trainer.namespace import Undo, in_words, override, pytorch, searches_lr, set_for_now, take_back
from lightning_async.trainer.strategy_view import view_of

log = logging.getLogger(__name__)


class Checkpointing:
    """A driver of the checkpoints of one fit, until `close`. All ranks make the same calls in the same sequence.

    It patches a Trainer and drives five parts. `CheckpointDirectory` reserves the directory for this training.
    `CheckpointRecovery` finds the checkpoint to resume from. A `SaveCoordinator` decides when to save. `Resume`
    captures and restores the fit's position. `Saver` writes files.

    Args:
        trainer: The Trainer.
        settings: The user's settings.
        call: Function that asks all ranks to come to a sync point at their next batch boundary. It is called when a
            save with parameter servers is due. At that sync point the owner of this object calls `save_together`.
            Default: does nothing.
    """

    def __init__(self, trainer: Any, settings: Settings, call: Callable[[], None] = lambda: None) -> None:
        self._trainer = trainer
        self._settings = settings
        self._call = call
        self.store = CheckpointStore(settings.dirpath)
        self.resume = Resume(trainer)
        self._state = TrainerState(trainer, settings.objects == "pickle", settings.trainable_only)
        self._recovery = CheckpointRecovery(trainer, settings, self.store, self.resume)
        self.saver: Saver | None = None
        self._pace: SaveCoordinator | None = None
        self._preempted = Preemption(trainer)
        self.resume.told = self._preempted.is_told
        self._preempted.on_late = self._leave_late
        self._left_alone = False
        """Whether this rank was told to stop, and could not wait for the other ranks at the sync point `STOP`."""
        self._undo: list[Undo] = []
        self._number = 0
        self._first_step = 0
        self._expected = False
        self._directory = CheckpointDirectory(trainer, self.store, settings.compared(), self._recovery.gather)
        self.written = WrittenFiles(trainer, self.store, self._recovery.gather)
        self._patience_s = PATIENCE_S
        self._watcher: Any = None

    def install(self) -> None:
        trainer = self._trainer
        strategy = self._trainer.strategy
        # Any stage may load a checkpoint of this package, but only a fit saves.
        reader = DirectoryIO(strategy.checkpoint_io, self._recovery.load)
        self._undo.append(override(strategy, "teardown", self._tear_down))
        self._undo.append(set_for_now(strategy, "_checkpoint_io", reader))
        self._undo.append(override(strategy, "load_model_state_dict", self._state.load_model))
        # A fast development run must leave no files.
        if trainer.state.fn != "fit" or trainer.fast_dev_run:
            return
        self._undo += self.resume.install()
        self.resume.on_boundary = self._boundary
        self._undo += [
            override(trainer.fit_loop, "run", self._run_fit),
            override(trainer, "_run_sanity_check", self._run_fit),
            override(trainer._checkpoint_connector, "resume_start", self._resume_start),
            override(trainer._checkpoint_connector, "resume_end", self._recovery.end),
            override(strategy, "load_optimizer_state_dict", self._load_optimizers),
            override(strategy, "on_train_start", self._begin),
            *self._preempted.install(),
            *self.written.install(),
        ]

    def _resume_start(self, original: Any, checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        self._directory.take()
        # A joining rank receives its state from the live ranks, and must not choose a checkpoint.
        if self._directory.joining:
            original(checkpoint_path, *args, **kwargs)
            return
        chosen = None if checkpoint_path else self._recovery.choose()
        original(checkpoint_path or chosen, *args, **kwargs)
        states = self._trainer._checkpoint_connector._loaded_checkpoint.get("callbacks", {})
        is_chosen = not checkpoint_path and self._settings.recover is not None
        self.written.resume(states, self._recovery.entry, is_chosen)

    def _load_optimizers(self, original: Any, checkpoint: Any) -> None:
        check_saved(self._trainer.optimizers, checkpoint["optimizer_states"])
        original(checkpoint)

    def start(self) -> None:
        """Agree with all ranks on the number of the next save, and start the saver. All ranks call this together.

        A joining rank returns at once: it calls `come` instead.
        """
        trainer = self._trainer
        # A joining rank calls `come` instead, with values that the live ranks send.
        if trainer.fast_dev_run or searches_lr(trainer) or self._directory.joining:
            return
        self._number = max(self._recovery.gather(self.store.next_number())) - 1
        self._directory.meet()
        self._start_saver()

    def _start_saver(self) -> None:
        trainer = self._trainer
        settings = self._settings
        rank = self._names.mine
        for problem in self.resume.problems():
            log.warning("Rank %d: this training cannot be resumed exactly: %s", rank, problem)
        pickles = settings.objects == "pickle"
        if not pickles and (names := left_out(trainer.lightning_module, trainer.datamodule)):
            log.warning("Hyper-parameters that checkpoints do not hold, as reading them would execute code: %s.", names)
        resumed = self._recovery.entry
        self._watcher = next((c for c in trainer.callbacks if hasattr(c, "clean_steps")), None)
        self.saver = Saver(
            self.store, rank, self._directory.program, settings.keep, resumed_from=resumed and resumed.number,
            good_after=settings.good_after if self._watcher else None,
            buffers=settings.buffers, max_failures=settings.max_failures, pickles=pickles,
            lost=lambda: self._names.lost, on_save=self.written.note_save,
        )  # fmt: skip
        self.saver.start()

    def for_joining_ranks(self) -> dict[str, Any]:
        """Return the values that a joining rank needs for `come`; called on a live rank at a sync point."""
        trained = sorted(self._state.trained)
        files = self.written.paths
        told = {**self._directory.for_joining_ranks(), "number": self._number, "trained": trained, "files": files}
        return told if self._pace is None else {**told, "number": self._pace.known, "group": list(self._pace.group)}

    def come(self, told: dict[str, Any]) -> None:
        """Start to save together with the live ranks; called on a joining rank.

        ``told`` is the result of `for_joining_ranks` on a live rank. Raises the errors of `CheckpointDirectory.join`.
        """
        self._directory.join(told)
        self._number = told["number"]
        self._state.trained.update(told["trained"])
        self.written.paths = told["files"]
        self._start_saver()

    def _begin(self, original: Any) -> None:
        """Prepare saves when the training loop starts: allocate memory, and create the save coordinator.

        ``original`` is the strategy's ``on_train_start``, which is called first. Replicas that are asynchronous between
        sync points are so when it returns.
        """
        original()
        trainer = self._trainer
        if self._recovery.entry is not None and trainer.is_global_zero:
            continue_files(trainer.loggers, trainer.fit_loop.epoch_loop._batches_that_stepped)
        self._state.check_frozen()
        if self.saver is not None:
            apart = view_of(trainer.strategy).averager is not None
            # Reserve before the first batch, so that a value that cannot be saved or a lack of memory shows now.
            shared, own = self._state.capture(ALIKE)
            self.saver.reserve(trainer.global_step, self._directory.group, shared, own)
            self._first_step = trainer.global_step
            fit = SavedFit(
                trainer, self.saver, self._settings, self._number, self._directory.group, self.resume, self._state,
                self._call,
            )  # fmt: skip
            if apart and trainer.strategy.served:
                self._pace = ServerSaves(fit)
            else:
                self._pace = AsyncSaves(fit) if apart else LockstepSaves(fit)
            self._undo.append(self.resume.points.follow())
            self.resume.points.keeps = apart or self._settings.on_exception

    def _boundary(self) -> None:
        """Poll the saver at a safe point, and let the save coordinator save if a save is due."""
        self._recovery.got_on = True
        if self._preempted.told and not isinstance(self._pace, LockstepSaves):
            self._preempted.act()
        elif self._preempted.told and self.resume.where is not None:
            # Ranks that step together leave a step later. A rank that hangs until then must not cost this state.
            self.resume.points.keeps = True
            self.resume.points.reach(self.resume.where)
        if self.saver is None or self._pace is None:
            return
        if self.resume.where == "batch":
            self.saver.step(None if self._watcher is None else self._watcher.clean_steps)
            # The first step after the start is over, so memory has its final size and the coordinator can plan.
            if not self._expected and self._trainer.global_step > self._first_step:
                self._expected = True
                self._pace.expect()
        self.saver.poll()
        self._directory.follow()
        self._pace.boundary(self._preempted)

    def save_together(self) -> None:
        """Save if a save is due on any rank and training uses parameter servers; otherwise do nothing.

        All ranks call this at a sync point. At a sync point, all ranks have the same version of the weights, and no
        rank pushes gradients.
        """
        if isinstance(self._pace, ServerSaves) and self.saver is not None:
            self._pace.save()

    def roll_back(self) -> int | None:
        """Restore the newest checkpoint that is marked as good, on all ranks; the position in the data does not change.

        All ranks call this together.

        Returns:
            The step of that checkpoint; None if no good checkpoint was found, and nothing was changed.
        """
        if self.saver is None:
            return None
        # The newest saves must be marked as good or deleted before a rank looks, or ranks would find different ones.
        self.saver.flush(PATIENCE_S)
        self._trainer.strategy.barrier("pending marks and deletions are done")
        try:
            world = view_of(self._trainer.strategy).world
            find = partial(self._recovery.find, "last_good")
            # A rank may die during the search. All live ranks then search again, so that they find the same checkpoint.
            entry = find() if world is None else world.in_one_generation(find)
        except CheckpointError as error:
            log.warning("Rank %d cannot roll back: %s", self._names.mine, error)
            return None
        if entry is None:
            return None
        checkpoint, resume = whole(
            self.store, entry, self._names, self._trainer.lightning_module, pickles=self._settings.objects == "pickle"
        )
        self._state.restore(checkpoint, resume)
        return entry.step

    def end(self) -> None:
        if self._pace is not None:
            self._pace.end()
            self._preempted.has_saved = True
        self.written.note_save()

    def _run_fit(self, original: Any) -> None:
        try:
            original()
        except BaseException as exception:
            # Also for KeyboardInterrupt and signals, which are no Exceptions.
            if self._is_preempted(exception):
                self._leave_preempted(exception)
            report_failure(self._trainer, exception)
            self._save_what_was(exception)
            raise

    def _is_preempted(self, exception: BaseException) -> bool:
        """Return whether this rank was told to stop by a signal, of which ``exception`` may be a consequence."""
        # Errors of this package have a known cause. Of these, only a lost peer can follow from the signal.
        if isinstance(exception, AsyncTrainingError):
            return self._preempted.told and isinstance(exception, PeerLost | CollectiveError)
        if not isinstance(exception, Exception) or _is_hosts_updated(exception):
            return False
        return self._preempted.is_told()

    def _leave_preempted(self, exception: BaseException) -> NoReturn:
        """Save together with the other ranks, or alone if that is impossible; then exit with code `TRY_AGAIN`."""
        log.warning(
            "Rank %d was told to stop, and something that it needs has ended: %s", self._names.mine, in_words(exception)
        )
        self._left_alone = not self._meets(exception)
        if self._left_alone:
            self._save_what_was(exception, "preemption")
        self._trainer._signal_connector.received_sigterm = True
        raise pytorch("utilities.exceptions").SIGTERMException(TRY_AGAIN) from exception

    def _leave_late(self) -> bool:
        """Save the last safe point, and end this process; called on another thread while a step takes too long.

        Returns False if the step is not at a moment from which training can be resumed.
        """
        position = self.resume.points.step_position
        position.held.clear()
        try:
            # The main thread sets the phase before it looks whether it is held.
            if position.within not in (StepPhase.BATCH, StepPhase.NOTHING):
                return False
            error = AsyncTrainingError("it was told to stop, and was in one step for too long")
            if self._pace is not None and self._pace.fail(error, "preemption"):
                assert self.saver is not None
                self.saver.wait(FAILED_S)
            log.warning(
                "Rank %d was told to stop, and its step takes too long (it may wait for another rank): it ends before "
                "that step.", self._names.mine
            )  # fmt: skip
            self._trainer.strategy.on_exception(error)
        except Exception as error:
            log.error("Rank %d cannot save within a step: %r", self._names.mine, error)
            return False
        finally:
            position.held.set()
        os._exit(TRY_AGAIN)

    def _meets(self, exception: BaseException) -> bool:
        """Wait for all ranks at the sync point at which all leave training early; return False if that is impossible.

        It is impossible if an optimizer step has updated this rank's model only in part, if ``exception`` is an error
        of this package, if replicas are not asynchronous at the moment, or if another rank fails during the wait.
        ``exception`` is the error that has ended this rank's training.
        """
        strategy = self._trainer.strategy
        within = self.resume.points.step_position.within
        sync_points = view_of(strategy).sync_points
        world = view_of(strategy).world
        lost = isinstance(exception, AsyncTrainingError)
        if sync_points is None or world is None or not world.asynchronous or lost or within is StepPhase.STEP:
            return False
        try:
            sync_points.request_stop()
            sync_points.rendezvous(SyncPointKind.STOP)
        except AsyncTrainingError as error:
            # Another rank has failed as well, so this rank saves alone.
            log.error("Rank %d cannot meet the others any more: %s", self._names.mine, error)
            return False
        world.asynchronous = False
        return True

    def _save_what_was(self, exception: BaseException, reason: str = "exception") -> None:
        """Save this rank's training alone after an exception, without waiting for other ranks.

        Errors of the save are only logged, because the user must see ``exception``. ``reason`` is the reason in the
        manifest.
        """
        in_order = pytorch("utilities.exceptions").SIGTERMException | CheckpointError
        # The other ranks go on with the training, and save it themselves.
        if isinstance(exception, Evicted):
            self._pace = None
        if self._pace is None or _is_hosts_updated(exception) or isinstance(exception, in_order):
            return
        if not self._settings.on_exception and reason == "exception":
            return
        try:
            if self._pace.fail(exception, reason):
                log.warning("Rank %d saves what was trained until this: %s", self._names.mine, in_words(exception))
        except Exception as error:
            log.error("Rank %d: the training until this exception cannot be saved: %r", self._names.mine, error)

    def fail(self, exception: BaseException) -> None:
        """Make the last save of asynchronous replicas if ``exception`` says that the job is preempted.

        Log advice if the checkpoint from which the fit was resumed may have caused the failure.
        """
        preempted = isinstance(exception, pytorch("utilities.exceptions").SIGTERMException)
        # A preempted job must not lose its last save, while a failed one should end soon.
        self._patience_s = PATIENCE_S if preempted else FAILED_S
        self._recovery.explain(exception)
        if preempted and not isinstance(self._pace, LockstepSaves | None) and not self._left_alone:
            try:
                self._pace.end("preemption")
            # Log only, so that the signal's own exception reaches Lightning.
            except AsyncTrainingError as error:
                log.error("Rank %d: there is no checkpoint of this moment: %s", self._names.mine, error)

    def _tear_down(self, original: Any) -> None:
        try:
            original()
        finally:
            # The saver must close even if Lightning's own tear-down fails.
            self.close()

    def close(self) -> None:
        take_back(self._undo)
        if self._pace is not None:
            # Stop before the saver closes, or a save might begin while the saver waits for its last one.
            self._pace.give_up()
        saver = self.saver
        self.saver = None
        pace = self._pace
        self._pace = None
        try:
            if saver is not None:
                saver.close(self._patience_s)
            if pace is not None:
                pace.close()
        finally:
            # Release the lock last, because the saver writes into the directory until it is closed.
            self._directory.close()

    @property
    def _names(self) -> StableIds:
        return names_of(self._trainer)


def _is_hosts_updated(exception: BaseException) -> bool:
    """Return whether this is the exception by which Horovod Elastic restarts training with a changed set of hosts."""
    return type(exception).__name__ == "HostsUpdatedInterrupt"


# Seconds between two looks whether the directory is still the one that was locked.
_LOOK_S = 1.0
_MEETING = re.compile(r"\.[0-9a-f]{12}-\d+")


class CheckpointDirectory:
    """The directory into which the ranks of one fit save. It is reserved for this fit until `close`.

    The attribute ``group`` has the stable ids of the ranks that see the same directory as this rank.

    Args:
        trainer: The Trainer.
        store: The checkpoints in the directory.
        settings: The settings that must be equal on all ranks, as text.
        gather: Function that returns a value of each rank, in rank order.
    """

    def __init__(self, trainer: Any, store: CheckpointStore, settings: str, gather: Callable[[Any], list[Any]]) -> None:
        self._trainer = trainer
        self._store = store
        self._settings = settings
        self._gather = gather
        self.joining = view_of(trainer.strategy).joining
        self.program = ""
        self.group: list[int] = []
        self._claim: DirectoryLock | None = None
        self._left = names_of(trainer).left
        self._looked_at = time.monotonic()

    def take(self) -> None:
        """Lock the directory, and wait until the saves of earlier programs are written. All ranks call this together.

        Call this before a checkpoint is chosen or renamed. A second call on the same rank does nothing. A joining rank
        does not lock the directory. It only waits for saves that an earlier process of the same rank is still writing.

        Raises:
            SettingsMismatch: The ranks were given different checkpoint settings.
            CheckpointError: Another program trains into the directory, or the directory is not writable.
        """
        if self.joining:
            abandon_saves_of(self._store, names_of(self._trainer).mine, PATIENCE_S)
        # The lock may be held already: a search for a learning rate ends with another call.
        elif self._claim is None:
            programs, everyones = zip(*self._gather([uuid.uuid4().hex[:12], self._settings]), strict=True)
            if len(set(everyones)) > 1:
                raise SettingsMismatch(f"The ranks have different settings for checkpoints: {sorted(set(everyones))}.")
            self.program = programs[0]
            self._claim = DirectoryLock(self._store, self.program)
            self._claim.take(self._gather)
            # Saves of an earlier program may still be under way, and would appear after the choice of a checkpoint.
            self._claim.wait(self._gather)

    def meet(self) -> None:
        """Find out which ranks see this directory, and set ``group``. All ranks call this together.

        Each rank writes a file into the directory and lists the other ranks' files. The first rank of the group then
        deletes unfinished checkpoints and other leftovers of killed programs.
        """
        store = self._store
        barrier = self._trainer.strategy.barrier
        rank = names_of(self._trainer).mine
        files = store.files
        prefix = f".{self.program}-"
        path = f"{store.dirpath}/{prefix}{rank}"
        files.write(path, [b""])
        try:
            # All files must be there before a rank lists them, and all lists made before a rank deletes its file.
            barrier("files are there")
            seen = [n.removeprefix(prefix) for n in files.names(store.dirpath) if n.startswith(prefix)]
            barrier("files were seen")
        finally:
            files.unlink(path)
        self.group = sorted(map(int, seen))
        if rank != self.group[0]:
            return
        # Delete the files of a program that was killed within this function.
        for name in files.names(store.dirpath):
            if _MEETING.fullmatch(name) and not name.startswith(prefix):
                files.unlink(f"{store.dirpath}/{name}")
        try:
            store.clean(self.program)
        # Leftovers may belong to another user, which is no reason to stop the training.
        except OSError as error:
            log.warning("Rank %d: unfinished checkpoints cannot be deleted: %s", rank, error)

    def for_joining_ranks(self) -> dict[str, Any]:
        """Return the values that a joining rank needs for `join`."""
        return {"program": self.program, "group": self.group, "settings": self._settings}

    def join(self, told: dict[str, Any]) -> None:
        """Share the lock on the directory with the live ranks; called on a joining rank.

        ``told`` is the result of `for_joining_ranks` on a live rank.

        Raises:
            SettingsMismatch: The live ranks were given other checkpoint settings.
            CheckpointError: This rank sees another directory than the live ranks, or another program has locked it.
        """
        if told["settings"] != self._settings:
            raise SettingsMismatch(
                f"This rank joins a running training, and has other settings for checkpoints: {self._settings}; "
                f"theirs are {told['settings']}."
            )
        self.program = told["program"]
        self.group = sorted({*told["group"], names_of(self._trainer).mine})
        self._claim = DirectoryLock(self._store, self.program)
        self._claim.join()

    def follow(self) -> None:
        """Keep the directory locked: live ranks may have changed, or somebody may have deleted the directory.

        If the rank that held the lock is lost, take the lock over. Raises the errors of `DirectoryLock.renew`.
        """
        left = names_of(self._trainer).left
        # The rank that held the lock may be among the lost ones.
        if self._claim is not None and left != self._left:
            self._left = left
            self._claim.keep()
        # Not at each batch, because a look costs a moment on network file systems.
        if self._claim is not None and (now := time.monotonic()) - self._looked_at >= _LOOK_S:
            self._looked_at = now
            self._claim.renew()

    def close(self) -> None:
        if self._claim is not None:
            self._claim.release()

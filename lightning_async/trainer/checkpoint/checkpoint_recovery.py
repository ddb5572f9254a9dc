"""Choice of the checkpoint from which a fit resumes, and the readers that load this checkpoint.

With `CheckpointRecovery`, all ranks find and verify one checkpoint, and agree on it. `WrittenFiles` deletes files of
`ModelCheckpoint` that are newer than this checkpoint. `DirectoryIO` and `MemoryIO` let Lightning read the checkpoint.
`CheckpointReader` lets ``torch.distributed.checkpoint`` read it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import logging
import os
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint import Metadata, StorageReader
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from lightning_async._checks import check_choice
from lightning_async.checkpoint.recovery import recover
from lightning_async.checkpoint.shards import load_own
from lightning_async.checkpoint.storage import seal, unseal
from lightning_async.checkpoint.store import CheckpointEntry, CheckpointStore, is_name
from lightning_async.errors import CheckpointError, DamagedCheckpoint
from lightning_async.trainer.checkpoint.checkpoint_state import check_state, whole
from lightning_async.trainer.checkpoint.resume import Resume
from lightning_async.trainer.checkpoint.save_timing import Settings
from lightning_async.trainer.data.samplers import resized
from lightning_async.trainer.environment.environments import NOBODY, names_of
from lightning_async.trainer.loops.loop_state import among, beside, completed, has_none
from lightning_async.trainer.namespace import (
    Undo,
    callbacks_of,
    fabric,
    override,
    override_for_users,
    readers_of_files,
    set_for_now,
)
from lightning_async.trainer.strategy_view import view_of

log = logging.getLogger(__name__)

FILES = "model_checkpoint_files"
"""Key of the list of files in the state of `FaultTolerantCheckpoint`."""


class CheckpointRecovery:
    """A service that chooses and loads the checkpoint from which one fit resumes."""

    def __init__(self, trainer: Any, settings: Settings, store: CheckpointStore, resume: Resume) -> None:
        self._trainer = trainer
        self._settings = settings
        self._store = store
        self._resume = resume
        # The checkpoint that this fit has loaded; None if training begins from scratch.
        self.entry: CheckpointEntry | None = None
        # Whether a batch has been trained since. Until then a failure is probably caused by the checkpoint.
        self.got_on = False
        # Ranks verify and load the chosen checkpoint while they agree on it, so that `load` need not do it again.
        self._loaded: tuple[str, tuple[dict[str, Any], Any]] | None = None

    def choose(self) -> str | None:
        """Return the path of the checkpoint to resume from, equal on all ranks; None to begin from scratch.

        All ranks call this together. Raises the errors of `recover`.
        """
        if self._settings.recover is None:
            return None
        self._loaded = None
        entry = self.find(self._settings.recover, self._read)
        return None if entry is None else entry.path

    def find(
        self, strategy: str, load: Callable[[CheckpointEntry], object] = lambda entry: None
    ) -> CheckpointEntry | None:
        """Return the checkpoint that all ranks agree on for a recovery ``strategy``, or None; warn of damaged ones.

        All ranks call this together. See `recover` for ``load``, and for the errors.
        """
        found = recover(self._store, strategy, self._settings.best, self.gather, load)
        for path, what in (found.damaged | found.unreadable).items():
            log.warning("Rank %d: the checkpoint %s is skipped: %s", self._trainer.global_rank, path, what)
        return found.entry

    def gather(self, value: Any) -> list[Any]:
        """Return ``value`` of every rank, in rank order. All ranks call this together."""
        strategy = self._trainer.strategy
        world = view_of(strategy).world
        if world is not None:
            return world.gather_objects(value)
        # A synchronous strategy of Lightning's has no collectives of this package, so each rank broadcasts once.
        return [strategy.broadcast(value, src) for src in range(self._trainer.world_size)]

    def load(self, store: CheckpointStore, entry: CheckpointEntry) -> dict[str, Any]:
        """Return this rank's Lightning checkpoint, read from a checkpoint of this package.

        In a fit, also pass this rank's position in the data to `Resume`. In a fit, all ranks call this together.
        """
        loaded = self._loaded
        self._loaded = None
        if loaded is not None and loaded[0] == entry.path:
            checkpoint, resume = loaded[1]
        else:
            store.verify(entry)
            checkpoint, resume = self._whole(store, entry)
        if self._trainer.state.fn == "fit":
            reopens = self._reopens(checkpoint, resume, entry)
            if reopens:
                _reopen(checkpoint)
            self._go_on(resume, store, entry, _reopened if reopens else lambda state: state)
            self.entry = entry
        return checkpoint

    def _read(self, entry: CheckpointEntry) -> None:
        """Load a checkpoint for `load`; raise ValueError if it does not hold what this program saves."""
        try:
            checkpoint, resume = self._whole(self._store, entry)
            check_state(checkpoint, resume, self._trainer._checkpoint_connector._get_loops_state_dict())
        except CheckpointError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise ValueError(f"it does not hold what a checkpoint must: {type(error).__name__}: {error}") from error
        self._loaded = (entry.path, (checkpoint, resume))

    def _whole(self, store: CheckpointStore, entry: CheckpointEntry) -> tuple[dict[str, Any], Any]:
        trainer = self._trainer
        return whole(
            store, entry, names_of(trainer), trainer.lightning_module, pickles=self._settings.objects == "pickle"
        )

    def _reopens(self, checkpoint: dict[str, Any], resume: Any, entry: CheckpointEntry) -> bool:
        """Return whether a resume continues the epoch in which training stopped, instead of beginning the next epoch.

        This is so if training stopped at limits that have changed since, all ranks have steps left under the present
        limits, and at least one rank's epoch ended before its data did. All ranks call this together.
        """
        if entry.manifest is None or entry.manifest.reason != "the end":
            return False
        limit = self._trainer.max_steps
        goes_on = limit == -1 or checkpoint["global_step"] < limit
        goes_on &= not self._resume.points.limits.are(entry.manifest.notes.get("stopped"))
        told = self.gather([goes_on, bool(resume and resume["rest"])])
        return all(goes for goes, _ in told) and any(rest for _, rest in told)

    def _go_on(self, resume: Any, store: CheckpointStore, entry: CheckpointEntry, opened: Callable[[Any], Any]) -> None:
        """Pass a resume state to `Resume.restore`: this rank's own, or one made from other ranks' states.

        This rank's own state is used unchanged if the saved epoch was divided among as many ranks as there are now.

        Args:
            resume: This rank's own resume state; None if the checkpoint has none.
            store: The checkpoints.
            entry: The checkpoint.
            opened: Function that is applied to each resume state before its use.
        """
        assert entry.manifest is not None
        resume = opened(resume)
        rank = self._trainer.global_rank
        ranks = self._trainer.world_size
        trained = entry.manifest.world_size
        # The epoch was divided among as many ranks as there are now, so this rank continues exactly.
        if resume is not None and among(resume) == ranks:
            self._resume.restore(resume)
            return
        saved = _all_of(store, entry, self._settings.objects == "pickle")
        states = {name: opened(state) for name, state in saved.items()}
        alike = trained == names_of(self._trainer).started
        # A rank without a state of its own skips as many batches as another one has read.
        if not states or (alike and resume is None):
            resume = beside(states, rank, entry.path)
        # Unless the number of ranks and the division are the same, the rest of the epoch is divided again.
        if not states or (alike and among(states[min(states)]) == ranks):
            self._resume.restore(resume)
        else:
            self._resume.restore(resized(completed(states), rank, ranks, resume))

    def end(self, original: Any) -> None:
        """Stop training again if the saved training had stopped early under the present limits; warn if it is complete.

        This runs when Lightning has restored the checkpoint. ``original`` is Lightning's method ``resume_end``, which
        is called first. The limits are ``max_epochs``, ``max_steps`` and those of `Timer` callbacks.
        """
        original()
        entry = self.entry
        limits = self._resume.points.limits
        if entry is not None and entry.manifest is not None and entry.manifest.reason == "the end":
            # Lightning does not restore `should_stop`, and would train on after an early stop.
            self._trainer.should_stop |= limits.are(entry.manifest.notes.get("stopped"))
        if entry is not None and limits.are_reached:
            log.warning(
                "Rank %d: nothing is trained, as the training in %s has ended (%s). To go on with it, raise "
                "`max_epochs` or `max_steps`; a new training needs a directory of its own, or `recover=None`.",
                self._trainer.global_rank, self._store.dirpath, entry.name,
            )  # fmt: skip

    def explain(self, exception: BaseException) -> None:
        """Log advice if ``exception`` has ended a resumed fit before the end of its first batch.

        The cause may be that the program's model, optimizers or data differ from those of the checkpoint.
        """
        if self.entry is not None and not self.got_on and isinstance(exception, Exception):
            log.error(
                "Rank %d failed at its first batch after going on from %s, or before. If this program's model, "
                "optimizers or data are not those of that training, give it a directory of its own, or `recover=None`.",
                self._trainer.global_rank, self.entry.path,
            )  # fmt: skip


def _reopen(checkpoint: dict[str, Any]) -> None:
    """Mark the last epoch of a Lightning checkpoint as unfinished, in place."""
    for count in checkpoint["loops"]["fit_loop"]["epoch_progress"].values():
        count["processed"] -= 1
        count["completed"] -= 1
    if (averaging := checkpoint.get("lightning_async")) is not None:
        averaging["replicas"] = [{**clocks, "epoch": clocks["epoch"] - 1} for clocks in averaging["replicas"]]


def _reopened(state: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a copy of a resume state that continues the interrupted epoch instead of beginning the next one."""
    if state is None:
        return None
    return {**state, "where": "batch", "loaders": state["rest"] or state["loaders"]}


def _all_of(store: CheckpointStore, entry: CheckpointEntry, pickles: bool) -> dict[int, dict[str, Any]]:
    """Return the `Resume` states in a checkpoint, by stable id.

    Leave out ranks that saved no such state, and ranks that joined during the epoch and had no part of its data.
    ``pickles`` says whether pickled objects may be loaded.
    """
    assert entry.manifest is not None
    ranks = entry.manifest.ranks
    states: dict[int, Any] = {rank: load_own(store, entry, rank, "resume", pickles=pickles) for rank in ranks}
    return {rank: state for rank, state in states.items() if state is not None and not has_none(state)}


class WrittenFiles:
    """The list of the files that a Trainer's `ModelCheckpoint` callbacks have written in this training.

    Each checkpoint of this package contains the list. The newest one is in a file of the checkpoints' directory.

    A killed training leaves files that are newer than the checkpoint from which it resumes. Their steps are trained
    again, so `resume` deletes them: Lightning would keep them, and name the new files ``last-v1.ckpt`` and so on.

    Args:
        trainer: The Trainer.
        store: The checkpoints of this package.
        gather: Function that returns a value of each rank, in rank order.
    """

    def __init__(self, trainer: Any, store: CheckpointStore, gather: Callable[[Any], list[Any]]) -> None:
        self._trainer = trainer
        self._store = store
        self._gather = gather
        self._path = f"{store.dirpath}/model-checkpoints.json"
        self._callbacks = callbacks_of(trainer, "ModelCheckpoint")
        self.paths: list[str] = []
        self._resumable = False
        """Whether a checkpoint of this training may exist or have existed."""

    def install(self) -> list[Undo]:
        calls = {"_save_checkpoint": self._write, "_link_checkpoint": self._write, "_remove_checkpoint": self._remove}
        return [override_for_users(callback, *call) for callback in self._callbacks for call in calls.items()]

    def _write(self, original: Any, *args: Any) -> None:
        # The file is listed before it is written, because this process may be killed in between. A link stands behind
        # the file that it names.
        self.paths = [*(path for path in self.paths if path != args[-1]), args[-1]]
        self._publish()
        original(*args)

    def _remove(self, original: Any, *args: Any) -> None:
        original(*args)
        self.paths = [path for path in self.paths if path != args[-1]]
        self._publish()

    def note_save(self) -> None:
        """Note that a save begins, or that training has ended: the next training from scratch is another one."""
        if not self._resumable:
            self._resumable = True
            self._publish()

    def _publish(self) -> None:
        if self._callbacks and self._trainer.is_global_zero:
            try:
                self._resumable = self._resumable or bool(self._store.entries())
                self._store.publish(self._path, seal({"paths": self.paths, "resumable": self._resumable}))
            except OSError as error:  # a file of ModelCheckpoint may be on another disk, and training goes on
                log.error(
                    "%s could not be written (%s). After a kill, files of ModelCheckpoint that it lacks are kept.",
                    self._path, error,
                )  # fmt: skip

    def resume(self, states: dict[str, Any], entry: CheckpointEntry | None, is_chosen: bool) -> None:
        """Delete the files that are newer than the loaded checkpoint; remove deleted ones from the callbacks' states.

        All ranks call this together, before Lightning restores the callbacks.

        Args:
            states: States of the callbacks in the loaded checkpoint; empty if training begins from scratch.
            entry: The loaded checkpoint; None if training begins from scratch. Where a newer one exists, nothing is
                deleted.
            is_chosen: Whether this package has chosen the checkpoint. If the user has, nothing is deleted.
        """
        self.paths = next((state[FILES] for state in states.values() if FILES in state), [])
        if is_chosen and self._callbacks:
            saved = [(each, states[each.state_key]) for each in self._callbacks if each.state_key in states]
            told = self._tidy(saved, entry) if self._trainer.is_global_zero else None
            missing, directories = self._gather(told)[0]
            for callback, state in saved:
                callback.dirpath = directories.get(callback.state_key, callback.dirpath)
                # Otherwise the end of training would write the last file again.
                callback._last_checkpoint_saved = state["last_model_path"]
                _forget(state, missing, min if callback.mode == "min" else max)
        self._publish()

    def _tidy(self, saved: list[tuple[Any, dict[str, Any]]], entry: CheckpointEntry | None) -> list[Any]:
        """Delete newer files; return those of the best that do not exist, and directories to use, by state key."""
        directories = {}
        for callback, state in saved:
            # Without a directory from the user, Lightning takes one of the logger's new version.
            restore = set_for_now(callback, "dirpath", None)
            default = callback._ModelCheckpoint__resolve_ckpt_dir(self._trainer)
            restore()
            if default == callback.dirpath and callback._fs.exists(state["dirpath"]):
                directories[callback.state_key] = state["dirpath"]
        listed: dict[str, Any] = {"paths": [], "resumable": False}
        with contextlib.suppress(OSError, DamagedCheckpoint):
            listed = unseal(self._store.files.read(self._path), self._path)
        # Whoever may write into the checkpoints' directory must not choose which other files are deleted.
        places = tuple(f"{place}/" for place in [*(each.dirpath for each in self._callbacks), *directories.values()])
        newer = [
            path
            for path in reversed(listed["paths"])
            if path not in self.paths and path.startswith(places) and path.endswith(".ckpt") and "/../" not in path
        ]
        # A training that has lost its checkpoints is another one. One that never had any was killed before the first.
        # After an older checkpoint, which the user has asked for, training went on, and may have ended.
        entries = self._store.entries()
        goes_on = not (entries or listed["resumable"]) if entry is None else entry.number == entries[0].number
        if newer and goes_on:
            log.warning("Files of `ModelCheckpoint` from steps that are trained again are deleted: %s.", newer)
            for path in newer:
                self._trainer.strategy.remove_checkpoint(path)
        missing = [path for each, state in saved for path in state["best_k_models"] if not each._fs.exists(path)]
        return [missing, directories]


def _forget(state: dict[str, Any], missing: list[str], best: Callable[..., str]) -> None:
    """Remove deleted files from the state of a `ModelCheckpoint`: files that were among the best when it was saved."""
    models = state["best_k_models"] = {path: x for path, x in state["best_k_models"].items() if path not in missing}
    if state["best_model_path"] in missing:
        state["best_model_path"] = best(models, key=models.__getitem__, default="")
        state["best_model_score"] = models.get(state["best_model_path"])


_CheckpointIO: Any = fabric("plugins.io.checkpoint_io").CheckpointIO


def entry_at(path: Any) -> tuple[CheckpointStore, CheckpointEntry] | None:
    """Return the store and the entry of the checkpoint at ``path``; None if it is no checkpoint of this package."""
    try:
        dirpath, _, name = os.fspath(path).rstrip("/").rpartition("/")
    except TypeError:
        # A path of another kind is for another checkpoint plugin.
        return None
    if not is_name(name):  # nothing is listed for a file of another kind, which may be at a URL
        return None
    store = CheckpointStore(dirpath or ".")
    return next(((store, entry) for entry in store.entries(name=name)), None)


def _named(path: Any) -> tuple[CheckpointStore, CheckpointEntry] | None:
    """Return the result of `entry_at`; raise CheckpointError for a directory of checkpoints."""
    found = entry_at(path)
    if found or not isinstance(path, str | os.PathLike) or not os.path.isdir(path):
        return found
    if entries := CheckpointStore(path).entries():
        raise CheckpointError(f"{path} is a directory of checkpoints: name one, as {entries[0].path}, the newest.")
    return None


@functools.cache
def load_folders() -> None:
    """Make Lightning load this package's checkpoints by their paths, wherever it loads a file.

    This replaces the function by which Lightning reads files, in the modules of ``load_from_checkpoint`` and of its
    checkpoint plugin. For anything but a checkpoint of this package, Lightning's own function is called.
    """
    for module in readers_of_files():
        override(module, "pl_load", _load_folder)


def _load_folder(original: Any, path: Any, map_location: Any = None, **kwargs: Any) -> Any:
    if not (found := _named(path)):
        return original(path, map_location=map_location, **kwargs)
    found[0].verify(found[1])
    checkpoint, _ = whole(*found, NOBODY, pickles=kwargs.get("weights_only") is False)
    # A function or a dictionary says where tensors of certain devices go, and these are on the CPU.
    if isinstance(map_location, str | torch.device):
        move_data_to_device = fabric("utilities.apply_func").move_data_to_device
        checkpoint["state_dict"].update(move_data_to_device(dict(checkpoint["state_dict"]), map_location))
    return checkpoint


class _Wrapping(_CheckpointIO):
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.inner.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.inner.load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        self.inner.remove_checkpoint(path)

    def teardown(self) -> None:
        self.inner.teardown()


class DirectoryIO(_Wrapping):
    """A Lightning checkpoint plugin that reads checkpoints of this package with the function ``load``.

    Saves, and checkpoints of other formats, are passed to the wrapped plugin ``inner``.
    """

    def __init__(self, inner: Any, load: Callable[[CheckpointStore, CheckpointEntry], dict[str, Any]]) -> None:
        super().__init__(inner)
        self._load = load

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if found := _named(path):
            return self._load(*found)
        return super().load_checkpoint(path, *args, **kwargs)


class MemoryIO(_Wrapping):
    """A Lightning checkpoint plugin that returns the given ``checkpoint`` from memory when Lightning loads ``path``.

    Everything else is passed to the wrapped plugin ``inner``.
    """

    def __init__(self, inner: Any, path: str, checkpoint: dict[str, Any]) -> None:
        super().__init__(inner)
        self._path = path
        self._checkpoint = checkpoint

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        # Each reader gets a copy, because Lightning changes the dict that it restores from.
        return copy.deepcopy(self._checkpoint) if path == self._path else super().load_checkpoint(path, *args, **kwargs)


class CheckpointReader(StorageReader):
    """A reader of this package's checkpoints for ``torch.distributed.checkpoint.load``.

    Use it as ``load(state, storage_reader=CheckpointReader(path))``. The keys of ``state`` are those of Lightning's
    checkpoint: ``{"state_dict": model.state_dict()}`` and ``{"optimizer_states": [optimizer.state_dict()]}``. A
    checkpoint of asynchronous replicas yields the model on which all replicas had agreed, and the first rank's
    optimizer state. Targets may be whole tensors or `DTensor`, on any number of ranks. Each rank reads the parts that
    it needs from memory-mapped files. The coordinating rank verifies every byte first.

    Loading executes no code from the checkpoint, unless ``objects="pickle"``.

    Args:
        path: Path or URL of the checkpoint, such as ``runs/checkpoints/000017-step-1200``.
        objects: ``"pickle"`` also loads pickled objects, which executes code in them. Default: ``"refuse"``, which
            raises an error for a checkpoint that holds pickled objects.

    Raises:
        CheckpointError: There is no checkpoint at ``path``.
        ValueError: ``objects`` has another value.
    """

    def __init__(self, path: str | os.PathLike[str], *, objects: Literal["refuse", "pickle"] = "refuse") -> None:
        check_choice(type(self).__name__, "objects", objects, ("refuse", "pickle"))
        self._pickles = objects == "pickle"
        self.checkpoint_id = os.fspath(path)
        self._store, self._entry = _found(self.checkpoint_id)
        self._values: dict[str, Any] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.checkpoint_id = os.fspath(checkpoint_id)
            self._store, self._entry = _found(self.checkpoint_id)
        self._values = {}

    def read_metadata(self) -> Metadata:
        manifest = self._entry.manifest
        if self._pickles and manifest is not None and manifest.pickles:
            # Every rank unpickles objects here, but the coordinator verifies later, in `set_up_storage_reader`.
            self._store.verify(self._entry)
        checkpoint, _ = whole(self._store, self._entry, NOBODY, mapped=True, pickles=self._pickles)
        self._values, paths = flatten_state_dict(checkpoint)
        return Metadata({key: _described(value) for key, value in self._values.items()}, planner_data=paths)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Verify the checkpoint on the coordinating rank; torch reports a failure to the other ranks."""
        if is_coordinator:
            self._store.verify(self._entry)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the planned values into their targets; return a future that is already completed."""
        for item in plan.items:
            value = self._values[item.storage_index.fqn]
            if item.type is LoadItemType.BYTE_IO:
                # Planners take plain values only as a stream that `torch.save` has written.
                stream = io.BytesIO()
                torch.save(value, stream)
                stream.seek(0)
                planner.load_bytes(item, stream)
            else:
                target = planner.resolve_tensor(item).detach()
                target.copy_(_part(value, item))
                planner.commit_tensor(item, target)
        self._values = {}
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether there is a checkpoint of this package at ``checkpoint_id``."""
        return entry_at(checkpoint_id) is not None


def _found(path: str) -> tuple[CheckpointStore, CheckpointEntry]:
    found = entry_at(path)
    if found is None:
        names = [entry.name for entry in CheckpointStore(path).entries()]
        there = f"it is a directory of checkpoints; the newest is {names[0]}" if names else "there is none"
        raise CheckpointError(f"`CheckpointReader({path!r})` needs the path of a checkpoint: {there}.")
    return found


def _described(value: Any) -> dcp.TensorStorageMetadata | dcp.BytesStorageMetadata:
    if not isinstance(value, Tensor):
        return dcp.BytesStorageMetadata()
    chunk = dcp.ChunkStorageMetadata(torch.Size([0] * value.dim()), value.size())
    return dcp.TensorStorageMetadata(dcp.TensorProperties(value.dtype), value.size(), [chunk])


def _part(tensor: Tensor, item: ReadItem) -> Tensor:
    for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        tensor = tensor.narrow(dimension, start, length)
    return tensor

"""Lightning reads checkpoints through a plugin of its strategy: this one knows the directories of this package, too."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

from lightning_async.engine.checkpoint.store import CheckpointStore, Entry
from lightning_async.errors import CheckpointError
from lightning_async.trainer.namespace import fabric

__all__ = ["DirectoryIO", "MemoryIO", "entry_at"]

_CheckpointIO: Any = fabric("plugins.io.checkpoint_io").CheckpointIO


def entry_at(path: Any) -> tuple[CheckpointStore, Entry] | None:
    """The committed checkpoint of this package at a path; None where there is something else."""
    try:
        dirpath, _, name = os.fspath(path).rstrip("/").rpartition("/")
    except TypeError:
        return None
    store = CheckpointStore(dirpath or ".")
    return next(((store, entry) for entry in store.entries(name=name)), None)


def _entries_in(path: Any) -> list[Entry]:
    return CheckpointStore(path).entries() if isinstance(path, str | os.PathLike) and os.path.isdir(path) else []


class _Wrapping(_CheckpointIO):
    """Another plugin, but for what subclasses read.

    Args:
        inner: the plugin that the strategy has.
    """

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
    """Reads directories of this package by ``load``; all else is the wrapped plugin's.

    Args:
        inner: the plugin that the strategy has.
        load: makes a Lightning checkpoint of one of ours, for this rank.
    """

    def __init__(self, inner: Any, load: Callable[[CheckpointStore, Entry], dict[str, Any]]) -> None:
        super().__init__(inner)
        self._load = load

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found = entry_at(path)
        if found is None and (entries := _entries_in(path)):
            raise CheckpointError(f"{path} is a directory of checkpoints: name one, as {entries[0].path}, the newest.")
        return super().load_checkpoint(path, *args, **kwargs) if found is None else self._load(*found)


class MemoryIO(_Wrapping):
    """Reads one checkpoint that is no file.

    Args:
        inner: the plugin that the strategy has.
        path: what the checkpoint is called.
        checkpoint: it; readers get copies.
    """

    def __init__(self, inner: Any, path: str, checkpoint: dict[str, Any]) -> None:
        super().__init__(inner)
        self._path, self._checkpoint = path, checkpoint

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return copy.deepcopy(self._checkpoint) if path == self._path else super().load_checkpoint(path, *args, **kwargs)

"""Lightning reads checkpoints through a plugin of its strategy: this one knows the directories of this package, too."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from lightning_async.engine.checkpoint.store import CheckpointStore, Entry
from lightning_async.errors import CheckpointError
from lightning_async.trainer.namespace import fabric

__all__ = ["DirectoryIO", "entry_at"]

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


class DirectoryIO(_CheckpointIO):
    """Reads directories of this package by ``load``; all else is the wrapped plugin's.

    Args:
        inner: the plugin that the strategy has.
        load: makes a Lightning checkpoint of one of ours, for this rank.
    """

    def __init__(self, inner: Any, load: Callable[[CheckpointStore, Entry], dict[str, Any]]) -> None:
        self.inner, self._load = inner, load

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.inner.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found = entry_at(path)
        if found is None and (entries := _entries_in(path)):
            raise CheckpointError(f"{path} is a directory of checkpoints: name one, as {entries[0].path}, the newest.")
        return self.inner.load_checkpoint(path, *args, **kwargs) if found is None else self._load(*found)

    def remove_checkpoint(self, path: Any) -> None:
        self.inner.remove_checkpoint(path)

    def teardown(self) -> None:
        self.inner.teardown()

"""torch.distributed.checkpoint reads checkpoints of this package into states that are divided in other ways."""

from __future__ import annotations

import io
import os
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint import Metadata, StorageReader
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from lightning_async.arguments import check_choice
from lightning_async.engine.checkpoint.store import CheckpointStore, Entry
from lightning_async.errors import CheckpointError
from lightning_async.trainer.checkpoint_io import entry_at
from lightning_async.trainer.names import NOBODY
from lightning_async.trainer.whole_state import whole

__all__ = ["CheckpointReader"]


class CheckpointReader(StorageReader):
    """Has ``torch.distributed.checkpoint.load(state, storage_reader=CheckpointReader(path))`` read a checkpoint.

    The keys are those of Lightning's checkpoint: ``{"state_dict": model.state_dict()}`` and
    ``{"optimizer_states": [optimizer.state_dict()]}``. Of replicas that drift it is what all had agreed on, with the
    first rank's optimizer. Targets may be whole tensors or `DTensor`, on any number of ranks: each reads the parts that
    it needs, out of files that are mapped into memory. The coordinating rank verifies every byte before.
    Nothing in a checkpoint is executed, unless ``objects="pickle"``.

    Args:
        path: of the checkpoint: ``runs/checkpoints/000017-step-1200``, or such a URL.
        objects: ``"pickle"``: load pickled objects, too, which executes code in them. Default: ``"refuse"``, a
            checkpoint that holds some is an error.

    Raises:
        CheckpointError: there is none.
        ValueError: ``objects`` is something else.
    """

    def __init__(self, path: str | os.PathLike[str], *, objects: Literal["refuse", "pickle"] = "refuse") -> None:
        check_choice(type(self).__name__, "objects", objects, ("refuse", "pickle"))
        self._pickles = objects == "pickle"
        self.checkpoint_id = os.fspath(path)
        self._store, self._entry = _found(self.checkpoint_id)
        self._values: dict[str, Any] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew, with another checkpoint where one is named."""
        if checkpoint_id is not None:
            self.checkpoint_id = os.fspath(checkpoint_id)
            self._store, self._entry = _found(self.checkpoint_id)
        self._values = {}

    def read_metadata(self) -> Metadata:
        """What there is, by key."""
        manifest = self._entry.manifest
        if self._pickles and manifest is not None and manifest.pickles:
            self._store.verify(self._entry)  # on every rank: each loads them, and verification by one comes later
        checkpoint, _ = whole(self._store, self._entry, NOBODY, mapped=True, pickles=self._pickles)
        self._values, paths = flatten_state_dict(checkpoint)
        return Metadata({key: _described(value) for key, value in self._values.items()}, planner_data=paths)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """One rank verifies, and all hear of it.

        Raises:
            DamagedCheckpoint: names the file and what is wrong.
        """
        if is_coordinator:
            self._store.verify(self._entry)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what the plan asks for; it is done when this returns."""
        for item in plan.items:
            value = self._values[item.storage_index.fqn]
            if item.type is LoadItemType.BYTE_IO:
                stream = io.BytesIO()
                torch.save(value, stream)  # a plain value of ours, in the form in which planners take it
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
        """Whether there is a checkpoint of this package."""
        return entry_at(checkpoint_id) is not None


def _found(path: str) -> tuple[CheckpointStore, Entry]:
    found = entry_at(path)
    if found is None:
        names = [entry.name for entry in CheckpointStore(path).entries()]
        there = f"it is a directory of checkpoints; the newest is {names[0]}" if names else "there is none"
        raise CheckpointError(f"`CheckpointReader({path!r})` needs the path of a checkpoint: {there}.")
    return found


def _described(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if not isinstance(value, Tensor):
        return BytesStorageMetadata()
    chunk = ChunkStorageMetadata(torch.Size([0] * value.dim()), value.size())
    return TensorStorageMetadata(TensorProperties(value.dtype), value.size(), [chunk])


def _part(tensor: Tensor, item: ReadItem) -> Tensor:
    for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        tensor = tensor.narrow(dimension, start, length)
    return tensor

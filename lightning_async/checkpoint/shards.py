"""The division of a state into parts, one for each rank to write, and the loading of the state from the parts.

A state is a tree: nested dicts and lists of plain values and tensors. A checkpoint holds one *shared* tree, which is
equal on all ranks, and one *own* tree of each rank. Each tensor of the shared tree is written by one rank, and all
ranks write about equally many bytes. The first rank writes the shared tree's plain values. A checkpoint can be loaded
on any number of ranks.

| file | holds |
| --- | --- |
| ``rank-0.bin`` | tensors, raw, each at a multiple of 64 bytes |
| ``rank-0.json`` | ``own`` and ``shared``: trees of `comm.serialization`; dtype, shape and offset of each tensor |

Reading these files executes no code. If the user has asked for pickles, objects are saved as pickles among the tensors,
and the manifest says so. A reader must then ask for pickles, too. It loads them only after every byte was verified.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_async.checkpoint.buffers import layout
from lightning_async.checkpoint.store import CheckpointEntry, CheckpointStore, Manifest
from lightning_async.comm.serialization import DTYPES, dtype_name, flatten, unflatten
from lightning_async.errors import CheckpointError, DamagedCheckpoint

_MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError, RecursionError)

_Place = list[Any]
"""Dtype, shape and offset in bytes of a tensor in a file, in this sequence."""


@dataclass(frozen=True)
class CheckpointShard:
    """The part of a checkpoint that one rank writes.

    Args:
        tensors: Tensors, in the order in which they are written to the file.
        text: JSON with the nested structure of the state, and with dtype, shape and offset of each tensor.
        pickles: Whether there are pickled objects among the tensors. Default: False.
    """

    tensors: list[Tensor]
    text: bytes
    pickles: bool = False

    @property
    def size(self) -> int:
        """The number of bytes of tensors and text together."""
        return layout(self.tensors)[1] + len(self.text)


@dataclass(frozen=True)
class Loaded:
    """The contents of a checkpoint, as one rank loads them.

    Args:
        shared: State that is equal on all ranks.
        own: State of the rank; None if the rank took no part in the save. Such a rank begins from the shared state.
        manifest: Manifest of the checkpoint.
    """

    shared: Any
    own: Any | None
    manifest: Manifest


def plan(sizes: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """Return, for each tensor, the rank that writes it.

    The largest tensor is assigned first. Each tensor goes to the rank with the fewest bytes so far, so no rank has more
    bytes than the mean plus one tensor. All ranks compute the same plan.

    Args:
        sizes: Number of bytes of each tensor.
        ranks: Ranks among which the tensors are divided.

    >>> plan([5, 9, 4, 8], ranks=[0, 2])
    [2, 0, 0, 2]
    """
    writers = [ranks[0]] * len(sizes)
    load = [0] * len(ranks)
    # The index breaks ties, so that the order is the same on all ranks.
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        lightest = load.index(min(load))
        writers[i] = ranks[lightest]
        load[lightest] += sizes[i]
    return writers


def shard(shared: object, own: object, rank: int, ranks: Sequence[int], pickles: bool = False) -> CheckpointShard:
    """Return the part of a checkpoint that ``rank`` writes: its own state, and its share of the shared state's tensors.

    Args:
        shared: State that is equal on all ranks.
        own: State of this rank.
        rank: This rank.
        ranks: All ranks that take part in the save, in any order.
        pickles: Whether to pickle objects. Default: False, objects raise an error.

    Raises:
        TypeError: The state holds an object that cannot be saved; the message names the object.
    """
    # All ranks must find the same plan, in whatever order they name the ranks.
    ranks = sorted(ranks)
    dump = _Dump() if pickles else None
    tree, tensors = _flat(shared, "shared", dump)
    own_tree, own_tensors = _flat(own, "own", dump)
    writers = plan([tensor.nbytes for tensor in tensors], ranks)
    mine = [i for i, writer in enumerate(writers) if writer == rank]
    chosen = [*(tensors[i] for i in mine), *own_tensors]
    places = [
        [dtype_name(tensor.dtype), list(tensor.shape), at] for tensor, at in zip(chosen, layout(chosen)[0], strict=True)
    ]
    text = {
        "shared": {"count": len(tensors), "tensors": dict(zip(mine, places, strict=False))},
        "own": {"tree": own_tree, "tensors": places[len(mine) :]},
    }
    # Equal on all ranks, so one copy is enough.
    if rank == ranks[0]:
        text["shared"]["tree"] = tree
    return CheckpointShard(chosen, json.dumps(text, allow_nan=False).encode(), dump is not None and dump.used)


def load(
    store: CheckpointStore, entry: CheckpointEntry, rank: int, mapped: bool = False, pickles: bool = False
) -> Loaded:
    """Read a checkpoint that `CheckpointStore.verify` has found undamaged; all tensors are on the CPU.

    Args:
        store: The checkpoints.
        entry: The checkpoint.
        rank: Rank whose ``own`` state to read.
        mapped: Whether tensors are memory-mapped views of local files, whose bytes are read when the tensors are used.
            On a network file system, the checkpoint must not be deleted while such tensors are in use. Default: False,
            tensors are copies.
        pickles: Whether to load pickled objects, which executes code in them. Default: False, a checkpoint with pickled
            objects raises an error.

    Raises:
        CheckpointError: The checkpoint has pickled objects, and ``pickles`` is False; or an object cannot be unpickled.
        DamagedCheckpoint: A file's contents are malformed, or the parts do not fit together; the message names the
            path.
    """
    manifest = entry.manifest or store.verify(entry)
    unpickle = _unpickler(entry, manifest, pickles)
    parts = [_Part.read(store, entry.path, writer, mapped, unpickle) for writer in sorted(manifest.ranks)]
    shared: dict[int, Tensor] = {}
    for part in parts:
        shared |= part.shared()
    count = parts[0].count
    # Checksums cannot show this: each rank's files are whole, but they come from states that differ.
    if len(shared) != count or sorted(shared) != [*range(len(shared))] or any(part.count != count for part in parts):
        raise DamagedCheckpoint(
            f"{entry.path}: ranks {list(manifest.ranks)} have written {len(shared)} of {count} tensors that they "
            "share: was their state equal?"
        )
    own = next((part.own() for part in parts if part.rank == rank), None)
    return Loaded(parts[0].shared_tree([shared[i] for i in range(len(shared))]), own, manifest)


def load_own(
    store: CheckpointStore, entry: CheckpointEntry, rank: int, *keys: str, mapped: bool = False, pickles: bool = False
) -> Any | None:
    """Return a rank's own state, or the value at ``keys`` in that state; None if the checkpoint does not have it.

    Args:
        store: The checkpoints.
        entry: The checkpoint.
        rank: Rank whose state to read.
        *keys: Keys of nested dictionaries, from the outermost to the innermost.
        mapped: Whether tensors are views of local files, see `load`. Default: False.
        pickles: Whether to load pickled objects, see `load`. Default: False.

    Raises the errors of `load`.
    """
    manifest = entry.manifest or store.verify(entry)
    unpickle = _unpickler(entry, manifest, pickles)
    return _Part.read(store, entry.path, rank, mapped, unpickle).own(*keys) if rank in manifest.ranks else None


def own_of(tensors: memoryview, text: bytes | bytearray, name: str) -> Any:
    """Return a rank's own state from a `CheckpointShard` in memory. Tensors are views of that memory if it is writable.

    Args:
        tensors: Bytes of the tensors.
        text: The `CheckpointShard.text`.
        name: Name of the shard, for error messages.

    Raises:
        DamagedCheckpoint: The contents are malformed.
    """
    return _Part(0, name, tensors, text, mapped=True).own()


class _Read(Sequence[Tensor]):
    """A sequence of tensors, each of which is read from the file when it is first used."""

    def __init__(self, readers: Sequence[Callable[[], Tensor]]) -> None:
        self._readers = readers
        self._read = dict[int, Tensor]()

    def __len__(self) -> int:
        return len(self._readers)

    def __getitem__(self, i: Any) -> Any:
        if i not in self._read:
            self._read[i] = self._readers[i]()
        return self._read[i]


class _Part:
    """The two files of one rank in a checkpoint."""

    def __init__(
        self,
        rank: int,
        path: str,
        tensors: memoryview,
        text: bytes | bytearray,
        mapped: bool,
        unpickle: Callable[[bytes], Any] | None = None,
    ) -> None:
        self.rank = rank
        self._path = path
        self._bytes = tensors
        self._mapped = mapped
        self._unpickle = unpickle
        with self._naming():
            self._text: dict[str, Any] = json.loads(text)
            self.count: int = self._text["shared"]["count"]

    @classmethod
    def read(
        cls, store: CheckpointStore, folder: str, rank: int, mapped: bool, unpickle: Callable[[bytes], Any] | None
    ) -> _Part:
        path = f"{folder}/rank-{rank}.json"
        text = bytes(store.files.view(path))
        return cls(rank, path, store.files.view(f"{folder}/rank-{rank}.bin"), text, mapped, unpickle)

    def shared(self) -> dict[int, Tensor]:
        with self._naming():
            return {int(number): self._tensor(*place) for number, place in self._text["shared"]["tensors"].items()}

    def shared_tree(self, tensors: list[Tensor]) -> Any:
        with self._naming():
            return unflatten(self._text["shared"]["tree"], tensors, self._unpickle)

    def own(self, *keys: str) -> Any:
        with self._naming():
            tree = self._text["own"]["tree"]
            for key in keys:
                tree = next((value for name, value in tree["dict"] if name == key), None)
                if tree is None:
                    return None
            read = _Read([functools.partial(self._tensor, *place) for place in self._text["own"]["tensors"]])
            return unflatten(tree, read, self._unpickle)

    def _tensor(self, name: str, shape: list[int], at: int) -> Tensor:
        dtype = DTYPES[name]
        end = at + math.prod(shape) * dtype.itemsize
        if at < 0 or end > len(self._bytes) or min(shape, default=0) < 0:
            raise ValueError(f"a tensor of {name}, {shape} at {at} does not fit into {len(self._bytes)} bytes")
        # `frombuffer` refuses empty memory.
        if end == at:
            return torch.empty(shape, dtype=dtype)
        memory = self._bytes[at:end]
        if not self._mapped or memory.readonly:
            # A copy in memory that the tensor may write to.
            memory = bytearray(memory)
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """Turn the error of malformed contents in the block into a `DamagedCheckpoint` that names the path."""
        try:
            yield
        except CheckpointError:
            raise
        except _MALFORMED as error:
            raise DamagedCheckpoint(f"{self._path} does not say what it should: {error!r}") from error


class _Dump:
    """A function that pickles an object; its attribute ``used`` says whether any object was pickled.

    Tensors in the object can be loaded on a host without their device.
    """

    used = False

    def __call__(self, value: object) -> bytes:
        self.used = True
        stream = io.BytesIO()
        torch.save(value, stream, pickle_protocol=pickle.DEFAULT_PROTOCOL)
        return stream.getvalue()


def _unpickler(entry: CheckpointEntry, manifest: Manifest, pickles: bool) -> Callable[[bytes], Any] | None:
    """Return the function that loads a checkpoint's pickled objects; None if the checkpoint has none.

    Raises:
        CheckpointError: The checkpoint has pickled objects, and ``pickles`` is False.
    """
    if not manifest.pickles:
        return None
    if not pickles:
        raise CheckpointError(
            f"{entry.path} holds pickled objects: to load it executes code that is in it. If you trust everybody who "
            "can write there, ask for it by `FaultTolerantCheckpoint(objects='pickle')`, "
            "`CheckpointReader(objects='pickle')`, `load_from_checkpoint(weights_only=False)`, or "
            "`lightning-async checkpoint export --objects pickle`."
        )

    def unpickle(data: bytes) -> Any:
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        except Exception as error:  # the object's class may raise anything, and may have changed since
            raise CheckpointError(
                f"{entry.path} holds a pickled object that cannot be loaded: {type(error).__name__}: {error}. Is its "
                "class where it was when the checkpoint was made?"
            ) from error

    return unpickle


def _flat(value: object, name: str, dump: _Dump | None) -> tuple[Any, list[Tensor]]:
    try:
        return flatten(value, dump=dump)
    except TypeError as error:
        raise TypeError(f"this state cannot be saved: in `{name}`, {error}") from None

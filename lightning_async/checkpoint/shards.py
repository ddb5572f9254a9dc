"""What each rank writes of a state, and how the parts become the state again, for any number of ranks.

A checkpoint holds one *shared* tree, which is equal on all ranks, and of each rank an *own* one. The shared tree's
tensors are divided among the ranks that take part, whole, so that the bytes balance; its plain values are the first's.

| file | holds |
| --- | --- |
| ``rank-0.bin`` | tensors, raw, each at a multiple of 64 bytes |
| ``rank-0.json`` | ``own`` and ``shared``: trees in the terms of `comm.frames`, and which tensor lies where |

To read them executes no code. Where a user has asked for it, objects are among the tensors as pickles; the manifest
says so, and who reads them has to ask for it, too: after every byte was verified.
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
"""Dtype, shape and offset of a tensor in a file."""


@dataclass(frozen=True)
class CheckpointShard:
    tensors: list[Tensor]
    text: bytes
    pickles: bool = False

    @property
    def size(self) -> int:
        return layout(self.tensors)[1] + len(self.text)


@dataclass(frozen=True)
class Loaded:
    """The content of a checkpoint. ``own`` is None where the rank had no part in it: it begins from what is shared."""

    shared: Any
    own: Any | None
    manifest: Manifest


def plan(sizes: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """Return which rank writes which tensor: the largest first, each to the rank that has the fewest bytes so far.

    No rank has more than the mean and one tensor. All ranks find the same plan.

    >>> plan([5, 9, 4, 8], ranks=[0, 2])
    [2, 0, 0, 2]
    """
    writers = [ranks[0]] * len(sizes)
    load = [0] * len(ranks)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        lightest = load.index(min(load))
        writers[i] = ranks[lightest]
        load[lightest] += sizes[i]
    return writers


def shard(shared: object, own: object, rank: int, ranks: Sequence[int], pickles: bool = False) -> CheckpointShard:
    """Return the part of ``rank``, one of ``ranks``; raise TypeError where something cannot be saved, and name it."""
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
    if rank == ranks[0]:
        text["shared"]["tree"] = tree
    return CheckpointShard(chosen, json.dumps(text, allow_nan=False).encode(), dump is not None and dump.used)


def load(
    store: CheckpointStore, entry: CheckpointEntry, rank: int, mapped: bool = False, pickles: bool = False
) -> Loaded:
    """Read a checkpoint that `CheckpointStore.verify` has found whole. Tensors are on the CPU, and the caller's.

    Args:
        store, entry: the checkpoint.
        rank: whose ``own`` to read.
        mapped: tensors are the files themselves where these are local, read when they are used. For as long as the
            checkpoint is there: over a network it must not be deleted meanwhile. Default: they are copies.
        pickles: load pickled objects, which executes code in them. Default: a checkpoint that has some is refused.

    Raises:
        CheckpointError: there are pickled objects in it, and they are not to be loaded or cannot be.
        DamagedCheckpoint: its parts do not fit together; names the file.
    """
    manifest = entry.manifest or store.verify(entry)
    unpickle = _unpickler(entry, manifest, pickles)
    parts = [_Part.read(store, entry.path, writer, mapped, unpickle) for writer in sorted(manifest.ranks)]
    shared: dict[int, Tensor] = {}
    for part in parts:
        shared |= part.shared()
    count = parts[0].count
    if sorted(shared) != list(range(count)) or any(part.count != count for part in parts):
        raise DamagedCheckpoint(
            f"{entry.path}: ranks {list(manifest.ranks)} have written {len(shared)} of {count} tensors that they "
            "share: was their state equal?"
        )
    own = next((part.own() for part in parts if part.rank == rank), None)
    return Loaded(parts[0].shared_tree([shared[i] for i in range(count)]), own, manifest)


def load_own(
    store: CheckpointStore, entry: CheckpointEntry, rank: int, *keys: str, mapped: bool = False, pickles: bool = False
) -> Any | None:
    """Return what is a rank's own, or what lies at ``keys`` in it; None where there is no such thing."""
    manifest = entry.manifest or store.verify(entry)
    unpickle = _unpickler(entry, manifest, pickles)
    return _Part.read(store, entry.path, rank, mapped, unpickle).own(*keys) if rank in manifest.ranks else None


def own_of(tensors: memoryview, text: bytes | bytearray, name: str) -> Any:
    """Return what is a rank's own, of a `CheckpointShard` in memory, where its tensors stay if that is writable."""
    return _Part(0, name, tensors, text, mapped=True).own()


class _Read(Sequence[Tensor]):
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
        return cls(rank, path, store.files.view(f"{folder}/rank-{rank}.bin"), store.files.read(path), mapped, unpickle)

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
        if end == at:
            return torch.empty(shape, dtype=dtype)
        memory = self._bytes[at:end]
        if not self._mapped or memory.readonly:
            memory = bytearray(memory)
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except _MALFORMED as error:
            raise DamagedCheckpoint(f"{self._path} does not say what it should: {error!r}") from error


class _Dump:
    """Pickles objects, with tensors in them that can be loaded where there is no such device; whether it did."""

    used = False

    def __call__(self, value: object) -> bytes:
        self.used = True
        stream = io.BytesIO()
        torch.save(value, stream, pickle_protocol=pickle.DEFAULT_PROTOCOL)
        return stream.getvalue()


def _unpickler(entry: CheckpointEntry, manifest: Manifest, pickles: bool) -> Callable[[bytes], Any] | None:
    """Return what loads the pickled objects of a checkpoint; None where it has none. Refuse unless ``pickles``."""
    if not manifest.pickles:
        return None
    if not pickles:
        raise CheckpointError(
            f"{entry.path} holds pickled objects: to load it executes code that is in it. If you trust everybody who "
            "can write there, ask for it by `FaultTolerantCheckpoint(objects='pickle')`, "
            "`CheckpointReader(objects='pickle')`, or `lightning-async checkpoint export --objects pickle`."
        )

    def unpickle(data: bytes) -> Any:
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        except Exception as error:  # of the object's class, which may have changed since
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

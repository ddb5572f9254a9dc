"""Arrays of a shard, in a file that outlives its server.

    journal | params 0, params 1, momentum 0, momentum 1, ... | of each worker: momentum 0, momentum 1, pulled, spare |

Each array that updates change exists twice. An update reads one copy and writes the other. The journal then records
that the new copy is the valid one. The arrays of one worker are mapped when they are first needed, and freed when the
worker is gone for good.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_async.engine._threads import share_out

T = TypeVar("T")
Arrays = dict[str, Tensor]
WHOLE = slice(None)
_PIECE = 1 << 19  # elements of a piece: small enough for the cache, large enough to outweigh the cost of a call
_LARGE = 1 << 21  # elements from which a second thread is worth its start
_SLOT = 1 << 18
SIZE = 2 * _SLOT
"""Number of bytes of memory that a journal takes."""
_HEAD = struct.Struct("<QI16s")
ROOM = _SLOT - _HEAD.size
"""Largest number of bytes of a record."""


class SharedArrays:
    """Flat fp32 arrays of one size, in a file.

    Args:
        descriptor: Descriptor of the file.
        numel: Number of elements of each array.
        shared: Names of arrays that all workers share. Each exists twice, see `banks`.
        own: Names of arrays that each worker has for itself, and that updates change. Each exists twice.
        kept: Names of arrays that each worker has for itself, and that updates do not change. Each exists once, or
            twice if `spare` is used.
        threads: Number of threads that work on large arrays.

    Raises:
        OSError: The memory cannot be allocated.
    """

    def __init__(
        self, descriptor: int, numel: int, shared: Sequence[str], own: Sequence[str], kept: Sequence[str], threads: int
    ) -> None:
        self._descriptor = descriptor
        self._numel = numel
        self._threads = threads if numel >= _LARGE else 1
        pieces = [slice(at, at + _PIECE) for at in range(0, numel, _PIECE)]
        self._pieces = pieces if len(pieces) > 1 else [WHOLE]
        self._own = tuple(own)
        self._kept = tuple(kept)
        self._array_bytes = -(-max(1, numel * torch.float32.itemsize) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._slots_at = SIZE + 2 * len(shared) * self._array_bytes
        self._slot_bytes = 2 * (len(self._own) + len(self._kept)) * self._array_bytes
        self._slots: dict[int, tuple[Arrays, Arrays]] = {}
        self._spares: dict[int, Arrays] = {}
        self.banks = self._pair(mapped(descriptor, SIZE, self._slots_at - SIZE), shared)
        """The two copies (banks) of the shared arrays, each as a mapping from names to tensors."""

    def slot(self, number: int) -> tuple[Arrays, Arrays]:
        """Return both copies of the arrays that belong to one worker.

        An array that exists only once is the same tensor in both results.

        Args:
            number: Number of the worker's slot, its place in the file.

        Raises:
            OSError: The memory cannot be allocated.
        """
        if number not in self._slots:
            size = self._slot_bytes - len(self._kept) * self._array_bytes
            memory = mapped(self._descriptor, self._slots_at + number * self._slot_bytes, size)
            pair = self._pair(memory, self._own)
            rest = memory[2 * len(self._own) * self._array_bytes :]
            kept = {name: self._array(rest, place) for place, name in enumerate(self._kept)}
            self._slots[number] = ({**pair[0], **kept}, {**pair[1], **kept})
        return self._slots[number]

    def spare(self, number: int) -> Arrays:
        """Return a second copy of one worker's arrays that otherwise exist once; `slot` returns the first copy.

        Args:
            number: Number of the worker's slot.

        Raises:
            OSError: The memory cannot be allocated.
        """
        if number not in self._spares:
            size = len(self._kept) * self._array_bytes
            memory = mapped(self._descriptor, self._slots_at + (number + 1) * self._slot_bytes - size, size)
            self._spares[number] = {name: self._array(memory, place) for place, name in enumerate(self._kept)}
        return self._spares[number]

    def keep_only(self, slots: Collection[int]) -> None:
        """Free the memory of all workers' slots except these."""
        size = os.fstat(self._descriptor).st_size
        end = self._slots_at + (max(slots, default=-1) + 1) * self._slot_bytes
        for number in set(self._slots) - set(slots):
            del self._slots[number]
            self._spares.pop(number, None)
        # Cut off the file behind the last slot in use; slots before it are freed one by one.
        if size > end:
            os.ftruncate(self._descriptor, end)
        for number in set(range(max(slots, default=0))) - set(slots):
            at = self._slots_at + number * self._slot_bytes
            with mmap.mmap(self._descriptor, self._slot_bytes, offset=at) as slot:
                # Gives the pages back and keeps the file's length, which later slots need.
                slot.madvise(mmap.MADV_REMOVE)

    def share_out(self, do: Callable[[slice], T]) -> list[T]:
        """Call ``do`` on several threads with the slice of each piece of an array; return the unordered results."""
        return share_out(do, self._pieces, self._threads)

    def copy(self, *pairs: tuple[Tensor, Tensor]) -> None:
        """For each pair (target, source), copy the source into the target, all pairs in one pass over memory.

        All tensors have the size of the shared arrays.
        """

        def copy(here: slice) -> None:
            for target, source in pairs:
                piece_of(target, here).copy_(piece_of(source, here))

        self.share_out(copy)

    def close(self) -> None:
        self.banks = ({}, {})
        self._slots.clear()
        self._spares.clear()

    def _pair(self, memory: Tensor, names: Sequence[str]) -> tuple[Arrays, Arrays]:
        places = [self._array(memory, place) for place in range(2 * len(names))]
        return dict(zip(names, places, strict=False)), dict(zip(names, places[len(names) :], strict=True))

    def _array(self, memory: Tensor, place: int) -> Tensor:
        at = place * self._array_bytes
        return memory[at : at + self._numel * torch.float32.itemsize].view(torch.float32)


def piece_of(array: Tensor, here: slice) -> Tensor:
    """Return the piece of an array at a slice that `SharedArrays.share_out` has passed on.

    Returns the array itself if there is only one piece.
    """
    return array if here is WHOLE else array[here]


class Journal:
    """A record in memory that is valid at any time, even if its process is killed while it writes.

    Two slots are written in turn, each with a number and a digest. The record is the newest slot with a valid digest. A
    slot that was being written when the process died has no valid digest, and the other slot is untouched.

    Args:
        memory: Memory of `SIZE` bytes, uint8: zeros, or the contents that a journal has left.

    >>> import torch
    >>> memory = torch.zeros(SIZE, dtype=torch.uint8)
    >>> Journal(memory).record is None
    True
    >>> Journal(memory).write({"version": 1})
    >>> Journal(memory).record
    {'version': 1}
    """

    def __init__(self, memory: Tensor) -> None:
        array: Any = memory.numpy()
        self._memory = memoryview(array)
        self._texts = _Texts()
        found = [each for each in map(self._read, (0, 1)) if each is not None]
        self._number, self._text = max(found, key=lambda each: each[0], default=(0, None))

    @property
    def record(self) -> dict[str, Any] | None:
        """The newest record; None if there is none."""
        return None if self._text is None else json.loads(self._text)

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a record, which is valid once this returns; raise ValueError if it is too long."""
        text = self._texts.of(record).encode()
        if len(text) > ROOM:
            raise ValueError(f"a record of {len(text)} bytes does not fit into {ROOM}.")
        number = self._number + 1
        at = number % 2 * _SLOT
        self._memory[at + _HEAD.size : at + _HEAD.size + len(text)] = text
        # The head is written last: without it, the slot has no valid digest.
        self._memory[at : at + _HEAD.size] = _HEAD.pack(number, len(text), _digest(number, text))
        self._number = number
        self._text = text

    def _read(self, slot: int) -> tuple[int, bytes] | None:
        at = slot * _SLOT
        number, length, digest = _HEAD.unpack_from(self._memory, at)
        text = bytes(self._memory[at + _HEAD.size : at + _HEAD.size + min(length, _SLOT)])
        return (number, text) if number and digest == _digest(number, text) else None


class _Texts:
    """An encoder of records as JSON that reuses the text of each entry that is the same object as in the last record.

    In a mapping of mappings, such as the workers' entries, it reuses the text of each inner mapping. Records must never
    be changed in place.
    """

    def __init__(self) -> None:
        self._last: Mapping[str, Any] = {}
        self._kept: dict[str, str] = {}
        self._known: dict[tuple[str, str], tuple[object, str]] = {}

    def of(self, record: Mapping[str, Any]) -> str:
        last = self._last
        before = self._kept
        self._last = record
        self._kept = {}
        fresh: dict[str, Any] = {}
        for name, value in record.items():
            if name in last and last[name] is value:
                self._kept[name] = before.get(name) or self._text(name, value)
            elif isinstance(value, dict) and _nests(value):
                self._kept[name] = self._text(name, value)
            else:
                fresh[name] = value
        texts = [json.dumps(fresh)[1:-1]] if fresh else []
        return f"{{{', '.join([*texts, *self._kept.values()])}}}"

    def _text(self, name: str, value: object) -> str:
        if not (isinstance(value, dict) and _nests(value)):
            return f"{json.dumps(name)}: {json.dumps(value)}"
        texts = {}
        for key, entry in value.items():
            before, text = self._known.get((name, key), (None, ""))
            texts[key] = text if before is entry else f"{json.dumps(key)}: {json.dumps(entry)}"
        for key in [key for key in self._known if key[0] == name and key[1] not in value]:
            del self._known[key]
        self._known.update({(name, key): (value[key], text) for key, text in texts.items()})
        return f"{json.dumps(name)}: {{{', '.join(texts.values())}}}"


def _nests(value: Mapping[str, Any]) -> bool:
    return bool(value) and all(isinstance(each, dict) for each in value.values())


def _digest(number: int, text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16, salt=struct.pack("<Q", number)).digest()


def mapped(descriptor: int, at: int, size: int) -> Tensor:
    """Map ``size`` bytes of a file, from offset ``at``, as uint8, and reserve their memory.

    Raises OSError if there is no memory.
    """
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    os.posix_fallocate(descriptor, at, size)  # without memory, this raises; a later write would kill the process
    return torch.frombuffer(mmap.mmap(descriptor, size, offset=at), dtype=torch.uint8)  # keeps the mapping

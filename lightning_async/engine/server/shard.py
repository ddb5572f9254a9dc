"""Where the arrays of a shard lie in the file that outlives its server.

    journal | params 0, params 1, momentum 0, momentum 1, ... | a worker's own: momentum 0, momentum 1, pulled, spare |

What is updated has two places: who writes fills the other one, and the journal says which one counts. What each worker
has of its own is mapped when it is first needed, and its memory given back when the worker is gone for good; the spare
place of what has one only is mapped for those who ask for it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from lightning_async.engine.parallel import share_out
from lightning_async.engine.server.journal import SIZE

__all__ = ["Arrays", "Shard", "mapped", "piece_of"]

T = TypeVar("T")
Arrays = dict[str, Tensor]

_PIECE = 1 << 19  # elements: few enough for the cache, enough that a call costs little beside them
_LARGE = 1 << 21  # from so many on a second thread is worth its start


WHOLE = slice(None)


def piece_of(array: Tensor, here: slice) -> Tensor:
    """One of the pieces that `Shard.share_out` tells of; where there is one only, no view is made."""
    return array if here is WHOLE else array[here]


class Shard:
    """Flat fp32 arrays of one size, in a file.

    Args:
        descriptor: of the file.
        numel: of each array.
        shared: names of those that have two places, in `banks`.
        own: names of each worker's, in two places.
        kept: names of each worker's, in one.
        threads: that work on large ones. Default: 1.

    Raises:
        OSError: there is no memory.
    """

    def __init__(
        self,
        descriptor: int,
        numel: int,
        shared: Sequence[str],
        own: Sequence[str] = (),
        kept: Sequence[str] = (),
        threads: int = 1,
    ) -> None:
        self._descriptor, self._numel = descriptor, numel
        self._threads = threads if numel >= _LARGE else 1
        pieces = [slice(at, at + _PIECE) for at in range(0, numel, _PIECE)]
        self._pieces = pieces if len(pieces) > 1 else [WHOLE]
        self._own, self._kept = tuple(own), tuple(kept)
        self._array_bytes = -(-max(1, numel * torch.float32.itemsize) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._slots_at = SIZE + 2 * len(shared) * self._array_bytes
        self._slot_bytes = 2 * (len(self._own) + len(self._kept)) * self._array_bytes
        self._slots: dict[int, tuple[Arrays, Arrays]] = {}
        self._spares: dict[int, Arrays] = {}
        self.banks = self._pair(mapped(descriptor, SIZE, self._slots_at - SIZE), shared)
        """The shared arrays, twice."""

    def slot(self, number: int) -> tuple[Arrays, Arrays]:
        """A worker's own arrays, twice; those that have one place only are the same in both.

        Raises:
            OSError: there is no memory.
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
        """A second place of those that have one only, beside that of `slot`; OSError as there."""
        if number not in self._spares:
            size = len(self._kept) * self._array_bytes
            memory = mapped(self._descriptor, self._slots_at + (number + 1) * self._slot_bytes - size, size)
            self._spares[number] = {name: self._array(memory, place) for place, name in enumerate(self._kept)}
        return self._spares[number]

    def keep_only(self, slots: Collection[int]) -> None:
        """Give back the memory of all other slots."""
        size, end = os.fstat(self._descriptor).st_size, self._slots_at + (max(slots, default=-1) + 1) * self._slot_bytes
        for number in set(self._slots) - set(slots):
            del self._slots[number]
            self._spares.pop(number, None)
        if size > end:
            os.ftruncate(self._descriptor, end)
        for number in set(range(max(slots, default=0))) - set(slots):
            with mmap.mmap(
                self._descriptor, self._slot_bytes, offset=self._slots_at + number * self._slot_bytes
            ) as slot:
                slot.madvise(mmap.MADV_REMOVE)

    def share_out(self, do: Callable[[slice], T]) -> list[T]:
        """Call a function with all pieces of an array; what it makes of them, in no order."""
        return share_out(do, self._pieces, self._threads)

    def copy(self, *pairs: tuple[Tensor, Tensor]) -> None:
        """To memory of the arrays' size, from such memory, all in one pass."""

        def copy(here: slice) -> None:
            for target, source in pairs:
                piece_of(target, here).copy_(piece_of(source, here))

        self.share_out(copy)

    def close(self) -> None:
        """Let go of the memory; the file is another's."""
        self.banks = ({}, {})
        self._slots.clear()
        self._spares.clear()

    def _pair(self, memory: Tensor, names: Sequence[str]) -> tuple[Arrays, Arrays]:
        places = [self._array(memory, place) for place in range(2 * len(names))]
        return dict(zip(names, places, strict=False)), dict(zip(names, places[len(names) :], strict=True))

    def _array(self, memory: Tensor, place: int) -> Tensor:
        at = place * self._array_bytes
        return memory[at : at + self._numel * torch.float32.itemsize].view(torch.float32)


def mapped(descriptor: int, at: int, size: int) -> Tensor:
    """A part of a file as uint8, in memory: all of it is there before it is first written to.

    Raises:
        OSError: there is no such memory.
    """
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    os.posix_fallocate(descriptor, at, size)  # an error here, where a write would be a signal
    return torch.frombuffer(mmap.mmap(descriptor, size, offset=at), dtype=torch.uint8)  # holds the mapping

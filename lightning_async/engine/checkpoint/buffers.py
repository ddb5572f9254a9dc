"""Memory that the trainer fills and the writer's process writes to disk: the only copy that training waits for.

    FREE --- the trainer begins to copy ---> FILLING --- copied ---> WRITER --- its answer has come ---> FREE
    FREE --- a larger state is expected ---> GROWING --- its memory is there ---> FREE

It is anonymous memory with a file descriptor, so that it needs no room in /dev/shm, has no name that could be left
behind, and lives on in the writer when the trainer is killed. Its pages are there before they are first written to:
else the first copy takes ten times as long.
"""

from __future__ import annotations

import contextlib
import enum
import mmap
import os
import tempfile
import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lightning_async.engine.checkpoint.copying import LARGE, copy_
from lightning_async.errors import CheckpointError

__all__ = ["ALIGNMENT", "Buffer", "Growth", "Owner", "anonymous_file", "layout"]

ALIGNMENT = 64
"""Bytes; each tensor begins at a multiple, so that it can be viewed in place, whatever its dtype."""
_PIECE = 32 << 20  # of so few pages torch does not make threads
_SPARE = 1 << 20  # for the text, and for a state that grows a little


class Owner(enum.Enum):
    """Who may touch a buffer."""

    FREE = "free"
    FILLING = "filling"
    GROWING = "growing"
    WRITER = "writer"


class Buffer:
    """One state's worth of memory that two processes share. Memory is taken when it is first needed.

    Args:
        name: shown by the system's tools.
    """

    def __init__(self, name: str) -> None:
        self.owner = Owner.FREE
        self._name = name
        self._descriptor = -1
        self._whole = torch.empty(0, dtype=torch.uint8)
        self._kinds: list[tuple[torch.dtype, torch.Size]] = []
        self._views: list[Tensor] = []
        self._pinned = False

    @property
    def descriptor(self) -> int:
        """For the writer; another one after each growth."""
        return self._descriptor

    @property
    def size(self) -> int:
        """Bytes that it has room for."""
        return self._whole.numel()

    def reserve(self, size: int) -> None:
        """Have room for so many bytes, in memory; what the buffer held is lost where it grows.

        Raises:
            CheckpointError: the system has no memory for it.
        """
        if size <= self.size:
            return
        self.release()
        size = -(-(size + size // 64 + _SPARE) // mmap.PAGESIZE) * mmap.PAGESIZE
        descriptor = -1
        try:
            descriptor = anonymous_file(self._name)
            os.ftruncate(descriptor, size)
            if hasattr(os, "posix_fallocate"):  # an error here, where a write would be a signal
                os.posix_fallocate(descriptor, 0, size)
            memory = mmap.mmap(descriptor, size)
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            raise CheckpointError(
                f"there is no memory for a copy of the state, {size / 2**20:.0f} MiB ({error.strerror}): "
                "take one buffer instead of two, or more memory."
            ) from error
        self._descriptor = descriptor
        self._whole = torch.frombuffer(memory, dtype=torch.uint8)  # holds the mapping as long as it lives
        # So that each page is in place. The system could do it at once (MAP_POPULATE), but holding the interpreter.
        for at in range(0, size, _PIECE):
            self._whole[at : at + _PIECE : mmap.PAGESIZE].zero_()
        self._pinned = _pin(self._whole)

    def fill(self, tensors: Sequence[Tensor], text: bytes) -> int:
        """Copy the tensors, each where `layout` puts it, and ``text`` behind them; where that begins.

        Waits until copies from devices have arrived. The buffer must be the trainer's.
        """
        assert self.owner is Owner.FILLING, f"{self._name} is {self.owner.value}"
        offsets, end = layout(tensors)
        self.reserve(end + len(text))
        kinds = [(tensor.dtype, tensor.shape) for tensor in tensors]
        if kinds != self._kinds:  # as it was at the last save, usually: making views takes longer than small copies
            self._kinds = kinds
            self._views = [
                self._whole[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                for tensor, at in zip(tensors, offsets, strict=True)
            ]
        copy_(self._views, tensors, non_blocking=self._pinned)
        for device in {tensor.device for tensor in tensors if tensor.is_cuda} if self._pinned else ():
            torch.cuda.current_stream(device).synchronize()
        os.pwrite(self._descriptor, text, end)
        return end

    def part_with(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies of the tensors, in this memory, which is theirs from now on: the buffer begins without any."""
        self.owner = Owner.FILLING
        try:
            self.fill(tensors, b"")
            return self._views
        finally:
            self.release()
            self.owner = Owner.FREE

    def view(self, size: int) -> memoryview:
        """The first bytes, in place; to be let go of before the buffer is filled again."""
        array: Any = self._whole.numpy()
        return memoryview(array)[:size]

    def release(self) -> None:
        """Give the memory back; the writer keeps what it has been given."""
        if self._pinned:
            _cudart().cudaHostUnregister(self._whole.data_ptr())
        self._pinned, self._kinds, self._views = False, [], []
        self._whole = torch.empty(0, dtype=torch.uint8)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Growth:
    """Buffers that get memory in the background: to have hundreds of megabytes takes longer than to fill them."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    @property
    def active(self) -> bool:
        """Whether that is under way."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, buffers: Sequence[Buffer], size: int) -> None:
        """Have room for so many bytes in each buffer that is free, soon; nobody else touches them until then."""
        growing = [buffer for buffer in buffers if buffer.owner is Owner.FREE and buffer.size < size]
        if self.active or not growing:
            return
        for buffer in growing:
            buffer.owner = Owner.GROWING
        self._thread = threading.Thread(
            target=self._grow, args=(growing, size), name="lightning_async-memory", daemon=True
        )
        self._thread.start()
        if size < LARGE:
            self._thread.join()

    def wait(self, timeout: float | None = None) -> None:
        """Until it is done; it waits for nobody itself."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _grow(self, buffers: Sequence[Buffer], size: int) -> None:
        for buffer in buffers:
            with contextlib.suppress(CheckpointError):  # the save that needs it says so
                buffer.reserve(size)
            buffer.owner = Owner.FREE


def layout(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each tensor begins, in bytes, and where the last one ends.

    >>> layout([torch.zeros(3), torch.zeros(20), torch.zeros(1)])
    ([0, 64, 192], 256)
    """
    ends = list(accumulate(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors))
    return [0, *ends][: len(tensors)], ends[-1] if ends else 0


def anonymous_file(name: str) -> int:
    """The descriptor of a file that has no place in any folder, in memory where the system has such."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _pin(memory: Tensor) -> bool:
    """Lock memory for the GPU's own copies into it; whether that was needed and has worked.

    Copies into memory that is not locked are right, too, but go through a small staging area, piece by piece.
    """
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return False
    return int(_cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0


def _cudart() -> Any:
    return torch.cuda.cudart()

"""Memory that the trainer fills and the writer's process writes to disk: the only copy that training waits for.

    FREE --- the trainer begins to copy ---> FILLING --- copied ---> WRITER --- its answer has come ---> FREE
    FREE --- a larger state is expected ---> GROWING --- its memory is there ---> FREE

It is anonymous memory with a file descriptor, so that it needs no room in /dev/shm, has no name that could be left
behind, and lives on in the writer when the trainer is killed. Its pages are there before they are first written to:
else the first copy takes ten times as long.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import gc
import mmap
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lightning_async.engine._threads import share_out
from lightning_async.errors import CheckpointError

PIECE = 4 << 20
"""Bytes that a thread copies at a time: so much may be waited for at the end."""
LARGE = 32 << 20
_MOST = 4  # threads; more do not make the memory faster
ALIGNMENT = 64
"""Bytes; each tensor begins at a multiple, so that it can be viewed in place, whatever its dtype."""
_PIECE = 32 << 20  # of so few pages torch does not make threads
_SPARE = 1 << 20  # for the text, and for a state that grows a little


class BufferOwner(enum.Enum):
    FREE = "free"
    FILLING = "filling"
    GROWING = "growing"
    WRITER = "writer"


class Buffer:
    def __init__(self, name: str) -> None:
        self.owner = BufferOwner.FREE
        self._name = name
        self._descriptor = -1
        self._whole = torch.empty(0, dtype=torch.uint8)
        self._kinds: list[tuple[torch.dtype, torch.Size]] = []
        self._views: list[Tensor] = []
        self._pinned = False

    @property
    def descriptor(self) -> int:
        """The writer's file descriptor; another one after each growth."""
        return self._descriptor

    @property
    def size(self) -> int:
        return self._whole.numel()

    def reserve(self, size: int) -> None:
        """Get room for so many bytes, or raise CheckpointError; what the buffer held is lost where it grows."""
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
        """Copy the tensors, each where `layout` puts it, and ``text`` behind them; return where that begins.

        Waits until copies from devices have arrived. The buffer must be the trainer's.
        """
        assert self.owner is BufferOwner.FILLING, f"{self._name} is {self.owner.value}"
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
        """Return copies of the tensors, in this memory, which is theirs from now on: the buffer begins without any."""
        self.owner = BufferOwner.FILLING
        try:
            self.fill(tensors, b"")
            return self._views
        finally:
            self.release()
            self.owner = BufferOwner.FREE

    def view(self, size: int) -> memoryview:
        array: Any = self._whole.numpy()
        return memoryview(array)[:size]

    def release(self) -> None:
        """Give the memory back; the writer keeps what it has been given."""
        if self._pinned:
            _cudart().cudaHostUnregister(self._whole.data_ptr())
        self._pinned = False
        self._kinds = []
        self._views = []
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
        return self._thread is not None and self._thread.is_alive()

    def begin(self, buffers: Sequence[Buffer], size: int) -> None:
        growing = [buffer for buffer in buffers if buffer.owner is BufferOwner.FREE and buffer.size < size]
        if self.active or not growing:
            return
        for buffer in growing:
            buffer.owner = BufferOwner.GROWING
        self._thread = threading.Thread(
            target=self._grow, args=(growing, size), name="lightning_async-memory", daemon=True
        )
        self._thread.start()
        if size < LARGE:
            self._thread.join()

    def wait(self, timeout: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(timeout)

    def _grow(self, buffers: Sequence[Buffer], size: int) -> None:
        for buffer in buffers:
            with contextlib.suppress(CheckpointError):  # the save that needs it says so
                buffer.reserve(size)
            buffer.owner = BufferOwner.FREE


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Suspend garbage collection: the many small objects that describe a state set it off, for longer than the copy."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def layout(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return where each tensor begins, in bytes, and where the last one ends.

    >>> layout([torch.zeros(3), torch.zeros(20), torch.zeros(1)])
    ([0, 64, 192], 256)
    """
    ends = list(accumulate(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors))
    return [0, *ends][: len(tensors)], ends[-1] if ends else 0


def copy_(views: Sequence[Tensor], tensors: Sequence[Tensor], non_blocking: bool = False) -> None:
    """Copy ``tensors`` into contiguous ``views`` of their shapes and dtypes in the host's memory."""
    by_torch: list[int] = []
    pieces: list[tuple[int, int, int]] = []
    for i, (view, tensor) in enumerate(zip(views, tensors, strict=True)):
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            by_torch.append(i)
            continue
        to = view.data_ptr()
        source = tensor.data_ptr()
        size = tensor.nbytes
        pieces.extend((to + at, source + at, min(PIECE, size - at)) for at in range(0, size, PIECE))
    with torch.no_grad():
        if by_torch:
            torch._foreach_copy_([views[i] for i in by_torch], [tensors[i] for i in by_torch], non_blocking)
    threads = min(_MOST, max(2, torch.get_num_threads()), os.cpu_count() or 1)
    if sum(size for _, _, size in pieces) < LARGE:
        threads = 1
    share_out(lambda piece: ctypes.memmove(*piece), pieces, threads)  # without the interpreter's lock


def anonymous_file(name: str) -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _pin(memory: Tensor) -> bool:
    """Lock memory for the GPU's own copies into it; return whether that was needed and has worked.

    Copies into memory that is not locked are right, too, but go through a small staging area, piece by piece.
    """
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return False
    return int(_cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0


def _cudart() -> Any:
    return torch.cuda.cudart()

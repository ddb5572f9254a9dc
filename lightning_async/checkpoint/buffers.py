"""Memory for copies of the trainer's state, from which the writer process writes them to disk.

Training waits only while its state is copied into a buffer. A buffer passes through these states:

    FREE --- the trainer begins to copy ---> FILLING --- copied ---> WRITER --- the writer has answered ---> FREE
    FREE --- a larger state is expected ---> GROWING --- allocated ---> FREE

A buffer's memory is an anonymous file with a descriptor. The file needs no room in /dev/shm, and has no name that could
be left behind. The writer process keeps the memory when the trainer is killed. The pages are allocated before the first
copy, because a copy into unallocated pages takes ten times as long.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
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
"""Number of bytes that a thread copies at a time. At the end of a copy, the other threads may wait for one piece."""
# Number of bytes from which memory is worth a thread.
LARGE = 32 << 20
_MOST = 4  # largest number of threads; more do not make the memory faster
ALIGNMENT = 64
"""Each tensor begins at a multiple of this number of bytes, so that it can be viewed in place with any dtype."""
_PIECE = 32 << 20  # bytes whose pages are few enough that torch starts no threads for them
_SPARE = 1 << 20  # bytes for the text, and for a state that grows a little


class BufferOwner(enum.Enum):
    """The state of a buffer, which says who may use its memory; see the module's docstring for the transitions."""

    FREE = "free"
    FILLING = "filling"
    GROWING = "growing"
    WRITER = "writer"


class Buffer:
    """Memory for one copy of a state. The attribute ``owner`` says who may use the memory.

    Args:
        name: Name of the anonymous file, for error messages and system tools.
    """

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
        """File descriptor for the writer; a different one after each growth."""
        return self._descriptor

    @property
    def size(self) -> int:
        return self._whole.numel()

    def reserve(self, size: int) -> None:
        """Allocate memory for at least ``size`` bytes, unless the buffer has as many already.

        A buffer that grows loses its contents, and gets another descriptor.

        Raises:
            CheckpointError: There is not enough memory.
        """
        if size <= self.size:
            return
        self.release()
        size = -(-(size + size // 64 + _SPARE) // mmap.PAGESIZE) * mmap.PAGESIZE
        descriptor = -1
        try:
            descriptor = anonymous_file(self._name)
            os.ftruncate(descriptor, size)
            if hasattr(os, "posix_fallocate"):  # without memory, this raises; a later write would kill the process
                os.posix_fallocate(descriptor, 0, size)
            memory = mmap.mmap(descriptor, size)
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            few_files = error.errno in (errno.EMFILE, errno.ENFILE)
            remedy = "raise `ulimit -n`" if few_files else "take one buffer instead of two, or more memory"
            raise CheckpointError(
                f"there is no memory for a copy of the state, {size / 2**20:.0f} MiB ({error.strerror}): {remedy}."
            ) from error
        self._descriptor = descriptor
        self._whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping
        # Touch each page, so that it is there. MAP_POPULATE would do this too, but would hold the interpreter's lock.
        for at in range(0, size, _PIECE):
            self._whole[at : at + _PIECE : mmap.PAGESIZE].zero_()
        self._pinned = _pin(self._whole)

    def fill(self, tensors: Sequence[Tensor], text: bytes) -> int:
        """Copy the tensors to the offsets that `layout` returns, and ``text`` behind the last tensor.

        Grow the buffer first if it is too small. Return only when copies from devices are complete. ``owner`` must be
        `BufferOwner.FILLING`.

        Returns:
            The offset in bytes at which the text begins.

        Raises:
            CheckpointError: There is not enough memory.
        """
        assert self.owner is BufferOwner.FILLING, f"{self._name} is {self.owner.value}"
        offsets, end = layout(tensors)
        self.reserve(end + len(text))
        kinds = [(tensor.dtype, tensor.shape) for tensor in tensors]
        # Usually equal to the last save: views are kept, because making them takes longer than small copies.
        if kinds != self._kinds:
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
        """Copy the tensors into this buffer's memory, and return the copies, which own that memory from now on.

        Afterwards the buffer is free, and has no memory. Raises the error of `reserve`.
        """
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
        """Release the memory and close the descriptor in this process.

        A writer process that has received the descriptor keeps the memory.
        """
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
    """A thread that allocates memory for buffers.

    For hundreds of megabytes, the allocation takes longer than the copy of the state into the memory.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    @property
    def active(self) -> bool:
        """Whether the thread is allocating memory."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, buffers: Sequence[Buffer], size: int) -> None:
        """Grow the free buffers that are smaller than ``size`` bytes, in a thread.

        Wait for the thread only if ``size`` is below `LARGE`. Do nothing while the thread of an earlier call is
        running. The thread ignores a lack of memory: the save that needs the memory reports it.
        """
        growing = [buffer for buffer in buffers if buffer.owner is BufferOwner.FREE and buffer.size < size]
        if self.active or not growing:
            return
        for buffer in growing:
            buffer.owner = BufferOwner.GROWING
        self._thread = threading.Thread(
            target=self._grow, args=(growing, size), name="lightning_async-memory", daemon=True
        )
        self._thread.start()
        # So little memory is there at once: the caller can use it without another attempt.
        if size < LARGE:
            self._thread.join()

    def wait(self, timeout: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(timeout)

    def _grow(self, buffers: Sequence[Buffer], size: int) -> None:
        for buffer in buffers:
            with contextlib.suppress(CheckpointError):  # the save that needs the memory will report the error
                buffer.reserve(size)
            buffer.owner = BufferOwner.FREE


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection during the block.

    Use this to copy a state. The copy creates many small objects. They would trigger garbage collections, which would
    take longer than the copy.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def layout(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return the offset of each tensor in one buffer, and the size of the buffer, both in bytes.

    Each tensor occupies a multiple of `ALIGNMENT` bytes, so the offsets and the size are multiples of it.

    >>> layout([torch.zeros(3), torch.zeros(20), torch.zeros(1)])
    ([0, 64, 192], 256)
    """
    ends = list(accumulate(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors))
    return [0, *ends][: len(tensors)], ends[-1] if ends else 0


def copy_(views: Sequence[Tensor], tensors: Sequence[Tensor], non_blocking: bool = False) -> None:
    """Copy each of ``tensors`` into the view with the same index; large copies use several threads.

    Args:
        views: Contiguous tensors in the host's memory, with the shapes and dtypes of ``tensors``.
        tensors: Tensors to copy, on any device.
        non_blocking: Whether copies from devices may be incomplete when this returns. Default: False.
    """
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
    share_out(lambda piece: ctypes.memmove(*piece), pieces, threads)  # memmove releases the interpreter's lock


def anonymous_file(name: str) -> int:
    """Create a file that is in no directory, and return its descriptor; ``name`` labels the file in system tools."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _pin(memory: Tensor) -> bool:
    """Page-lock memory, so that a GPU can copy into it directly; return whether the memory is page-locked.

    Copies into memory that is not page-locked are correct, too, but slower: they go piece by piece through a small
    staging area.
    """
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return False
    return int(_cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0


def _cudart() -> Any:
    return torch.cuda.cudart()

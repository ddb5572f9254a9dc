"""What the state of a run needs of a file system, and how what was written is known again."""

from __future__ import annotations

import contextlib
import mmap
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from lightning_async.errors import DamagedCheckpoint

__all__ = ["PIECE", "STALE_S", "Chunk", "FileRecord", "Files", "Lock", "checking", "compare", "pieces"]

PIECE = 4 << 20
"""Bytes that are written or read at a time; a checksum is taken while they are in the processor's cache."""

STALE_S = 3600.0
"""Where a file system has no locks: nobody writes in a folder any more that did not change for so long."""

Chunk = bytes | bytearray | memoryview | mmap.mmap


@dataclass(frozen=True)
class FileRecord:
    """What was written to a file: how many bytes, and their CRC-32."""

    size: int
    crc32: int


class Lock:
    """A file that is locked until its descriptor is closed here, and in every process that it was handed to.

    Args:
        descriptor: of the open file, which a fork of this process does not keep.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def write(self, data: bytes) -> None:
        """Say something in the file, instead of what it said."""
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, data, 0)

    def close(self) -> None:
        """Let go. Idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


class Files(Protocol):
    """What a checkpoint needs of a file system. Paths are joined with ``/``."""

    atomic: bool
    """Whether a folder can be renamed in one step."""

    def write(self, path: str, chunks: Iterable[Chunk]) -> FileRecord:
        """Write a new file, and its folder where that is missing; durable when it returns."""
        ...

    def read(self, path: str) -> bytes:
        """All that a file holds."""
        ...

    def view(self, path: str) -> memoryview:
        """All that a file holds, mapped into memory where that is possible; what is written there stays there."""
        ...

    def check(self, path: str, record: FileRecord) -> None:
        """Read the whole file; raises `DamagedCheckpoint` where it does not hold what the record says."""
        ...

    def sync(self, folder: str) -> None:
        """Make the names in a folder durable."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Give a folder a new name, or a file where that is atomic; durable when it returns."""
        ...

    def commit(self, temporary: str, final: str) -> None:
        """Give a written folder its final name: after a power failure, all of it is there or nothing."""
        ...

    def names(self, folder: str) -> list[str]:
        """Names in a folder, sorted; none where it is missing."""
        ...

    def exists(self, path: str) -> bool:
        """Whether there is such a file or folder."""
        ...

    def unlink(self, path: str) -> None:
        """Delete a file, if it is there."""
        ...

    def remove(self, folder: str) -> None:
        """Delete a folder and all in it, if it is there."""
        ...

    def hold(self, folder: str) -> contextlib.AbstractContextManager[None]:
        """Make a folder, and let others know for a while that a living process writes in it."""
        ...

    def lock(self, path: str, shared: bool = False) -> Lock | None:
        """Lock a file, and make it where it is missing; None where the file system has no locks.

        Raises:
            BlockingIOError: another one holds it; with ``shared``, one that does not share it.
        """
        ...

    def identity(self, folder: str) -> str:
        """Equal for two processes only where they see the same folder, not two of one name."""
        ...

    def idle(self, folder: str) -> bool:
        """Whether no living process holds the folder."""
        ...


def pieces(chunks: Iterable[Chunk]) -> Iterator[memoryview]:
    """All bytes, cut as they are written."""
    for chunk in chunks:
        whole = memoryview(chunk).cast("B")
        for start in range(0, len(whole), PIECE):
            yield whole[start : start + PIECE]


def compare(path: str, record: FileRecord, size: int, parts: Iterator[bytes]) -> None:
    """Raise `DamagedCheckpoint` where size or checksum differ."""
    if size != record.size:
        raise DamagedCheckpoint(f"{path} has {size} bytes, {record.size} were written.")
    crc = read = 0
    for piece in parts:
        crc = zlib.crc32(piece, crc)
        read += len(piece)
    if (read, crc) != (record.size, record.crc32):
        raise DamagedCheckpoint(f"{path} has the checksum {crc:08x}, {record.crc32:08x} was written.")


@contextlib.contextmanager
def checking(path: str, record: FileRecord) -> Iterator[None]:
    """A file that is missing is damage, too."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise DamagedCheckpoint(f"{path} is missing; it had {record.size} bytes.") from None

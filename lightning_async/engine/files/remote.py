"""Files behind fsspec."""

from __future__ import annotations

import contextlib
import errno
import os
import time
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

from lightning_async.engine.files.protocol import PIECE, STALE_S, Chunk, FileRecord, Lock, checking, compare, pieces

__all__ = ["RemoteFiles"]


class RemoteFiles:
    """Files behind fsspec: object stores, memory, whatever has a URL. A file is durable when it is closed.

    Folders have no atomic rename there, so whoever writes several files needs one that is written last, as a mark.

    Args:
        url: of any place in the file system, such as ``s3://bucket/run``.

    Raises:
        ModuleNotFoundError: fsspec, or what it needs for this kind of URL, is not installed.
        OSError: of any method.
    """

    atomic = False

    def __init__(self, url: str) -> None:
        import fsspec

        self._system: Any = fsspec.core.url_to_fs(url)[0]

    def write(self, path: str, chunks: Iterable[Chunk]) -> FileRecord:
        self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
        size = crc = 0
        with self._system.open(path, "wb") as file:
            for piece in pieces(chunks):
                crc = zlib.crc32(piece, crc)
                size += len(piece)
                file.write(piece)
        return FileRecord(size, crc)

    def read(self, path: str) -> bytes:
        with self._system.open(path, "rb") as file:
            return file.read()

    def view(self, path: str) -> memoryview:
        return memoryview(self.read(path))

    def check(self, path: str, record: FileRecord) -> None:
        self._system.invalidate_cache()
        with checking(path, record), self._system.open(path, "rb") as file:
            compare(path, record, self._system.size(path), iter(lambda: file.read(PIECE), b""))

    def sync(self, folder: str) -> None:
        pass

    def rename(self, old: str, new: str) -> None:
        if not (names := self.names(old)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), old)
        self._system.makedirs(new, exist_ok=True)
        for name in names:
            self._system.mv(f"{old}/{name}", f"{new}/{name}")
        self.remove(old)

    def commit(self, temporary: str, final: str) -> None:
        if temporary != final:
            raise ValueError(f"`RemoteFiles.commit({temporary!r}, {final!r})`: there is no atomic rename.")

    def names(self, folder: str) -> list[str]:
        self._system.invalidate_cache()  # other processes write there too
        try:
            return sorted(path.rstrip("/").rpartition("/")[2] for path in self._system.ls(folder, detail=False))
        except FileNotFoundError:
            return []

    def exists(self, path: str) -> bool:
        self._system.invalidate_cache()
        return self._system.exists(path)

    def unlink(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._system.rm_file(path)

    def remove(self, folder: str) -> None:
        self._system.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            self._system.rm(folder, recursive=True)

    @contextlib.contextmanager
    def hold(self, folder: str) -> Iterator[None]:
        self._system.makedirs(folder, exist_ok=True)
        yield

    def lock(self, path: str, shared: bool = False) -> Lock | None:
        return None

    def identity(self, folder: str) -> str:
        return f"{folder}:{os.getpid()}" if folder.startswith("memory:") else folder

    def idle(self, folder: str) -> bool:
        names = self.names(folder)
        try:
            changed = [self._system.modified(f"{folder}/{name}").timestamp() for name in names]
        except NotImplementedError:  # leave it: better a folder too many than one too few
            return False
        except FileNotFoundError:  # its writer is at work
            return False
        return bool(changed) and time.time() - max(changed) > STALE_S

"""Files of a file system that is mounted here.

What is lost in a power failure depends on the order of a few system calls, so these go through one seam, ``calls``,
where tests record and replay them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import time
import uuid
import weakref
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

from lightning_async.engine.files.protocol import PIECE, STALE_S, Chunk, FileRecord, Lock, checking, compare, pieces

__all__ = ["LocalFiles"]

_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _let_go() -> None:
    """In a fork, such as a loader's worker: it may outlive this process, whose locks shall end with it."""
    for lock in list(_locks):
        lock.close()


os.register_at_fork(after_in_child=_let_go)


class LocalFiles:
    """Files that are on the disk when their writer says so.

    Args:
        calls: where system calls come from. Default: ``os``.

    Raises:
        OSError: of any method, with the path.
    """

    atomic = True

    def __init__(self, calls: Any = os) -> None:
        self._calls = calls

    def write(self, path: str, chunks: Iterable[Chunk]) -> FileRecord:
        self._make(os.path.dirname(path))
        with _naming(path):
            descriptor = self._calls.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            try:
                size = crc = 0
                for piece in pieces(chunks):
                    crc = zlib.crc32(piece, crc)
                    size += len(piece)
                    while piece:  # a write may take a part only
                        piece = piece[self._calls.write(descriptor, piece) :]
                # Never tried again where it fails: the kernel may have dropped what it could not write.
                self._calls.fsync(descriptor)
            finally:
                self._calls.close(descriptor)
        return FileRecord(size, crc)

    def read(self, path: str) -> bytes:
        with _naming(path), open(path, "rb") as file:
            return file.read()

    def view(self, path: str) -> memoryview:
        with _naming(path), open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))

    def check(self, path: str, record: FileRecord) -> None:
        with checking(path, record), _naming(path), open(path, "rb", buffering=0) as file:
            compare(path, record, os.fstat(file.fileno()).st_size, iter(lambda: file.read(PIECE), b""))

    def sync(self, folder: str) -> None:
        with _naming(folder), self._opened(folder) as descriptor:
            try:
                self._calls.fsync(descriptor)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems sync files only
                    raise

    def rename(self, old: str, new: str) -> None:
        with _naming(new):
            self._calls.rename(old, new)
        self.sync(os.path.dirname(new))

    def commit(self, temporary: str, final: str) -> None:
        self.sync(temporary)
        self.rename(temporary, final)

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(folder))
        except FileNotFoundError:
            return []

    def exists(self, path: str) -> bool:
        return os.path.lexists(path)

    def unlink(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._calls.unlink(path)

    def remove(self, folder: str) -> None:
        if os.path.islink(folder) or not os.path.isdir(folder):  # what a link leads to is not ours
            self.unlink(folder)
            return
        for name in self.names(folder):
            self.remove(f"{folder}/{name}")
        with contextlib.suppress(FileNotFoundError):
            self._calls.rmdir(folder)

    @contextlib.contextmanager
    def hold(self, folder: str) -> Iterator[None]:
        self._make(folder)
        with self._opened(folder) as descriptor:
            # Without waiting: where the file system has no locks, the folder's age tells others.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            yield

    def identity(self, folder: str) -> str:
        try:
            with open("/proc/sys/kernel/random/boot_id") as file:  # names of hosts need not differ
                host = file.read().strip()
            found = os.stat(folder)
        except OSError:
            return uuid.uuid4().hex
        return f"{host}:{found.st_dev}:{found.st_ino}"

    def idle(self, folder: str) -> bool:
        try:
            with self._opened(folder) as descriptor:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
                except OSError:
                    return time.time() - os.fstat(descriptor).st_mtime > STALE_S
        except (FileNotFoundError, NotADirectoryError):
            pass
        return True

    def lock(self, path: str, shared: bool = False) -> Lock | None:
        self._make(os.path.dirname(path))
        with _naming(path):
            descriptor = self._calls.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            self._calls.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise
            return None
        _locks.add(lock := Lock(descriptor))
        return lock

    def _make(self, folder: str) -> None:
        """A new folder is durable only when the one that it lies in is."""
        if not folder or os.path.isdir(folder):
            return
        above = os.path.dirname(folder)
        self._make(above)
        with contextlib.suppress(FileExistsError):  # another rank was quicker
            self._calls.mkdir(folder)
        self.sync(above)

    @contextlib.contextmanager
    def _opened(self, folder: str) -> Iterator[int]:
        descriptor = self._calls.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            self._calls.close(descriptor)


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Errors of calls that know a descriptor only get the path."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, path) from error

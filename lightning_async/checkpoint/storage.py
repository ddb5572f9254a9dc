"""Files that are durable when their writer says so, with their sizes and checksums; local ones and fsspec's.

`files_at` finds the file system of a path. What is lost in a power failure depends on the order of a few system calls,
so these go through one seam, ``calls``, where tests record and replay them. `seal` and `unseal` put a checksum over a
value. Standard library only: the process that writes checkpoints imports this without torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import re
import time
import uuid
import weakref
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from lightning_async.errors import DamagedCheckpoint

PIECE = 4 << 20
"""Bytes that are written or read at a time; a checksum is taken while they are in the processor's cache."""

STALE_S = 3600.0
"""Seconds without a change after which nobody writes in a folder any more, where a file system has no locks."""

Chunk = bytes | bytearray | memoryview | mmap.mmap
_SEALED = re.compile(rb'\{"crc32": "([0-9a-f]{8})",\n"sealed": (.*)\}\n', re.DOTALL)


def files_at(dirpath: str | os.PathLike[str]) -> tuple[Files, str]:
    """Return the file system that a path or URL belongs to, and the path in the form in which it is asked for there.

    >>> files_at("file:///data/run/")[1]
    '/data/run'
    """
    path = os.fspath(dirpath)
    scheme, found, rest = path.partition("://")
    if found and scheme not in ("file", "local"):
        return RemoteFiles(path), path.rstrip("/")
    return LocalFiles(), os.path.abspath(os.path.expanduser(rest if found else path))


@dataclass(frozen=True)
class FileRecord:
    size: int
    crc32: int


class Lock:
    """A file that is locked until its descriptor is closed here, and in every process that it was handed to."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def write(self, data: bytes) -> None:
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, data, 0)

    def close(self) -> None:
        descriptor = self.descriptor
        self.descriptor = -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


def pieces(chunks: Iterable[Chunk]) -> Iterator[memoryview]:
    for chunk in chunks:
        whole = memoryview(chunk).cast("B")
        for start in range(0, len(whole), PIECE):
            yield whole[start : start + PIECE]


def compare(path: str, record: FileRecord, size: int, parts: Iterator[bytes]) -> None:
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
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise DamagedCheckpoint(f"{path} is missing; it had {record.size} bytes.") from None


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _let_go() -> None:
    """Close all locks in a fork, such as a loader's worker: it may outlive this process, with which they shall end."""
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
    """Whether a folder can be renamed in one step."""

    def __init__(self, calls: Any = os) -> None:
        self._calls = calls

    def write(self, path: str, chunks: Iterable[Chunk]) -> FileRecord:
        """Write a new file, and its folder where that is missing; durable when it returns."""
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
        """Return all that a file holds, mapped where that is possible; what is written there stays there."""
        with _naming(path), open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))

    def check(self, path: str, record: FileRecord) -> None:
        """Read the whole file; raise `DamagedCheckpoint` where it does not hold what the record says."""
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
        """Give a folder a new name, or a file where that is atomic; durable when it returns."""
        with _naming(new):
            self._calls.rename(old, new)
        self.sync(os.path.dirname(new))

    def commit(self, temporary: str, final: str) -> None:
        """Give a written folder its final name: after a power failure, all of it is there or nothing."""
        self.sync(temporary)
        self.rename(temporary, final)

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; none where it is missing."""
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
        """Make a folder, and let others know for a while that a living process writes in it."""
        self._make(folder)
        with self._opened(folder) as descriptor:
            # Without waiting: where the file system has no locks, the folder's age tells others.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            yield

    def identity(self, folder: str) -> str:
        """Return what is equal for two processes only where they see the same folder, not two of one name."""
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
        """Lock a file; None where the file system has no locks. Raise BlockingIOError where another one holds it."""
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
        """Make a folder, durably: a new one is durable only when the one that it lies in is."""
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
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, path) from error


class RemoteFiles:
    """Files behind fsspec: object stores, memory, whatever has a URL. Methods are those of `LocalFiles`.

    A file is durable when it is closed. Folders have no atomic rename there: of several files, one that is written last
    is the mark.

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


Files = LocalFiles | RemoteFiles
"""The file system of a directory of checkpoints. Paths are joined with ``/``."""


def seal(value: object) -> bytes:
    """Return JSON with a checksum over itself, JSON still. NaN and infinities are written as Python's ``json`` does."""
    body = json.dumps(value, indent=1).encode()
    return b'{"crc32": "%08x",\n"sealed": %s}\n' % (zlib.crc32(body), body)


def unseal(data: bytes, path: str) -> Any:
    found = _SEALED.fullmatch(data)
    if found is None:
        raise DamagedCheckpoint(f"{path} has {len(data)} bytes that are no manifest.")
    if int(found[1], 16) != zlib.crc32(found[2]):
        raise DamagedCheckpoint(f"{path} does not have the checksum {found[1].decode()} that it gives itself.")
    try:
        return json.loads(found[2])
    except (ValueError, RecursionError) as error:  # whoever wrote this has sealed what is no JSON
        raise DamagedCheckpoint(f"{path} does not hold what a manifest must: {error}") from error

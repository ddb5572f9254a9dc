"""Durable files, with sizes and checksums, on local disks or behind fsspec.

`files_at` returns the file system of a path. `seal` and `unseal` add and verify a checksum of a value. A power failure
can destroy more or fewer files, depending on the order of a few system calls. These calls therefore go through one
attribute, ``calls``, where tests record and replay them. This module imports the standard library only, because the
writer process starts without torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import re
import stat
import time
import uuid
import weakref
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from lightning_async._subprocess import boot_id
from lightning_async.errors import DamagedCheckpoint

PIECE = 4 << 20
"""Number of bytes that are written or read at a time: few enough to be in the processor's cache for the checksum."""

LONGEST_TEXT = 64 << 20
"""Largest number of bytes of a manifest, and of other short files."""

STALE_S = 3600.0
"""Seconds without a change after which a folder counts as unused, on file systems without locks."""

Chunk = bytes | bytearray | memoryview | mmap.mmap
_SEALED = re.compile(rb'\{"crc32": "([0-9a-f]{8})",\n"sealed": (.*)\}\n', re.DOTALL)


def files_at(dirpath: str | os.PathLike[str]) -> tuple[Files, str]:
    """Return the file system of a path or URL, and the path in the form that this file system expects.

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
    """The size in bytes and the checksum of a file, as they were when it was written."""

    size: int
    crc32: int


class Lock:
    """A locked file.

    The lock lasts until the descriptor is closed in this process and in all processes that inherited it.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def write(self, data: bytes) -> None:
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, data, 0)

    def is_at(self, path: str) -> bool:
        """Return whether the path still leads to the locked file: it may have been deleted, and made again."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), os.lstat(path))
        except FileNotFoundError:
            return False
        except OSError:  # the file system does not answer, which says nothing of the file
            return True

    def close(self) -> None:
        """Close the descriptor in this process; a second call does nothing."""
        descriptor = self.descriptor
        self.descriptor = -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


def pieces(chunks: Iterable[Chunk]) -> Iterator[memoryview]:
    """Cut chunks into pieces of at most `PIECE` bytes."""
    for chunk in chunks:
        whole = memoryview(chunk).cast("B")
        for start in range(0, len(whole), PIECE):
            yield whole[start : start + PIECE]


def compare(path: str, record: FileRecord, size: int, parts: Iterator[bytes]) -> None:
    """Raise DamagedCheckpoint if the size or the checksum of a file differs from its record.

    Args:
        path: Path of the file, for error messages.
        record: Size and checksum of the file when it was written.
        size: Present size of the file, in bytes.
        parts: The present contents, piece by piece.
    """
    if size != record.size:
        raise DamagedCheckpoint(f"{path} has {size} bytes, {record.size} were written.")
    crc = read = 0
    for piece in parts:
        crc = zlib.crc32(piece, crc)
        read += len(piece)
    # The size again: the file may have been cut while it was read.
    if (read, crc) != (record.size, record.crc32):
        raise DamagedCheckpoint(f"{path} has the checksum {crc:08x}, {record.crc32:08x} was written.")


@contextlib.contextmanager
def checking(path: str, record: FileRecord) -> Iterator[None]:
    """Turn the error of a missing file in the block into DamagedCheckpoint; ``record`` is the file's record."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise DamagedCheckpoint(f"{path} is missing; it had {record.size} bytes.") from None


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _let_go() -> None:
    """Close all locks in a forked process, such as a data loader's worker, because the fork may outlive its parent."""
    for lock in list(_locks):
        lock.close()


# A lock must end with the process that took it, not with the last of its forks.
os.register_at_fork(after_in_child=_let_go)


class LocalFiles:
    """Durable operations on local files: a method that writes returns only when the data is on the disk.

    A method that fails raises an OSError that names the path.

    Args:
        calls: Module or object with the system calls. Default: ``os``.
    """

    atomic = True
    """Whether a folder can be renamed in one step."""

    def __init__(self, calls: Any = os) -> None:
        self._calls = calls

    def write(self, path: str, chunks: Iterable[Chunk]) -> FileRecord:
        """Write a file, and make its folder if the folder is missing; the file is durable when this returns.

        An existing file is replaced. So is a link, whose target stays as it is.
        """
        self._make(os.path.dirname(path))
        new = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with _naming(path):
            # Never into what is there: whoever may write into the folder could have made a link to any file.
            try:
                descriptor = self._calls.open(path, new, 0o666)
            except FileExistsError:
                self.unlink(path)
                descriptor = self._calls.open(path, new, 0o666)
            try:
                size = crc = 0
                for piece in pieces(chunks):
                    crc = zlib.crc32(piece, crc)
                    size += len(piece)
                    while piece:  # the system may write only a part at a time
                        piece = piece[self._calls.write(descriptor, piece) :]
                # Never repeated if it fails: the kernel may have dropped the data, and report success then.
                self._calls.fsync(descriptor)
            finally:
                self._calls.close(descriptor)
        return FileRecord(size, crc)

    def read(self, path: str) -> bytes:
        """Return the contents of a short file; raise DamagedCheckpoint if it has more than `LONGEST_TEXT` bytes."""
        with _naming(path), _plain(path) as file:
            if (size := os.fstat(file.fileno()).st_size) > LONGEST_TEXT:
                raise DamagedCheckpoint(f"{path} has {size} bytes; at most {LONGEST_TEXT} are read at once.")
            return file.read()

    def view(self, path: str) -> memoryview:
        """Return the contents of a file, memory-mapped where possible.

        Writes to the returned memory do not change the file.
        """
        with _naming(path), _plain(path) as file:
            # `mmap` refuses empty files.
            if not os.fstat(file.fileno()).st_size:
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))

    def check(self, path: str, record: FileRecord) -> None:
        """Read the whole file; raise `DamagedCheckpoint` if the file is missing or differs from the record."""
        with checking(path, record), _naming(path), _plain(path) as file:
            compare(path, record, os.fstat(file.fileno()).st_size, iter(lambda: file.read(PIECE), b""))

    def sync(self, folder: str) -> None:
        """Make the entries of a folder durable: the creation, renaming and deletion of files in it."""
        with _naming(folder), self._opened(folder) as descriptor:
            try:
                self._calls.fsync(descriptor)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems only sync files
                    raise

    def rename(self, old: str, new: str) -> None:
        """Rename a folder or a file in one step; the new name is durable when this returns."""
        with _naming(new):
            self._calls.rename(old, new)
        self.sync(os.path.dirname(new))

    def commit(self, temporary: str, final: str) -> None:
        """Rename a complete folder to its final name, durably.

        After a power failure, the final name either does not exist or has all contents.
        """
        # In this order: the final name must never be durable before the contents are.
        self.sync(temporary)
        self.rename(temporary, final)

    def names(self, folder: str) -> list[str]:
        """Return the sorted names in a folder; an empty list if the folder is missing."""
        try:
            return sorted(os.listdir(folder))
        except FileNotFoundError:
            return []

    def exists(self, path: str) -> bool:
        return os.path.lexists(path)

    def unlink(self, path: str) -> None:
        """Delete a file, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            self._calls.unlink(path)

    def remove(self, folder: str) -> None:
        """Delete a folder with all its contents, if it exists."""
        if os.path.islink(folder) or not os.path.isdir(folder):  # the target of a link does not belong to us
            self.unlink(folder)
            return
        for name in self.names(folder):
            self.remove(f"{folder}/{name}")
        with contextlib.suppress(FileNotFoundError):
            self._calls.rmdir(folder)

    @contextlib.contextmanager
    def hold(self, folder: str) -> Iterator[None]:
        """Make a folder; during the block, mark the folder as used by a living process, see `idle`."""
        self._make(folder)
        with self._opened(folder, os.O_NOFOLLOW) as descriptor:
            # Without waiting, and without an error: if there are no locks, others look at the folder's age.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            yield

    def identity(self, folder: str) -> str:
        """Return a text that is equal in two processes only if both see the same folder, not just the same path."""
        try:
            found = os.stat(folder)
            return f"{boot_id()}:{found.st_dev}:{found.st_ino}"
        except OSError:
            return uuid.uuid4().hex

    def idle(self, folder: str) -> bool:
        """Return whether no living process uses the folder, see `hold`.

        On a file system without locks, a folder is unused if it has not changed for `STALE_S` seconds.
        """
        try:
            with self._opened(folder) as descriptor:
                try:
                    # An exclusive lock fails as long as any process holds the folder, see `hold`.
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
                except OSError:
                    return time.time() - os.fstat(descriptor).st_mtime > STALE_S
        except (FileNotFoundError, NotADirectoryError):
            pass
        return True

    def lock(self, path: str, shared: bool = False) -> Lock | None:
        """Lock a file, without waiting.

        Args:
            path: Path of the file, which is made if it is missing.
            shared: Whether to take a shared lock, which several processes can hold. Default: False, an exclusive one.

        Returns:
            The lock; None if the file system has no locks.

        Raises:
            BlockingIOError: Another process holds a lock that excludes this one.
            DamagedCheckpoint: There is a link, a folder, a pipe or a device in place of the file.
        """
        self._make(os.path.dirname(path))
        if os.path.lexists(path) and (os.path.islink(path) or not os.path.isfile(path)):
            raise DamagedCheckpoint(f"{path} is a link, a folder, a pipe or a device, and no file of ours: delete it.")
        # What comes in its place in this moment is not followed, nor waited for.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with _naming(path):
            descriptor = self._calls.open(path, flags, 0o666)
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
        """Make a folder and its missing parents, durably: each parent is synced after a folder was made in it."""
        if not folder or os.path.isdir(folder):
            return
        above = os.path.dirname(folder)
        self._make(above)
        with contextlib.suppress(FileExistsError):  # another rank was quicker
            self._calls.mkdir(folder)
        self.sync(above)

    @contextlib.contextmanager
    def _opened(self, folder: str, flags: int = 0) -> Iterator[int]:
        descriptor = self._calls.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | flags)
        try:
            yield descriptor
        finally:
            self._calls.close(descriptor)


def _plain(path: str) -> IO[bytes]:
    """Open a file for reading, without a buffer; raise DamagedCheckpoint for a pipe, a device or a folder."""
    # Without waiting: a pipe opens only when somebody writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedCheckpoint(f"{path} is a folder, a pipe or a device, where a file was written.")
    return open(descriptor, "rb", buffering=0)


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Add the path to an OSError of the block that names no file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, path) from error


class RemoteFiles:
    """Files behind fsspec, such as object stores. The methods are documented in `LocalFiles`.

    A file is durable when it is closed. A folder cannot be renamed in one step. Therefore the file that is written
    last, the manifest, marks a folder as complete.

    Args:
        url: URL of any file in the file system.

    Raises:
        ModuleNotFoundError: fsspec, or a package that it needs for this kind of URL, is not installed.
        OSError: Any method may raise this.
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
        self._system.invalidate_cache()  # other processes write there, too
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
        except NotImplementedError:  # its age is unknown: better a folder too many than one too few
            return False
        except FileNotFoundError:  # a file has gone meanwhile, so a process is at work there
            return False
        return bool(changed) and time.time() - max(changed) > STALE_S


Files = LocalFiles | RemoteFiles
"""The file system of a directory of checkpoints. Paths are joined with ``/``."""


def seal(value: object) -> bytes:
    """Return JSON that contains a value and the checksum of that value.

    NaN and infinities are written as Python's ``json`` writes them.
    """
    body = json.dumps(value, indent=1).encode()
    return b'{"crc32": "%08x",\n"sealed": %s}\n' % (zlib.crc32(body), body)


def unseal(data: bytes, path: str) -> Any:
    """Return the value in the JSON that `seal` has made; ``path`` is for error messages.

    Raises:
        DamagedCheckpoint: The checksum does not match, or the data is malformed.
    """
    found = _SEALED.fullmatch(data)
    if found is None:
        raise DamagedCheckpoint(f"{path} has {len(data)} bytes that are no manifest.")
    if int(found[1], 16) != zlib.crc32(found[2]):
        raise DamagedCheckpoint(f"{path} does not have the checksum {found[1].decode()} that it gives itself.")
    try:
        return json.loads(found[2])
    except (ValueError, RecursionError) as error:  # the checksum is right, but the contents are not JSON
        raise DamagedCheckpoint(f"{path} does not hold what a manifest must: {error}") from error

"""Snapshots of a server's shard on disk, for the case that its host is lost; damaged snapshots are skipped.

    server-2/00000007.bin    the weights, and each field of the optimizer's state, one after the other
    server-2/00000007.json   the record, with checksums of both files; written once the .bin file is durable

A snapshot is valid once its .json file exists. The two newest are kept. `Snapshots` takes the snapshots of one store,
and `Shelf` is the folder that contains them.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_async.checkpoint.storage import FileRecord, Files, files_at, seal, unseal
from lightning_async.errors import AsyncTrainingError, DamagedCheckpoint
from lightning_async.parameter_server.consistency import WorkerRules
from lightning_async.parameter_server.store import Store

_FORMAT = 2
_KEPT = 2
_LOCK_S = 30.0  # the lock of a server that was killed is free once the system has taken its memory back
GONE = (
    "was taken for dead, or was started again elsewhere; or another training has begun anew with the same servers, or "
    "has a worker of the same name, as it may not in the modes sync and ssp."
)


class Snapshots:
    """The snapshots of one store; a store without weights begins with the newest one.

    Args:
        store: The store.
        lock: Lock under which the store is used.
        shelf: Folder of the snapshots.
        every_s: Seconds between two snapshots, taken only if anything has changed. Default: infinity, a snapshot is
            taken when a worker asks.
    """

    def __init__(self, store: Store, lock: Any, shelf: Shelf, every_s: float = math.inf) -> None:
        self._store = store
        self._lock = lock
        self._shelf = shelf
        self._every_s = every_s
        self._taking = threading.Lock()
        self._copies: dict[str, Tensor] = {}
        self._taken: Mapping[str, Any] = {}
        if (found := shelf.newest()) is not None:
            # Only a server that has lost its memory needs the snapshot; a restarted one has newer weights.
            if restores := not store.ready:
                store.restore(found.record, found.parts)
            self._taken = store.record if restores else found.record

    @property
    def version(self) -> int:
        """The newest version whose pushes are all in the folder's newest snapshot; -1 if there is none.

        The caller holds the lock. A push that waits in a buffer has not changed the version yet, so a snapshot of this
        version may lack it.
        """
        if not self._store.ready or self._taken.get("incarnation") != self._store.incarnation:
            return -1
        version = self._taken["version"]
        # A push that waits in a buffer changes no version, so a snapshot of this version may lack it.
        return version if version < self._store.version or self._has_all else version - 1

    @property
    def _has_all(self) -> bool:
        now = self._store.record
        then = self._taken
        if any(then.get(each) != now[each] for each in ("incarnation", "version")):
            return False
        before = {(name, entry["life"]): entry["push"] for name, entry in then["workers"].items()}
        return all(entry["push"] <= before.get((name, entry["life"]), 0) for name, entry in now["workers"].items())

    def begin(self) -> None:
        """Start a thread that takes a snapshot every ``every_s`` seconds, if that is finite."""
        if self._every_s < math.inf:
            threading.Thread(target=self._now_and_then, name="lightning_async snapshots", daemon=True).start()

    def take(self, last: bool = False) -> None:
        """Write a snapshot of the present version, unless the newest snapshot contains all pushes.

        Workers wait while the arrays are copied, and not while the copies are written.

        Args:
            last: Whether to keep the lock until the process ends, so that no push is applied afterwards. Default:
                False.

        Raises:
            OSError: The snapshot cannot be written.
        """
        # One snapshot at a time, because all use the same copies.
        with self._taking:
            # Kept until the process ends.
            if last:
                self._lock.acquire()
            with self._lock:
                if not self._store.ready or self._has_all:
                    return
                numel = self._store.contents["numel"]
                names = list(self._store.parts)
            while True:
                if list(self._copies) != names:
                    # Kept for later snapshots, which need no new memory then.
                    self._copies = {name: torch.zeros(numel) for name in names}
                with self._lock:
                    record = dict(self._store.record)
                    names = list(self._store.parts)
                    # A worker may have joined or left between the two locks: then the copies are made again.
                    if list(self._copies) == names:
                        self._store.copy_parts(self._copies)
                        break
            # Without the lock: workers go on while the disk is written.
            self._shelf.put(Snapshot(record, self._copies))
            with self._lock:
                self._taken = record

    def _now_and_then(self) -> None:
        while True:
            time.sleep(self._every_s)
            try:
                self.take()
            except (OSError, AsyncTrainingError) as error:
                print(f"A parameter server cannot take a snapshot: {error}", file=sys.stderr)


class Shelf:
    """The folder of one server's snapshots, locked for this server.

    Args:
        folder: Folder of all servers' snapshots, as a path or as a URL of fsspec.
        server: Number of the server.
        table: Number of the table. Default: 0.

    Raises:
        OSError: The folder cannot be written to.
        AsyncTrainingError: Another server has locked the folder.
    """

    def __init__(self, folder: str, server: int, table: int = 0) -> None:
        self._files, root = files_at(folder)
        self._folder = f"{root}/server-{server}" + (f"-table-{table}" if table else "")
        self._lock = _locked(self._files, f"{self._folder}/lock")
        self._number = max(self._numbers(".bin") + self._numbers(".json"), default=0)
        # The server died between the two files.
        for torn in set(self._numbers(".bin")) - set(self._numbers(".json")):
            self._files.unlink(self._path(torn, ".bin"))

    def put(self, snapshot: Snapshot) -> None:
        """Write a snapshot, which is durable once this returns; raise OSError if it cannot be written."""
        number = self._number + 1
        try:
            self._write(number, snapshot)
        except OSError:
            self._delete(number)  # an unfinished snapshot would take the room that the next one needs
            raise
        self._number = number
        # Deleted only once the new one is durable.
        for old in [each for each in self._numbers(".json") if each <= number - _KEPT]:
            self._delete(old)

    def newest(self) -> Snapshot | None:
        """Return the newest undamaged snapshot, or None; print a line for each damaged one."""
        for number in sorted(self._numbers(".json"), reverse=True):
            try:
                return self._read(number)
            except (OSError, DamagedCheckpoint) as error:
                print(f"A snapshot of a parameter server is skipped: {error}", file=sys.stderr)
        return None

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def _write(self, number: int, snapshot: Snapshot) -> None:
        data = self._path(number, ".bin")
        described = self._path(number, ".json")
        names = {name: part.numel() for name, part in snapshot.parts.items()}
        arrays: list[Any] = [part.numpy() for part in snapshot.parts.values() if part.numel()]
        file = self._files.write(data, [memoryview(each).cast("B") for each in arrays])
        self._files.sync(self._folder)
        value = {"format": _FORMAT, "record": dict(snapshot.record), "parts": names, "file": asdict(file)}
        # Written second, and only once the data is durable: this file makes the snapshot count.
        self._files.write(described, [seal(value)])
        self._files.sync(self._folder)

    def _delete(self, number: int) -> None:
        with contextlib.suppress(OSError):  # a file that cannot be deleted takes room, and does no other harm
            self._files.unlink(self._path(number, ".json"))
            self._files.unlink(self._path(number, ".bin"))

    def _read(self, number: int) -> Snapshot:
        described = self._path(number, ".json")
        data = self._path(number, ".bin")
        value = unseal(self._files.read(described), described)
        if not isinstance(value, dict) or value.get("format") != _FORMAT:
            raise DamagedCheckpoint(f"{described} is no snapshot that this version can read.")
        self._files.check(data, FileRecord(**value["file"]))
        whole = torch.frombuffer(bytearray(self._files.view(data)) or bytearray(1), dtype=torch.uint8)
        parts = {}
        at = 0
        for name, numel in value["parts"].items():
            size = numel * torch.float32.itemsize
            parts[name] = whole[at : at + size].view(torch.float32)
            at += size
        return Snapshot(value["record"], parts)

    def _numbers(self, ending: str) -> list[int]:
        names = [name for name in self._files.names(self._folder) if name.endswith(ending)]
        return [int(name[: -len(ending)]) for name in names if name[: -len(ending)].isdigit()]

    def _path(self, number: int, ending: str) -> str:
        return f"{self._folder}/{number:08d}{ending}"


@dataclass(frozen=True)
class Snapshot:
    """One version of a shard: the record of its store, and the store's arrays by name."""

    record: Mapping[str, Any]
    parts: Mapping[str, Tensor]


def _locked(files: Files, path: str) -> Any:
    until = time.monotonic() + _LOCK_S
    while True:
        try:
            return files.lock(path)
        except BlockingIOError:
            if time.monotonic() > until:
                raise AsyncTrainingError(f"{path} is locked: another server keeps its snapshots there.") from None
        time.sleep(0.05)


class RequestError(Exception):
    """A request that a server refuses.

    Args:
        kind: Kind of the refusal, which selects the worker's exception.
        why: Text for the worker.
    """

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


@contextmanager
def memory_for(worker: str, worker_rules: WorkerRules) -> Iterator[None]:
    """Turn an OSError that is raised in the ``with`` block into a RequestError that says for what memory is missing."""
    try:
        yield
    except OSError as error:
        why = f"its host has no memory for what `staleness={worker_rules.staleness!r}` keeps of {worker!r}: {error}."
        raise RequestError("memory", why) from error

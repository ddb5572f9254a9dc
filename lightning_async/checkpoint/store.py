"""The directory of a run's checkpoints: what is in it, and every step from a folder to a checkpoint.

    000017-step-1200.tmp-<run> --- all files durable, the manifest last: commit ---> 000017-step-1200
    000017-step-1200 --- damaged: quarantine ---> 000017-step-1200.damaged-1
    000017-step-1200 --- remove ---> 000017-step-1200.removed ---> nothing

A final name stands for a whole checkpoint at any moment. Where folders cannot be renamed in one step (fsspec), files
are written under the final name, and ``manifest.json``, the last one, makes them a checkpoint. Standard library only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_async.checkpoint.storage import FileRecord, Files, files_at, seal, unseal
from lightning_async.errors import CheckpointError, DamagedCheckpoint

FORMAT = 2
"""Counts changes that an older version of this package could not read. What has no pickles is of format 1."""
MANIFEST = "manifest.json"
GOOD = "good.json"
_LONGEST = 4000  # characters of an error
_NAME = re.compile(r"(?P<number>\d{6,})-step-(?P<step>\d+)(?P<rest>\..+)?")
_RUN = re.compile(r"[A-Za-z0-9_-]+")


class CheckpointStore:
    """The checkpoints in one directory, which need not exist: a local one, or a URL that fsspec knows."""

    def __init__(self, dirpath: str | os.PathLike[str], files: Files | None = None) -> None:
        found, self.dirpath = files_at(dirpath)
        self.files = files or found

    def final(self, number: int, step: int) -> str:
        return f"{self.dirpath}/{number:06d}-step-{step}"

    def temporary(self, number: int, step: int, run: str) -> str:
        if not _RUN.fullmatch(run):
            raise ValueError(f"`CheckpointStore.temporary(run={run!r})` must be letters, digits, `-` and `_`.")
        final = self.final(number, step)
        return f"{final}.tmp-{run}" if self.files.atomic else final

    def next_number(self) -> int:
        """Return one more than any number in the directory, those of damaged and unfinished checkpoints included."""
        return 1 + max((int(found["number"]) for found in self._matches()), default=0)

    def begun(self, number: int, run: str) -> bool:
        """Return whether this number is there, or one rank of a run writes it alone, as ``<run>-<rank>``."""
        rests = [match["rest"] or "" for match in self._matches() if int(match["number"]) == number]
        return any(not rest.startswith(".tmp-") or rest.startswith(f".tmp-{run}-") for rest in rests)

    def hold(self, temporary: str) -> contextlib.AbstractContextManager[None]:
        """Make the folder; while this lasts, or until this process dies, `clean` leaves it alone."""
        return self.files.hold(temporary)

    def add_rank(self, temporary: str, manifest: RankManifest) -> None:
        self.publish(f"{temporary}/{_rank_manifest(manifest.rank)}", manifest.to_bytes())

    def publish(self, path: str, data: bytes) -> None:
        if self.files.atomic:
            self.files.write(f"{path}.part", [data])
            self.files.rename(f"{path}.part", path)
        else:  # a file of a remote store is there when it is closed
            self.files.write(path, [data])

    def give_up(self, temporary: str, rank: int, why: str) -> None:
        """Say that nothing will come of a rank's part, so that nobody waits for it."""
        self.publish(f"{temporary}/{failure_of(rank)}", why[:_LONGEST].encode())
        self.discard_if_committed(temporary)

    def discard_if_committed(self, temporary: str) -> None:
        """Delete a folder that was made anew, as another rank has renamed it meanwhile: nobody else would."""
        final, _, run = temporary.rpartition(".tmp-")
        if self.files.atomic and run and self.files.exists(f"{final}/{MANIFEST}"):
            self.discard(temporary)

    def missing(self, temporary: str, ranks: Iterable[int]) -> list[int]:
        names = set(self.files.names(temporary))
        return [rank for rank in ranks if _rank_manifest(rank) not in names]

    def silent_and_failed(self, temporary: str, ranks: Iterable[int]) -> tuple[list[int], list[int]]:
        """Return the ranks that did not say what became of their parts, and those that have said that they failed."""
        missing = self.missing(temporary, ranks)
        names = set(self.files.names(temporary)) if missing else ()
        failed = [rank for rank in missing if failure_of(rank) in names]
        return [rank for rank in missing if rank not in failed], failed

    def discard_if_hopeless(self, temporary: str, ranks: Collection[int]) -> None:
        """Delete a folder whose first rank has failed, and would not: the last rank to be ready does."""
        silent, failed = self.silent_and_failed(temporary, ranks)
        if min(ranks) in failed and not silent:
            self.discard(temporary)

    def commit(self, temporary: str, manifest: Manifest) -> CheckpointEntry:
        """Make a checkpoint of a folder in which all of ``manifest.ranks`` are ready; durable when it returns.

        Raises:
            CheckpointError: a rank is missing.
            DamagedCheckpoint: a rank's manifest does not hold what was written, two wrote one file, or one is gone.
        """
        if missing := self.missing(temporary, manifest.ranks):
            raise CheckpointError(f"{temporary} cannot be committed: nothing is there of ranks {missing}.")
        files: dict[str, FileRecord] = {}
        pickles = False
        for rank in manifest.ranks:
            name = _rank_manifest(rank)
            data = self.files.read(f"{temporary}/{name}")
            said = RankManifest.from_bytes(data, f"{temporary}/{name}")
            listed = said.files
            pickles |= said.pickles
            if twice := files.keys() & listed.keys():
                raise DamagedCheckpoint(f"{temporary}/{name} names {sorted(twice)}, which another rank wrote.")
            files |= {**listed, name: FileRecord(len(data), zlib.crc32(data))}
        if gone := sorted(files.keys() - set(self.files.names(temporary))):
            raise DamagedCheckpoint(f"{temporary} had {gone}, which somebody has deleted.")
        manifest = dataclasses.replace(manifest, files=files, pickles=pickles)
        final = self.final(manifest.number, manifest.step)
        self.files.write(f"{temporary}/{MANIFEST}", [manifest.to_bytes()])
        self.files.commit(temporary, final)
        return CheckpointEntry(final.rpartition("/")[2], final, manifest.number, manifest.step, manifest)

    def discard(self, temporary: str) -> None:
        self.files.unlink(f"{temporary}/{MANIFEST}")
        self.files.remove(temporary)

    def entries(self, number: int | None = None, name: str | None = None) -> list[CheckpointEntry]:
        wanted = [
            match
            for match in self._matches()
            if not match["rest"] and number in (None, int(match["number"])) and name in (None, match.string)
        ]
        found = [entry for match in wanted if (entry := self._entry(match))]
        return sorted(found, key=lambda entry: (entry.number, entry.step), reverse=True)

    def verify(self, entry: CheckpointEntry, part: int = 0, parts: int = 1) -> Manifest:
        """Read every file of a checkpoint, or one of so many ``parts`` of these; return its manifest, if it is whole.

        Raises:
            DamagedCheckpoint: names the file and what is wrong.
            CheckpointError: a newer version of this package wrote it.
        """
        manifest = self._manifest(entry)
        by_size = sorted(manifest.files.items(), key=lambda each: (-each[1].size, each[0]))
        for name, record in by_size[part::parts]:
            self.files.check(f"{entry.path}/{name}", record)
        return manifest

    def trouble(self, entry: CheckpointEntry, part: int = 0, parts: int = 1) -> CheckpointError | OSError | None:
        try:
            self.verify(entry, part, parts)
        except (CheckpointError, OSError) as error:
            return error
        return None

    def promote(self, entry: CheckpointEntry) -> None:
        """Mark a checkpoint as good, durably: training went on from it without harm."""
        if not self.files.exists(f"{entry.path}/{MANIFEST}"):  # the mark must not make a folder of that name again
            raise CheckpointError(f"{entry.path} is gone: it cannot be marked as good.")
        if self._is_good(entry):  # a mark that is there is not written a second time: it could be lost meanwhile
            return
        self.files.write(f"{entry.path}/{GOOD}", [seal({"number": entry.number})])
        self.files.sync(entry.path)

    def quarantine(self, entry: CheckpointEntry) -> str:
        """Take a damaged checkpoint out of the way; return its new path."""
        taken = set(self.files.names(self.dirpath))
        k = next(k for k in range(1, len(taken) + 2) if f"{entry.name}.damaged-{k}" not in taken)
        path = f"{entry.path}.damaged-{k}"
        with contextlib.suppress(FileNotFoundError):  # another rank was quicker
            self.files.rename(entry.path, path)
        return path

    def remove(self, entry: CheckpointEntry) -> None:
        """Delete a checkpoint; at no moment a part of it stands under its final name."""
        gone = f"{entry.path}.removed"
        if self.files.atomic:
            self.files.remove(gone)
            with contextlib.suppress(FileNotFoundError):
                self.files.rename(entry.path, gone)
            self.files.remove(gone)
        else:
            self.discard(entry.path)

    def clean(self, run: str = "", damaged: bool = False) -> list[str]:
        """Delete what was left unfinished and no living process holds, but nothing of this run; return the names."""
        left = []
        for match in self._matches():
            name = match.string
            rest = match["rest"] or ""
            path = f"{self.dirpath}/{name}"
            unfinished = rest.startswith(".tmp-") and rest != f".tmp-{run}"
            if not self.files.atomic and not rest:
                unfinished = not self.files.exists(f"{path}/{MANIFEST}")
            unwanted = rest == ".removed" or (damaged and rest.startswith(".damaged-"))
            if unwanted or (unfinished and self.files.idle(path)):
                self.files.remove(path)
                left.append(name)
        return left

    def writing(self) -> list[str]:
        return [path.rpartition("/")[2] for path in self.unfinished() if not self.files.idle(path)]

    def unfinished(self) -> list[str]:
        return [f"{self.dirpath}/{m.string}" for m in self._matches() if (m["rest"] or "").startswith(".tmp-")]

    def _matches(self) -> list[re.Match[str]]:
        return [found for found in map(_NAME.fullmatch, self.files.names(self.dirpath)) if found]

    def _entry(self, match: re.Match[str]) -> CheckpointEntry | None:
        name = match.string
        entry = CheckpointEntry(name, f"{self.dirpath}/{name}", int(match["number"]), int(match["step"]))
        try:
            return dataclasses.replace(entry, manifest=self._manifest(entry), good=self._is_good(entry))
        except (CheckpointError, OSError) as error:
            if not self.files.exists(entry.path if self.files.atomic else f"{entry.path}/{MANIFEST}"):
                return None  # gone meanwhile, or unfinished
            return dataclasses.replace(entry, error=error)

    def _manifest(self, entry: CheckpointEntry) -> Manifest:
        path = f"{entry.path}/{MANIFEST}"
        try:
            data = self.files.read(path)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise DamagedCheckpoint(f"{path} is missing.") from None
        manifest = Manifest.from_bytes(data, path)
        if (manifest.number, manifest.step) != (entry.number, entry.step):
            raise DamagedCheckpoint(f"{path} is that of {manifest.number:06d}-step-{manifest.step}.")
        if absent := [rank for rank in manifest.ranks if _rank_manifest(rank) not in manifest.files]:
            raise DamagedCheckpoint(f"{path} has no files of ranks {absent}.")
        return manifest

    def _is_good(self, entry: CheckpointEntry) -> bool:
        path = f"{entry.path}/{GOOD}"
        try:
            return unseal(self.files.read(path), path) == {"number": entry.number}
        except (OSError, DamagedCheckpoint):
            return False


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint under its final name; without a manifest where that cannot be read, and then ``error`` says why."""

    name: str
    path: str
    number: int
    step: int
    manifest: Manifest | None = None
    good: bool = False
    error: CheckpointError | OSError | None = None


def failure_of(rank: int) -> str:
    return f"rank-{rank}.failed"


def _rank_manifest(rank: int) -> str:
    return f"rank-{rank}.manifest.json"


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint, and where training stood.

    Args:
        number: counts the saves of a directory; order is by it.
        step: optimizer steps taken, their mean over asynchronous replicas. It may go back, after a rollback.
        round: rounds committed.
        generation: of the groups.
        world_size: ranks that trained.
        ranks: ranks whose files are here.
        created: seconds since 1970.
        metrics: what was logged, for keeping and finding the best.
        notes: anything else of plain values.
        files: all files beside this one; filled in when it is committed.
        pickles: whether there are pickled objects in them, which execute code when they are loaded; filled in, too.
    """

    number: int
    step: int
    round: int = 0
    epoch: int = 0
    generation: int = 0
    world_size: int = 1
    ranks: tuple[int, ...] = (0,)
    reason: str = ""
    created: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    pickles: bool = False

    def to_bytes(self) -> bytes:
        return _sealed(self)

    @classmethod
    def from_bytes(cls, data: bytes, path: str = "manifest.json") -> Manifest:
        value = _known(cls, data, path)
        return cls(**{**value, "ranks": tuple(value["ranks"])})


@dataclass(frozen=True)
class RankManifest:
    """The files that one rank has written, all of them durable; whether there are pickled objects in them."""

    rank: int
    files: Mapping[str, FileRecord]
    pickles: bool = False

    def to_bytes(self) -> bytes:
        return _sealed(self)

    @classmethod
    def from_bytes(cls, data: bytes, path: str = "rank manifest") -> RankManifest:
        return cls(**_known(cls, data, path))


def _sealed(manifest: Manifest | RankManifest) -> bytes:
    fields = dataclasses.asdict(manifest)
    if not fields.pop("pickles"):
        return seal({"format": 1, **fields})
    return seal({"format": FORMAT, **fields, "pickles": True})


def _known(kind: type[Manifest | RankManifest], data: bytes, path: str) -> dict[str, Any]:
    """Return the fields that this version knows; what a later one of the same format adds is passed over."""
    value = unseal(data, path)
    names = {each.name for each in dataclasses.fields(kind)}
    if isinstance(value, dict):
        value = {"pickles": False, **value}
    if not isinstance(value, dict) or not names | {"format"} <= value.keys() or not _is_number(value["format"]):
        raise DamagedCheckpoint(f"{path} does not hold what a manifest must.")
    if value["format"] > FORMAT:
        raise CheckpointError(
            f"{path} is of format {value['format']}, this version reads up to {FORMAT}: update lightning-async."
        )
    if strange := sorted(name for name in names if not _KINDS.get(name, _is_number)(value[name])):
        raise DamagedCheckpoint(f"{path} does not hold what a manifest must: {strange} are of another kind.")
    files = {name: FileRecord(record["size"], record["crc32"]) for name, record in value["files"].items()}
    return {**{name: value[name] for name in names}, "files": files}


def _is_number(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_file(name: str, record: object) -> bool:
    numbers = [record.get("size"), record.get("crc32")] if isinstance(record, dict) else [None]
    return _FILE.fullmatch(name) is not None and all(map(_is_number, numbers))


_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
_LATEST = 253402300800.0
"""The year 10000: no calendar knows a later one."""
_KINDS: dict[str, Callable[[Any], bool]] = {
    "reason": lambda value: isinstance(value, str),
    "created": lambda value: type(value) in (int, float) and 0 <= value < _LATEST,
    "ranks": lambda value: isinstance(value, list) and len(value) > 0 and all(map(_is_number, value)),
    "metrics": lambda value: isinstance(value, dict) and all(type(each) in (int, float) for each in value.values()),
    "versions": lambda value: isinstance(value, dict),
    "notes": lambda value: isinstance(value, dict),
    "files": lambda value: isinstance(value, dict) and all(_is_file(*item) for item in value.items()),
    "pickles": lambda value: isinstance(value, bool),
}
"""Whether a field is of its kind; the others are numbers, from 0 on."""

"""The directory of a run's checkpoints, and the renamings by which a folder becomes a checkpoint or ceases to be one.

    000017-step-1200.tmp-<run> --- all files durable, the manifest last: commit ---> 000017-step-1200
    000017-step-1200 --- damaged: quarantine ---> 000017-step-1200.damaged-1
    000017-step-1200 --- remove ---> 000017-step-1200.removed ---> nothing

A folder gets its final name only when its checkpoint is complete. Some file systems (fsspec) cannot rename a folder in
one step. There, files are written under the final name, and the last file, ``manifest.json``, makes the folder a
checkpoint. This module imports the standard library only.
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

FORMAT = 1
"""Newest format of manifests that this version reads."""
MANIFEST = "manifest.json"
GOOD = "good.json"
_LONGEST = 4000  # characters of an error that are kept
_NAME = re.compile(r"(?P<number>\d{6,})-step-(?P<step>\d+)(?P<rest>\..+)?")
_RUN = re.compile(r"[A-Za-z0-9_-]+")


class CheckpointStore:
    """The checkpoints in one directory. The directory need not exist yet.

    Args:
        dirpath: Local path, or URL of fsspec.
        files: File system. Default: None, the file system of the path.
    """

    def __init__(self, dirpath: str | os.PathLike[str], files: Files | None = None) -> None:
        found, self.dirpath = files_at(dirpath)
        self.files = files or found

    def final(self, number: int, step: int) -> str:
        """Return the path that a checkpoint has once it is committed."""
        return f"{self.dirpath}/{number:06d}-step-{step}"

    def temporary(self, number: int, step: int, run: str) -> str:
        """Return the path of an unfinished checkpoint.

        On a file system without atomic renames, this is the path that `final` returns. ``run`` is the name of the run.
        """
        if not _RUN.fullmatch(run):
            raise ValueError(f"`CheckpointStore.temporary(run={run!r})` must be letters, digits, `-` and `_`.")
        final = self.final(number, step)
        return f"{final}.tmp-{run}" if self.files.atomic else final

    def next_number(self) -> int:
        """Return one more than the largest number of a checkpoint in the directory.

        Damaged and unfinished checkpoints count, too.
        """
        return 1 + max((int(found["number"]) for found in self._matches()), default=0)

    def begun(self, number: int, run: str) -> bool:
        """Return whether the directory has a save with this number that makes another one superfluous.

        This is a save that was committed, or an unfinished save that a single rank of the run ``run`` writes without
        the other ranks. Unfinished saves by several ranks do not count, except on a file system without atomic renames.
        """
        rests = [match["rest"] or "" for match in self._matches() if int(match["number"]) == number]
        return any(not rest.startswith(".tmp-") or rest.startswith(f".tmp-{run}-") for rest in rests)

    def hold(self, temporary: str) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that makes the folder, and protects it from `clean` during the block.

        The protection ends, too, when this process ends.
        """
        return self.files.hold(temporary)

    def add_rank(self, temporary: str, manifest: RankManifest) -> None:
        """Write the manifest of one rank's part, after all files of that part are durable."""
        self.publish(f"{temporary}/{_rank_manifest(manifest.rank)}", manifest.to_bytes())

    def publish(self, path: str, data: bytes) -> None:
        """Write a file so that other processes see either the complete file or none."""
        if self.files.atomic:
            self.files.write(f"{path}.part", [data])
            self.files.rename(f"{path}.part", path)
        else:  # a file of a remote store appears when it is closed
            self.files.write(path, [data])

    def give_up(self, temporary: str, rank: int, why: str) -> None:
        """Report in the folder that a rank will not write its part, so that no other rank waits for the part.

        Args:
            temporary: Folder of the unfinished checkpoint.
            rank: The rank that will not write its part.
            why: Reason, for the other ranks.
        """
        self.publish(f"{temporary}/{failure_of(rank)}", why[:_LONGEST].encode())
        self.discard_if_committed(temporary)

    def discard_if_committed(self, temporary: str) -> None:
        """Delete an unfinished folder if its checkpoint is committed already.

        The first rank renames the folder when it commits. A rank that is late then makes the folder again under the old
        name. No other process deletes that folder.
        """
        final, _, run = temporary.rpartition(".tmp-")
        if self.files.atomic and run and self.files.exists(f"{final}/{MANIFEST}"):
            self.discard(temporary)

    def missing(self, temporary: str, ranks: Iterable[int]) -> list[int]:
        """Return those of ``ranks`` whose parts are not durable yet."""
        names = set(self.files.names(temporary))
        return [rank for rank in ranks if _rank_manifest(rank) not in names]

    def silent_and_failed(self, temporary: str, ranks: Iterable[int]) -> tuple[list[int], list[int]]:
        """Return two lists of ranks: those that have written neither a part nor a failure, and those with a failure."""
        # Parts first, failures second: a rank that reports in between is seen at the next look.
        missing = self.missing(temporary, ranks)
        names = set(self.files.names(temporary)) if missing else ()
        failed = [rank for rank in missing if failure_of(rank) in names]
        return [rank for rank in missing if rank not in failed], failed

    def discard_if_hopeless(self, temporary: str, ranks: Collection[int]) -> None:
        """Delete an unfinished folder if its checkpoint cannot be committed, and no rank will write into it any more.

        That is so if the first of ``ranks`` has reported a failure, and each other rank has written a part or reported
        a failure. Each rank calls this after it has written, so the last rank deletes the folder.
        """
        silent, failed = self.silent_and_failed(temporary, ranks)
        if min(ranks) in failed and not silent:
            self.discard(temporary)

    def commit(self, temporary: str, manifest: Manifest) -> CheckpointEntry:
        """Turn a folder into a checkpoint, after all ``manifest.ranks`` have written their parts; durable on return.

        Raises:
            CheckpointError: A rank's part is missing.
            DamagedCheckpoint: A rank's manifest is damaged, two ranks wrote a file of the same name, or a file is
                missing.
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
        # A last look: another program may have cleaned the directory.
        if gone := sorted(files.keys() - set(self.files.names(temporary))):
            raise DamagedCheckpoint(f"{temporary} had {gone}, which somebody has deleted.")
        manifest = dataclasses.replace(manifest, files=files, pickles=pickles)
        final = self.final(manifest.number, manifest.step)
        # The manifest comes last: it lists all other files, with their checksums.
        self.files.write(f"{temporary}/{MANIFEST}", [manifest.to_bytes()])
        self.files.commit(temporary, final)
        return CheckpointEntry(final.rpartition("/")[2], final, manifest.number, manifest.step, manifest)

    def discard(self, temporary: str) -> None:
        """Delete an unfinished folder.

        The manifest is deleted first, so that a partly deleted folder is no checkpoint.
        """
        self.files.unlink(f"{temporary}/{MANIFEST}")
        self.files.remove(temporary)

    def entries(self, number: int | None = None, name: str | None = None) -> list[CheckpointEntry]:
        """Return the committed checkpoints, the newest first; if given, only those with this ``number`` or ``name``.

        Checkpoints whose manifest cannot be read are included, with their ``error``.
        """
        wanted = [
            match
            for match in self._matches()
            if not match["rest"] and number in (None, int(match["number"])) and name in (None, match.string)
        ]
        found = [entry for match in wanted if (entry := self._entry(match))]
        return sorted(found, key=lambda entry: (entry.number, entry.step), reverse=True)

    def verify(self, entry: CheckpointEntry, part: int = 0, parts: int = 1) -> Manifest:
        """Read the files of a checkpoint, and return its manifest if the files are undamaged.

        Args:
            entry: The checkpoint.
            part: Index of the share of the files to read. Default: 0.
            parts: Number of shares into which the files are divided. Default: 1, all files are read.

        Raises:
            DamagedCheckpoint: A file is damaged; the message names the file and the damage.
            CheckpointError: A newer version of this package wrote the checkpoint.
        """
        manifest = self._manifest(entry)
        # The same order on all ranks, with large files spread over the shares.
        by_size = sorted(manifest.files.items(), key=lambda each: (-each[1].size, each[0]))
        for name, record in by_size[part::parts]:
            self.files.check(f"{entry.path}/{name}", record)
        return manifest

    def trouble(self, entry: CheckpointEntry, part: int = 0, parts: int = 1) -> CheckpointError | OSError | None:
        """Return the error that `verify` raises for these arguments, or None."""
        try:
            self.verify(entry, part, parts)
        except (CheckpointError, OSError) as error:
            return error
        return None

    def promote(self, entry: CheckpointEntry) -> None:
        """Mark a checkpoint as good, durably: training has continued from it without a divergence alarm.

        Raises:
            CheckpointError: The checkpoint does not exist any more.
        """
        if not self.files.exists(f"{entry.path}/{MANIFEST}"):  # writing the mark would make the folder again
            raise CheckpointError(f"{entry.path} is gone: it cannot be marked as good.")
        if self._is_good(entry):  # to write the mark a second time could destroy it for a moment
            return
        self.files.write(f"{entry.path}/{GOOD}", [seal({"number": entry.number})])
        self.files.sync(entry.path)

    def quarantine(self, entry: CheckpointEntry) -> str:
        """Rename a damaged checkpoint, so that `entries` does not return it any more; return the new path."""
        # Earlier damaged checkpoints of the same number stay, under other names.
        taken = set(self.files.names(self.dirpath))
        k = next(k for k in range(1, len(taken) + 2) if f"{entry.name}.damaged-{k}" not in taken)
        path = f"{entry.path}.damaged-{k}"
        with contextlib.suppress(FileNotFoundError):  # another rank was quicker
            self.files.rename(entry.path, path)
        return path

    def remove(self, entry: CheckpointEntry) -> None:
        """Delete a checkpoint. A folder that is deleted only in part is never taken for a checkpoint."""
        gone = f"{entry.path}.removed"
        if self.files.atomic:
            self.files.remove(gone)
            with contextlib.suppress(FileNotFoundError):
                self.files.rename(entry.path, gone)
            self.files.remove(gone)
        else:
            self.discard(entry.path)

    def clean(self, run: str = "", damaged: bool = False) -> list[str]:
        """Delete unfinished checkpoints that no living process uses, and leftovers of `remove`; return their names.

        Args:
            run: Name of this run, whose unfinished checkpoints are not deleted. Default: none.
            damaged: Whether to delete damaged checkpoints, too. Default: False.
        """
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
        """Return the names of unfinished checkpoints that a living process uses."""
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
                return None  # deleted meanwhile, or unfinished
            return dataclasses.replace(entry, error=error)

    def _manifest(self, entry: CheckpointEntry) -> Manifest:
        path = f"{entry.path}/{MANIFEST}"
        try:
            data = self.files.read(path)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise DamagedCheckpoint(f"{path} is missing.") from None
        manifest = Manifest.from_bytes(data, path)
        # A user may have renamed or copied the folder.
        if (manifest.number, manifest.step) != (entry.number, entry.step):
            raise DamagedCheckpoint(f"{path} is that of {manifest.number:06d}-step-{manifest.step}.")
        if absent := [rank for rank in manifest.ranks if _rank_manifest(rank) not in manifest.files]:
            raise DamagedCheckpoint(f"{path} has no files of ranks {absent[:8]}.")
        return manifest

    def _is_good(self, entry: CheckpointEntry) -> bool:
        path = f"{entry.path}/{GOOD}"
        try:
            return unseal(self.files.read(path), path) == {"number": entry.number}
        except (OSError, DamagedCheckpoint):
            return False


@dataclass(frozen=True)
class CheckpointEntry:
    """A committed checkpoint in the directory.

    Args:
        name: Name of the folder.
        path: Path of the folder.
        number: Number of the save.
        step: Number of optimizer steps taken.
        manifest: Manifest of the checkpoint. Default: None, the manifest cannot be read.
        good: Whether the checkpoint is marked as good. Default: False.
        error: Reason why the manifest cannot be read. Default: None.
    """

    name: str
    path: str
    number: int
    step: int
    manifest: Manifest | None = None
    good: bool = False
    error: CheckpointError | OSError | None = None


def is_name(name: str) -> bool:
    """Return whether the folder of a checkpoint may have this name."""
    return _NAME.fullmatch(name) is not None


def failure_of(rank: int) -> str:
    """Return the name of the file in which a rank reports a failure."""
    return f"rank-{rank}.failed"


def _rank_manifest(rank: int) -> str:
    return f"rank-{rank}.manifest.json"


@dataclass(frozen=True)
class Manifest:
    """The table of contents of a checkpoint, and the progress of training at the time of the save.

    Args:
        number: Number of the save in the directory; checkpoints are ordered by it.
        step: Number of optimizer steps taken, averaged over asynchronous replicas. It may decrease after a rollback.
        round: Number of committed rounds.
        epoch: Number of the epoch.
        generation: Number of the generation of the process groups.
        world_size: Number of ranks that trained.
        ranks: Ranks that have written a part of this checkpoint.
        reason: Reason for the save.
        created: Time of the save, in seconds since 1970.
        metrics: Logged metrics by name, by which policies keep checkpoints and find the best one.
        versions: Versions of packages, by package.
        notes: Anything else, as plain values.
        files: Size and checksum of each file by name, except the manifest itself; filled in when the checkpoint is
            committed.
        pickles: Whether files hold pickled objects, which execute code when they are loaded; filled in when the
            checkpoint is committed.
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
    """The list of the files that one rank has written; all of them are durable.

    Args:
        rank: The rank.
        files: Size and checksum of each file, by name.
        pickles: Whether the files hold pickled objects. Default: False.
    """

    rank: int
    files: Mapping[str, FileRecord]
    pickles: bool = False

    def to_bytes(self) -> bytes:
        return _sealed(self)

    @classmethod
    def from_bytes(cls, data: bytes, path: str = "rank manifest") -> RankManifest:
        return cls(**_known(cls, data, path))


def _sealed(manifest: Manifest | RankManifest) -> bytes:
    return seal({"format": FORMAT, **dataclasses.asdict(manifest)})


def _known(kind: type[Manifest | RankManifest], data: bytes, path: str) -> dict[str, Any]:
    """Return the manifest's fields that this version of the package knows.

    Ignore further fields, which a later version of the same format may have added.

    Raises:
        DamagedCheckpoint: The data is malformed, or a field has a wrong type.
        CheckpointError: The format is newer than this version of the package.
    """
    value = unseal(data, path)
    names = {each.name for each in dataclasses.fields(kind)}
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
"""The year 10000, because no calendar of Python's knows a later one."""
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
"""Checks of the fields' types; all other fields are whole numbers from 0."""

"""What a checkpoint says of itself. Each manifest holds a checksum over itself, so that no changed bit goes unseen.

Standard library only.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_async.engine.files import FileRecord
from lightning_async.engine.files.sealed import seal, unseal
from lightning_async.errors import CheckpointError, DamagedCheckpoint

__all__ = ["Manifest", "RankManifest"]

FORMAT = 2
"""Counts changes that an older version of this package could not read. What has no pickles is of format 1."""


@dataclass(frozen=True)
class RankManifest:
    """The files that one rank has written, all of them durable; whether there are pickled objects in them."""

    rank: int
    files: Mapping[str, FileRecord]
    pickles: bool = False

    def to_bytes(self) -> bytes:
        """As a file."""
        return _sealed(self)

    @classmethod
    def from_bytes(cls, data: bytes, path: str = "rank manifest") -> RankManifest:
        """Read again; raises `DamagedCheckpoint` where any bit has changed."""
        return cls(**_known(cls, data, path))


@dataclass(frozen=True)
class Manifest:
    """What is in a checkpoint, and where training stood.

    Args:
        number: counts the saves of a directory; order is by it.
        step: optimizer steps taken, their mean over the replicas while these drift. It may go back, after a rollback.
        round: rounds committed. Default: 0.
        epoch: number of the epoch that was under way. Default: 0.
        generation: of the groups. Default: 0.
        world_size: ranks that trained. Default: 1.
        ranks: ranks whose files are here. Default: rank 0 alone.
        reason: why it was saved. Default: ``""``.
        created: seconds since 1970. Default: 0.
        metrics: what was logged, for keeping and finding the best. Default: none.
        versions: of the packages that wrote it. Default: none.
        notes: anything else of plain values. Default: none.
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
        """As a file."""
        return _sealed(self)

    @classmethod
    def from_bytes(cls, data: bytes, path: str = "manifest.json") -> Manifest:
        """Read again.

        Raises:
            DamagedCheckpoint: any bit has changed.
            CheckpointError: a newer version of this package wrote it.
        """
        value = _known(cls, data, path)
        return cls(**{**value, "ranks": tuple(value["ranks"])})


def _sealed(manifest: Manifest | RankManifest) -> bytes:
    fields = dataclasses.asdict(manifest)
    if not fields.pop("pickles"):
        return seal({"format": 1, **fields})
    return seal({"format": FORMAT, **fields, "pickles": True})


def _known(kind: type[Manifest | RankManifest], data: bytes, path: str) -> dict[str, Any]:
    """The fields that this version knows; what a later one of the same format adds is passed over."""
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
    """One of this folder's."""
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

"""What a checkpoint says of itself. Each manifest holds a checksum over itself, so that no changed bit goes unseen.

Standard library only.
"""

from __future__ import annotations

import dataclasses
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_async.engine.files import FileRecord
from lightning_async.errors import CheckpointError, DamagedCheckpoint

__all__ = ["Manifest", "RankManifest", "seal", "unseal"]

FORMAT = 1
"""Counts changes that an older version of this package could not read."""

_SEALED = re.compile(rb'\{"crc32": "([0-9a-f]{8})",\n"sealed": (.*)\}\n', re.DOTALL)


def seal(value: object) -> bytes:
    """JSON with a checksum over itself; JSON still. NaN and infinities are written as Python's ``json`` does."""
    body = json.dumps(value, indent=1).encode()
    return b'{"crc32": "%08x",\n"sealed": %s}\n' % (zlib.crc32(body), body)


def unseal(data: bytes, path: str) -> Any:
    """What was sealed; raises `DamagedCheckpoint` where any bit has changed."""
    found = _SEALED.fullmatch(data)
    if found is None:
        raise DamagedCheckpoint(f"{path} has {len(data)} bytes that are no manifest.")
    if int(found[1], 16) != zlib.crc32(found[2]):
        raise DamagedCheckpoint(f"{path} does not have the checksum {found[1].decode()} that it gives itself.")
    try:
        return json.loads(found[2])
    except (ValueError, RecursionError) as error:  # whoever wrote this has sealed what is no JSON
        raise DamagedCheckpoint(f"{path} does not hold what a manifest must: {error}") from error


@dataclass(frozen=True)
class RankManifest:
    """The files that one rank has written, all of them durable."""

    rank: int
    files: Mapping[str, FileRecord]

    def to_bytes(self) -> bytes:
        """As a file."""
        return seal({"format": FORMAT, **dataclasses.asdict(self)})

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

    def to_bytes(self) -> bytes:
        """As a file."""
        return seal({"format": FORMAT, **dataclasses.asdict(self)})

    @classmethod
    def from_bytes(cls, data: bytes, path: str = "manifest.json") -> Manifest:
        """Read again.

        Raises:
            DamagedCheckpoint: any bit has changed.
            CheckpointError: a newer version of this package wrote it.
        """
        value = _known(cls, data, path)
        return cls(**{**value, "ranks": tuple(value["ranks"])})


def _known(kind: type[Manifest | RankManifest], data: bytes, path: str) -> dict[str, Any]:
    """The fields that this version knows; what a later one of the same format adds is passed over."""
    value = unseal(data, path)
    names = {each.name for each in dataclasses.fields(kind)}
    if not isinstance(value, dict) or not names | {"format"} <= value.keys():
        raise DamagedCheckpoint(f"{path} does not hold what a manifest must.")
    if value["format"] > FORMAT:
        raise CheckpointError(
            f"{path} is of format {value['format']}, this version reads up to {FORMAT}: update lightning-async."
        )
    files = {name: FileRecord(record["size"], record["crc32"]) for name, record in value["files"].items()}
    return {**{name: value[name] for name in names}, "files": files}

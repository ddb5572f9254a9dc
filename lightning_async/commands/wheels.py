"""Wheels that take long to build: kept for the next environment, and compared with their checksums before use."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

__all__ = ["BuildError", "keep", "kept"]


class BuildError(RuntimeError):
    """What stands in the way of a build, and what to do about it."""


def kept(cache: Path, pattern: str) -> Path | None:
    """The wheel that was kept, if it is what was kept.

    Raises:
        BuildError: other users may write into the folder, so that they could have it installed.
    """
    if not cache.is_dir():
        return None
    status = cache.stat()
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
        raise BuildError(
            f"other users may write into {cache}: `chmod go-w` it, or pass `--cache` a folder of your own."
        )
    for wheel in cache.glob(pattern):
        note = wheel.with_name(f"{wheel.name}.sha256")
        if note.is_file() and note.read_text() == checksum(wheel):
            return wheel
        print(f"{wheel} is not what was kept there, and is built again", flush=True)
    return None


def keep(cache: Path, wheel: Path) -> Path:
    """Copy a wheel to where the next build looks for it, with its checksum."""
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    place = cache / wheel.name
    # Under other names first: builds may run at the same time.
    half, note = (cache / f".{os.getpid()}-{wheel.name}{kind}" for kind in ("", ".sha256"))
    shutil.copyfile(wheel, half)
    note.write_text(checksum(half))
    half.replace(place)
    note.replace(cache / f"{wheel.name}.sha256")
    return place


def checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()

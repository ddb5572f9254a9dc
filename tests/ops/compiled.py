"""What compilers make of the native sources, kept outside of the clone until a source, the command or they change."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.support import ROOT

SOURCES = ROOT / "cuda_ext"


def compiled(name: str, command: Sequence[str], sources: Path = SOURCES) -> Path:
    """The folder with what ``command`` makes of the sources, and ``log``, what it says; ``OUT`` in it is the folder.

    It runs within ``sources``. What it has made of the same sources before, with the same compiler, is taken as it is.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_async/compiled"
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    version = subprocess.run([command[0], "--version"], capture_output=True, check=True, timeout=30).stdout
    digest = hashlib.sha256("\0".join(command).encode() + version)
    for path in sorted(sources.rglob("*.*")):
        if path.is_file() and path.parent.name != "__pycache__":  # which says when its sources were written
            digest.update(str(path.relative_to(sources)).encode() + path.read_bytes())
    place = cache / f"{name}-{digest.hexdigest()[:16]}"
    if not place.exists():
        _compile(command, place, sources)
        for old in cache.glob(f"{name}-*"):
            if old != place:
                shutil.rmtree(old, ignore_errors=True)
    return place


def _compile(command: Sequence[str], place: Path, sources: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="lightning-async-") as folder:
        done = subprocess.run(
            [word.replace("OUT", folder) for word in command],
            cwd=sources, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=280,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        Path(folder, "log").write_text(done.stderr)
        half = place.with_name(f".{os.getpid()}-{place.name}")  # tests may run at the same time
        shutil.copytree(folder, half)
    if place.exists():
        shutil.rmtree(half)
    else:
        half.rename(place)

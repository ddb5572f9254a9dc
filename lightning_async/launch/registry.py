"""A registry of this user's jobs on this host, in which ``lightning-async status`` finds their stores.

Each launcher keeps one file, which only its user can read, because it holds the job's secret, as the environments of
ranks do. The folder is in ``XDG_RUNTIME_DIR``, or in the directory of temporary files if that variable is not set.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_async._subprocess import status_of


@dataclass(frozen=True, kw_only=True)
class JobEntry:
    launcher: int  # process id of its launcher
    started: int  # start time of that process, in ticks: another process may get the same id later
    port: int  # port of the store, which listens on loopback
    secret: str  # secret of the job
    program: tuple[str, ...]  # command line, without Python


class Registry:
    """The file by which this launcher's job is found: it is one entry in the user's folder of running jobs.

    `lightning-async status` reads this folder. A launcher whose entry cannot be written runs without an entry.

    Args:
        secret: Secret of the job.
        program: Command line of the program, without the Python interpreter.
    """

    def __init__(self, secret: str, program: tuple[str, ...]) -> None:
        self._secret = secret
        self._program = program
        self._path = _folder() / f"{os.getpid()}.json"

    def write(self, port: int) -> None:
        """Write this job's entry. ``port`` is the port of the job's store."""
        entry = JobEntry(
            launcher=os.getpid(), started=_started(os.getpid()) or 0, port=port, secret=self._secret,
            program=self._program,
        )  # fmt: skip
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            if not _is_ours(self._path.parent):
                return
            # Renamed when it is whole, so that a reader never sees half an entry.
            part = self._path.with_suffix(".part")
            part.unlink(missing_ok=True)
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w") as file:
                json.dump(asdict(entry), file)
            part.rename(self._path)

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def running() -> list[JobEntry]:
    """Return the jobs of this user on this host, the oldest first; delete the entries of dead launchers."""
    found = []
    folder = _folder()
    if not _is_ours(folder):
        return []
    for path in folder.glob("*.json"):
        try:
            said = json.loads(path.read_text())
            entry = JobEntry(**{**said, "program": tuple(said["program"])})
        except (OSError, ValueError, TypeError, KeyError):
            continue
        if _started(entry.launcher) == entry.started:
            found.append(entry)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return sorted(found, key=lambda entry: entry.started)


def _folder() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime, "lightning_async")
    return Path(tempfile.gettempdir(), f"lightning_async-{os.getuid()}")


def _is_ours(folder: Path) -> bool:
    """Return whether the folder belongs to this user, and no other user can read or change it.

    This is checked because the folder may be in a shared directory, where another user may have made it first.
    """
    try:
        found = folder.lstat()
    except OSError:
        return False
    return folder.is_dir() and not folder.is_symlink() and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _started(process: int) -> int | None:
    """Return the start time of a process, in clock ticks since the host's boot; None if the process has ended."""
    try:
        fields = status_of(process)
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])

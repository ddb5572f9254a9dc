"""Where each rank of this host writes what it has died of, as torch.distributed.elastic has it, and what is read there.

Programs under torch's ``@record`` write it, and the Trainers of this package's strategies.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["ERROR_FILE", "ErrorFiles"]

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""The environment variable of a rank that names its file."""
_LONGEST = 300
_MOST_BYTES = 1 << 22


class ErrorFiles:
    """A file for each rank, which is there once the rank has failed.

    Args:
        logs: where they are, and stay; None for a directory that goes with the launcher.
    """

    def __init__(self, logs: Path | None) -> None:
        self._logs = logs
        self._own: str | None = None

    def begin(self, rank: int) -> dict[str, str]:
        """A rank is about to start: what an earlier start has left goes; the variable that it gets.

        Raises:
            OSError: the directory cannot be made.
        """
        path = self._path(rank)
        path.unlink(missing_ok=True)
        return {ERROR_FILE: str(path)}

    def read(self, rank: int) -> str:
        """What a rank that has ended has written, in one line; "" where that is nothing."""
        try:
            with self._path(rank).open("rb") as file:
                said = json.loads(file.read(_MOST_BYTES))
        except (OSError, ValueError, RecursionError):
            return ""
        message = _message(said).strip()
        line = message.splitlines()[0] if message else ""
        return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."

    def close(self) -> None:
        """Those that were not asked for."""
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)

    def _path(self, rank: int) -> Path:
        if self._logs is not None:
            return (self._logs / f"rank-{rank}.error.json").absolute()
        if self._own is None:
            self._own = tempfile.mkdtemp(prefix="lightning-async-errors-")
        return Path(self._own) / f"rank-{rank}.error.json"


def _message(said: Any) -> str:
    """Of either form: {"message": {"message": ...}}, {"message": ...}."""
    for _ in range(2):
        with contextlib.suppress(TypeError, KeyError):
            said = said["message"]
    return said if isinstance(said, str) else ""

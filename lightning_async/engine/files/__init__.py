"""Files that are durable when their writer says so, with their sizes and checksums; local ones and fsspec's.

Standard library only: the process that writes checkpoints imports this without torch.
"""

from __future__ import annotations

import os

from lightning_async.engine.files.local import LocalFiles
from lightning_async.engine.files.protocol import FileRecord, Files, Lock
from lightning_async.engine.files.remote import RemoteFiles

__all__ = ["FileRecord", "Files", "LocalFiles", "Lock", "RemoteFiles", "files_at"]


def files_at(dirpath: str | os.PathLike[str]) -> tuple[Files, str]:
    """The file system that a path or URL belongs to, and the path in the form in which it is asked for there.

    >>> files_at("file:///data/run/")[1]
    '/data/run'
    """
    path = os.fspath(dirpath)
    scheme, found, rest = path.partition("://")
    if found and scheme not in ("file", "local"):
        return RemoteFiles(path), path.rstrip("/")
    return LocalFiles(), os.path.abspath(os.path.expanduser(rest if found else path))

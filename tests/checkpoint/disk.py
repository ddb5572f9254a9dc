"""A disk that loses power: what may be there afterwards, under a model stricter than real file systems.

What was written to a file since its last fsync may be there, half there, zeros, or not there. What changed in a folder
since its last fsync (a new name, a rename, a deletion) may have happened or not, each change by itself. Nothing else
orders what reaches the disk.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple


class Call(NamedTuple):
    """One system call: what it did, to which path."""

    name: str
    path: str
    value: bytes | str = b""


class Recorder:
    """``os``, with a list of the calls that change something."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._paths: dict[int, str] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        descriptor = os.open(path, flags, mode)
        self._paths[descriptor] = path
        if flags & os.O_CREAT:
            self.calls.append(Call("create", path))
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        count = os.write(descriptor, data)
        self.calls.append(Call("write", self._paths[descriptor], bytes(data[:count])))
        return count

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)
        self.calls.append(Call("fsync", self._paths[descriptor]))

    def mkdir(self, path: str) -> None:
        os.mkdir(path)
        self.calls.append(Call("mkdir", path))

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)
        self.calls.append(Call("rename", old, new))

    def unlink(self, path: str) -> None:
        os.unlink(path)
        self.calls.append(Call("unlink", path))

    def rmdir(self, path: str) -> None:
        os.rmdir(path)
        self.calls.append(Call("unlink", path))


@dataclass(eq=False)
class File:
    durable: bytes = b""
    written: bytes = b""

    def sync(self) -> None:
        self.durable = self.written

    def after_power_loss(self, source: random.Random) -> bytes:
        written = self.written
        half = source.randrange(len(written) + 1)
        there = [
            self.durable,
            written,
            written[:half],
            bytes(len(written)),
            written[:half] + bytes(len(written) - half),
        ]
        return source.choice(there) if written != self.durable else written


@dataclass(eq=False)
class Folder:
    now: dict[str, File | Folder] = field(default_factory=dict)
    durable: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[tuple[str | None, str | None, File | Folder]] = field(default_factory=list)
    """Old name, new name, and what it is the name of."""

    def change(self, old: str | None, new: str | None, node: File | Folder) -> None:
        change(self.now, old, new, node)
        self.pending.append((old, new, node))

    def sync(self) -> None:
        self.durable, self.pending = dict(self.now), []

    def after_power_loss(self, source: random.Random) -> dict[str, File | Folder]:
        names = dict(self.durable)
        share = source.choice((0.0, 0.5, 1.0))  # nothing and all are the likeliest to show a mistake
        for old, new, node in self.pending:
            if source.random() < share:
                change(names, old, new, node)
        return names


def change(names: dict[str, File | Folder], old: str | None, new: str | None, node: File | Folder) -> None:
    if old is not None and names.get(old) is node:
        del names[old]
    if new is not None:
        names[new] = node


class Disk:
    """Plays recorded calls over what is durable in a folder at the start."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self._tree = self._load(root)

    def _load(self, path: Path) -> Folder:
        folder = Folder()
        for each in path.iterdir():
            if each.is_dir():
                node: File | Folder = self._load(each)
            else:
                data = each.read_bytes()
                node = File(data, data)
            folder.now[each.name] = folder.durable[each.name] = node
        return folder

    def play(self, call: Call) -> None:
        if call.name == "none":
            return
        if call.name == "fsync":
            node = self._find(call.path)
            assert node is not None
            node.sync()
            return
        folder, name = self._find(os.path.dirname(call.path)), os.path.basename(call.path)
        assert isinstance(folder, Folder)
        node = folder.now.get(name)
        if call.name == "create" and isinstance(node, File):
            node.written = b""
        elif call.name in ("create", "mkdir"):
            folder.change(None, name, File() if call.name == "create" else Folder())
        elif call.name == "write":
            assert isinstance(node, File) and isinstance(call.value, bytes)
            node.written += call.value
        else:
            assert node is not None
            assert call.name in ("rename", "unlink")
            folder.change(name, os.path.basename(str(call.value)) if call.name == "rename" else None, node)

    def _find(self, path: str) -> File | Folder | None:
        node: File | Folder | None = self._tree
        for name in path.removeprefix(self.root).split("/"):
            if name:
                assert isinstance(node, Folder)
                node = node.now.get(name)
        return node

    def after_power_loss(self, source: random.Random) -> dict[str, bytes | None]:
        """Paths below the root, with what they hold; None for folders."""
        found: dict[str, bytes | None] = {}

        def look(path: str, node: File | Folder) -> None:
            if isinstance(node, File):
                found[path] = node.after_power_loss(source)
            else:
                found[path] = None
                for name, below in sorted(node.after_power_loss(source).items()):
                    look(f"{path}/{name}", below)

        look("", self._tree)
        return found

"""A record that is there whole, whenever the process that writes it is killed.

There are two slots, written in turn; each has its number and a digest in front. The newest one whose digest is right is
the record: what was being written when its process died is not, and the one before is untouched.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["ROOM", "SIZE", "Journal"]

_SLOT = 1 << 16
SIZE = 2 * _SLOT
"""Bytes of memory that a journal takes."""
_HEAD = struct.Struct("<QI16s")
ROOM = _SLOT - _HEAD.size
"""Bytes of a record."""


class Journal:
    """One record, in memory that outlives the process.

    Args:
        memory: uint8, `SIZE` of it; zeros, or what a journal has left there.

    >>> import torch
    >>> memory = torch.zeros(SIZE, dtype=torch.uint8)
    >>> Journal(memory).record is None
    True
    >>> Journal(memory).write({"version": 1})
    >>> Journal(memory).record
    {'version': 1}
    """

    def __init__(self, memory: Tensor) -> None:
        array: Any = memory.numpy()
        self._memory, self._texts = memoryview(array), _Texts()
        found = [each for each in map(self._read, (0, 1)) if each is not None]
        self._number, self._text = max(found, key=lambda each: each[0], default=(0, None))

    @property
    def record(self) -> dict[str, Any] | None:
        """What was written last; None: nothing."""
        return None if self._text is None else json.loads(self._text)

    def write(self, record: Mapping[str, Any]) -> None:
        """From when this returns, and not before, the record is this one.

        Raises:
            ValueError: it is too long.
        """
        text = self._texts.of(record).encode()
        if len(text) > ROOM:
            raise ValueError(f"a record of {len(text)} bytes does not fit into {ROOM}.")
        number = self._number + 1
        at = number % 2 * _SLOT
        self._memory[at + _HEAD.size : at + _HEAD.size + len(text)] = text
        self._memory[at : at + _HEAD.size] = _HEAD.pack(number, len(text), _digest(number, text))
        self._number, self._text = number, text

    def _read(self, slot: int) -> tuple[int, bytes] | None:
        at = slot * _SLOT
        number, length, digest = _HEAD.unpack_from(self._memory, at)
        text = bytes(self._memory[at + _HEAD.size : at + _HEAD.size + min(length, _SLOT)])
        return (number, text) if number and digest == _digest(number, text) else None


class _Texts:
    """Records in JSON: what is the same object as before is not written anew, nor are those parts of a mapping of
    mappings, as there is one for each worker; none is changed in place."""

    def __init__(self) -> None:
        self._last: Mapping[str, Any] = {}
        self._kept: dict[str, str] = {}
        self._known: dict[tuple[str, str], tuple[object, str]] = {}

    def of(self, record: Mapping[str, Any]) -> str:
        last, before, self._last, self._kept = self._last, self._kept, record, {}
        fresh: dict[str, Any] = {}
        for name, value in record.items():
            if name in last and last[name] is value:
                self._kept[name] = before.get(name) or self._text(name, value)
            elif isinstance(value, dict) and _nests(value):
                self._kept[name] = self._text(name, value)
            else:
                fresh[name] = value
        texts = [json.dumps(fresh)[1:-1]] if fresh else []
        return f"{{{', '.join([*texts, *self._kept.values()])}}}"

    def _text(self, name: str, value: object) -> str:
        if not (isinstance(value, dict) and _nests(value)):
            return f"{json.dumps(name)}: {json.dumps(value)}"
        texts = {}
        for key, entry in value.items():
            before, text = self._known.get((name, key), (None, ""))
            texts[key] = text if before is entry else f"{json.dumps(key)}: {json.dumps(entry)}"
        gone = [key for key in self._known if key[0] == name and key[1] not in value]
        for key in gone:
            del self._known[key]
        self._known.update({(name, key): (value[key], text) for key, text in texts.items()})
        return f"{json.dumps(name)}: {{{', '.join(texts.values())}}}"


def _nests(value: Mapping[str, Any]) -> bool:
    return bool(value) and all(isinstance(each, dict) for each in value.values())


def _digest(number: int, text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16, salt=struct.pack("<Q", number)).digest()

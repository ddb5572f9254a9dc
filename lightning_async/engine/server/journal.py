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
    """Records in JSON: of a mapping of mappings, as there is one for each worker, only those are written that have
    been replaced since; none is changed in place."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[object, str]] = {}

    def of(self, record: Mapping[str, Any]) -> str:
        nested = {name: value for name, value in record.items() if isinstance(value, dict) and _nests(value)}
        rest = json.dumps({name: value for name, value in record.items() if name not in nested})
        known, self._known = self._known, {}
        for name, value in nested.items():
            for key, entry in value.items():
                before, text = known.get((name, key), (None, ""))
                if before is not entry:
                    text = f"{json.dumps(key)}: {json.dumps(entry)}"
                self._known[name, key] = entry, text
            texts = ", ".join(self._known[name, key][1] for key in value)
            rest = f"{rest[:-1]}{', ' if len(rest) > 2 else ''}{json.dumps(name)}: {{{texts}}}}}"
        return rest


def _nests(value: Mapping[str, Any]) -> bool:
    return bool(value) and all(isinstance(each, dict) for each in value.values())


def _digest(number: int, text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16, salt=struct.pack("<Q", number)).digest()

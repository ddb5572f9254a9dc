"""Values that are written with a checksum over themselves, so that no changed bit goes unseen; JSON, and JSON still."""

from __future__ import annotations

import json
import re
import zlib
from typing import Any

from lightning_async.errors import DamagedCheckpoint

__all__ = ["seal", "unseal"]

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

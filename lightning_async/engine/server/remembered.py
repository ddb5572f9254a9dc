"""What a store's record says of workers, as pure functions.

Of each name: its ``life``; its ``client``'s own name; the ``push`` that was applied last, its ``lag``, whether it was
``dropped``, and whether all were ``called`` with it; its ``clock``; whether it is ``live``, waited for by others, and
at which gate it ``rests``; the ``slot`` of memory that it has of its own, and which ``bank`` of that counts, with
`BOTH` added where it has both places of what it has pulled. Where the server's memory was lost, the push that it had
``said`` was applied. Beside them ``lives``: the highest that one has had.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from typing import Any

from lightning_async.engine.server.journal import ROOM

__all__ = [
    "BOTH",
    "LOST_LIVES",
    "check_room",
    "first_record",
    "free_slot",
    "restored",
    "said",
    "slots_of",
    "with_pushes",
]

BOTH = 2
"""In ``bank``: both places of what a worker has pulled are there."""
LOST_LIVES = 1 << 32
"""Lives that may have been given after a snapshot: nobody is to have one of these again."""
_TOLD, _SPARE = 214, 2048  # bytes that a worker may take beside its name, and that the rest may grow by

Record = Mapping[str, Any]


def first_record(before: Record, contents: Mapping[str, Any], scalars: Mapping[str, float]) -> dict[str, Any]:
    """Of version 0, where there were no weights.

    Args:
        before: that says of workers alone.
        contents: what the weights are of.
        scalars: of the optimizer's state.
    """
    return {
        **before, "version": 0, "bank": 0, "scalars": dict(scalars), "contents": dict(contents), "means": (0.0, 0) * 2,
        "lags": {"counts": {}, "dropped": 0}, "gathered": 0, "buffer": 0, "incarnation": secrets.token_hex(8),
    }  # fmt: skip


def restored(snapshot: Record) -> dict[str, Any]:
    """What differs from the snapshot where a store begins with that; ``restored`` grows each time, also where two begin
    with the same one."""
    when = max(snapshot.get("restored", 0) + 1, int(time.time()))
    return {"incarnation": secrets.token_hex(8), "lives": snapshot["lives"] + LOST_LIVES, "restored": when}


def with_pushes(
    workers: Mapping[str, Mapping[str, Any]], pushes: Mapping[str, int], changes: Mapping[str, Any]
) -> dict[str, Mapping[str, Any]]:
    """The workers once these pushes are applied; those that are forgotten stay so.

    >>> with_pushes({"a": {"push": 1, "clock": 3}}, {"a": 2}, {"lag": 0})
    {'a': {'push': 2, 'clock': 4, 'lag': 0}}
    """
    pushed = {
        name: {**workers[name], **changes, "push": number, "clock": workers[name]["clock"] + 1}
        for name, number in pushes.items()
        if name in workers
    }
    return {**workers, **pushed}


def said(told: Mapping[str, Any]) -> int:
    """The worker's last push that it has heard is applied, also where that was lost since; or a later one that is.

    >>> said({"push": 3}), said({"push": 3, "said": 5}), said({"push": 6, "said": 5})
    (3, 5, 6)
    """
    return max(told["push"], told.get("said", 0))


def slots_of(record: Record) -> dict[int, int]:
    """The slots that are some worker's, and the bank of each that counts."""
    return {told["slot"]: told["bank"] & ~BOTH for told in record["workers"].values() if "slot" in told}


def free_slot(record: Record) -> int:
    """The first one that is nobody's.

    >>> free_slot({"workers": {"a": {"slot": 0, "bank": 1}, "b": {}, "c": {"slot": 2, "bank": 0}}})
    1
    """
    used = slots_of(record)
    return next(slot for slot in range(len(used) + 1) if slot not in used)


def check_room(record: Record, names: Mapping[str, Any]) -> None:
    """Raise ValueError where these workers might not fit into the journal, whatever becomes of them."""
    rest = len(json.dumps({**record, "workers": {}}))
    if len(json.dumps([*names])) + _TOLD * len(names) + rest + _SPARE > ROOM:
        raise ValueError(f"a server remembers {len(names) - 1} workers, and has no room for one more.")

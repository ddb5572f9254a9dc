"""Whose a sample of a stream is, where those that are left read it again for what the lost had left: pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning_async.data.partitions import Partition

__all__ = ["Told", "dealt", "place_in"]

Told = Mapping[str, Any]
"""One rank's part of a stream, in plain values: its ``members`` and ``rank``; or ``place``, of ``parts``, in what
others had ``left``, each with the number of the first batch that counts. Its loader has ``batch_size``, ``workers``."""


def place_in(partition: Partition, told: Told) -> Callable[[Any], int | None]:
    """Called with each sample of a stream in turn: its place in this part, or None where it is in another one."""
    if "left" in told:
        return _place_in_rest(partition, told)
    owner, rank, taken = partition.dealer(told["members"]), told["rank"], 0

    def place(sample: Any) -> int | None:
        nonlocal taken
        if owner(sample) != rank:
            return None
        taken += 1
        return taken - 1

    return place


def _place_in_rest(partition: Partition, told: Told) -> Callable[[Any], int | None]:
    lost = [(place_in(partition, each), each, begin) for each, begin in told["left"]]
    mine, parts, taken = told["place"], told["parts"], 0

    def place(sample: Any) -> int | None:
        nonlocal taken
        places = [(each(sample), of, begin) for each, of, begin in lost]  # all are asked of each sample
        if not any(at is not None and _batch(at, of) >= begin for at, of, begin in places):
            return None
        taken += 1
        return (taken - 1) // parts if (taken - 1) % parts == mine else None

    return place


def _batch(place: int, of: Told) -> int:
    """The number of the batch with this sample: workers have samples in turn, and give batches in turn.

    >>> [_batch(place, {"workers": 2, "batch_size": 2}) for place in range(7)]
    [0, 1, 0, 1, 2, 3, 2]
    """
    turn, worker = divmod(place, of["workers"])
    return turn // of["batch_size"] * of["workers"] + worker


def dealt(left: Iterable[tuple[Told, int]], takers: Mapping[str, Told]) -> dict[str, Told]:
    """What is left of these parts, each with the number of the first batch that counts, dealt out by samples in turn.

    Args:
        takers: by name, what each has: its loader stays.
    """
    lost = [(dict(each), begin) for each, begin in left]
    return {
        name: {
            "kind": "stream", "batch_size": own["batch_size"], "workers": own["workers"], "left": lost, "place": i,
            "parts": len(takers),
        }
        for i, (name, own) in enumerate(takers.items())
    }  # fmt: skip

"""Small checkpoints, written through the store as a writer does it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping

from lightning_async.checkpoint.store import CheckpointEntry, CheckpointStore, Manifest, RankManifest


def contents(number: int, rank: int) -> dict[str, bytes]:
    """What a rank writes: it can be told from the number."""
    source = random.Random(1000 * number + rank)
    return {f"rank-{rank}.bin": source.randbytes(500 + rank), f"rank-{rank}.json": b'{"number": %d}' % number}


def write_ranks(store: CheckpointStore, temporary: str, number: int, ranks: tuple[int, ...]) -> None:
    for rank in ranks:
        files = {n: store.files.write(f"{temporary}/{n}", [data]) for n, data in contents(number, rank).items()}
        store.add_rank(temporary, RankManifest(rank, files))


def save(
    store: CheckpointStore,
    number: int,
    step: int | None = None,
    ranks: tuple[int, ...] = (0, 1),
    metrics: Mapping[str, float] | None = None,
    run: str = "run",
) -> CheckpointEntry:
    step = 10 * number if step is None else step
    temporary = store.temporary(number, step, run)
    with store.hold(temporary):
        write_ranks(store, temporary, number, ranks)
        return store.commit(temporary, Manifest(number, step, ranks=ranks, metrics=metrics or {}))


def assert_whole(store: CheckpointStore, entry: CheckpointEntry) -> None:
    """Verified, and equal to what was saved."""
    manifest = store.verify(entry)
    for rank in manifest.ranks:
        for name, data in contents(entry.number, rank).items():
            assert store.files.read(f"{entry.path}/{name}") == data


class FailingCalls:
    """``os``, but calls of one name fail, after some that succeed."""

    def __init__(self, name: str, number: int, after: int = 0) -> None:
        self.name, self.number, self.left = name, number, after

    def __getattr__(self, name: str) -> Callable[..., object]:
        return self._fail if name == self.name else getattr(os, name)

    def _fail(self, *arguments: object) -> object:
        if not self.left:
            raise OSError(self.number, os.strerror(self.number))
        self.left -= 1
        return getattr(os, self.name)(*arguments)

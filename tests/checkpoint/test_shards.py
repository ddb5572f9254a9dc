"""A state divided among ranks, and put together again by any number of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_async.engine.checkpoint.buffers import ALIGNMENT, layout
from lightning_async.engine.checkpoint.manifest import Manifest, RankManifest
from lightning_async.engine.checkpoint.shards import load, load_own, plan, shard
from lightning_async.engine.checkpoint.store import CheckpointStore, Entry
from lightning_async.errors import DamagedCheckpoint
from tests.checkpoint.states import assert_equal, assert_loaded, own_of, shared_of


def commit(folder: Path, number: int, ranks: tuple[int, ...], shared: dict[int, Any] | None = None) -> Entry:
    """What the writers do, in one process and without their memory."""
    store = CheckpointStore(folder)
    temporary = store.temporary(number, number * 10, "run")
    for rank in ranks:
        part = shard((shared or {}).get(rank, shared_of(number, 1000)), own_of(number, rank), rank, ranks)
        offsets, end = layout(part.tensors)
        data = bytearray(end)
        for tensor, at in zip(part.tensors, offsets, strict=True):
            data[at : at + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        records = {
            f"rank-{rank}.bin": store.files.write(f"{temporary}/rank-{rank}.bin", [data]),
            f"rank-{rank}.json": store.files.write(f"{temporary}/rank-{rank}.json", [part.text]),
        }
        store.add_rank(temporary, RankManifest(rank, records))
    return store.commit(temporary, Manifest(number, number * 10, ranks=ranks))


@given(st.lists(st.integers(0, 1000)), st.sets(st.integers(0, 9), min_size=1).map(sorted))
def test_a_plan_is_balanced(sizes: list[int], ranks: list[int]):
    writers = plan(sizes, ranks)
    assert len(writers) == len(sizes) and set(writers) <= set(ranks)
    loads = [sum(size for size, writer in zip(sizes, writers, strict=True) if writer == rank) for rank in ranks]
    assert max(loads) <= sum(sizes) / len(ranks) + max(sizes, default=0)


@pytest.mark.parametrize("ranks", [(0,), (0, 1), (1, 2, 5)], ids=str)
def test_every_rank_reads_its_own_and_what_is_shared(tmp_path: Path, ranks: tuple[int, ...]):
    entry, store = commit(tmp_path, 3, ranks), CheckpointStore(tmp_path)
    for rank in range(7):
        loaded = load(store, entry, rank)
        assert_loaded(loaded, 3, rank, has_own=rank in ranks)
        assert_equal(load_own(store, entry, rank), loaded.own)
    bins = [(tmp_path / entry.name / f"rank-{rank}.bin").stat().st_size for rank in ranks]
    own = own_of(3, 0)["random"].nbytes
    shared = sum(bins) - own * len(ranks)
    assert shared < 1000 * 4 + 500 * 8 + 300 * 4 + 8 + ALIGNMENT * (5 + len(ranks))  # each tensor is there once


def test_loaded_tensors_are_the_callers(tmp_path: Path):
    entry, store = commit(tmp_path, 3, (0,)), CheckpointStore(tmp_path)
    load(store, entry, 0).shared["module"]["weight"].add_(1)
    assert_loaded(load(store, entry, 0), 3, 0)
    store.verify(entry)


def test_what_cannot_be_saved_is_named():
    with pytest.raises(TypeError, match=r"in `own`, callbacks\['X'\] is a builtins.object, and cannot"):
        shard({}, {"callbacks": {"X": object()}}, 0, (0,))


def test_states_that_were_not_equal_are_no_checkpoint(tmp_path: Path):
    entry = commit(tmp_path, 3, (0, 1), {1: {**shared_of(3, 1000), "more": torch.ones(3)}})
    with pytest.raises(DamagedCheckpoint, match=r"ranks \[0, 1\] have written .* was their state equal"):
        load(CheckpointStore(tmp_path), entry, 0)


BROKEN = [
    b"",
    b"[1]",
    b'{"shared": {}}',
    json.dumps({"shared": {"count": 1, "tensors": {"0": ["float32", [9999999], 0]}, "tree": None}}).encode(),
    json.dumps({"shared": {"count": 1, "tensors": {"0": ["float32", [1], -4]}, "tree": None}}).encode(),
    json.dumps({"shared": {"count": 1, "tensors": {"0": ["object", [1], 0]}, "tree": None}}).encode(),
    json.dumps({"shared": {"count": 1, "tensors": {"0": ["float32", [1], 0]}, "tree": {"tensor": 4}}}).encode(),
]


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_text_that_makes_no_sense_is_damage(tmp_path: Path, text: bytes):
    entry = commit(tmp_path, 3, (0,))
    (tmp_path / entry.name / "rank-0.json").write_bytes(text)
    with pytest.raises(DamagedCheckpoint, match=r"rank-0\.json does not say what it should"):
        load(CheckpointStore(tmp_path), entry, 5)


def test_one_thing_of_a_ranks_own_is_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    entry, store, read = commit(tmp_path, 3, (0, 1)), CheckpointStore(tmp_path), []
    real = torch.frombuffer

    def frombuffer(*arguments: Any, **options: Any) -> torch.Tensor:
        read.append(arguments)
        return real(*arguments, **options)

    monkeypatch.setattr(torch, "frombuffer", frombuffer)
    assert load_own(store, entry, 1, "number") == (3, None)
    assert load_own(store, entry, 1, "absent") is None and load_own(store, entry, 4, "random") is None
    assert not read
    assert_equal(load_own(store, entry, 1, "random"), own_of(3, 1)["random"])
    assert len(read) == 1


def test_mapped_tensors_are_the_callers_as_well(tmp_path: Path):
    """What is written to them is not in the file, and they outlive its name."""
    entry, store = commit(tmp_path, 3, (0, 1)), CheckpointStore(tmp_path)
    loaded = load(store, entry, 0, mapped=True)
    assert_loaded(loaded, 3, 0)
    loaded.shared["module"]["weight"].zero_()
    assert not loaded.shared["module"]["weight"].any()
    store.verify(entry)
    again = load(store, entry, 1, mapped=True)
    store.remove(entry)
    assert_loaded(again, 3, 1)

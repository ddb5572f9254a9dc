"""A state divided among ranks, and put together again by any number of them."""

from __future__ import annotations

import json
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_async.checkpoint.buffers import ALIGNMENT, layout
from lightning_async.checkpoint.shards import load, load_own, plan, shard
from lightning_async.checkpoint.store import CheckpointEntry, CheckpointStore, Manifest, RankManifest
from lightning_async.errors import CheckpointError, DamagedCheckpoint
from tests.checkpoint.states import assert_equal, assert_loaded, own_of, shared_of


class Scale:
    """An object of a user's, with a tensor in it; remembers that it was loaded."""

    loaded = 0

    def __init__(self, factor: float) -> None:
        self.factor, self.mean = factor, torch.full((3,), factor)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        Scale.loaded += 1


def commit(
    folder: Path,
    number: int,
    ranks: tuple[int, ...],
    shared: dict[int, Any] | None = None,
    own: dict[int, Any] | None = None,
    pickles: bool = False,
) -> CheckpointEntry:
    """What the writers do, in one process and without their memory."""
    store = CheckpointStore(folder)
    temporary = store.temporary(number, number * 10, "run")
    for rank in ranks:
        common, mine = (
            (shared or {}).get(rank, shared_of(number, 1000)),
            own_of(number, rank) | (own or {}).get(rank, {}),
        )
        part = shard(common, mine, rank, ranks, pickles)
        offsets, end = layout(part.tensors)
        data = bytearray(end)
        for tensor, at in zip(part.tensors, offsets, strict=True):
            data[at : at + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        records = {
            f"rank-{rank}.bin": store.files.write(f"{temporary}/rank-{rank}.bin", [data]),
            f"rank-{rank}.json": store.files.write(f"{temporary}/rank-{rank}.json", [part.text]),
        }
        store.add_rank(temporary, RankManifest(rank, records, part.pickles))
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


def test_what_cannot_be_pickled_is_named():
    with pytest.raises(TypeError, match=r"in `own`, callbacks\['X'\] is a builtins.function, and cannot be pickled: "):
        shard({}, {"callbacks": {"X": lambda: None}}, 0, (0,), pickles=True)


def test_objects_are_pickled_where_that_is_asked_for(tmp_path: Path):
    """Only rank 1 has one: the checkpoint says so, and nobody loads it without asking for it."""
    sparse = torch.tensor([[0.0, 2.0]]).to_sparse()
    state = {"scale": Scale(2.5), "sparse": sparse, "twice": [Scale(1.0), (Scale(3.0), 4)], "plain": 7}
    entry, store = commit(tmp_path, 3, (0, 1), own={1: state}, pickles=True), CheckpointStore(tmp_path)
    assert entry.manifest is not None
    assert entry.manifest.pickles
    before = Scale.loaded
    for refused in (lambda: load(store, entry, 0), lambda: load_own(store, entry, 1, "plain")):
        with pytest.raises(CheckpointError, match="holds pickled objects: to load it executes code") as raised:
            refused()
        assert not isinstance(raised.value, DamagedCheckpoint)
    assert Scale.loaded == before
    assert_loaded(load(store, entry, 0, pickles=True), 3, 0)
    own = load(store, entry, 1, pickles=True).own
    assert own is not None
    assert [own["scale"].factor, own["scale"].mean.tolist(), own["plain"]] == [2.5, [2.5] * 3, 7]
    assert own["sparse"].to_dense().tolist() == [[0.0, 2.0]]
    assert [own["twice"][0].factor, own["twice"][1][0].factor, own["twice"][1][1]] == [1.0, 3.0, 4]
    scale: Any = load_own(store, entry, 1, "scale", mapped=True, pickles=True)
    assert scale.factor == 2.5


def test_a_state_without_objects_is_a_checkpoint_without_pickles(tmp_path: Path):
    entry = commit(tmp_path, 3, (0, 1), pickles=True)
    assert entry.manifest is not None
    assert not entry.manifest.pickles
    assert_loaded(load(CheckpointStore(tmp_path), entry, 1), 3, 1)


def test_pickles_that_the_manifest_does_not_tell_of_are_not_loaded(tmp_path: Path):
    entry = commit(tmp_path, 3, (0,), own={0: {"scale": Scale(2.5)}}, pickles=True)
    assert entry.manifest is not None
    silent = replace(entry, manifest=replace(entry.manifest, pickles=False))
    before = Scale.loaded
    for pickles in (False, True):
        with pytest.raises(DamagedCheckpoint, match="there is a pickled object in it, which is not to be loaded"):
            load(CheckpointStore(tmp_path), silent, 0, pickles=pickles)
    assert Scale.loaded == before


def test_an_object_whose_class_is_gone_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    entry = commit(tmp_path, 3, (0,), own={0: {"scale": Scale(2.5)}}, pickles=True)
    monkeypatch.delattr(sys.modules[__name__], "Scale")
    with pytest.raises(
        CheckpointError, match=r"pickled object that cannot be loaded: AttributeError.*Is its class"
    ) as error:
        load(CheckpointStore(tmp_path), entry, 0, pickles=True)
    assert not isinstance(error.value, DamagedCheckpoint)


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


def test_a_count_of_a_hundred_million_costs_no_memory(tmp_path: Path):
    entry = commit(tmp_path, 3, (0,))
    text = {"shared": {"count": 10**8, "tensors": {}, "tree": None}, "own": {"tree": None, "tensors": []}}
    (tmp_path / entry.name / "rank-0.json").write_text(json.dumps(text))
    tracemalloc.start()
    with pytest.raises(DamagedCheckpoint, match="0 of 100000000 tensors"):
        load(CheckpointStore(tmp_path), entry, 0)
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()


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

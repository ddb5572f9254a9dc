"""Ranks are killed while all save, and those that are left save on: real processes, the store in one of its own."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from lightning_async.checkpoint.shards import load_own
from lightning_async.checkpoint.store import CheckpointStore, Manifest
from lightning_async.data.redistribution import rest
from tests.callbacks.checkpoint_ranks import settled
from tests.callbacks.loss_ranks import BATCH, SAMPLES
from tests.strategies.test_failures import ended
from tests.support import RankResult, run_ranks

pytestmark = pytest.mark.processes

EVERYBODY = (0, 1, 2)


def ran(folder: Path, ranks: int = 3, **kwargs: Any) -> list[RankResult]:
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
    arguments = {"folder": str(folder), **kwargs}
    return run_ranks("tests.callbacks.loss_ranks:train", ranks, kwargs=arguments, env=env, timeout=120, check=False)


def without(dead: int, results: list[RankResult]) -> list[dict[str, Any]]:
    """What the others say, which have all ended in order and alike."""
    for result in results:
        assert not result.timed_out and (result.rank == dead) == bool(result.returncode), "\n".join(map(str, results))
    told = [ended(result) for result in results if result.rank != dead]
    assert len({each["digest"] for each in told}) == 1, told
    return told


def whole(folder: Path) -> list[Manifest]:
    """All checkpoints, verified, the oldest first; nothing else is left there."""
    store, entries = CheckpointStore(folder), settled(folder)
    assert [entry.error for entry in entries] == [None] * len(entries)
    left = {str(path): path.read_bytes()[:200] for path in folder.rglob("*.tmp-*/*")}
    assert left == {} and [name for name in os.listdir(folder) if ".tmp" in name] == []
    return [store.verify(entry) for entry in reversed(entries)]


@pytest.mark.parametrize(
    ("place", "schedule", "dead"),
    [
        ("step", "asynchronous", 0),
        ("mark", "asynchronous", 1),
        ("part", "asynchronous", 0),
        ("handed over", "asynchronous", 0),
        ("end", "asynchronous", 0),
        ("raises", "asynchronous", 0),
        ("last", "asynchronous", 1),
        ("part", "synchronous", 0),
        ("step", "warming up", 1),
    ],
)
def test_those_that_are_left_save_on(place: str, schedule: str, dead: int, tmp_path: Path) -> None:
    results = ran(tmp_path, victim=dead, place=place, schedule=schedule)
    told = without(dead, results)
    assert sorted(each["rank"] for each in told) == [0, 1]
    saves, left = whole(tmp_path), tuple(rank for rank in EVERYBODY if rank != dead)
    assert {save.world_size for save in saves} == {3}, "that were started"
    ranks = [save.ranks for save in saves]
    assert ranks[-1] == left and saves[-1].reason == "the end"
    in_turn = place not in ("end", "raises", "last")
    assert ranks == sorted(ranks, key=len, reverse=True) or not in_turn, "first of all, then of these"
    said = "".join(result.stderr for result in results)
    given_up = said.count("is given up: a rank is lost whose part was yet to come")
    if place in ("mark", "part", "last"):
        assert given_up == 1, said
    elif place in ("handed over", "end", "raises"):
        assert given_up == 0, said
    # A rank that merges and packs in one tick while the next round commits has no part, and one that writes its part of
    # a save that is given up meanwhile finds its folder gone: the next save follows.
    # Rank 0 gives saves up, and may die before it has said so.
    expected = r"comes too late for its part" + (r"|\[Errno 2\] .*\.tmp-" if given_up or dead == 0 else "")
    assert "could not be saved" not in said or re.search(expected, said), said
    if place in ("step", "mark", "part"):
        assert sum(save.ranks == left for save in saves) > 2, "saves go on"


SEEN = set(range(SAMPLES))


def stopped(folder: Path, dead: int, epoch: int, **kwargs: Any) -> tuple[list[dict[str, Any]], Manifest]:
    """What those say that are left, when one of them fails in an epoch and ends the other; and the newest save."""
    results = ran(folder, victim=dead, stops_in=epoch, min_replicas=2, **kwargs)
    told = [ended(result) for result in results if result.rank != dead]
    assert all("error" in each for each in told), "\n".join(map(str, results))
    return told, whole(folder)[-1]


def test_started_again_an_epoch_that_was_dealt_out_to_those_that_were_left_is_seen_whole(tmp_path: Path) -> None:
    """By as many as were started at first, and by as many as were left."""
    _, save = stopped(tmp_path / "3", dead=0, epoch=1)
    assert (save.ranks, save.world_size, save.epoch) == ((1, 2), 3, 1)
    store = CheckpointStore(tmp_path / "3")
    owns: list[Any] = [load_own(store, store.entries()[0], rank, "checkpoint", "seen") for rank in save.ranks]
    before = {1: [sample for own in owns for sample in own[1]]}
    shutil.copytree(tmp_path / "3", tmp_path / "2")
    for ranks in (3, 2):
        results = ran(tmp_path / str(ranks), ranks)
        told = without(-1, results)
        for epoch in (1, 2):
            seen = {sample for each in told for sample in each["seen"][str(epoch)]}
            assert seen | set(before.get(epoch, ())) == SEEN, (ranks, epoch)
        assert max(each["new"] for each in told) < 2 * SAMPLES / BATCH / ranks, "it went on within the epoch"
        absent = "Rank 0 has no state of its own in"
        assert ("".join(result.stderr for result in results).count(absent) == 1) is (ranks == 3)


def test_started_again_in_the_epoch_of_the_loss_the_lost_one_begins_at_anothers_place(tmp_path: Path) -> None:
    _, save = stopped(tmp_path, dead=1, epoch=0)
    assert (save.ranks, save.world_size, save.epoch) == ((0, 2), 3, 0)
    store = CheckpointStore(tmp_path)
    own: Any = load_own(store, store.entries()[0], 0, "resume")
    ((lost, _, committed),) = own["unsaved"]["left"]
    results = ran(tmp_path, 3)
    told = without(-1, results)
    seen = [each["seen"]["0"] for each in told]
    assert all(len(set(samples)) == len(samples) for samples in seen), "each of it once"
    assert not set(seen[0]) & set(seen[2])
    assert (lost, len(SEEN - {*seen[0], *seen[1], *seen[2]})) == ("1", BATCH * committed), "what it had shared"
    assert "Rank 1 has no state of its own in" in results[1].stderr


def test_started_again_amid_what_a_lost_one_had_left_each_sample_is_seen_once(tmp_path: Path) -> None:
    """The others train on it at the end of the epoch, of which the lost one has nothing any more; what is left then is
    divided evenly, so that up to two samples come once more."""
    own = SAMPLES // BATCH // 3
    _, save = stopped(tmp_path, dead=1, epoch=0, stops_at=(own + 2, 1))  # all that was asked for before is saved then
    assert (save.ranks, save.world_size, save.epoch) == ((0, 2), 3, 0)
    store = CheckpointStore(tmp_path)
    entry = store.entries()[0]
    resumes: list[Any] = [load_own(store, entry, rank, "resume") for rank in (0, 2)]
    ((first,), (second,)) = (each["loaders"] for each in resumes)
    assert (first["share"]["kind"], second["share"]["kind"]) == ("given", "given")
    shared = own * BATCH - len(first["share"]["indices"]) - len(second["share"]["indices"])
    left = rest([first, second])
    once_more = left[: -len(left) % 3]
    states: list[Any] = [load_own(store, entry, rank, "checkpoint", "seen") for rank in (0, 0, 2)]
    before = [state[0] for state in states]
    results = ran(tmp_path, 3)
    told = without(-1, results)
    seen = [each["seen"]["0"] for each in told]
    assert [now[: len(then)] for now, then in zip(seen, before, strict=True)] == before, "the lost one has rank 0's"
    new = [sample for now, then in zip(seen, before, strict=True) for sample in now[len(then) :]]
    assert sorted(new) == sorted(left + once_more)
    counted = [*before[0], *before[2], *left]
    assert len(set(counted)) == len(counted) == SAMPLES - shared
    for epoch in ("1", "2"):
        assert sorted(sample for each in told for sample in each["seen"][epoch]) == sorted(SEEN)

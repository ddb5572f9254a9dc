"""A rank comes back at odd moments: nobody who trains is disturbed, and it is as the others are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from lightning_async.checkpoint.shards import load_own
from lightning_async.checkpoint.store import CheckpointStore
from tests.strategies.joining_workers import wait_for
from tests.strategies.live_rank_workers import SAMPLES
from tests.strategies.odd_joining_workers import STEPS
from tests.strategies.test_failures import ended
from tests.support import RankGroup, start_ranks

pytestmark = pytest.mark.processes

TRAIN = "tests.strategies.odd_joining_workers:train"


@contextmanager
def ranks(
    folder: Path, moment: str, newcomers: int = 1, dies: str = "1", size: int = 3, windows: int = 0
) -> Iterator[RankGroup]:
    """Some, of which one dies, and joining ranks in its place, which wait for a file each."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    def env(number: int) -> dict[str, str]:
        shared = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
        shared |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        alone = {"RANK": dies, "LOCAL_RANK": dies, "LIGHTNING_ASYNC_REJOIN": str(number - size + 1)}
        return shared | (alone if number >= size else {})

    arguments = {"folder": str(folder), "moment": moment, "windows": windows}
    with start_ranks(TRAIN, size + newcomers, kwargs=arguments, env=env, timeout=150) as group:
        yield group


def test_within_an_epoch_it_takes_its_part_of_the_rest_and_all_else_is_as_with_the_others(tmp_path: Path) -> None:
    """A layer was unfrozen meanwhile, and something is logged later; all come to `max_steps` together."""
    with ranks(tmp_path, "mid epoch") as group:
        results = group.join()
    said = [ended(results[number]) for number in (0, 2, 3)]
    assert [results[number].returncode for number in (0, 2, 3)] == [0, 0, 0], "\n".join(map(str, results))
    assert [each["world_size"] for each in said] == [3, 3, 3]
    for same in ("lr", "epochs", "digest"):
        assert len({each[same] for each in said}) == 1, (same, said)
    assert {each["late"] for each in said} == {1.0}
    in_epoch = [each["trained"]["1"] for each in said]  # which it came in, after three steps of the others at least
    assert sorted(sample for each in in_epoch for sample in each) == list(range(SAMPLES))
    parts = [len(each) // 2 for each in in_epoch]
    assert parts[2] > 0 and parts[0] + parts[1] - 2 * parts[2] >= 2 * 3 - 2, parts
    store = CheckpointStore(tmp_path / "saved")
    within = [e for e in store.entries() if e.manifest and e.manifest.ranks == (0, 1, 2) and e.manifest.epoch == 1]
    assert within
    for entry in within:
        states: list[Any] = [load_own(store, entry, rank, "resume") for rank in (0, 2, 1)]
        assert [state["dealt"] for state in states] == [[0, 3], [1, 3], [2, 3]]
    # Epoch 0 and 1, then 8 steps in each: who had a step less of the rest than another has not come to the last one.
    assert {each["steps"] for each in said} <= {STEPS - 1, STEPS}, said


def test_started_again_in_an_epoch_in_which_a_joining_rank_had_no_part_each_sample_is_seen_once(tmp_path: Path) -> None:
    """It has the lost first rank's name, and the last number; what two had left, three take. It is told to end."""
    with ranks(tmp_path, "accumulates", dies="0") as group:
        first = group.join()
    said = [ended(first[number]) for number in (1, 2, 3)]
    assert [first[number].returncode for number in (1, 2, 3)] == [75] * 3, "\n".join(map(str, first))
    seen = [sample for each in said for sample in each["trained"].get("1", [])]
    assert "1" not in said[2]["trained"] and 12 <= len(seen) == len({*seen}) <= 44
    arguments = {"folder": str(tmp_path)}
    with start_ranks("tests.strategies.odd_joining_workers:again", 3, kwargs=arguments) as group:
        results = group.join()
    assert [result.returncode for result in results] == [0] * 3, "\n".join(map(str, results))
    later = [sample for result in results for sample in ended(result)["trained"]["1"]]
    assert sorted({*seen, *later}) == list(range(SAMPLES)) and not {*seen} & {*later}, (seen, later)
    assert len(later) - len({*later}) < 3  # as torch makes parts equal


def test_where_rank_0_has_taken_its_last_step_nobody_is_taken_in(tmp_path: Path) -> None:
    with ranks(tmp_path, "at the end") as group:
        results = group.join()
    said = [ended(results[number]) for number in (0, 2)]
    assert [results[number].returncode for number in (0, 2, 3)] == [0, 0, 0], "\n".join(map(str, results))
    assert "is over on the other ranks, and their result is taken" in results[3].stderr, results[3].stderr
    assert [(each["steps"], each["world_size"]) for each in said] == [(60, 2), (60, 2)]


def test_troubles_while_it_is_taken_in_are_not_those_who_trains(tmp_path: Path) -> None:
    """What rank 0 has for the first one cannot be sent; the second one finds that rank 2 dies, and waits again; rank 0
    is told to stop while it takes that in."""
    with ranks(tmp_path, "trouble", newcomers=2) as group:
        for before, start in ((1, 1), (3, 2)):
            group.processes[before].wait(150.0)
            (tmp_path / f"start {start}").touch()
        results = group.join()
    assert not any(result.timed_out for result in results), "\n".join(map(str, results))
    assert "Can't pickle" in results[0].stderr and "training goes on without" in results[0].stderr
    assert results[2].returncode == -9
    assert "could not be admitted, and waits again" in results[4].stderr
    for number in (0, 4):
        assert ended(results[number])["error"].startswith("SIGTERMException"), results[number]


def test_whoever_is_lost_when_all_are_connected_the_others_go_on_and_it_comes_again(
    tmp_path: Path,
) -> None:
    """The first one is killed before the sync point, then rank 2; the live ranks admit the second one."""
    with ranks(tmp_path, "ready", newcomers=2) as group:
        for number in (0, 2):
            wait_for(tmp_path / f"rank {number} is ready")
        group.processes[3].kill()
        (tmp_path / "killed").touch()
        results = group.join()
    assert [results[number].returncode for number in (0, 2, 3, 4)] == [0, -9, -9, 0], "\n".join(map(str, results))
    assert "rank 1 could not be admitted, and training goes on without" in results[0].stderr
    assert "could not be admitted, and waits again" in results[4].stderr
    said = [ended(results[number]) for number in (0, 4)]
    assert len({each["digest"] for each in said}) == 1
    assert [(each["rank"], each["world_size"]) for each in said] == [(0, 2), (1, 2)]
    last = str(said[0]["epochs"] - 1)
    assert sorted(sample for each in said for sample in each["trained"][last]) == list(range(SAMPLES))


def test_within_an_epoch_of_streams_it_begins_its_own_until_the_others_end(tmp_path: Path) -> None:
    with ranks(tmp_path, "stream") as group:
        results = group.join()
    assert [results[number].returncode for number in (0, 2, 3)] == [0, 0, 0], "\n".join(map(str, results))
    said = [ended(results[number]) for number in (0, 2, 3)]
    assert len({each["digest"] for each in said}) == 1
    assert [each["epochs"] for each in said] == [3, 3, 3]
    assert [len(each["trained"]["1"]) for each in said[:2]] == [24, 24]
    assert said[2]["trained"].keys() == {"1", "2"}
    assert len(said[2]["trained"]["1"]) > 0  # of a stream without end
    assert [len(each["trained"]["2"]) for each in said] == [24, 24, 24]


def test_who_waits_is_taken_in_as_soon_as_one_is_lost(tmp_path: Path) -> None:
    """It comes under the number of one whose death nobody knows of yet, and one is left who could look again."""
    with ranks(tmp_path, "room", size=2) as group:
        results = group.join()
    assert [results[number].returncode for number in (0, 1, 2)] == [0, -9, 0], "\n".join(map(str, results))
    said = [ended(results[number]) for number in (0, 2)]
    assert len({each["digest"] for each in said}) == 1
    assert [(each["rank"], each["world_size"]) for each in said] == [(0, 2), (1, 2)]


@pytest.mark.parametrize("windows", [0, 4])
def test_too_few_stand_until_one_has_come(windows: int, tmp_path: Path) -> None:
    """Of three, of which two are wanted, two die; within a window of gradients, too, which goes on."""
    with ranks(tmp_path, "short", windows=windows) as group:
        for number in (1, 2):
            group.processes[number].wait(150.0)
        (tmp_path / "start 1").touch()
        results = group.join()
    assert [results[number].returncode for number in range(4)] == [0, -9, -9, 0], "\n".join(map(str, results))
    said = [ended(results[number]) for number in (0, 3)]
    assert len({each["digest"] for each in said}) == 1
    assert [(each["rank"], each["world_size"]) for each in said] == [(0, 2), (1, 2)]
    assert said[0]["alone"] <= 2  # the step under way, and one whose data was at hand
    assert "event=short" in results[0].stderr and "event=enough" in results[0].stderr
    last = str(said[0]["epochs"] - 1)
    assert sorted(sample for each in said for sample in each["trained"][last]) == list(range(SAMPLES))


def test_too_few_end_where_nobody_comes_in_time(tmp_path: Path) -> None:
    with ranks(tmp_path, "short for good", newcomers=0) as group:
        results = group.join()
    error = ended(results[0])["error"]
    assert error.startswith("PeerLost: Rank 0: 1 of at least 2 replicas are left"), results[0]
    assert "none has joined within 0:00:06" in error  # that is no hang, either
    assert ended(results[0])["alone"] <= 2

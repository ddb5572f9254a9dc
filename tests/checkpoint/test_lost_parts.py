"""Ranks are lost with their parts of saves under way: these are completed by what was handed over, or given up."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lightning_async.algorithms import Latest
from lightning_async.checkpoint import retention
from lightning_async.checkpoint.saver import Saver
from lightning_async.checkpoint.store import CheckpointStore

pytestmark = pytest.mark.processes

EVERYBODY = (0, 1, 2)
Make = Callable[[int], Saver]


@pytest.fixture
def lost() -> set[int]:
    return set()


@pytest.fixture
def make(tmp_path: Path, lost: set[int]) -> Iterator[Make]:
    made: list[Saver] = []

    def make(rank: int) -> Saver:
        saver = Saver(CheckpointStore(tmp_path), rank, "run", Latest(9), max_failures=1, lost=lambda: lost)
        saver.start()
        made.append(saver)
        return saver

    yield make
    for saver in made:
        if saver._writer.pid is not None:
            os.kill(saver._writer.pid, signal.SIGCONT)
        saver.close(5.0)


def save(saver: Saver, number: int, ranks: tuple[int, ...] = EVERYBODY) -> None:
    saver.save(number, 10 * number, ranks, {"x": torch.ones(3)}, {"own": saver._rank}, {})


def poll(*savers: Saver, until: Callable[[], object], seconds: float = 20.0) -> None:
    late = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < late, "in vain"
        for saver in savers:
            saver.poll()
        time.sleep(0.005)


def committed(folder: Path) -> dict[int, tuple[int, ...]]:
    store = CheckpointStore(folder)
    return {entry.number: store.verify(entry).ranks for entry in store.entries()}


@pytest.mark.parametrize("dead", EVERYBODY)
def test_a_save_whose_part_does_not_come_is_given_up_and_the_next_one_is_whole(
    dead: int, tmp_path: Path, make: Make, lost: set[int], caplog: pytest.LogCaptureFixture
) -> None:
    left = [make(rank) for rank in EVERYBODY if rank != dead]
    for saver in left:
        save(saver, 1)
    poll(*left, until=lambda: left[1]._writer.busy is False)
    lost.add(dead)
    poll(*left, until=lambda: left[0].gave_up)
    assert not left[1].gave_up, "one tells"
    assert [message for message in caplog.messages if "save 1 is given up" in message] == [
        f"Rank {left[0]._rank}: save 1 is given up: a rank is lost whose part was yet to come."
    ]
    ranks = tuple(saver._rank for saver in left)
    for saver in left:
        save(saver, 2, ranks)
    assert all(saver.wait(20.0) for saver in left)
    assert committed(tmp_path) == {2: ranks}
    assert [name for name in os.listdir(tmp_path) if ".tmp" in name] == []
    assert all(saver.costs.failed == 0 for saver in left), "it is no failure of theirs"


@pytest.mark.parametrize("dead", [1, 2])
def test_a_rank_that_leaves_by_an_exception_and_says_so_fails_no_save_of_those_that_are_left(
    dead: int, tmp_path: Path, make: Make, lost: set[int], caplog: pytest.LogCaptureFixture
) -> None:
    left, leaves = [make(rank) for rank in EVERYBODY if rank != dead], make(dead)
    for saver in left:
        save(saver, 1)
    leaves.give_up(1, 10, "its training ended before its next batch boundary", EVERYBODY)
    lost.add(dead)
    poll(*left, until=lambda: left[0].gave_up)
    assert "could not be saved" not in caplog.text
    assert all(saver.costs.failed == 0 for saver in left), "it is no failure of theirs"
    assert [name for name in os.listdir(tmp_path) if ".tmp" in name] == []


@pytest.mark.parametrize("dead", [0, 1])
def test_what_a_lost_rank_has_handed_over_is_waited_for(dead: int, tmp_path: Path, make: Make, lost: set[int]) -> None:
    """Its writer outlives it, and has yet to begin."""
    savers = [make(rank) for rank in EVERYBODY]
    gone = savers.pop(dead)
    pid = gone._writer.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    save(gone, 1)
    lost.add(dead)
    for saver in savers:
        save(saver, 1)
    looked = time.monotonic() + 0.5
    poll(*savers, until=lambda: time.monotonic() > looked)
    assert savers[0]._losses.concerned(lost)
    if dead == 0:
        assert savers[0].wait(20.0), "the next save is not held up"
    os.kill(pid, signal.SIGCONT)
    assert savers[0].wait(20.0, settled=True)
    assert savers[0].is_committed(1)
    assert committed(tmp_path) == {1: EVERYBODY}
    assert not savers[0].gave_up


def test_a_rank_that_is_stopped_has_a_writer_that_was_given_nothing(
    tmp_path: Path, make: Make, lost: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lives for as long as that rank does, and nobody waits for it."""
    monkeypatch.setattr(retention, "SOON_S", 0.3)
    stopped, *left = map(make, EVERYBODY)
    for saver in left:
        save(saver, 1)
    lost.add(0)
    poll(*left, until=lambda: left[0].gave_up)
    assert stopped._writer.pid is not None
    assert committed(tmp_path) == {}


def test_those_that_are_left_are_lost_in_turn(tmp_path: Path, make: Make, lost: set[int]) -> None:
    """Who is to look after a save is lost as well, and the next one does."""
    last = make(2)
    save(last, 1)
    poll(last, until=lambda: not last._writer.busy)
    lost.add(0)
    assert not last._losses.concerned(lost)
    lost.add(1)
    poll(last, until=lambda: last.gave_up)
    save(last, 2, (2,))
    assert last.wait(20.0)
    assert committed(tmp_path) == {2: (2,)}


def test_of_saves_that_were_committed_and_deleted_nothing_is_left_behind(
    tmp_path: Path, make: Make, lost: set[int]
) -> None:
    savers = [make(rank) for rank in EVERYBODY]
    for saver in reversed(savers):
        save(saver, 1)
    for saver in savers:
        assert saver.wait(20.0)
    store = CheckpointStore(tmp_path)
    store.remove(store.entries()[0])
    lost.add(0)
    poll(savers[1], until=lambda: not savers[1]._losses.concerned(lost))
    assert not savers[1].gave_up
    assert [name for name in os.listdir(tmp_path) if not name.startswith(".")] == []

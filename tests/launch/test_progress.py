"""No rank takes steps: by table, and with a launcher that starts them again."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from lightning_async.launch import store_main
from lightning_async.launch.hang_detection import ReportedProgress, Watched
from lightning_async.launch.state_machine import Policy
from lightning_async.launch.store import LaunchStore
from lightning_async.membership.status import ENDED, FAILED, StatusRecord
from tests.launch.conftest import SCRIPT, Launched


def says(
    name: int, step: int, state: str = "trains", at: float = 1.0, members: str = "01", run: int = 1
) -> StatusRecord:
    return StatusRecord(
        name=str(name), step=step, state=state, at=at, process=10 + name, members=tuple(members), run=run
    )  # fmt: skip


def test_where_nobody_takes_a_step_it_says_where_each_stands():
    progress = ReportedProgress((20.0, 10.0), 3, now=0.0)
    assert progress.look([], 9.9) is None
    assert progress.look([says(0, 4), says(1, 5, at=1.0)], 9.95) is None  # they have begun
    assert progress.look([says(0, 4, at=2.0), says(1, 5)], 15.0) is None
    assert progress.look([says(0, 5, at=3.0), says(1, 5)], 19.0) is None  # one of them is enough
    assert progress.look([says(0, 5, "waits (validation)", 4.0), says(1, 5)], 28.9) is None
    words = progress.look([says(0, 5, "waits (validation)", 5.0), says(1, 5)], 29.0)
    assert words is not None
    assert words.splitlines() == [
        "No rank has taken a step for 10 s (--hang-after 10):",
        "rank 0 (process 10) waits (validation), at step 5",
        "rank 1 (process 11) trains, at step 5; nothing was heard of it for 19 s",
        "rank 2 has reported no step yet",
    ]
    assert progress.look([says(0, 5), says(1, 5)], 38.9) is None  # the launcher has heard it
    assert progress.look([says(0, 5), says(1, 5)], 39.0) is not None  # and did not do anything


def test_nobody_has_begun():
    words = ReportedProgress((10.0, 1.0), 2, now=5.0).look([], 15.0)
    assert words is not None
    assert words.splitlines() == [
        "No rank has taken its first step within 10 s (--hang-after-start 10):",
        "rank 0 has reported no step yet",
        "rank 1 has reported no step yet",
    ]


def test_until_the_first_step_of_a_training_there_is_more_time():
    """Imports, then a step that compiles; the same in a training that goes on from step 400, and in a second one."""
    progress = ReportedProgress((100.0, 10.0), 2, now=0.0)
    assert progress.look([], 90.0) is None
    told = [says(0, 400), says(1, 400)]
    assert progress.look(told, 99.0) is None
    assert progress.look(told, 198.0) is None
    assert progress.look([says(0, 401), says(1, 400)], 198.5) is None
    words = progress.look([says(0, 401), says(1, 400)], 208.5)
    assert words is not None
    assert words.startswith("No rank has taken a step for 10 s (--hang-after 10):")
    told = [says(0, 0, run=2), says(1, 401)]
    assert progress.look(told, 210.0) is None
    assert progress.look(told, 309.0) is None
    words = progress.look(told, 310.0)
    assert words is not None
    assert words.startswith("No rank has taken its first step within 100 s (--hang-after-start 100):")


def test_one_that_comes_back_has_no_more_time_than_the_others():
    """They wait for it: they have taken steps in this training."""
    progress = ReportedProgress((100.0, 10.0), 2, now=0.0)
    assert progress.look([says(0, 0), says(1, 0)], 1.0) is None
    assert progress.look([says(0, 7), says(1, 7)], 2.0) is None
    back = replace(says(1, 7), process=99)
    assert progress.look([says(0, 7), says(1, 7), back], 3.0) is None
    assert progress.look([says(0, 7), says(1, 7), back], 13.0) is not None


@pytest.mark.parametrize(
    ("hang_after_s", "hang_after_start_s", "limits"),
    [(None, None, None), (20.0, None, (1800.0, 20.0)), (3600.0, None, (3600.0, 3600.0)), (600.0, 60.0, (60.0, 600.0))],
)
def test_limits(hang_after_s: float | None, hang_after_start_s: float | None, limits: tuple[float, float] | None):
    policy = Policy(ranks=1, hang_after_s=hang_after_s, hang_after_start_s=hang_after_start_s)
    assert policy.hang_limits == limits


def test_a_limit_that_nobody_looks_at_is_refused():
    with pytest.raises(ValueError, match=r"`Policy\(hang_after_start_s=60\)` needs `hang_after_s`"):
        Policy(ranks=1, hang_after_start_s=60.0)


def test_time_in_which_nobody_looks_does_not_count():
    """A job was suspended for an hour."""
    clock = Watched(100.0)
    progress = ReportedProgress((30.0, 30.0), 1, clock.now)
    told = [says(0, 4, members="0")]
    assert progress.look(told, clock.tick(100.5)) is None
    assert progress.look(told, clock.tick(3700.5)) is None
    assert clock.now == 10.5
    assert progress.look(told, clock.tick(3710.0)) is None
    assert progress.look(told, clock.tick(3720.0)) is None
    assert progress.look(told, clock.tick(3730.0)) is not None


def test_a_hang_that_goes_on_is_told_of_again_and_not_to_those_who_have_another_store(
    monkeypatch: pytest.MonkeyPatch,
):
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    store, looks = HashStore(), iter(range(10))
    monkeypatch.setattr(store_main, "_stores", [store])

    def sleep(seconds: float) -> None:
        if next(looks) == 9:
            store_main._stores.append(None)

    monkeypatch.setattr(store_main, "time", SimpleNamespace(monotonic=iter(range(100)).__next__, sleep=sleep))
    with mine, theirs:
        store_main._look_for_progress(store, theirs, 4711, 1, (3.0, 9.0))
        kept = object.__new__(LaunchStore)
        kept._channel = mine
        for port in (4711, 4711, 4712):
            kept._port = port
            told = kept.words()
            assert told.startswith("No rank has taken its first step within 3 s" if port == 4711 else ""), (port, told)
            assert bool(told) is (port == 4711)


@pytest.mark.parametrize("state", [ENDED, FAILED])
def test_what_follows_after_training_is_no_hang(state: str):
    """Rank 1 was lost in it."""
    progress = ReportedProgress((10.0, 10.0), 2, now=0.0)
    told = [says(1, 3), says(0, 9, members="0", run=2)]
    assert progress.look(told, 1.0) is None
    told[1] = says(0, 9, state, members="0", run=2)
    assert progress.look(told, 8.0) is None
    assert progress.look(told, 500.0) is None
    told[1] = says(0, 0, members="0", run=3)  # it trains again
    assert progress.look(told, 501.0) is None
    assert progress.look(told, 511.0) is not None


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the launcher needs Linux")
def test_ranks_that_hang_are_killed_and_started_again_and_the_last_ones_code_says_so(
    launch: Callable[..., Launched],
):
    limits = ("--hang-after", "1", "--hang-after-start", "6")
    again = launch("-n", "2", "--max-restarts", "1", *limits, SCRIPT, "hangs_at_first")
    ends = launch("-n", "2", "--hang-after", "9", "--hang-after-start", "0.5", SCRIPT, "end", "-", "-")
    assert ends.end() == 70, ends.err
    assert again.end() == 0, again.err
    for job, seconds in ((again, "6"), (ends, "0.5")):
        assert f"s (--hang-after-start {seconds}):\n[launch] rank 0 has reported no step yet\n" in job.err
        assert "[launch] rank 1 has reported no step yet\n[launch] All are killed.\n" in job.err
        assert job.err.count("by the launcher") >= 2
    assert "All ranks start again in 1 s (restart 1 of 1)." in again.err
    assert again.out.count("start 1") == 2
    assert ends.err.endswith("[launch] exit code 70\n")

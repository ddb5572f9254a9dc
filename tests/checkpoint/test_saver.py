"""One rank's saves: what fails is counted and told, and nobody waits for a part that does not come."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from lightning_async.algorithms import Latest
from lightning_async.checkpoint.saver import Saver
from lightning_async.checkpoint.store import CheckpointStore
from lightning_async.errors import CheckpointError
from tests.checkpoint.test_writer import POISONED

pytestmark = pytest.mark.processes


def saver_of(folder: Path, rank: int = 0, **settings: object) -> Saver:
    saver = Saver(CheckpointStore(folder), rank, "run", Latest(2), **settings)  # pyright: ignore[reportArgumentType]
    saver.start()
    return saver


@pytest.mark.parametrize("late", [0.0, 0.5])
def test_nobody_waits_for_a_rank_that_gives_up(tmp_path: Path, late: float) -> None:
    first, second = saver_of(tmp_path, 0), saver_of(tmp_path, 1)
    try:
        started = time.monotonic()
        first.save(1, 10, (0, 1), {"x": torch.ones(3)}, {"own": 0}, {})
        first.wait(late)
        second.give_up(1, 10, "another round had come", (0, 1))
        assert first.wait(20.0), "not ten minutes"
        assert time.monotonic() - started < 20.0
        assert first.costs.failed == 1
        assert CheckpointStore(tmp_path).entries() == []
        for saver, rank in ((first, 0), (second, 1)):
            saver.save(2, 20, (0, 1), {"x": torch.ones(3)}, {"own": rank}, {})
        assert first.wait(20.0)
        assert [entry.step for entry in CheckpointStore(tmp_path).entries()] == [20]
        assert first.costs.failed_in_a_row == 0
    finally:
        first.close(5.0)
        second.close(5.0)


def test_who_gives_up_what_others_have_committed_leaves_nothing_behind(tmp_path: Path) -> None:
    """It would make the folder anew that they have renamed, and nobody looks at that again."""
    first, second = saver_of(tmp_path, 0), saver_of(tmp_path, 1)
    try:
        first.save(1, 10, (0,), {"x": torch.ones(3)}, {"own": 0}, {})
        assert first.wait(20.0)
        second.give_up(1, 10, "another round had come")
        second.flush(20.0)
        assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["000001-step-10"]
        store = CheckpointStore(tmp_path)
        assert store.trouble(store.entries()[0]) is None
    finally:
        first.close(5.0)
        second.close(5.0)


def test_what_the_first_rank_gives_up_is_deleted(tmp_path: Path) -> None:
    """The other one is ready by then, and will not look at it again."""
    first, second = saver_of(tmp_path, 0), saver_of(tmp_path, 1)
    try:
        second.save(1, 10, (0, 1), {"x": torch.ones(3)}, {"own": 1}, {})
        assert second.wait(20.0)
        first.give_up(1, 10, "another round had come", (0, 1))
        first.flush(20.0)
        assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []
    finally:
        first.close(5.0)
        second.close(5.0)


def test_nobody_waits_for_a_rank_whose_writers_have_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = saver_of(tmp_path, 0)
    monkeypatch.setattr("lightning_async._subprocess._BOOT", POISONED)
    second = saver_of(tmp_path, 1)
    try:
        for number in (1, 2):
            for saver, rank in ((first, 0), (second, 1)):
                saver.save(number, 10 * number, (0, 1), {"x": torch.ones(3)}, {"own": rank}, {})
            assert second.wait(20.0)
            assert first.wait(20.0), "not ten minutes"
        assert [saver.costs.failed for saver in (first, second)] == [1, 1]
        assert [entry.step for entry in CheckpointStore(tmp_path).entries()] == [20]
    finally:
        first.close(5.0)
        second.close(5.0)


def test_a_state_that_cannot_be_saved_is_given_up_and_counted(tmp_path: Path) -> None:
    first, second = saver_of(tmp_path, 0), saver_of(tmp_path, 1, max_failures=1)
    try:
        first.save(1, 10, (0, 1), {}, {}, {})
        second.save(1, 10, (0, 1), {}, {"strange": object()}, {})
        assert first.wait(20.0)
        assert first.costs.failed == second.costs.failed == 1
        message = r"1 saves in a row have failed, the last one with: .*strange.*[^.]\. Training ends"
        with pytest.raises(CheckpointError, match=message):
            second.poll()
    finally:
        first.close(5.0)
        second.close(5.0)


def test_a_save_that_takes_very_long_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its writer is stopped, as one is that waits for a disk that does not answer: nothing is saved meanwhile."""
    monkeypatch.setattr("lightning_async.checkpoint.saver.PATIENCE_S", 0.2)
    saver = saver_of(tmp_path)
    pid = saver._writer.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        saver.save(1, 10, (0,), {}, {}, {})
        for _ in range(50):
            saver.poll()
            time.sleep(0.01)
        told = [message for message in caplog.messages if "has been under way for" in message]
        assert 1 <= len(told) <= (time.monotonic() - began) / 0.2, "not at every step"
        assert f"(process {pid})" in told[0]
    finally:
        os.kill(pid, signal.SIGCONT)
        saver.close(20.0)
    assert [entry.step for entry in CheckpointStore(tmp_path).entries()] == [10]


@pytest.mark.parametrize("end", ["flush", "close"])
def test_waits_at_the_end_take_their_timeout_once(tmp_path: Path, end: str) -> None:
    """The writer process is stopped, and a deletion does not end either."""
    saver = Saver(CheckpointStore(tmp_path), 0, "run", Latest(2))
    saver.save(1, 1, [0], {"w": torch.zeros(10)}, {}, {})
    saver.wait(60.0)
    writer = saver._writer.pid
    assert writer is not None and saver.costs.committed == 1
    os.kill(writer, signal.SIGSTOP)
    allowed = threading.Event()
    try:
        saver.save(2, 2, [0], {"w": torch.zeros(10)}, {}, {})
        saver._retention.ask(lambda: allowed.wait(60.0))
        began = time.monotonic()
        getattr(saver, end)(3.0)
        assert 2.9 < time.monotonic() - began < 5.0
    finally:
        allowed.set()
        os.kill(writer, signal.SIGCONT)
        saver.close(60.0)

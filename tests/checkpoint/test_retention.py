"""Deleting and marking in the background: in order, without holding up training, and never what is needed."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from lightning_async.algorithms import Latest, Saved
from lightning_async.checkpoint.recovery import recover
from lightning_async.checkpoint.retention import RetentionThread
from lightning_async.checkpoint.storage import LocalFiles
from lightning_async.checkpoint.store import CheckpointStore
from lightning_async.errors import CheckpointError
from tests.checkpoint.stores import assert_whole, save


def numbers(store: CheckpointStore) -> list[int]:
    return [entry.number for entry in store.entries()]


class SlowCalls:
    """``os``, but to delete a file takes until it is allowed."""

    def __init__(self) -> None:
        self.allowed = threading.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def unlink(self, path: str) -> None:
        assert self.allowed.wait(30)
        os.unlink(path)


def test_to_mark_what_is_gone_makes_no_checkpoint_of_it(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    entry = save(store, 1)
    store.remove(entry)
    with pytest.raises(CheckpointError, match="000001-step-10 is gone"):
        store.promote(entry)
    assert os.listdir(tmp_path) == []


def test_training_does_not_wait_for_a_deletion(tmp_path: Path):
    calls = SlowCalls()
    store = CheckpointStore(tmp_path, LocalFiles(calls))
    keeper = RetentionThread(store, Latest(1))
    for number in (1, 2, 3):
        save(store, number)
        keeper.prune()
    keeper.promote(3)
    assert not keeper.flush(0.05)
    assert numbers(store) in ([3, 2], [3, 2, 1]), "the first deletion is under way"
    calls.allowed.set()
    assert keeper.close(30)
    assert [(entry.number, entry.good) for entry in store.entries()] == [(3, True)]
    assert os.listdir(tmp_path) == ["000003-step-30"]


def test_what_is_needed_stays(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    keeper = RetentionThread(store, Latest(1), resumed_from=1)
    keeper.awaited.add(2)
    for number in (1, 2, 3, 4):
        save(store, number)
    keeper.prune()
    assert keeper.flush(30)
    assert numbers(store) == [4, 2, 1]
    keeper.promote(2)
    keeper.awaited.clear()
    keeper.resumed_from = None
    keeper.prune()
    assert keeper.close(30)
    assert numbers(store) == [4, 2]
    found = recover(store, "last_good").entry
    assert found is not None and found.number == 2
    assert_whole(store, found)


def test_what_fails_is_told_and_the_next_one_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    store = CheckpointStore(tmp_path)
    for number in (1, 2):
        save(store, number)

    def rename(*_: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path))

    keeper = RetentionThread(store, Latest(1))
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(store.files, "rename", rename)
        keeper.prune()
        keeper.promote(7)
        assert keeper.flush(30)
    assert "Read-only file system" in caplog.text
    assert "There is no checkpoint of number 7" in caplog.text
    keeper.prune()
    assert keeper.close(30)
    assert numbers(store) == [2]


def test_a_policy_that_fails_is_raised_where_it_was_asked(tmp_path: Path):
    class Broken:
        def keep(self, saved: Sequence[Saved]) -> set[int]:
            raise ZeroDivisionError("a mistake of the user's")

    store = CheckpointStore(tmp_path)
    save(store, 1)
    keeper = RetentionThread(store, Broken())
    keeper.prune()
    assert keeper.flush(30)
    temporary = store.temporary(2, 20, "run")
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        keeper.give_up(temporary, 1, "no room")
    assert keeper.close(30)
    assert os.listdir(temporary) == ["rank-1.failed"], "others wait for this"


def test_a_deletion_that_never_ends_does_not_hold_up_the_end(tmp_path: Path):
    calls = SlowCalls()
    store = CheckpointStore(tmp_path, LocalFiles(calls))
    save(store, 1)
    save(store, 2)
    keeper = RetentionThread(store, Latest(1))
    keeper.prune()
    assert not keeper.close(0.05)
    calls.allowed.set()
    assert keeper.close(30)
    assert keeper.close(30)

"""Recovery tries candidates in order, verifies before it chooses, and all ranks choose one."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_async.algorithms import Best
from lightning_async.checkpoint import store as manifest
from lightning_async.checkpoint.recovery import STRATEGIES, agree, candidates, recover
from lightning_async.checkpoint.storage import LocalFiles, seal
from lightning_async.checkpoint.store import CheckpointEntry, CheckpointStore
from lightning_async.errors import CheckpointError, DamagedCheckpoint
from tests.checkpoint.stores import assert_whole, save, write_ranks

LOSS = Best("loss")


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """Five checkpoints: steps 10, 20, 30, 20, 30, the losses .5, .3, .4, none, nan; the second and third are good."""
    store = CheckpointStore(tmp_path / "run")
    metrics = [{"loss": 0.5}, {"loss": 0.3}, {"loss": 0.4}, {}, {"loss": float("nan")}]
    for number, (step, each) in enumerate(zip((10, 20, 30, 20, 30), metrics, strict=True), start=1):
        entry = save(store, number, step, metrics=each)
        if number in (2, 3):
            store.promote(entry)
    return store


def damage(store: CheckpointStore, number: int, name: str = "rank-1.bin") -> None:
    path = Path(next(entry.path for entry in store.entries() if entry.number == number)) / name
    data = path.read_bytes()
    path.write_bytes(data[:100] + bytes([data[100] ^ 4]) + data[101:])


@pytest.mark.parametrize(
    ("strategy", "order"),
    [
        ("auto", [5, 4, 3, 2, 1]),
        ("latest", [5, 4, 3, 2, 1]),
        ("best", [2, 3, 1]),
        ("last_good", [3, 2]),
        ("step=20", [4, 2]),
        ("step=30", [5, 3]),
        ("step=7", []),
    ],
)
def test_each_strategy_has_its_order(store: CheckpointStore, strategy: str, order: list[int]):
    assert [entry.number for entry in candidates(store.entries(), strategy, LOSS)] == order
    if order:
        found = recover(store, strategy, LOSS)
        assert found.entry is not None and found.entry.number == order[0]
        assert_whole(store, found.entry)
        damage(store, order[0])
        again = recover(store, strategy, LOSS)
        assert again.entry is not None and again.entry.number == order[1]
        ((path, why),) = again.damaged.items()
        assert "rank-1.bin has the checksum" in why and path not in os.listdir(store.dirpath)
        assert f"{Path(path).name}.damaged-1" in os.listdir(store.dirpath)


@pytest.mark.parametrize("strategy", ["newest", "step=", "step=x", "step=-1", "step", "", "best=1"])
def test_another_strategy_is_refused(store: CheckpointStore, strategy: str):
    with pytest.raises(ValueError, match=rf"`recover='{strategy}'` must be one of \('auto'"):
        recover(store, strategy, LOSS)


def test_the_best_needs_a_metric(store: CheckpointStore):
    with pytest.raises(ValueError, match=r"`recover='best'` needs a metric"):
        recover(store, "best")


@pytest.mark.parametrize("strategy", [*STRATEGIES, "step=9"])
def test_an_empty_directory_has_nothing(tmp_path: Path, strategy: str):
    assert recover(CheckpointStore(tmp_path / "none"), strategy, LOSS).entry is None


def test_what_was_not_asked_for_is_not_passed_over(store: CheckpointStore):
    with pytest.raises(CheckpointError, match=r"`recover='step=7'` finds no checkpoint in .*/run that all"):
        recover(store, "step=7")


def test_every_damaged_one_is_tried_named_and_kept(store: CheckpointStore):
    for number, name in [(5, "manifest.json"), (4, "rank-0.manifest.json"), (3, "rank-0.bin")]:
        damage(store, number, name)
    os.unlink(f"{store.final(2, 20)}/rank-1.json")
    found = recover(store)
    assert found.entry is not None and found.entry.number == 1 and not found.unreadable
    assert set(found.damaged) == {store.final(5, 30), store.final(4, 20), store.final(3, 30), store.final(2, 20)}
    assert len([name for name in os.listdir(store.dirpath) if name.endswith(".damaged-1")]) == 4
    damage(store, 1)
    assert recover(store).entry is None  # nothing is left: training begins anew, and `damaged` says why
    assert store.next_number() == 6


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["manifest.json", "rank-0.bin"])
def test_a_pipe_in_place_of_a_file_is_damage(store: CheckpointStore, name: str):
    path = Path(store.final(5, 30)) / name
    path.unlink()
    os.mkfifo(path)
    found = recover(store)
    assert found.entry is not None and found.entry.number == 4 and "a pipe" in found.damaged[store.final(5, 30)]


def test_contents_that_make_no_sense_are_passed_over(store: CheckpointStore):
    def load(entry: CheckpointEntry) -> None:
        if entry.number == 5:
            raise ValueError("it makes no sense")
        if entry.number == 4:
            raise DamagedCheckpoint("it is no state")

    found = recover(store, load=load)
    assert found.entry is not None and found.entry.number == 3
    assert found.unreadable == {store.final(5, 30): "it makes no sense"}
    assert found.damaged == {store.final(4, 20): "it is no state"}
    assert [entry.number for entry in store.entries()] == [5, 3, 2, 1]


def test_at_a_url_too():
    store = CheckpointStore(f"memory://{uuid.uuid4().hex}/run")
    for number in range(1, 4):
        save(store, number)
    write_ranks(store, store.temporary(4, 40, "unfinished"), 4, (0, 1))
    data = store.files.read(f"{store.final(3, 30)}/rank-0.bin")
    store.files.write(f"{store.final(3, 30)}/rank-0.bin", [data[:-1]])
    store.files.unlink(f"{store.final(2, 20)}/rank-1.json")
    found = recover(store)
    assert found.entry is not None and found.entry.number == 1
    assert set(found.damaged) == {store.final(3, 30), store.final(2, 20)}
    assert store.files.names(store.dirpath) == [
        *("000001-step-10", "000002-step-20.damaged-1", "000003-step-30.damaged-1", "000004-step-40"),
    ]
    assert_whole(store, found.entry)
    store.files.remove(store.dirpath)


def test_what_cannot_be_read_is_left_where_it_is(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch):
    """A disk or a network that fails is no damage."""
    real = LocalFiles.check

    def check(self: LocalFiles, path: str, record: Any) -> None:
        if "/000005" in path or broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        real(self, path, record)

    broken = False
    monkeypatch.setattr(LocalFiles, "check", check)
    found = recover(store)
    assert found.entry is not None and found.entry.number == 4 and not found.damaged
    assert "Input/output error" in found.unreadable[store.final(5, 30)]
    broken = True
    with pytest.raises(CheckpointError, match=r"rank 0: .*000005-step-30: .*Input/output error"):
        recover(store)
    monkeypatch.undo()
    found = recover(store)
    assert found.entry is not None and found.entry.number == 5


def test_where_nothing_can_be_renamed_the_next_one_is_still_found(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
):
    damage(store, 5)

    def rename(*_: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(store.files, "rename", rename)
    found = recover(store)
    assert found.entry is not None and found.entry.number == 4
    assert "It keeps its name: [Errno 30]" in found.damaged[store.final(5, 30)]


def test_a_newer_format_is_not_passed_over(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(manifest, "FORMAT", 3)
    monkeypatch.setattr(manifest, "seal", lambda fields: seal({**fields, "format": 3}))
    save(store, 6)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"000006-step-60/manifest.json is of format 3"):
        recover(store)


class Ranks:
    """Threads as ranks that gather plain values."""

    def __init__(self, number: int) -> None:
        self._barrier = threading.Barrier(number, timeout=30)
        self._values: list[Any] = [None] * number

    def gather(self, rank: int) -> Callable[[Any], Sequence[Any]]:
        def gather(value: Any) -> Sequence[Any]:
            self._values[rank] = value
            self._barrier.wait()
            found = list(self._values)
            self._barrier.wait()
            return found

        return gather

    def recover(self, stores: Sequence[CheckpointStore], strategy: str = "auto") -> list[Any]:
        def one(rank: int) -> Any:
            try:
                found = recover(stores[rank], strategy, LOSS, self.gather(rank))
            except CheckpointError as error:
                return error
            return found.entry and found.entry.number

        with ThreadPoolExecutor(len(stores)) as pool:
            return list(pool.map(one, range(len(stores))))


def test_ranks_with_one_directory_agree(store: CheckpointStore):
    damage(store, 5, "manifest.json")
    damage(store, 4)
    assert Ranks(3).recover([CheckpointStore(store.dirpath) for _ in range(3)]) == [3, 3, 3]
    assert sorted(os.listdir(store.dirpath))[-2:] == ["000004-step-20.damaged-1", "000005-step-30.damaged-1"]


def test_ranks_with_one_directory_divide_the_reading(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch):
    real, read = LocalFiles.check, []

    def check(self: LocalFiles, path: str, record: Any) -> None:
        read.append((threading.get_ident(), path))
        real(self, path, record)

    monkeypatch.setattr(LocalFiles, "check", check)
    assert Ranks(3).recover([CheckpointStore(store.dirpath) for _ in range(3)]) == [5] * 3
    assert len({path for _, path in read}) == len(read) == 6, "each file once"
    assert len({thread for thread, _ in read}) == 3
    for number in (5, 4, 3, 2, 1):
        damage(store, number, ("rank-0.bin", "rank-1.bin", "rank-0.manifest.json")[number % 3])
        left = next(iter(range(number - 1, 0, -1)), None)
        assert Ranks(3).recover([CheckpointStore(store.dirpath) for _ in range(3)]) == [left] * 3
    assert len(os.listdir(store.dirpath)) == 5


def test_one_rank_that_cannot_load_it_is_enough(store: CheckpointStore):
    def load(rank: int, entry: CheckpointEntry) -> None:
        if (rank, entry.number) == (1, 5):
            raise ValueError("it makes no sense")

    ranks = Ranks(3)
    with ThreadPoolExecutor(3) as pool:
        tasks = [pool.submit(recover, store, gather=ranks.gather(r), load=partial(load, r)) for r in range(3)]
        found = [task.result(60.0).entry for task in tasks]
    assert [entry and entry.number for entry in found] == [4, 4, 4]


def test_ranks_with_directories_of_their_own_take_what_all_can_read(store: CheckpointStore, tmp_path: Path):
    shutil.copytree(store.dirpath, tmp_path / "other")
    other = CheckpointStore(tmp_path / "other")
    other.remove(other.entries()[0])
    damage(other, 3)
    assert Ranks(2).recover([store, other]) == [4, 4]
    damage(store, 4)
    assert Ranks(2).recover([store, other]) == [2, 2]
    assert Ranks(2).recover([other, store], "best") == [2, 2]
    assert "000004-step-20" in os.listdir(other.dirpath), "the copy without damage keeps its name"


def test_ranks_that_have_none_in_common_are_told(store: CheckpointStore, tmp_path: Path):
    empty = CheckpointStore(tmp_path / "empty")
    for error in Ranks(2).recover([store, empty]):
        assert isinstance(error, CheckpointError)
        assert "There are [5, 0] others, by rank" in str(error)
    assert Ranks(2).recover([empty, empty]) == [None, None]


def test_a_newer_format_on_one_rank_stops_all(store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(store.dirpath, tmp_path / "other")
    monkeypatch.setattr(manifest, "FORMAT", 3)
    monkeypatch.setattr(manifest, "seal", lambda fields: seal({**fields, "format": 3}))
    save(store, 6)
    monkeypatch.undo()
    for error in Ranks(2).recover([CheckpointStore(tmp_path / "other"), store]):
        assert "is of format 3" in str(error)


def test_a_directory_that_one_rank_cannot_list_stops_all(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch):
    """And none waits for the one that has failed."""
    other = CheckpointStore(store.dirpath)

    def names(folder: str) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)

    monkeypatch.setattr(other.files, "names", names)
    for error in Ranks(2).recover([store, other]):
        assert isinstance(error, CheckpointError)
        assert f"rank 1: [Errno 13] Permission denied: '{store.dirpath}'" in str(error)


@given(st.lists(st.sets(st.integers(0, 8)).map(lambda row: sorted(row, reverse=True)), min_size=1, max_size=4))
def test_agreement_is_on_the_newest_that_all_have(rows: list[list[int]]):
    assert agree(rows) == max(set(rows[0]).intersection(*rows), default=None)

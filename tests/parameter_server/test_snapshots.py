"""A shard on disk: whole or passed over, what acknowledgements say of it, and what becomes of pushes after it."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_async.algorithms.staleness import make_policy
from lightning_async.checkpoint.storage import LocalFiles
from lightning_async.errors import AsyncTrainingError
from lightning_async.parameter_server.discovery import Agreement
from lightning_async.parameter_server.snapshots import Shelf, Snapshot, Snapshots
from lightning_async.parameter_server.store import Store, restored
from tests.parameter_server.running import Running, push, running


def store(optimizer: str, arguments: dict[str, Any], staleness: str) -> Store:
    made = empty()
    made.initialise(torch.arange(5.0), optimizer, arguments, "plan", make_policy(staleness))
    return made


def empty() -> Store:
    return Store(os.memfd_create("test"))


@pytest.mark.parametrize(
    ("optimizer", "arguments", "staleness"),
    [
        ("Adam", {"lr": 0.1}, "none"),
        ("delta", {}, "none"),
        ("Adagrad", {"lr": 0.1}, "none"),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, "dana_gap_aware"),
        ("SGD", {"lr": 0.1}, "fedbuff"),
    ],
)
def test_a_restored_store_goes_on_as_the_one_before_would_have(
    tmp_path: Path, optimizer: str, arguments: dict, staleness: str
):
    before, pulled = store(optimizer, arguments, staleness), torch.empty(5)
    before.remember({name: {"life": 2, "push": 0, "clock": 0, "live": True} for name in "ab"})
    for name in "ab":
        before.pull(name, pulled)
        before.push(name, 1, torch.ones(5), 0)
    shelf = Shelf(str(tmp_path), 3)
    Snapshots(before, threading.RLock(), shelf).take()
    shelf.close()
    after, other = empty(), Shelf(str(tmp_path), 3)
    assert Snapshots(after, threading.RLock(), other).version == after.version == before.version
    other.close()
    assert after.workers == before.workers and after.contents == before.contents
    assert after.incarnation != before.incarnation  # what was applied after the snapshot is in one of them only
    for number in (2, 3):
        for each in (before, after):
            each.push("a", number, torch.full((5,), 0.5), 1)
            each.pull("a", pulled)
    assert after.version == before.version > 0 or staleness == "fedbuff"
    assert after.parts.keys() == before.parts.keys()
    for name, part in before.parts.items():
        assert torch.equal(part, after.parts[name]), name


def test_two_are_kept_and_the_newest_that_is_whole_is_taken(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    shelf = Shelf(str(tmp_path), 0)
    for version in range(1, 6):
        shelf.put(Snapshot({"version": version}, {"params": torch.full((1000,), float(version))}))
    folder = tmp_path / "server-0"
    assert sorted(os.listdir(folder)) == ["00000004.bin", "00000004.json", "00000005.bin", "00000005.json", "lock"]

    def newest() -> float | None:
        found = shelf.newest()
        if found is not None:
            assert found.record["version"] == found.parts["params"][0] == found.parts["params"][-1]
        return None if found is None else found.record["version"]

    assert newest() == 5
    data = folder / "00000005.bin"
    whole = data.read_bytes()
    for damaged in (whole[:-1], whole[:1999] + b"x" + whole[2000:], b""):
        data.write_bytes(damaged)
        assert newest() == 4
    data.write_bytes(whole)
    told = folder / "00000005.json"
    text = told.read_text()
    for damaged in (text[:-10], text.replace('"version": 5', '"version": 6'), "", json.dumps({"format": 1})):
        told.write_text(damaged)
        assert newest() == 4
    data.unlink()
    told.write_text(text)
    assert newest() == 4
    assert "00000005.bin is missing" in capfd.readouterr().err
    (folder / "00000004.json").unlink()
    assert newest() is None
    shelf.close()
    again = Shelf(str(tmp_path), 0)  # what a server that was killed has written of one is taken away
    assert "00000004.bin" not in os.listdir(folder)
    again.put(Snapshot({"version": 6}, {"params": torch.full((1000,), 6.0)}))
    again.close()
    assert (folder / "00000006.json").exists()


class FullDisk:
    """``os``, on a disk with room for so many bytes more."""

    def __init__(self, room: int) -> None:
        self.room = room

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, descriptor: int, data: memoryview) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = os.write(descriptor, data[: self.room])
        self.room -= count
        return count


@pytest.mark.parametrize(
    "room", [0, 2000, 4000, 4100]
)  # of nothing, of half the weights, of those alone, of half the words
def test_a_snapshot_that_a_full_disk_had_no_room_for_takes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
):
    disk = FullDisk(1 << 20)
    monkeypatch.setattr(
        "lightning_async.parameter_server.snapshots.files_at", lambda folder: (LocalFiles(disk), folder)
    )
    shelf, folder = Shelf(str(tmp_path), 0), tmp_path / "server-0"

    def put(version: int) -> None:
        shelf.put(Snapshot({"version": version}, {"params": torch.full((1000,), float(version))}))

    put(1)
    put(2)
    there = sorted(os.listdir(folder))
    for _ in range(3):
        disk.room = room
        with pytest.raises(OSError, match="No space left"):
            put(3)
        assert sorted(os.listdir(folder)) == there and (found := shelf.newest()) and found.record["version"] == 2
    disk.room = 1 << 20
    put(4)  # and the one before is kept, however many have failed between them
    found = shelf.newest()
    assert found and found.record["version"] == 4
    assert sorted(os.listdir(folder)) == ["00000002.bin", "00000002.json", "00000003.bin", "00000003.json", "lock"]
    shelf.close()


def test_a_folder_is_one_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lightning_async.parameter_server.snapshots._LOCK_S", 0.1)
    shelf = Shelf(str(tmp_path), 0)
    other = Shelf(str(tmp_path), 1)
    with pytest.raises(AsyncTrainingError, match="another server keeps its snapshots there"):
        Shelf(str(tmp_path), 0)
    shelf.close()
    other.close()
    Shelf(str(tmp_path), 0).close()


def test_an_answer_says_what_it_survives(tmp_path: Path):
    with running(snapshots=tmp_path) as server:
        a = server.started("a")
        a.gradients[0].fill_(1.0)
        first = a.push()
        assert first.durable == (-1,)
        assert (answer := a.snapshot()).durable == answer.versions == (1,)
        assert a.pull().durable == (1,)
        second = a.push()
        assert (second.durable, second.versions) == ((1,), (2,))
        assert a.snapshot().durable == (2,)
        assert len(os.listdir(tmp_path / "server-0")) == 5
        a.snapshot()
        assert len(os.listdir(tmp_path / "server-0")) == 5  # nothing has changed


def test_a_server_without_a_folder_says_so():
    with running() as server:
        a = server.started("a")
        with pytest.raises(AsyncTrainingError, match="takes no snapshots"):
            a.snapshot()


def test_a_disk_that_is_full_does_not_end_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with running(snapshots=tmp_path) as server:
        a = server.started("a")
        push(a, 1.0)

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device", "a/path")

        assert server.server.snapshots is not None
        monkeypatch.setattr(server.server.snapshots._shelf, "put", full)
        with pytest.raises(AsyncTrainingError, match=r"cannot take a snapshot.*No space left on device"):
            a.snapshot()
        b = server.started("b")
        assert push(b, 1.0).tolist() == [2.0] * 8


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_pushes_after_the_snapshot_are_lost_with_the_host_and_the_workers_go_on(tmp_path: Path, mode: str):
    with running(snapshots=tmp_path, mode=mode) as server:
        a = server.started("a")
        for _ in range(2):
            push(a, 1.0)
        a.snapshot()
        for _ in range(3):
            push(a, 1.0)
        lose_host(server)
        a.gradients[0].fill_(10.0)
        answer = a.push()
        assert (answer.versions, answer.lost, answer.resent, answer.lags) == ((3,), 3, 1, (0,))
        assert a.weights[0].tolist() == [12.0] * 8
        assert push(a, 1.0).tolist() == [13.0] * 8
        told = server.store.workers["a"]
        assert [told[name] for name in ("life", "push", "clock", "live")] == [1, 7, 4, True]


@pytest.mark.parametrize("snapshots_between", [0, 1])
def test_a_push_that_is_lost_counts_once_however_often_the_host_is_lost(tmp_path: Path, snapshots_between: int):
    with running(snapshots=tmp_path) as server:
        a = server.started("a")
        a.snapshot()
        push(a, 1.0)
        push(a, 1.0)
        for lost in (2, 3 - snapshots_between):
            lose_host(server)
            assert (a.pull().lost, a.lags()[0]["lost"]) == (lost, lost)
            push(a, 1.0)
            for _ in range(snapshots_between):
                a.snapshot()
        assert a.weights[0].tolist() == [1.0 + snapshots_between] * 8


def test_a_worker_that_the_snapshot_does_not_know_goes_on_too(tmp_path: Path):
    with running(snapshots=tmp_path) as server:
        a = server.started("a")
        push(a, 1.0)
        a.snapshot()
        b = server.started("b")
        push(b, 1.0)
        push(b, 1.0)
        lose_host(server)
        b.gradients[0].fill_(5.0)
        answer = b.push()
        assert (answer.lost, b.weights[0].tolist()) == (2, [6.0] * 8)
        assert push(a, 1.0).tolist() == [7.0] * 8
        assert a.pull().lost == 0


def test_a_push_that_is_in_the_snapshot_and_was_not_answered_is_not_applied_again(tmp_path: Path):
    with running(snapshots=tmp_path) as server:
        a = server.started("a")
        push(a, 1.0)
        send = a._lines[0]._try  # type: ignore[attr-defined]

        def answered_by_nobody(channel: Any) -> None:
            """It is applied, and in a snapshot, and the host is lost before the answer."""
            send(channel)
            channel.receive(20)
            assert server.server.snapshots is not None
            server.server.snapshots.take()
            a._lines[0]._try = send  # type: ignore[attr-defined]
            lose_host(server)

        a._lines[0]._try = answered_by_nobody  # type: ignore[attr-defined]
        a.gradients[0].fill_(2.0)
        answer = a.push()
        assert (answer.versions, answer.lost, a.weights[0].tolist()) == ((2,), 0, [3.0] * 8)


def lose_host(server: Running) -> None:
    """The memory is gone, and another server begins in its place."""
    server.server.close()
    assert server.server.snapshots is not None
    server.server.snapshots._shelf.close()
    os.close(server.file)
    server.file = os.memfd_create("test")
    server.begin()


def test_a_push_that_waits_in_a_buffer_survives_a_host_only_with_the_next_snapshot(tmp_path: Path):
    with running(snapshots=tmp_path, staleness="fedbuff") as server:
        a = server.started("a")
        assert (answer := a.snapshot()).durable == answer.versions
        a.gradients[0].fill_(1.0)
        answer = a.push()
        assert (answer.versions, answer.durable) == ((0,), (-1,))
        assert (answer := a.snapshot()).durable == answer.versions
        lose_host(server)
        for _ in range(9):
            answer = a.push()
        assert (answer.versions, answer.lost, a.weights[0].tolist()) == ((1,), 0, [1.0] * 8)


def test_who_has_weights_that_were_lost_is_behind_whatever_their_version() -> None:
    """One worker stood at a sync point, with version 15, when its server was lost; the other goes on from a snapshot.
    Each would ask for weights without end that nobody has."""
    box: Any = SimpleNamespace(
        shared_state=SimpleNamespace(changed=threading.Condition()), register=lambda component: None
    )
    before, after = Agreement(box), Agreement(box)
    before.pulled((15,), 0)
    after.pulled((1,), restored({"lives": 1})["restored"])
    parts = [before.compose(), after.compose()]
    assert before.is_due(parts) and after.is_due(parts)
    assert before.behind and not after.behind
    before.pulled((1,), int(parts[1].restored))
    parts[0] = before.compose()
    assert not before.is_due(parts) and not before.behind


def test_each_beginning_with_a_snapshot_is_later_than_the_one_before() -> None:
    first = restored({"lives": 1})
    assert restored({"lives": 1, "restored": first["restored"]})["restored"] > first["restored"]

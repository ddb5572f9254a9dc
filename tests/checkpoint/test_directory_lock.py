"""One program at a time writes into a directory; who comes after a killed one waits for what that has handed over."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_async import _subprocess
from lightning_async.checkpoint import writer_process
from lightning_async.checkpoint.store import CheckpointStore
from lightning_async.checkpoint.writer import Writer
from lightning_async.checkpoint.writer_process import DirectoryLock
from lightning_async.cli.main import main
from lightning_async.errors import CheckpointError
from tests.checkpoint.states import job_of
from tests.checkpoint.stores import save
from tests.checkpoint.test_recovery import Ranks

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_process, "GRACE_S", 0.2)
    monkeypatch.setattr(writer_process, "QUIET_S", 0.3)


@contextlib.contextmanager
def forked(body: Callable[[], object]) -> Iterator[int]:
    """A process that has done something and lives on, until it is killed at the end."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            kept = body()
            os.write(write, b".")
            time.sleep(60.0)
            del kept
        os._exit(1)
    os.close(write)
    try:
        assert os.read(read, 1), "it has failed"
        yield pid
    finally:
        os.close(read)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def taken(store: CheckpointStore, program: str = "first") -> DirectoryLock:
    found = DirectoryLock(store, program)
    found.take()
    return found


def test_a_second_program_hears_who_is_there(tmp_path: Path):
    store = CheckpointStore(tmp_path / "run")
    with forked(lambda: taken(store)) as pid:
        with pytest.raises(CheckpointError) as raised:
            taken(store, "second")
        said = str(raised.value)
        who = f"process {pid} on host {socket.gethostname()} trains into it, since 20"
        assert f"{store.dirpath} is in use: {who}" in said
        taken(CheckpointStore(tmp_path / "elsewhere"), "second").release()
        kill(pid)
        taken(store, "second").release()
    assert not store.entries()


def test_a_program_whose_first_rank_is_lost_keeps_the_directory(tmp_path: Path):
    store = CheckpointStore(tmp_path / "run")
    with forked(lambda: taken(store)) as pid:
        ours = taken(store)
        kill(pid)
        with pytest.raises(CheckpointError, match=f"process {pid} on"):
            taken(store, "second")
        ours.keep()
        with pytest.raises(CheckpointError, match=f"process {os.getpid()} on"):
            taken(store, "second")
        ours.release()
        taken(store, "second").release()


@pytest.mark.parametrize("name", [".claim", ".ranks"])
def test_a_link_in_place_of_a_lock_file_is_named(tmp_path: Path, name: str):
    (target := tmp_path / "precious").write_bytes(b"x" * 50)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(target)
    with pytest.raises(CheckpointError, match=rf"run/\{name} is a link, .* and no file of ours: delete it"):
        taken(CheckpointStore(tmp_path / "run"))
    assert target.read_bytes() == b"x" * 50


def test_a_link_in_place_of_a_writers_lock_is_named(tmp_path: Path):
    (tmp_path / ".writer-0").symlink_to("precious")
    with pytest.raises(CheckpointError, match=r"\.writer-0 is a link"):
        Writer(tmp_path).start()


def test_a_deleted_directory_is_locked_again(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    store = CheckpointStore(tmp_path / "run")
    ranks = [taken(store), taken(store)]
    shutil.rmtree(store.dirpath)
    for rank in reversed(ranks):
        rank.renew()
    assert caplog.text.count("was deleted while this program trains into it") == 2
    with pytest.raises(CheckpointError, match=f"process {os.getpid()} on"):
        taken(store, "second")
    for rank in ranks:
        rank.renew()
        rank.release()
    assert len(caplog.records) == 2
    taken(store, "second").release()


def test_a_deleted_directory_of_another_program_is_left(tmp_path: Path):
    store = CheckpointStore(tmp_path / "run")
    first = taken(store)
    shutil.rmtree(store.dirpath)
    second = taken(store, "second")
    with pytest.raises(CheckpointError, match=r"was deleted while this program trained into it\. .* is in use"):
        first.renew()
    second.renew()
    second.release()


def test_a_rank_joins_where_the_first_one_was_stopped_when_the_others_lost_it_and_is_gone(tmp_path: Path):
    store = CheckpointStore(tmp_path / "run")
    with forked(lambda: taken(store)) as pid:
        ours = taken(store)
        ours.keep()  # that one has it still
        kill(pid)
    joining = DirectoryLock(store, "first")
    joining.join()
    with pytest.raises(CheckpointError, match="is no directory that the other ranks train into"):
        DirectoryLock(store, "second").join()
    ours.release()
    with pytest.raises(CheckpointError, match="is in use"):
        taken(store, "second")
    joining.release()
    with pytest.raises(CheckpointError, match="is no directory that the other ranks train into"):
        DirectoryLock(store, "first").join()


def test_what_a_killed_program_has_forked_keeps_nothing(tmp_path: Path):
    """Workers of a loader live on for a while."""
    store, worker = CheckpointStore(tmp_path / "run"), []
    read, write = os.pipe()

    def body() -> DirectoryLock:
        found = taken(store)
        pid = os.fork()
        if not pid:
            time.sleep(60.0)
            os._exit(0)
        os.write(write, b"%d" % pid)
        return found

    with forked(body) as pid:
        worker = int(os.read(read, 20))
        try:
            kill(pid)
            taken(store, "second").release()
            os.kill(worker, 0)  # it is still there
        finally:
            os.kill(worker, signal.SIGKILL)
            os.close(read)
            os.close(write)


def test_a_forks_copy_does_not_let_go(tmp_path: Path):
    store = CheckpointStore(tmp_path / "run")
    ours = taken(store)
    with forked(lambda: ours.release()), pytest.raises(CheckpointError, match=f"process {os.getpid()} on"):
        taken(store, "second")
    ours.release()
    ours.release()


def test_ranks_of_one_program_share_it_and_all_hear_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two see one directory, the third has its own, as on another host."""
    here, there = CheckpointStore(tmp_path / "here"), CheckpointStore(tmp_path / "there")

    def take(ranks: Ranks, program: str, rank: int, told: list[str]) -> None:
        mine = DirectoryLock((here, here, there)[rank], program)
        try:
            mine.take(ranks.gather(rank))
            mine.wait(ranks.gather(rank))
        except CheckpointError as error:
            told[rank] = str(error)
        claims.append(mine)

    def all_take(program: str) -> list[str]:
        ranks, told = Ranks(3), [""] * 3
        threads = [threading.Thread(target=take, args=(ranks, program, rank, told)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return told

    claims: list[DirectoryLock] = []
    with monkeypatch.context() as patch:  # one that is to share it waits until the other has said who it is
        patch.setattr(writer_process, "GRACE_S", 20.0)
        assert all_take("first") == ["", "", ""]
    told = all_take("second")
    assert len(set(told)) == 1
    assert told[0].count("is in use") == 3
    assert "rank 2: " + there.dirpath in told[0]
    for each in claims[:3]:
        each.release()
    monkeypatch.setattr(writer_process, "GRACE_S", 1.0)
    with forked(lambda: taken(there, "third")):
        assert [words.count("is in use") for words in all_take("second")] == [1, 1, 1]
        taken(here, "fourth").release()  # what two of the ranks had is given back
    for each in claims:
        each.release()


def test_where_nothing_can_be_written_and_where_there_are_no_locks(tmp_path: Path):
    (tmp_path / "file").touch()
    refusal = r"rank 0: .*/file/run cannot be written into: .*Not a directory.* pass another `dirpath`\)"
    with pytest.raises(CheckpointError, match=refusal):
        taken(CheckpointStore(tmp_path / "file" / "run"))
    url = CheckpointStore(f"memory://{uuid.uuid4().hex}/run")
    first, second = taken(url, "first"), taken(url, "second")
    second.wait()
    first.release()


def dying(folder: Path, saves: int, rank: int = 0, ranks: tuple[int, ...] = (0,)) -> int:
    """A trainer that is killed when its writer, which is stopped, has so many saves; the writer's process number."""
    read, write = os.pipe()

    def body() -> None:
        writer = Writer(folder, rank)
        writer.start()
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGSTOP)
        for number in range(1, saves + 1):
            writer.save(job_of(number, rank, ranks), queue=True)
        os.write(write, b"%d" % writer.pid)
        writer.wait(60.0)

    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            body()
        os._exit(1)
    writer = int(os.read(read, 20))
    kill(pid)
    os.close(read)
    os.close(write)
    return writer


@contextlib.contextmanager
def once_said(action: Callable[[], object]) -> Iterator[None]:
    """Do it as soon as somebody says that he waits."""

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "still writing" in record.getMessage():
                writer_process.log.removeHandler(self)
                action()

    writer_process.log.addHandler(heard := Heard())
    yield
    writer_process.log.removeHandler(heard)


@pytest.mark.parametrize("saves", [0, 1, 2])
def test_what_a_killed_trainer_has_handed_over_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, saves: int
):
    """Also what its writer has not begun with."""
    store, writer = CheckpointStore(tmp_path / "run"), dying(tmp_path / "run", saves)
    mine = taken(store, "second")
    with caplog.at_level(logging.WARNING, "lightning_async"), once_said(lambda: os.kill(writer, signal.SIGCONT)):
        began = time.monotonic()
        mine.wait(timeout_s=30.0)
    assert time.monotonic() - began < 20.0
    assert [entry.number for entry in store.entries()] == list(range(saves, 0, -1))
    assert f"still writing something in {store.dirpath}; waiting for it, 30 s more at most" in caplog.text
    assert len(caplog.records) == 1
    mine.release()


@pytest.mark.parametrize("saves", [0, 1])
def test_a_part_that_can_come_no_more_is_not_waited_for(tmp_path: Path, saves: int):
    """Both ranks were killed; the second one had no part for its writer yet, or it had."""
    store, first = CheckpointStore(tmp_path / "run"), dying(tmp_path / "run", 1, 0, (0, 1))
    second = dying(tmp_path / "run", saves, 1, (0, 1))
    mine, began = taken(store, "second"), time.monotonic()
    os.kill(first, signal.SIGCONT)
    later = threading.Timer(0.6, lambda: os.kill(second, signal.SIGCONT))
    later.start()
    mine.wait()
    assert 0.5 < time.monotonic() - began < 20.0, "as long as a writer of the second one lives, and no longer"
    later.join()
    assert len(store.entries()) == saves
    store.clean()
    assert [name for name in os.listdir(store.dirpath) if ".tmp-" in name] == []
    mine.release()


def test_who_trains_again_in_one_process_does_not_wait_for_a_part_that_can_come_no_more(tmp_path: Path):
    store, writer = CheckpointStore(tmp_path / "run"), Writer(tmp_path / "run")
    writer.save(job_of(1, 0, (0, 1)))
    assert "writes on, then ends" in str(writer.close(0.2)[0].error)
    mine, began = taken(store, "second"), time.monotonic()
    mine.wait()
    assert time.monotonic() - began < 20.0
    mine.release()
    assert not store.entries()


PATIENT = _subprocess._BOOT.replace(
    "importlib.import_module(module)",
    """
from lightning_async.checkpoint import writer_process as writer
wait_for = writer.wait_for
writer.wait_for = lambda channel, seconds, others=(): wait_for(channel, 3600.0, others)
importlib.import_module(module)""",
)
assert PATIENT != _subprocess._BOOT
"""It does not look once a second whether its trainer lives."""


def test_a_writer_that_has_nothing_hears_at_once_that_its_trainer_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_subprocess, "_BOOT", PATIENT)
    store, writer = CheckpointStore(tmp_path / "run"), dying(tmp_path / "run", 0)
    os.kill(writer, signal.SIGCONT)
    mine, began = taken(store, "second"), time.monotonic()
    mine.wait(timeout_s=60.0)
    mine.release()
    assert time.monotonic() - began < 60.0


def test_a_wait_has_an_end(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    store, writer = CheckpointStore(tmp_path / "run"), dying(tmp_path / "run", 1)
    mine = taken(store, "second")
    with caplog.at_level(logging.WARNING, "lightning_async"):
        mine.wait(timeout_s=0.5)
    assert "it is not waited for any longer" in caplog.text
    assert not store.entries()
    os.kill(writer, signal.SIGCONT)
    mine.wait(timeout_s=20.0)
    assert len(store.entries()) == 1
    mine.release()


def test_commands_that_change_something_respect_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    store = CheckpointStore(tmp_path / "run")
    for number in (1, 2, 3):
        save(store, number)
    with forked(lambda: taken(store)) as pid:
        for command in (["prune", store.dirpath, "--latest", "1"], ["verify", store.dirpath, "--quarantine"]):
            assert main(["checkpoint", *command]) == 1
            assert f"is in use: process {pid} on host" in capsys.readouterr().err
        assert main(["checkpoint", "prune", store.dirpath, "--latest", "1", "--dry-run"]) == 0
        assert main(["checkpoint", "verify", store.dirpath]) == 0
        assert main(["checkpoint", "list", store.dirpath]) == 0
        assert ".claim" not in capsys.readouterr().out
        assert len(store.entries()) == 3
    assert main(["checkpoint", "prune", store.dirpath, "--latest", "1"]) == 0
    assert len(store.entries()) == 1

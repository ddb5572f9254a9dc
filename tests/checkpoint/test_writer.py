"""The process that writes: what it writes, what it says where it cannot, and that nobody waits for it without end."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import fsspec.asyn
import pytest
import torch

from lightning_async._subprocess import _BOOT
from lightning_async.checkpoint import writer as process
from lightning_async.checkpoint.shards import load
from lightning_async.checkpoint.store import CheckpointStore
from lightning_async.checkpoint.writer import Result, SaveBusy, SaveJob, Writer
from lightning_async.errors import CheckpointError
from tests.checkpoint.states import assert_loaded, job_of

pytestmark = pytest.mark.processes

MakeWriter = Callable[..., Writer]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeWriter]:
    """Writers that are closed at the end, whatever became of their processes."""
    made: list[Writer] = []
    pids: set[int] = set()

    def make(folder: Path | str = tmp_path, **arguments: object) -> Writer:
        writer = Writer(folder, **arguments)  # pyright: ignore[reportArgumentType]
        writer.start()
        assert writer.pid is not None
        pids.add(writer.pid)
        made.append(writer)
        return writer

    yield make
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    for writer in made:
        writer.close(5.0)


def saved(writer: Writer, job: SaveJob) -> Result:
    writer.save(job)
    (result,) = writer.wait(20.0)
    assert result.number == job.number
    return result


def committed(folder: Path) -> list[int]:
    store = CheckpointStore(folder)
    entries = store.entries()
    for entry in entries:
        store.verify(entry)
        assert_loaded(load(store, entry, 0), entry.number, 0)
    return [entry.number for entry in entries]


def names(folder: Path) -> list[str]:
    """What is there, without files that are only locked."""
    return sorted(name for name in os.listdir(folder) if not name.startswith("."))


def pid_of(writer: Writer) -> int:
    assert writer.pid is not None
    return writer.pid


def test_saves_are_committed_and_read_again(tmp_path: Path, make: MakeWriter):
    writer = make()
    for number in (1, 2, 3):
        result = saved(writer, job_of(number))
        assert result.committed and result.error is None and result.bytes > 8000 and result.seconds < 20
    assert committed(tmp_path) == [3, 2, 1]
    assert names(tmp_path) == ["000001-step-10", "000002-step-20", "000003-step-30"]
    manifest = CheckpointStore(tmp_path).entries()[0].manifest
    assert manifest is not None and (manifest.reason, manifest.epoch) == ("test", 3)
    assert time.time() - manifest.created < 60


def test_the_state_may_change_once_it_is_copied(tmp_path: Path, make: MakeWriter):
    writer, job = make(), job_of(1, numel=1_000_000)
    os.kill(pid_of(writer), signal.SIGSTOP)
    writer.save(job)
    job.shared["module"]["weight"].zero_()
    job.own["random"].zero_()
    os.kill(pid_of(writer), signal.SIGCONT)
    writer.wait(20.0)
    store = CheckpointStore(tmp_path)
    assert_loaded(load(store, store.entries()[0], 0), 1, 0, numel=1_000_000)


def test_the_process_is_small_and_knows_no_torch(tmp_path: Path, make: MakeWriter):
    pid = pid_of(writer := make())
    saved(writer, job_of(1))
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "torch" not in maps and "numpy" not in maps
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    assert int(status["VmRSS"].split()[0]) < 40_000
    assert os.getsid(pid) == pid
    assert {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in (0, 1)} == {"/dev/null"}
    assert len(os.listdir(f"/proc/{pid}/fd")) <= 6  # none of the trainer's own


def test_a_module_beside_the_script_takes_nobodys_place(
    tmp_path: Path, make: MakeWriter, monkeypatch: pytest.MonkeyPatch
):
    for name in ("json", "mmap", "lightning_async", "fsspec"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    writer = make("a/relative/path")
    monkeypatch.chdir("/")
    assert saved(writer, job_of(1)).committed
    assert committed(tmp_path / "a/relative/path") == [1]


def test_one_at_a_time_or_one_behind(tmp_path: Path, make: MakeWriter):
    writer = make()
    os.kill(pid_of(writer), signal.SIGSTOP)
    writer.save(job_of(1))
    with pytest.raises(SaveBusy, match=r"save 2 cannot begin: save 1 has been under way for \d"):
        writer.save(job_of(2))
    writer.save(job_of(2), queue=True)
    with pytest.raises(SaveBusy):
        writer.save(job_of(3), queue=True)
    assert writer.busy and writer.poll() == []
    os.kill(pid_of(writer), signal.SIGCONT)
    assert [result.number for result in writer.wait(20.0)] == [1, 2]
    assert not writer.busy
    assert saved(writer, job_of(3)).committed
    assert committed(tmp_path) == [3, 2, 1]


def test_a_writer_that_is_stopped_holds_up_nobody(tmp_path: Path, make: MakeWriter):
    writer = make(buffers=1)
    pid = pid_of(writer)
    os.kill(pid, signal.SIGSTOP)
    writer.save(job_of(1, numel=1_000_000))
    began = time.monotonic()
    with pytest.raises(SaveBusy):
        writer.save(job_of(2), queue=True)
    assert writer.wait(0.2) == []
    (result,) = writer.close(0.3)
    assert time.monotonic() - began < 20.0, "it never ends"
    assert result.error is not None and f"is not written yet; process {pid} writes on" in result.error
    os.kill(pid, signal.SIGCONT)
    assert_gone(pid)
    assert committed_numbers(tmp_path) == [1]


def test_a_writer_that_stays_stopped_is_replaced_and_nothing_lost(
    tmp_path: Path, make: MakeWriter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Also while training ends, and waits for it."""
    monkeypatch.setattr(process, "_STOPPED_S", 0.6)
    writer = make()
    pid = pid_of(writer)
    os.kill(pid, signal.SIGSTOP)
    writer.save(job_of(1))
    writer.save(job_of(2), queue=True)
    results = writer.close(60.0)
    assert [(result.number, result.committed) for result in results] == [(1, True), (2, True)]
    assert_gone(pid)
    assert committed(tmp_path) == [2, 1]
    stopped, ended = caplog.messages
    assert f"the process {pid} that writes checkpoints has been stopped (SIGSTOP) for " in stopped
    assert ended == f"Rank 0: the process {pid} that writes checkpoints has ended (signal 9)."


def test_a_writer_that_dies_is_replaced_and_nothing_lost(
    tmp_path: Path, make: MakeWriter, caplog: pytest.LogCaptureFixture
):
    writer = make()
    for number in range(1, 4):
        pid = pid_of(writer)
        os.kill(pid, signal.SIGSTOP)
        writer.save(job_of(2 * number - 1))
        writer.save(job_of(2 * number), queue=True)
        os.kill(pid, signal.SIGKILL)
        results = writer.wait(20.0)
        assert [(result.number, result.committed) for result in results] == [
            (2 * number - 1, True),
            (2 * number, True),
        ]
        assert writer.pid != pid
    assert committed(tmp_path) == [6, 5, 4, 3, 2, 1]
    assert caplog.record_tuples[0][1] == logging.WARNING and "has ended (signal 9)" in caplog.text


def test_a_writer_that_dies_at_any_moment(tmp_path: Path, make: MakeWriter):
    writer, chance = make(), random.Random(0)
    took = saved(writer, job_of(1, numel=300_000)).seconds
    for number in range(2, 22):
        writer.save(job_of(number, numel=300_000))
        time.sleep(chance.uniform(0.0, 1.2 * took))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid_of(writer), signal.SIGKILL)
        (result,) = writer.wait(20.0)
        assert result.committed and result.error is None
        store = CheckpointStore(tmp_path)
        (entry, *_) = store.entries()
        store.verify(entry)
        assert_loaded(load(store, entry, 0), number, 0, numel=300_000)
    assert len(names(tmp_path)) == 21


def test_a_writer_that_dies_idle_is_replaced_by_the_next_save(tmp_path: Path, make: MakeWriter):
    writer = make()
    os.kill(pid_of(writer), signal.SIGKILL)
    assert saved(writer, job_of(1)).committed


POISONED = _BOOT.replace(
    "importlib.import_module(module)",
    """
import os
from lightning_async.checkpoint import writer_process as writer
perform = writer.perform
writer.perform = lambda job, *rest: os.kill(os.getpid(), 9) if job["number"] == 1 else perform(job, *rest)
importlib.import_module(module)""",
)
assert POISONED != _BOOT
"""Save 1 kills any process that begins with it."""


def test_a_save_that_kills_its_writer_is_given_up_and_no_other(
    tmp_path: Path, make: MakeWriter, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("lightning_async._subprocess._BOOT", POISONED)
    writer = make()
    os.kill(pid_of(writer), signal.SIGSTOP)
    writer.save(job_of(1))
    writer.save(job_of(2), queue=True)
    os.kill(pid_of(writer), signal.SIGCONT)
    first, second = writer.wait(20.0)
    assert not first.committed and "save 1, begun" in str(first.error)
    assert "is lost: 2 processes have died of it; the last one: signal 9" in str(first.error)
    assert second.committed and not writer.busy
    assert committed(tmp_path) == [2]


def test_what_was_done_before_the_writer_died_is_not_done_twice(tmp_path: Path, make: MakeWriter):
    """It had committed, and died before it could say so."""
    other = make()
    assert saved(other, job_of(1)).committed
    inode = (tmp_path / "000001-step-10/rank-0.bin").stat().st_ino
    writer = make()
    os.kill(pid_of(writer), signal.SIGSTOP)
    writer.save(job_of(1))
    os.kill(pid_of(writer), signal.SIGKILL)
    (result,) = writer.wait(20.0)
    assert result.committed
    assert (tmp_path / "000001-step-10/rank-0.bin").stat().st_ino == inode
    assert names(tmp_path) == ["000001-step-10"]


def test_a_writer_that_cannot_start_says_why(make: MakeWriter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("sys.executable", str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match="no process that writes checkpoints can be started"):
        Writer(tmp_path, rank=3).start()
    monkeypatch.undo()
    monkeypatch.setattr("lightning_async._subprocess._BOOT", "raise SystemExit('no room at the inn')")
    writer = make()
    writer.save(job_of(1))
    (result,) = writer.wait(20.0)
    assert result.error is not None and "exit status 1: no room at the inn" in result.error


def test_where_no_file_can_be_opened_a_save_fails_and_later_ones_work(tmp_path: Path, make: MakeWriter):
    writer, fresh, (soft, hard) = make(), make(), resource.getrlimit(resource.RLIMIT_NOFILE)
    os.kill(pid_of(writer), signal.SIGKILL)
    assert select.select([writer._process._channel], [], [], 10.0)[0]  # pyright: ignore
    before = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(CheckpointError, match=r"no process .* can be started: .*Too many open files"):
            writer.save(job_of(1))
        with pytest.raises(CheckpointError, match=r"no memory for a copy .*Too many open files"):
            fresh.save(job_of(1))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) <= before
    assert saved(writer, job_of(2)).committed
    assert saved(fresh, job_of(3)).committed


def test_a_file_system_that_refuses_is_named_and_later_saves_work(tmp_path: Path, make: MakeWriter):
    writer = make()
    assert saved(writer, job_of(1)).committed
    limits = resource.prlimit(pid_of(writer), resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    result = saved(writer, job_of(2, numel=1_000_000))
    assert not result.committed and result.error is not None
    assert "rank 0: save 2, begun" in result.error and "rank-0.bin" in result.error
    assert "File too large" in result.error
    assert "memfd" not in Path(f"/proc/{writer.pid}/maps").read_text()
    assert names(tmp_path) == ["000001-step-10"]
    resource.prlimit(pid_of(writer), resource.RLIMIT_FSIZE, limits)
    assert saved(writer, job_of(3)).committed
    assert committed(tmp_path) == [3, 1]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root can mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(small_disk: Path, make: MakeWriter):
    writer, numel = make(small_disk), 700_000  # about 6 MB
    assert saved(writer, job_of(1)).committed
    results = [saved(writer, job_of(number, numel=numel)) for number in range(2, 7)]
    assert [result.committed for result in results] == [True, True, True, False, False]
    assert "No space left on device" in str(results[-1].error)
    store = CheckpointStore(small_disk)
    assert [entry.number for entry in store.entries()] == [4, 3, 2, 1]
    assert len(names(small_disk)) == 4  # nothing is left of those that failed
    for entry in store.entries()[1:]:
        store.verify(entry)
        store.remove(entry)
    assert saved(writer, job_of(7, numel=numel)).committed
    writer.close(5.0)


def test_two_ranks_commit_together(tmp_path: Path, make: MakeWriter):
    writers = [make(rank=rank) for rank in (0, 1)]
    for number in (1, 2):
        for rank, writer in enumerate(writers):
            writer.save(job_of(number, rank, (0, 1)))
        (first,), (second,) = (writer.wait(20.0) for writer in writers)
        assert first.committed and not second.committed and first.error is second.error is None
    store = CheckpointStore(tmp_path)
    for entry in store.entries():
        store.verify(entry)
        for rank in (0, 1, 2):
            assert_loaded(load(store, entry, rank), entry.number, rank, has_own=rank < 2)


@pytest.fixture(scope="module")
def fsspecs_thread() -> None:
    """Started once for the process, so before what a test leaves behind is looked at."""
    fsspec.asyn.get_loop()


@pytest.mark.usefixtures("fsspecs_thread")
def test_a_file_system_without_rename(tmp_path: Path, make: MakeWriter):
    """Of fsspec, in the writers' processes too."""
    url = f"dir::file://{tmp_path}"
    writers = [make(url, rank=rank) for rank in (0, 1)]
    store = CheckpointStore(url)
    assert not store.files.atomic
    for rank, writer in enumerate(writers):
        writer.save(job_of(1, rank, (0, 1)))
    assert [result.committed for writer in writers for result in writer.wait(30.0)] == [True, False]
    (entry,) = store.entries()
    store.verify(entry)
    for rank in (0, 1):
        assert_loaded(load(store, entry, rank), 1, rank)
    assert list(tmp_path.rglob("manifest.json"))


def test_without_the_part_of_one_rank_nothing_is_committed(tmp_path: Path, make: MakeWriter):
    first, second = make(rank=0, deadline=timedelta(seconds=0.3)), make(rank=1)
    first.save(job_of(1, 0, (0, 1)))
    (result,) = first.wait(20.0)
    assert not result.committed and "nothing was heard of rank(s) [1] for 0 s" in str(result.error)
    assert [path.name for path in tmp_path.rglob("rank*.*") if path.is_file()] == ["rank-0.failed"]
    # It was only late.
    second.save(job_of(1, 1, (0, 1)))
    assert [result.committed for result in second.wait(20.0)] == [False]
    assert names(tmp_path) == []
    # Only the other one: it cannot know, and leaves what it has written to `clean`.
    second.save(job_of(2, 1, (0, 1)))
    assert [result.committed for result in second.wait(20.0)] == [False]
    store = CheckpointStore(tmp_path)
    assert store.entries() == []
    assert store.clean("another") == ["000002-step-20.tmp-run"]


def test_a_folder_that_somebody_deletes_is_not_waited_for(tmp_path: Path, make: MakeWriter):
    first = make(rank=0)
    first.save(job_of(1, 0, (0, 1)))
    declared = tmp_path / "000001-step-10.tmp-run" / "rank-0.manifest.json"
    until = time.monotonic() + 20.0
    while not declared.exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    shutil.rmtree(declared.parent.rename(tmp_path / "gone"))  # at once: it makes the folder anew, to say so in it
    (result,) = first.wait(20.0)
    assert "was deleted while it was written" in str(result.error)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("late", [0, 1])
def test_where_one_rank_fails_the_others_hear_of_it(tmp_path: Path, make: MakeWriter, failing: int, late: int):
    writers = [make(rank=rank) for rank in (0, 1)]
    resource.prlimit(pid_of(writers[failing]), resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    os.kill(pid_of(writers[late]), signal.SIGSTOP)
    for rank, writer in enumerate(writers):
        writer.save(job_of(1, rank, (0, 1), numel=100_000))
    early = writers[1 - late]
    results = {1 - late: early.wait(0.3)}
    os.kill(pid_of(writers[late]), signal.SIGCONT)
    results[late] = writers[late].wait(20.0)
    results[1 - late] += early.wait(20.0)
    (first,), (second,) = results[0], results[1]
    assert "File too large" in str(results[failing][0].error)
    assert not first.committed and not second.committed
    if failing == 1:
        assert "rank 1 could not write its part" in str(first.error) and "File too large" in str(first.error)
    assert names(tmp_path) == []


def test_it_ends_with_its_trainer_not_with_its_terminal(make: MakeWriter):
    pid = pid_of(writer := make())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        saved(writer, job_of(int(number)))  # it is past its start
        os.kill(pid, number)
    assert saved(writer, job_of(100)).committed and pid_of(writer) == pid
    assert writer.close(5.0) == []
    assert_gone(pid)


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"`Writer\(buffers=3\)` must be 1 or 2"):
        Writer("x", buffers=3)
    with pytest.raises(ValueError, match=r"must be > 0"):
        Writer("x", deadline=timedelta(0))


def test_what_cannot_be_saved_leaves_the_buffer_free(tmp_path: Path, make: MakeWriter):
    writer = make(buffers=1)
    with pytest.raises(TypeError, match=r"in `shared`, x is a builtins.object"):
        writer.save(SaveJob(1, 1, "run", (0,), {"x": object()}, None))
    with pytest.raises(ValueError, match="must hold rank 0"):
        writer.save(SaveJob(1, 1, "run", (1,), None, None))
    with pytest.raises(TypeError, match="colour"):
        writer.save(SaveJob(1, 1, "run", (0,), None, None, {"colour": "red"}))
    with pytest.raises(TypeError, match="JSON"):
        writer.save(SaveJob(1, 1, "run", (0,), None, None, {"metrics": {"loss": torch.ones(1)}}))
    assert saved(writer, job_of(1)).committed


def test_the_training_thread_waits_for_one_copy_only(tmp_path: Path, make: MakeWriter):
    """400 MB. The limit is on the processor's time: how long that takes depends on who else wants it."""
    state = {f"layer{i}": torch.ones(5_000_000) for i in range(20)}
    writer, spent = make(buffers=1), []
    writer.reserve(SaveJob(1, 1, "run", (0,), state, None))
    for number in (1, 2):
        began = time.process_time()
        stall = writer.save(SaveJob(number, number, "run", (0,), state, None))
        spent.append(time.process_time() - began)
        (result,) = writer.wait(60.0)
        assert result.committed and result.bytes > 400_000_000
        print(f"stall {1000 * stall:.0f} ms ({1000 * spent[-1]:.0f} of work), written after {result.seconds:.2f} s")
        store = CheckpointStore(tmp_path)
        store.remove(store.entries()[0])
    assert min(spent) < 0.5


def committed_numbers(folder: Path) -> list[int]:
    return [entry.number for entry in CheckpointStore(folder).entries()]


def assert_gone(pid: int) -> None:
    """Soon; it may be a child that nobody has waited for yet."""
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} still runs")

"""Trainers that do nothing but save, and what kills them and looks at what is left."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import random
import signal
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch

from lightning_async.checkpoint.shards import load
from lightning_async.checkpoint.store import CheckpointStore
from lightning_async.checkpoint.writer import SaveBusy, Writer
from tests.checkpoint.states import assert_loaded, job_of

NUMEL = 500_000  # 4 MB a save
KEEP = 3
_PR_SET_CHILD_SUBREAPER = 36
_SYS_EXIT = {"x86_64": 60, "aarch64": 93}


@dataclass(frozen=True)
class Trainer:
    """A process that saves without end, the process that writes for it, and what it says it has committed."""

    pid: int
    writer: int
    said: int

    def committed(self) -> int:
        """The newest; 0 for none. The trainer has ended."""
        with open(self.said, "rb") as file:
            return max(map(int, file.read().split()), default=0)


def start(folder: str, run: str, first: int, rank: int, ranks: tuple[int, ...]) -> Trainer:
    """Fork a trainer; it is at its first save when this returns."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            os.close(read)
            save_for_ever(folder, run, first, rank, ranks, write)
        os._exit(1)
    os.close(write)
    return Trainer(pid, int(os.read(read, 16)), read)


def save_for_ever(folder: str, run: str, number: int, rank: int, ranks: tuple[int, ...], told: int) -> NoReturn:
    store = CheckpointStore(folder)
    writer = Writer(folder, rank, deadline=timedelta(seconds=1))
    writer.start()
    os.write(told, b"%-16d" % (writer.pid or 0))
    while True:
        with contextlib.suppress(SaveBusy):
            writer.save(job_of(number, rank, ranks, NUMEL, run), queue=True)
            number += 1
        for result in writer.wait(0.005):
            if result.committed:
                os.write(told, b"%d\n" % result.number)
                for entry in store.entries()[KEEP:]:
                    store.remove(entry)


def kill_often(folder: str, kills: int, seed: int, ranks: int = 1, tmpdir: str | None = None) -> dict[str, int]:
    """Start trainers and kill them at random moments; what was seen."""
    torch.set_num_threads(1)  # nothing that a fork would miss
    adopt()
    if tmpdir is not None:
        os.environ["TMPDIR"] = tmpdir
    chance, newest, seen = random.Random(seed), 0, {"committed": 0, "left": 0, "after": 0}
    store, long_enough = CheckpointStore(folder), 0.0
    for i in range(kills):
        first = store.next_number()
        everyone = tuple(range(ranks))
        trainers = [start(folder, f"run{i}", first, rank, everyone) for rank in everyone]
        if not i:
            long_enough = time_of_saves(trainers[0])
        if i % 2 == 0:  # the machine may be much busier by now: enough of them are killed after a save
            wait_until_one_is_committed(store, first)
        time.sleep(chance.uniform(0.0, long_enough))
        if i % 8 == 7:  # by chance alone, on a busy machine, none would be in the middle of it
            stop_while_one_is_written(folder, trainers)
        kill(trainers, chance, writers_too=i % 4 == 3, writer_first=i % 5 == 4)
        said = max(trainer.committed() for trainer in trainers)
        wait_until_gone()
        seen["left"] += bool(store.clean("none"))
        newest = check(store, max(newest, said), ranks)
        seen["committed"] += newest >= first
        seen["after"] += newest >= first and newest > said  # its trainer did not live to hear of it
    return {**seen, "newest": newest}


def wait_until_one_is_committed(store: CheckpointStore, first: int) -> None:
    until = time.monotonic() + 10.0
    while time.monotonic() < until and not any(entry.number >= first for entry in store.entries()):
        time.sleep(0.005)


def stop_while_one_is_written(folder: str, trainers: list[Trainer]) -> None:
    """All of them, with their writers, at a moment in which a save is under way."""
    everybody, until = [pid for trainer in trainers for pid in (trainer.pid, trainer.writer)], time.monotonic() + 10.0
    while time.monotonic() < until:
        for pid in everybody:
            os.kill(pid, signal.SIGSTOP)
        if any(".tmp-" in name for name in os.listdir(folder)):
            return
        for pid in everybody:
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.002)


def time_of_saves(trainer: Trainer) -> float:
    """Seconds for the first two saves on this machine, as busy as it is."""
    began, text = time.monotonic(), b""
    while text.count(b"\n") < 2:
        text += os.read(trainer.said, 1)
    return time.monotonic() - began


def kill(trainers: list[Trainer], chance: random.Random, writers_too: bool, writer_first: bool) -> None:
    for trainer in trainers:
        if writer_first:  # the trainer sees it, and starts another one
            with contextlib.suppress(ProcessLookupError):
                os.kill(trainer.writer, signal.SIGKILL)
            time.sleep(chance.uniform(0.0, 0.1))
        os.kill(trainer.pid, signal.SIGKILL)
        if writers_too:
            with contextlib.suppress(ProcessLookupError):
                os.kill(trainer.writer, signal.SIGKILL)
    for trainer in trainers:
        status = os.waitpid(trainer.pid, 0)[1]
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "the trainer has failed before it was killed"


def adopt() -> None:
    """What trainers have started is this process's once they are gone, see `wait_until_gone`."""
    assert ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def wait_until_gone(pid: int = -1) -> None:
    """One writer whose trainer is dead, or all of them: each ends when it has finished what it had.

    Whoever can be waited for has let go of all. ``/proc`` tells less: a process that is dying has no command line any
    more while its memory is given back, and holds its locks until that is done.
    """
    deadline = time.monotonic() + 60.0
    with contextlib.suppress(ChildProcessError):  # there are no others
        while (found := os.waitpid(pid, os.WNOHANG)[0]) != pid:
            assert time.monotonic() < deadline, "writers still run"
            if not found:
                time.sleep(0.005)


def check(store: CheckpointStore, committed: int, ranks: int) -> int:
    """All that is there is whole; the newest number, which is not older than ``committed``."""
    entries = store.entries()
    newest = entries[0].number if entries else 0
    assert newest >= committed, f"save {committed} was committed, {newest} is the newest that is left"
    for entry in entries:
        store.verify(entry)
        assert entry.manifest is not None and entry.manifest.ranks == tuple(range(ranks))
    for rank in range(ranks if entries else 0):
        assert_loaded(load(store, entries[0], rank), newest, rank, NUMEL)
    names = [name for name in store.files.names(store.dirpath) if not name.startswith(".writer-")]
    assert names == sorted(entry.name for entry in entries), f"something is left that is no checkpoint: {names}"
    return newest


def save_once_and_die(folder: str, fork: bool) -> int:
    """Killed when the writer has the save, but has not begun; the writer goes on, and then ends. The newest save.

    Args:
        folder: of the checkpoints.
        fork: a fork of the trainer lives on, with all that it had open, as loaders' workers do for a while.
    """
    adopt()
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        writer = Writer(folder)
        writer.start()
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGSTOP)
        writer.save(job_of(1, numel=NUMEL))
        worker = os.fork() if fork else 0
        if fork and not worker:
            time.sleep(60.0)
            os._exit(0)
        os.write(write, b"%-16d%d" % (writer.pid, worker))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    writer, worker = int(os.read(read, 16)), int(os.read(read, 16))
    assert not CheckpointStore(folder).entries()
    os.kill(writer, signal.SIGCONT)
    try:
        wait_until_gone(writer)
    finally:
        if worker:
            os.kill(worker, signal.SIGKILL)
    return check(CheckpointStore(folder), 1, 1)


def die_slowly(folder: str) -> dict[str, bool]:
    """A writer that is dying as nobody looks for it: nothing is in its command line, and it holds a save. What was seen
    of it while it died, and what is left afterwards.

    So it is of one that is killed, while the kernel gives its memory back, for some milliseconds; here its first thread
    has ended, and another one has not, for as long as the test will.
    """
    adopt()
    store = CheckpointStore(folder)
    temporary = store.temporary(1, 1, "run")
    (told, tell), (sync_point, open_sync_point) = os.pipe(), os.pipe()
    if not (trainer := os.fork()):
        if not os.fork():
            os.close(open_sync_point)
            threading.Thread(target=hold_until, args=(store, temporary, tell, sync_point)).start()
            ctypes.CDLL(None).syscall(_SYS_EXIT[platform.machine()], 0)  # this thread's end, and no more
        signal.pause()
    writer = int(os.read(told, 16))
    os.kill(trainer, signal.SIGKILL)
    os.waitpid(trainer, 0)
    while Path(f"/proc/{writer}/cmdline").read_bytes():
        time.sleep(0.005)
    seen = {"held": not store.clean()}
    threading.Timer(0.2, os.close, [open_sync_point]).start()  # no sooner than it is looked for, and no matter when
    wait_until_gone()
    return {**seen, "cleaned": store.clean() == [Path(temporary).name], "left": bool(os.listdir(folder))}


def hold_until(store: CheckpointStore, temporary: str, tell: int, sync_point: int) -> None:
    with store.hold(temporary):
        os.write(tell, b"%d" % os.getpid())
        os.read(sync_point, 1)  # until its other end is closed
    os._exit(0)

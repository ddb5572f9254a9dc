"""The process that writes one rank's part of checkpoints; on the first rank, it also commits the checkpoints.

The process runs beside the trainer, in a session of its own, so that it completes its jobs when the trainer is killed.
It starts without this package's ``__init__`` and imports the standard library only; it therefore starts in milliseconds
and takes 15 MB. A job is one part of one save. The trainer sends two numbers and the descriptor of the memory that
holds the job:

    [ tensors ][ JSON of the rank ][ the job, as JSON ]
                                   ^ offset            ^ offset + length

A message is therefore always small, and sending it never blocks. Jobs are processed one after the other: `main`
receives them, and `perform` carries out one. A `DirectoryLock` keeps other programs out of a directory of checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any

from lightning_async.checkpoint.storage import Files, Lock
from lightning_async.checkpoint.store import CheckpointStore, Manifest, RankManifest, failure_of
from lightning_async.errors import CheckpointError

log = logging.getLogger(__name__)

MESSAGE = struct.Struct("<QQ?")
"""Offset and length in bytes of the job in the memory, and whether an earlier process has died during this job."""
_LONGEST_ERROR = 4000
Job = dict[str, Any]
"""A job, as `Writer` composes it."""
GRACE_S = 3.0
"""Seconds to wait for another program to release the directory: it may be ending, or may only delete something."""
QUIET_S = 5.0
"""Seconds after which a wait is logged."""
_PAUSE_S = 0.02
_WRITER = ".writer-"
Gather = Callable[[Any], Sequence[Any]]


def main(descriptor: int, trainer: int) -> None:
    """Carry out jobs until the trainer's process has ended, or the trainer closes the channel.

    Args:
        descriptor: File descriptor of the channel to the trainer.
        trainer: Process id of the trainer.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for the trainer: this process finishes its jobs
    with socket.socket(fileno=descriptor) as channel, _death_of(trainer) as death:
        while (message := _next(channel, trainer, death)) is not None:
            answer = _answer(*message, orphaned=lambda: os.getppid() != trainer or _is_closed(channel))
            with contextlib.suppress(OSError):  # the trainer may be gone
                channel.sendall(json.dumps(answer).encode() + b"\n")


@contextlib.contextmanager
def _death_of(trainer: int) -> Iterator[list[int]]:
    """Yield a list with one descriptor, which becomes readable when the trainer ends.

    The list is empty if the system has no such descriptors.
    """
    try:
        descriptor = os.pidfd_open(trainer)
    except (AttributeError, OSError):
        yield []
        return
    try:
        yield [descriptor]
    finally:
        os.close(descriptor)


def _next(channel: socket.socket, trainer: int, death: Sequence[int]) -> tuple[int, int, int, bool] | None:
    # Forks that native libraries make in the trainer inherit its end of the channel, and would hide that it ends.
    while not wait_for(channel, 1.0, death):
        if os.getppid() != trainer:
            return None
    try:
        data, descriptors, *_ = socket.recv_fds(channel, MESSAGE.size, 1)
    except ConnectionError:
        return None
    return (descriptors[0], *MESSAGE.unpack(data)) if data else None


def _is_closed(channel: socket.socket) -> bool:
    poll = select.poll()
    poll.register(channel, getattr(select, "POLLRDHUP", 0))
    return bool(poll.poll(0))


def wait_for(channel: socket.socket, seconds: float, others: Sequence[int] = ()) -> bool:
    """Wait until the channel is readable or closed; return False if the wait ends for another reason.

    Args:
        channel: The channel.
        seconds: Longest wait, in seconds.
        others: Descriptors that end the wait, too, when they become readable. Default: none.
    """
    poll = select.poll()  # `select.select` cannot take descriptors above 1023
    for each in (channel, *others):
        poll.register(each, select.POLLIN)
    return any(found == channel.fileno() for found, _ in poll.poll(max(0.0, seconds) * 1000))


def _answer(descriptor: int, offset: int, length: int, again: bool, orphaned: Callable[[], bool]) -> dict[str, Any]:
    started = time.monotonic()
    number = None
    try:
        # Not closed here: after a failed write, the traceback refers to the memory. It is freed once unused.
        memory = memoryview(mmap.mmap(descriptor, offset + length, prot=mmap.PROT_READ))
        job: Job = json.loads(bytes(memory[offset:]))
        number = job["number"]
        done = perform(job, memory, again, orphaned)
    except Exception as error:
        text = f"{type(error).__name__}: {error}" if not isinstance(error, CheckpointError | OSError) else str(error)
        done = {"error": text[:_LONGEST_ERROR]}
    finally:
        os.close(descriptor)
    return {"number": number, "seconds": time.monotonic() - started, **done}


def perform(
    job: Job, memory: memoryview, again: bool = False, orphaned: Callable[[], bool] = lambda: False
) -> dict[str, Any]:
    """Write the files of a job; on the first rank of the save, also commit the checkpoint once all parts are durable.

    Args:
        job: The job, as `Writer` composes it.
        memory: Memory that holds the contents of the files.
        again: Whether an earlier process has died during this job, and may have written some files. Default: False.
        orphaned: Function that returns whether the trainer's process has ended, or has closed its channel. Default: it
            never has.

    Returns:
        Fields of the answer to the trainer: ``"bytes"``, the size of the job, and ``"committed"``, whether this rank
        has committed the checkpoint.

    Raises:
        CheckpointError: On the first rank: another rank has failed, or has not written its part before the deadline.
        OSError: A file could not be written.
    """
    store = CheckpointStore(job["dirpath"])
    number = job["number"]
    step = job["step"]
    rank = job["rank"]
    temporary = store.temporary(number, step, job["run"])
    commits = rank == min(job["ranks"])
    manifest = f"{store.final(number, step)}/manifest.json"
    if again and store.files.exists(manifest):
        return {"bytes": job["bytes"], "committed": commits}  # an earlier writer had done all except answer
    with store.hold(temporary):
        try:
            # A part that an earlier writer has reported as written must stay: the first rank may be committing it.
            if not again or store.missing(temporary, [rank]):
                _write(store, temporary, job, memory)
        except BaseException as error:
            _fail(store, temporary, job, error)
            raise
        if commits:
            _commit(store, temporary, job, orphaned)
        else:
            # The first rank may have committed, or given up, while this one was writing.
            store.discard_if_committed(temporary)
            store.discard_if_hopeless(temporary, job["ranks"])
    return {"bytes": job["bytes"], "committed": commits}


def _write(store: CheckpointStore, temporary: str, job: Job, memory: memoryview) -> None:
    records = {}
    for name, (begin, end) in job["files"].items():
        records[name] = store.files.write(f"{temporary}/{name}", [memory[begin:end]])
    store.add_rank(temporary, RankManifest(job["rank"], records, job["pickles"]))


def _commit(store: CheckpointStore, temporary: str, job: Job, orphaned: Callable[[], bool]) -> None:
    # A program that restarts a killed training waits for this process. It therefore must not wait for ranks that were
    # killed before they had handed over their part.
    started = time.monotonic()
    pause = 0.005
    silent = []
    longest = 0.1 if store.files.atomic else 2.0  # a question to a remote store costs time, or money
    try:
        while True:
            silent, failed = store.silent_and_failed(temporary, job["ranks"])
            if not silent:
                break
            if job["rank"] in silent:  # this rank had written its part, so the folder was deleted
                raise CheckpointError(f"{temporary} was deleted while it was written.")
            # Training is over, and no process is left that could bring the missing parts.
            if orphaned() and all(has_writer(store, rank) is False for rank in silent):
                # Asked again: their writers may have reported in the moment before they ended.
                silent, failed = store.silent_and_failed(temporary, job["ranks"])
                if silent:
                    raise CheckpointError(f"{temporary}: rank(s) {silent} have ended, as training has.")
                break
            if time.monotonic() - started > job["deadline_s"]:
                raise CheckpointError(
                    f"{temporary}: nothing was heard of rank(s) {silent} for {job['deadline_s']:.0f} s. See what "
                    "became of them; where they live and their disk is slow, allow more time."
                )
            time.sleep(pause)
            # Short pauses first, because parts usually come within milliseconds of each other.
            pause = min(2 * pause, longest)
        # All ranks have answered, so the folder can be deleted safely below.
        if failed:
            said = store.files.read(f"{temporary}/{failure_of(failed[0])}").decode(errors="replace")
            raise CheckpointError(f"{temporary}: rank {failed[0]} could not write its part: {said}")
        store.commit(temporary, Manifest(**{**job["manifest"], "ranks": tuple(job["ranks"])}))
    except BaseException as error:
        with contextlib.suppress(OSError):
            store.discard(temporary)
            if silent:  # a rank that is only late finds this, and deletes what it writes
                store.give_up(temporary, job["rank"], str(error))
        raise


def _fail(store: CheckpointStore, temporary: str, job: Job, error: BaseException) -> None:
    with contextlib.suppress(OSError):
        for name in job["files"]:
            store.files.unlink(f"{temporary}/{name}")
        store.give_up(temporary, job["rank"], str(error))
    with contextlib.suppress(OSError):
        store.discard_if_hopeless(temporary, job["ranks"])


class DirectoryLock:
    """A lock that prevents other programs from writing into a directory of checkpoints.

    Each rank of a program has a `DirectoryLock`. A program first waits until the writer processes of earlier programs
    have finished. There are three kinds of lock files:

    - ``.claim`` is locked by one rank's process until the process ends. The file contains the program's name and the
      process id.
    - ``.ranks`` has a shared lock of each rank of that program, because the rank that locks ``.claim`` may be lost.
    - ``.writer-0`` is locked by the process that writes rank 0's part. This process outlives its trainer.

    The kernel releases a lock when its process ends, however the process ends. On file systems without locks (fsspec),
    other programs are not noticed. Readers need no lock.

    Args:
        store: The checkpoints.
        program: Name of the program, the same on all its ranks.
        does: Description of what the program does in the directory, for error messages of other programs. Default: it
            trains.
    """

    def __init__(self, store: CheckpointStore, program: str, does: str = "trains into it") -> None:
        self._store = store
        self._program = program
        self._does = does
        self._path = f"{store.dirpath}/.claim"
        self._shared_path = f"{store.dirpath}/.ranks"
        self._lock: Lock | None = None
        self._shared: Lock | None = None

    def take(self, gather: Gather = lambda value: [value]) -> None:
        """Lock the directory for this program; all ranks of the program must call this together.

        Wait a few seconds if another program has locked the directory.

        Args:
            gather: Function that returns a plain value of each rank, in rank order. Default: for a single rank.

        Raises:
            CheckpointError: Another program has locked the directory, or the directory is not writable; raised on all
                ranks.
        """
        told = gather(self._take())
        # All ranks raise together, and none keeps the directory.
        if any(told):
            self.release()
            raise CheckpointError("; ".join(f"rank {rank}: {words}" for rank, words in enumerate(told) if words))
        with contextlib.suppress(OSError):  # the holder of `.claim` alone could be in the way
            self._shared = self._store.files.lock(self._shared_path, shared=True)

    def join(self) -> None:
        """Add this rank to the ranks that share this program's lock, on a rank that joins a running program.

        Raises:
            CheckpointError: The other ranks of this program have not locked this directory.
        """
        try:
            lock = self._store.files.lock(self._path)
        except BlockingIOError:
            theirs = self._holder().get("program") == self._program
        else:
            # Nobody holds the claim. Either the file system has no locks, or the rank that held it was lost and has
            # ended since; then the other ranks still share `.ranks`.
            shared = _is_free(self._store.files, self._shared_path) is False
            theirs = lock is None or (shared and self._holder().get("program") == self._program)
            if lock is not None:
                lock.close()
        if not theirs:
            raise CheckpointError(f"{self._store.dirpath} is no directory that the other ranks train into.")
        self.take()

    def keep(self) -> None:
        """Take over the lock on ``.claim`` if the rank that held it has ended. Does not wait."""
        if self._lock is None and self._shared is not None:
            with contextlib.suppress(OSError):  # another rank was quicker, or a process tests the lock just now
                self._lock = self._store.files.lock(self._path)
                self._say()

    def renew(self) -> None:
        """Lock the directory again if it was deleted, with the files that this program has locked.

        Raises:
            CheckpointError: Another program has locked the directory since then, or it is not writable.
        """
        if self._shared is None or self._shared.is_at(self._shared_path):
            return
        self._shared.close()
        if self._lock is None or not self._lock.is_at(self._path):
            self.release()
            if words := self._take():
                raise CheckpointError(f"{self._store.dirpath} was deleted while this program trained into it. {words}")
        self._shared = self._store.files.lock(self._shared_path, shared=True)
        log.warning(
            "%s was deleted while this program trains into it: it is made again, without the checkpoints that were "
            "there.", self._store.dirpath,
        )  # fmt: skip

    def wait(self, gather: Gather = lambda value: [value], timeout_s: float = 600.0) -> None:
        """Wait until the writer processes of earlier programs have stopped writing into the directory.

        All ranks must call this together. After ``timeout_s`` this logs a warning and returns.

        Args:
            gather: Function that returns a plain value of each rank, in rank order. Default: for a single rank.
            timeout_s: Longest wait, in seconds. Default: 600.
        """
        began = time.monotonic()
        said = False
        while any(gather(_writes(self._store, QUIET_S))):
            left = timeout_s - (time.monotonic() - began)
            there = ", ".join(self._store.writing()) or "something"
            if not said or left <= 0:
                log.warning(
                    "A process of an earlier training is still writing %s in %s; %s.", there, self._store.dirpath,
                    f"waiting for it, {left:.0f} s more at most" if left > 0 else "it is not waited for any longer",
                )  # fmt: skip
            said = True
            # Gathered, because clocks differ: all ranks must leave this loop in the same turn.
            if any(gather(left <= 0)):
                return

    def release(self) -> None:
        for lock in (self._lock, self._shared):
            if lock is not None:
                lock.close()
        self._lock = None
        self._shared = None

    def _take(self) -> str:
        """Try to lock ``.claim``, for a few seconds; return the reason of a failure.

        Return an empty text if this rank, or another rank of this program, has locked the file.
        """
        until = time.monotonic() + GRACE_S
        while True:
            try:
                self._lock = self._store.files.lock(self._path)
                self._check_ranks()
            except BlockingIOError:
                holder = self._holder()
                if holder.get("program") == self._program:  # another rank of this program
                    return ""
                if time.monotonic() > until:
                    return self._refusal(holder)
                time.sleep(_PAUSE_S)
            except (CheckpointError, OSError) as error:
                where = f"{self._store.dirpath} cannot be written into"
                return f"{where}: {error} (make that possible, or pass another `dirpath`)"
            else:
                self._say()
                return ""

    def _check_ranks(self) -> None:
        """Raise BlockingIOError if ranks of another program hold the lock on ``.ranks``, and release this rank's locks.

        This happens if another program still trains into the directory, but has lost the rank that held ``.claim``.
        """
        try:
            shared = self._store.files.lock(self._shared_path)
        except BlockingIOError:
            self.release()
            raise
        if shared is not None:
            shared.close()

    def _say(self) -> None:
        if self._lock is None:
            return
        who = {
            "program": self._program, "does": self._does, "host": socket.gethostname(), "pid": os.getpid(),
            "since": datetime.now().astimezone().isoformat(" ", "seconds"),
        }  # fmt: skip
        self._lock.write(json.dumps(who).encode())

    def _holder(self) -> dict[str, Any]:
        try:
            found = json.loads(self._store.files.read(self._path))
        except (CheckpointError, OSError, ValueError):  # the holder has not written its name yet
            return {}
        return found if isinstance(found, dict) else {}

    def _refusal(self, holder: dict[str, Any]) -> str:
        who = "process {pid} on host {host} {does}, since {since}".format(
            **{"pid": "?", "host": "?", "does": "uses it", "since": "?", **holder}
        )
        return (
            f"{self._store.dirpath} is in use: {who}. Two programs must not write checkpoints into one directory: end "
            "that one, or take another directory."
        )


def lock_of_writer(files: Files, dirpath: str, rank: int) -> Lock | None:
    """Take the lock that a rank's writer process is to hold until it ends; return None if the lock cannot be taken.

    Raises:
        DamagedCheckpoint: There is a link, or something else that is no file, in place of the lock file.
    """
    try:
        return files.lock(f"{dirpath}/{_WRITER}{rank}", shared=True)
    except OSError:  # the first save will report what is wrong with the directory
        return None


def has_writer(store: CheckpointStore, rank: int) -> bool | None:
    """Return whether a process lives that may still write a rank's part; None if that is unknown."""
    free = _is_free(store.files, f"{store.dirpath}/{_WRITER}{rank}")
    return None if free is None else not free


def _is_free(files: Files, path: str) -> bool | None:
    try:
        lock = files.lock(path)
    except BlockingIOError:  # a process holds it, or tests it just now
        return False
    except (CheckpointError, OSError):
        return None
    if lock is None:
        return None
    lock.close()
    return True


def _writes(store: CheckpointStore, patience_s: float) -> bool:
    until = time.monotonic() + patience_s
    while True:
        names = [name for name in store.files.names(store.dirpath) if name.startswith(_WRITER)]
        if all(_is_free(store.files, f"{store.dirpath}/{name}") is not False for name in names):
            return False
        if time.monotonic() > until:
            return True
        time.sleep(_PAUSE_S)

"""The process that writes one rank's part of checkpoints, and commits them where its rank is the first.

It lives beside the trainer, in a session of its own, so that it finishes what it was given when the trainer is killed.
It is started without this package's ``__init__``, and imports the standard library only: it is there in milliseconds,
and takes 15 MB. A job comes as two numbers, with the descriptor of the memory that holds it:

    [ tensors ][ JSON of the rank ][ the job, as JSON ]
                                   ^ offset            ^ offset + length

so that a message is always small, and to send one never waits. One job is done after the other: `main` takes them, and
`perform` does one. A `DirectoryLock` keeps other programs out of a directory of checkpoints.
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
"""Offset and length of the job in the memory, and whether another process has died of it."""
_LONGEST_ERROR = 4000
Job = dict[str, Any]
"""A job, as `Writer` composes it."""
GRACE_S = 3.0
"""A program that ends, or one that only deletes something, may let go."""
QUIET_S = 5.0
"""Seconds after which a wait is logged."""
_PAUSE_S = 0.02
_WRITER = ".writer-"
Gather = Callable[[Any], Sequence[Any]]


def main(descriptor: int, trainer: int) -> None:
    """Do jobs until the trainer, the process of that number, is gone, or says that there are no more."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # they are meant for the trainer: what it has handed over is finished
    with socket.socket(fileno=descriptor) as channel, _death_of(trainer) as death:
        while (message := _next(channel, trainer, death)) is not None:
            answer = _answer(*message, orphaned=lambda: os.getppid() != trainer or _is_closed(channel))
            with contextlib.suppress(OSError):  # nobody may be left to hear it
                channel.sendall(json.dumps(answer).encode() + b"\n")


@contextlib.contextmanager
def _death_of(trainer: int) -> Iterator[list[int]]:
    """Give a descriptor that can be read when the trainer has ended; none where the system knows no such thing."""
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
    # Forks of the trainer that Python has not made have the other end of the channel, too, and hide that it ends.
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
    """Wait until the channel can be read or is closed, and return whether it is so; ``others`` end the wait, too."""
    poll = select.poll()  # `select.select` cannot take descriptors above 1023
    for each in (channel, *others):
        poll.register(each, select.POLLIN)
    return any(found == channel.fileno() for found, _ in poll.poll(max(0.0, seconds) * 1000))


def _answer(descriptor: int, offset: int, length: int, again: bool, orphaned: Callable[[], bool]) -> dict[str, Any]:
    started = time.monotonic()
    number = None
    try:
        # Given back when nothing refers to it any more: where a write has failed, its traceback does until it is told.
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
    """Write the files of a job, and commit the checkpoint where this rank is the first; return the answer.

    Args:
        job: as `Writer` composes it.
        memory: that its files are in.
        again: another process has died of it, and may have done all or a part. Default: False.
        orphaned: whether the trainer has ended, or its training has. Default: neither.

    Raises:
        CheckpointError: another rank has failed, or did not answer before the deadline.
    """
    store = CheckpointStore(job["dirpath"])
    number = job["number"]
    step = job["step"]
    rank = job["rank"]
    temporary = store.temporary(number, step, job["run"])
    commits = rank == min(job["ranks"])
    manifest = f"{store.final(number, step)}/manifest.json"
    if again and store.files.exists(manifest):
        return {"bytes": job["bytes"], "committed": commits}  # a writer before this one had done all but answer
    with store.hold(temporary):
        try:
            # What an earlier writer has declared written, the first rank may be committing now.
            if not again or store.missing(temporary, [rank]):
                _write(store, temporary, job, memory)
        except BaseException as error:
            _fail(store, temporary, job, error)
            raise
        if commits:
            _commit(store, temporary, job, orphaned)
        else:
            store.discard_if_committed(temporary)
            store.discard_if_hopeless(temporary, job["ranks"])
    return {"bytes": job["bytes"], "committed": commits}


def _write(store: CheckpointStore, temporary: str, job: Job, memory: memoryview) -> None:
    records = {}
    for name, (begin, end) in job["files"].items():
        records[name] = store.files.write(f"{temporary}/{name}", [memory[begin:end]])
    store.add_rank(temporary, RankManifest(job["rank"], records, job["pickles"]))


def _commit(store: CheckpointStore, temporary: str, job: Job, orphaned: Callable[[], bool]) -> None:
    # Who starts a killed training again waits for this: so ranks are not waited for that were killed before they had
    # handed over their part.
    started = time.monotonic()
    pause = 0.005
    silent = []
    longest = 0.1 if store.files.atomic else 2.0  # to ask a remote store costs something
    try:
        while True:
            silent, failed = store.silent_and_failed(temporary, job["ranks"])
            if not silent:
                break
            if job["rank"] in silent:  # it had said so: what others have said may be gone, too
                raise CheckpointError(f"{temporary} was deleted while it was written.")
            if orphaned() and all(has_writer(store, rank) is False for rank in silent):
                silent, failed = store.silent_and_failed(temporary, job["ranks"])  # they may have been about to end
                if silent:
                    raise CheckpointError(f"{temporary}: rank(s) {silent} have ended, as training has.")
                break
            if time.monotonic() - started > job["deadline_s"]:
                raise CheckpointError(
                    f"{temporary}: nothing was heard of rank(s) {silent} for {job['deadline_s']:.0f} s. See what "
                    "became of them; where they live and their disk is slow, allow more time."
                )
            time.sleep(pause)
            pause = min(2 * pause, longest)
        if failed:
            said = store.files.read(f"{temporary}/{failure_of(failed[0])}").decode(errors="replace")
            raise CheckpointError(f"{temporary}: rank {failed[0]} could not write its part: {said}")
        store.commit(temporary, Manifest(**{**job["manifest"], "ranks": tuple(job["ranks"])}))
    except BaseException as error:
        with contextlib.suppress(OSError):
            store.discard(temporary)
            if silent:  # one that is only late deletes what it writes from now on
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
    """A program's lock on a directory of checkpoints while it writes there; one for each rank, of which one holds it.

    One program at a time writes into a directory, and waits for what an earlier one still writes. ``.claim`` is locked
    by one process of the program that trains there, while it lives, and says who that is. All of that program's share
    the lock of ``.ranks``: the first one may be lost, and the others train on. The process that writes rank 0's part
    locks ``.writer-0`` from before its first save on, and outlives its trainer.

    The kernel lets go of a lock when its process ends, however it ends. Where a file system has no locks (fsspec's),
    nobody is noticed. Readers need no lock.
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
        """Take the directory for this program; all of its ranks call this together, and ``gather`` plain values.

        Raises:
            CheckpointError: on all ranks; another program has a directory, and which one, or it cannot be written.
        """
        told = gather(self._take())
        if any(told):
            self.release()
            raise CheckpointError("; ".join(f"rank {rank}: {words}" for rank, words in enumerate(told) if words))
        with contextlib.suppress(OSError):  # nobody but who has `.claim` would be in the way
            self._shared = self._store.files.lock(self._shared_path, shared=True)

    def join(self) -> None:
        """Share the directory with this program's other ranks; raise CheckpointError where they train elsewhere."""
        try:
            lock = self._store.files.lock(self._path)
        except BlockingIOError:
            theirs = self._holder().get("program") == self._program
        else:
            # The file system has no locks; or the rank that had said so was stopped when the others lost it, and has
            # let go since.
            shared = _is_free(self._store.files, self._shared_path) is False
            theirs = lock is None or (shared and self._holder().get("program") == self._program)
            if lock is not None:
                lock.close()
        if not theirs:
            raise CheckpointError(f"{self._store.dirpath} is no directory that the other ranks train into.")
        self.take()

    def keep(self) -> None:
        """Hold the lock in the place of the rank that had it, and may be lost. Waits for nobody."""
        if self._lock is None and self._shared is not None:
            with contextlib.suppress(OSError):  # another rank was quicker, or somebody looks whether we have it
                self._lock = self._store.files.lock(self._path)
                self._say()

    def wait(self, gather: Gather = lambda value: [value], timeout_s: float = 600.0) -> None:
        """Wait, in turns of some seconds, until processes of an earlier program write nothing there any more."""
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
            if any(gather(left <= 0)):
                return

    def release(self) -> None:
        for lock in (self._lock, self._shared):
            if lock is not None:
                lock.close()
        self._lock = None
        self._shared = None

    def _take(self) -> str:
        """Take the lock; return why not, and nothing where this program has the directory."""
        until = time.monotonic() + GRACE_S
        while True:
            try:
                self._lock = self._store.files.lock(self._path)
                self._check_ranks()
            except BlockingIOError:
                holder = self._holder()
                if holder.get("program") == self._program:  # another rank
                    return ""
                if time.monotonic() > until:
                    return self._refusal(holder)
                time.sleep(_PAUSE_S)
            except OSError as error:
                return f"{self._store.dirpath} cannot be written into: {error}"
            else:
                self._say()
                return ""

    def _check_ranks(self) -> None:
        """Raise BlockingIOError where another program's ranks go on without the one that had taken the directory."""
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
        except (OSError, ValueError):  # it is about to say who it is
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
    """Return the lock that the writer of a rank's part holds as long as it lives; None where that cannot be."""
    try:
        return files.lock(f"{dirpath}/{_WRITER}{rank}", shared=True)
    except OSError:  # what is wrong with the directory, the first save will tell
        return None


def has_writer(store: CheckpointStore, rank: int) -> bool | None:
    """Return whether a process lives that may write a rank's part; None where that cannot be known."""
    free = _is_free(store.files, f"{store.dirpath}/{_WRITER}{rank}")
    return None if free is None else not free


def _is_free(files: Files, path: str) -> bool | None:
    try:
        lock = files.lock(path)
    except BlockingIOError:  # or another one that looks, just now
        return False
    except OSError:
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

"""The process that writes one rank's part of checkpoints, and commits them where its rank is the first.

It lives beside the trainer, in a session of its own, so that it finishes what it was given when the trainer is killed.
It is started without this package's ``__init__``, and imports the standard library only: it is there in milliseconds,
and takes 15 MB. A job comes as two numbers, with the descriptor of the memory that holds it:

    [ tensors ][ JSON of the rank ][ the job, as JSON ]
                                   ^ offset            ^ offset + length

so that a message is always small, and to send one never waits. One job is done after the other.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lightning_async.engine.checkpoint.claim import has_no_writer
from lightning_async.engine.checkpoint.manifest import Manifest, RankManifest
from lightning_async.engine.checkpoint.store import CheckpointStore, failure_of
from lightning_async.errors import CheckpointError

__all__ = ["MESSAGE", "main", "perform", "wait_for"]

MESSAGE = struct.Struct("<QQ?")
"""Where in the memory the job lies, offset and length, and whether another process has died of it."""
_LONGEST_ERROR = 4000

Job = dict[str, Any]
"""As `engine.checkpoint.process` composes it."""


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
    """A descriptor that has something to read when the trainer has ended; none where the system knows no such thing."""
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
    """The descriptor of the memory and the `MESSAGE` of the next job; None where no more will come."""
    # Forks of the trainer have the other end of the channel, too: that it ends is not heard as long as they live.
    while not wait_for(channel, 1.0, death):
        if os.getppid() != trainer:
            return None
    try:
        data, descriptors, *_ = socket.recv_fds(channel, MESSAGE.size, 1)
    except ConnectionError:
        return None
    return (descriptors[0], *MESSAGE.unpack(data)) if data else None


def _is_closed(channel: socket.socket) -> bool:
    """Whether the other end is; what it has sent before can still be read."""
    poll = select.poll()
    poll.register(channel, getattr(select, "POLLRDHUP", 0))
    return bool(poll.poll(0))


def wait_for(channel: socket.socket, seconds: float, others: Sequence[int] = ()) -> bool:
    """Wait until there is something to read, or the other end is closed; whether that is so.

    Args:
        channel: to read from.
        seconds: at most.
        others: descriptors that end the wait, too. Default: none.
    """
    poll = select.poll()  # `select.select` cannot take descriptors above 1023
    for each in (channel, *others):
        poll.register(each, select.POLLIN)
    return any(found == channel.fileno() for found, _ in poll.poll(max(0.0, seconds) * 1000))


def _answer(descriptor: int, offset: int, length: int, again: bool, orphaned: Callable[[], bool]) -> dict[str, Any]:
    started, number = time.monotonic(), None
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
    """Write the files of a job, and commit the checkpoint where this rank is the first; what to answer.

    Args:
        job: what to write, see `engine.checkpoint.process`.
        memory: that its files are in.
        again: another process has died of it, and may have done all or a part. Default: False.
        orphaned: whether the trainer has ended, or its training has. Default: neither.

    Raises:
        CheckpointError: another rank has failed, or was not heard of before the deadline.
        OSError: the file system refuses.
    """
    store = CheckpointStore(job["dirpath"])
    number, step, rank = job["number"], job["step"], job["rank"]
    temporary, commits = store.temporary(number, step, job["run"]), rank == min(job["ranks"])
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
    """Wait for the others, and commit, or delete what cannot be committed any more.

    Who starts a killed training again waits for this: so ranks are not waited for that were killed before they had
    handed over their part.

    Raises:
        CheckpointError: another rank has failed, or was not heard of before the deadline; or the folder is gone.
    """
    started, pause, silent = time.monotonic(), 0.005, []
    longest = 0.1 if store.files.atomic else 2.0  # to ask a remote store costs something
    try:
        while True:
            silent, failed = store.heard(temporary, job["ranks"])
            if not silent:
                break
            if job["rank"] in silent:  # it had said so: what others have said may be gone, too
                raise CheckpointError(f"{temporary} was deleted while it was written.")
            if orphaned() and all(has_no_writer(store, rank) for rank in silent):
                silent, failed = store.heard(temporary, job["ranks"])  # they may have been about to end
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
    """Give back the room, and tell the first rank, which waits for this one."""
    with contextlib.suppress(OSError):
        for name in job["files"]:
            store.files.unlink(f"{temporary}/{name}")
        store.give_up(temporary, job["rank"], str(error))
    with contextlib.suppress(OSError):
        store.discard_if_hopeless(temporary, job["ranks"])

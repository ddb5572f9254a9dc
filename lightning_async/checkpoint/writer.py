"""The trainer's side of the writer process: pass saves to the process, receive its answers, and replace it if it dies.

    save --- copied into a free buffer; a message ---> the writer --- poll: its answer ---> the buffer is free

Only the training thread uses this module. `Writer.wait` and `Writer.close` wait for a disk, with a timeout; nothing
else does.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from lightning_async._subprocess import HelperProcess, in_words, status_of
from lightning_async.checkpoint import writer_process
from lightning_async.checkpoint.buffers import Buffer, BufferOwner, Growth, anonymous_file, uncollected
from lightning_async.checkpoint.shards import CheckpointShard, shard
from lightning_async.checkpoint.storage import Lock, files_at
from lightning_async.checkpoint.store import Manifest
from lightning_async.checkpoint.writer_process import MESSAGE, lock_of_writer, wait_for
from lightning_async.errors import CheckpointError

log = logging.getLogger(__name__)

_EXIT_S = 1.0  # seconds for an idle writer to end; one that still writes is left alone
# Seconds between two looks whether a process is stopped.
_STANDSTILL_LOOK_S = 0.5
# Longest time between two looks that counts as stopped, see `Standstill`.
_LONGEST_LOOK_S = 10.0
_REMEDY = (
    "Put plain values and tensors there, or pass `FaultTolerantCheckpoint(objects='pickle')`: then whoever loads such "
    "a checkpoint has to ask for it, as that executes code in it."
)
_ATTEMPTS = 2  # writers that may try one job: a job that has killed two would kill the next one, too
# Seconds for which a writer is stopped before it is replaced.
_STOPPED_S = 20.0
# Longest wait for an answer before the process is looked at.
_LOOK_S = 0.5


class Writer:
    """A client of the process that writes one rank's parts of checkpoints.

    Args:
        dirpath: Directory of checkpoints, or URL of fsspec.
        rank: This rank. Default: 0.
        buffers: Number of buffers for copies of the state, 1 or 2. With 2, one save can be copied while another one is
            written. Default: 2.
        deadline: Longest time for which the committing rank waits for the other ranks' parts. Default: 10 minutes.
        pickles: Whether objects are saved as pickles. Default: False, a state with objects raises an error.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self, dirpath: str | os.PathLike[str], rank: int = 0, buffers: int = 2,
        deadline: timedelta = timedelta(minutes=10), pickles: bool = False,
    ) -> None:  # fmt: skip
        if buffers not in (1, 2):
            raise ValueError(f"`Writer(buffers={buffers!r})` must be 1 or 2.")
        if deadline <= timedelta(0):
            raise ValueError(f"`Writer(deadline={deadline!r})` must be > 0.")
        path = os.fspath(dirpath)
        self._dirpath = path if "://" in path else os.path.abspath(os.path.expanduser(path))
        self._rank = rank
        self._deadline = deadline
        self._pickles = pickles
        self._buffers = [Buffer(f"checkpoint-{rank}-{i}") for i in range(buffers)]
        self._flights: deque[_Flight] = deque()
        self._done: list[Result] = []
        self._process: WriterChannel | None = None
        self._growth = Growth()

    @property
    def busy(self) -> bool:
        """Whether a save was still being written at the last `poll`, or memory is being allocated, see `expect`."""
        return bool(self._flights) or self._growth.active

    @property
    def waited_s(self) -> float:
        """The seconds since the save that is being written was passed to the process; 0 if no save is being written."""
        return _since(self._flights[0]) if self._flights else 0.0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the writer process, unless it is running."""
        if self._process is None:
            self._process = WriterChannel(self._rank, lock_of_writer(*files_at(self._dirpath), self._rank))

    def reserve(self, job: SaveJob) -> None:
        size = self._shard(job).size
        for buffer in self._buffers:
            if buffer.owner is BufferOwner.FREE:
                buffer.reserve(size)

    def expect(self, job: SaveJob, more: int = 0) -> None:
        """Allocate the memory for later saves in the background; `busy` is True until the memory is allocated.

        Args:
            job: A save of the same state as the later ones.
            more: Number of bytes that later saves need in addition to this state. Default: 0.
        """
        self._growth.begin(self._buffers, self._shard(job).size + more)

    def save(self, job: SaveJob, queue: bool = False) -> float:
        """Copy the state, and pass the copy to the writer process; the state may change once this returns.

        Args:
            job: The save.
            queue: Whether the copy may begin while an earlier save is being written, if a buffer is free. Default:
                False.

        Returns:
            The seconds that this took.

        Raises:
            SaveBusy: An earlier save is being written; with ``queue``: no buffer is free.
            TypeError: The state holds an object that cannot be saved; the message names the object.
            CheckpointError: There is not enough memory for a copy, or the process cannot be started.
        """
        began = time.monotonic()
        self._growth.wait()
        self._take_answers()
        free = [buffer for buffer in self._buffers if buffer.owner is BufferOwner.FREE]
        if not free or (self._flights and not queue):
            first = self._flights[0]
            raise SaveBusy(
                f"rank {self._rank}: save {job.number} cannot begin: save {first.number} has been under way for "
                f"{began - first.started:.1f} s (process {self.pid})."
            )
        self.start()
        with uncollected():
            part = self._shard(job)
            buffer = free[0]
            buffer.owner = BufferOwner.FILLING
            try:
                flight = self._fill(buffer, job, part)
            except BaseException:
                buffer.owner = BufferOwner.FREE
                raise
        buffer.owner = BufferOwner.WRITER
        # Recorded before it is sent: if the writer process has died, the next one gets it.
        self._flights.append(flight)
        self._send(flight)
        return time.monotonic() - began

    def poll(self) -> list[Result]:
        """Return the results of all saves that have ended since the last call, without waiting.

        If the writer process has died, start another one, which writes the unfinished saves.
        """
        self._take_answers()
        results = self._done
        self._done = []
        return results

    def wait(self, timeout: float) -> list[Result]:
        """Wait until no save is being written, for at most ``timeout`` seconds; return the results as `poll` does."""
        until = time.monotonic() + timeout
        self._growth.wait(timeout)
        self._take_answers()
        while self._flights and self._process and (left := until - time.monotonic()) > 0:
            self._process.wait(min(left, _LOOK_S))
            self._take_answers()
        return self.poll()

    def close(self, timeout: float) -> list[Result]:
        """Wait for the last save, then end the writer process and free the memory; return the results.

        A save that takes longer than ``timeout`` seconds has a `Result` with an error. The process then completes that
        save before it ends by itself.
        """
        results = self.wait(timeout)
        self._growth.wait()
        process = self._process
        self._process = None
        # A process that still writes does not end within a moment.
        exit_s = 0.0 if self._flights else _EXIT_S
        for flight in self._flights:
            pid = process.pid if process else None
            results.append(self._failure(flight, f"is not written yet; process {pid} writes on, then ends by itself."))
        self._flights.clear()
        for buffer in self._buffers:
            buffer.owner = BufferOwner.FREE
            buffer.release()
        if process is not None:
            process.close(exit_s)
        return results

    def _shard(self, job: SaveJob) -> CheckpointShard:
        if self._rank not in job.ranks:
            raise ValueError(f"`SaveJob(ranks={job.ranks!r})` must hold rank {self._rank}, whose part it is.")
        try:
            return shard(job.shared, job.own, self._rank, job.ranks, self._pickles)
        except TypeError as error:
            raise error if self._pickles else TypeError(f"{error} {_REMEDY}") from None

    def _fill(self, buffer: Buffer, job: SaveJob, part: CheckpointShard) -> _Flight:
        ranks = sorted(job.ranks)
        manifest = Manifest(**{"created": time.time(), **job.manifest, "number": job.number, "step": job.step,
                               "ranks": tuple(ranks)})  # fmt: skip
        end = part.size - len(part.text)
        told = {
            "dirpath": self._dirpath, "number": job.number, "step": job.step, "run": job.run, "ranks": ranks,
            "rank": self._rank, "deadline_s": self._deadline.total_seconds(), "bytes": part.size,
            "pickles": part.pickles,
            "files": {f"rank-{self._rank}.bin": [0, end], f"rank-{self._rank}.json": [end, part.size]},
            "manifest": asdict(manifest),
        }  # fmt: skip
        text = json.dumps(told).encode()
        buffer.fill(part.tensors, part.text + text)
        return _Flight(job.number, buffer, part.size, len(text))

    def _send(self, flight: _Flight) -> None:
        assert self._process is not None
        with contextlib.suppress(OSError):  # the process has died, as the next look at its answers will show
            self._process.send(flight.buffer.descriptor, flight.offset, flight.length, again=flight.attempts > 1)

    def _take_answers(self) -> None:
        if self._process is None:
            return
        # Answers come in the order of the saves.
        for answer in self._process.answers():
            flight = self._flights.popleft()
            flight.buffer.owner = BufferOwner.FREE
            if "error" in answer:
                self._done.append(self._failure(flight, f"has failed. {answer['error']}"))
            else:
                self._done.append(Result(flight.number, _since(flight), answer["bytes"], answer["committed"]))
        # After its answers: a save that it has answered is done.
        if self._process.died:
            self._replace(self._process)
        elif self._flights and (stopped_s := self._process.stopped_s()) >= _STOPPED_S:
            # Nothing is saved while the process is stopped. After the kill, another one finishes its saves.
            log.warning(
                "Rank %d: the process %d that writes checkpoints has been stopped (SIGSTOP) for %.0f s, with a save to "
                "write. It is killed, and another one writes that.", self._rank, self._process.pid, stopped_s,
            )  # fmt: skip
            self._process.kill()

    def _replace(self, dead: WriterChannel) -> None:
        how = dead.close()
        self._process = None
        log.warning("Rank %d: the process %d that writes checkpoints has ended (%s).", self._rank, dead.pid, how)
        first, *_ = [*self._flights, None]  # the writer died during this save, and had not begun the next one
        for flight in list(self._flights):
            try:
                if flight.attempts == _ATTEMPTS:
                    raise CheckpointError(f"is lost: {_ATTEMPTS} processes have died of it; the last one: {how}.")
                self.start()
            except CheckpointError as error:
                self._flights.remove(flight)
                flight.buffer.owner = BufferOwner.FREE
                self._done.append(self._failure(flight, str(error), lost=True))
            else:
                # Only the save that was being written counts: it may be the cause of the death.
                flight.attempts += flight is first
                self._send(flight)

    def _failure(self, flight: _Flight, what: str, lost: bool = False) -> Result:
        seconds = _since(flight)
        shown = f"rank {self._rank}: save {flight.number}, begun {seconds:.1f} s ago, {what}"
        return Result(flight.number, seconds, error=shown, lost=lost)


@dataclass(frozen=True)
class SaveJob:
    """A save, as one rank passes it to its writer process.

    Args:
        number: Number of the save.
        step: Number of optimizer steps taken.
        run: Name of the run, which is a part of the name of the unfinished checkpoint.
        ranks: Ranks that take part in the save; the lowest one commits the checkpoint.
        shared: State that is equal on all these ranks.
        own: State of this rank.
        manifest: Further fields of the `Manifest`. Only those of the committing rank are used. Default: none.
    """

    number: int
    step: int
    run: str
    ranks: Sequence[int]
    shared: Any
    own: Any
    manifest: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """The result of one save on this rank.

    Args:
        number: Number of the save.
        seconds: Seconds since the save was passed to the writer process.
        bytes: Number of bytes of this rank's files.
        committed: Whether this rank has committed the checkpoint. Other ranks only know that their part is durable.
        error: Reason why the save has failed. Default: None, it has not failed.
        lost: Whether the other ranks still wait for this rank's part, because the writer process died before it could
            report the failure to them. Default: False.
    """

    number: int
    seconds: float
    bytes: int = 0
    committed: bool = False
    error: str | None = None
    lost: bool = False


class SaveBusy(CheckpointError):
    """An error: a save cannot begin, because an earlier save is still being written."""


@dataclass
class _Flight:
    """A save that was passed to the writer process, and for which no answer has arrived yet."""

    number: int
    buffer: Buffer
    offset: int
    length: int
    attempts: int = 1
    started: float = field(default_factory=time.monotonic)


def _since(flight: _Flight) -> float:
    return time.monotonic() - flight.started


class WriterChannel:
    """A running writer process of one rank, and the channel to it.

    Args:
        rank: The rank.
        lock: Lock file. The writer process inherits it and holds the lock until it ends; this process closes its own
            descriptor of the file. Default: None.
    """

    def __init__(self, rank: int, lock: Lock | None = None) -> None:
        self.died = False
        self._received = b""
        self._standstill = Standstill()
        self._looks_at = -math.inf
        try:
            with contextlib.ExitStack() as opened:
                self._errors = anonymous_file("checkpoint-errors")
                opened.callback(os.close, self._errors)
                self._process = HelperProcess(
                    writer_process.__name__, [os.getpid()], f"writes the checkpoints of rank {rank}",
                    descriptors=[lock.descriptor] if lock else [], stderr=self._errors,
                )  # fmt: skip
                opened.pop_all()
        except OSError as error:
            raise CheckpointError(f"rank {rank}: no process that writes checkpoints can be started: {error}") from error
        finally:
            # The process has its own copy of the descriptor, so that the lock ends with the process.
            if lock is not None:
                lock.close()
        self._channel = self._process.channel
        self.pid = self._process.popen.pid

    def send(self, descriptor: int, offset: int, length: int, again: bool) -> None:
        """Send a job to the process. The job is JSON in the memory of a buffer.

        Args:
            descriptor: File descriptor of the buffer's memory.
            offset: Offset of the JSON in that memory, in bytes.
            length: Number of bytes of the JSON.
            again: Whether an earlier process has died during this job.
        """
        socket.send_fds(self._channel, [MESSAGE.pack(offset, length, again)], [descriptor])

    def answers(self) -> list[dict[str, Any]]:
        """Return the answers that have arrived, without waiting. If the process has died, set ``died`` to True."""
        with contextlib.suppress(BlockingIOError):
            while not self.died:
                try:
                    data = self._channel.recv(1 << 16, socket.MSG_DONTWAIT)
                except ConnectionError:
                    data = b""
                self._received += data
                # An empty message is the end of the channel.
                self.died = not data
        *lines, self._received = self._received.split(b"\n")
        return [json.loads(line) for line in lines]

    def wait(self, timeout: float) -> None:
        wait_for(self._channel, timeout)

    def stopped_s(self) -> float:
        """Return for how many seconds the process has been stopped (SIGSTOP); 0 if the system does not report that."""
        now = time.monotonic()
        if now >= self._looks_at:
            self._looks_at = now + _STANDSTILL_LOOK_S
            self._standstill.look(_is_stopped(self.pid), now)
        return self._standstill.seconds

    def kill(self) -> None:
        self._process.popen.kill()
        self._standstill = Standstill()

    def close(self, timeout_s: float = _EXIT_S) -> str:
        """Close the channel, which makes the process end; return in words how the process has ended.

        Wait for ``timeout_s`` seconds; default: one. A process that is still writing then is left to end by itself.
        """
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)  # works even if a fork of this process has the socket open
        self._channel.close()
        status = self._process.wait(timeout_s)
        said = os.pread(self._errors, 1 << 16, 0).decode(errors="replace").strip()
        os.close(self._errors)
        if status is None:
            self._process.leave()
            return "it has not ended"
        return in_words(status) if status < 0 else f"{in_words(status)}: {said[-1000:]}"


class Standstill:
    """A measurement of how long a process has been stopped (SIGSTOP), by looking at the process in intervals.

    Between two looks, at most `_LONGEST_LOOK_S` seconds count. If the whole job is suspended, the process that looks is
    stopped as well, and the time of the suspension must not count in full.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last: float | None = None

    def look(self, stopped: bool, now: float) -> float:
        """Record whether the process is stopped now; return for how many seconds in a row it has been stopped.

        Of the time between two calls, at most `_LONGEST_LOOK_S` (10) seconds are counted. In the example, 3600 seconds
        between the second and the third call count as 10.

        Args:
            stopped: Whether the process is stopped now.
            now: Present time, in seconds.

        >>> still = Standstill()
        >>> [still.look(True, now) for now in (100.0, 104.0, 3704.0)], still.look(False, 3705.0)
        ([0.0, 4.0, 14.0], 0.0)
        """
        before = self._last
        self._last = now if stopped else None
        self.seconds = 0.0 if before is None or not stopped else self.seconds + min(now - before, _LONGEST_LOOK_S)
        return self.seconds


def _is_stopped(pid: int) -> bool:
    try:
        return status_of(pid)[0] == "T"
    except (OSError, IndexError):
        return False

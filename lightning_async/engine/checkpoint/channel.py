"""A process that writes checkpoints, as its trainer sees it: how it is started, told, heard, and noticed to be dead."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, ClassVar

from lightning_async.bare import bare_command
from lightning_async.engine.checkpoint.buffers import anonymous_file
from lightning_async.engine.checkpoint.writer import MESSAGE, wait_for
from lightning_async.engine.files import Lock
from lightning_async.errors import CheckpointError

__all__ = ["Channel", "Standstill"]

_EXIT_S = 1.0  # a writer that has nothing to do ends at once; one that is stopped is not waited for
_LOOK_S = 0.5
_LONGEST_LOOK_S = 10.0


class Standstill:
    """Seconds for which a process has been stopped (SIGSTOP), by looks at it.

    Between two looks at most some seconds count: a job that is suspended stops who looks, too, and when it goes on, the
    process that is looked at may do so a moment later.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last: float | None = None

    def look(self, stopped: bool, now: float) -> float:
        """Whether it is stopped, at that many monotonic seconds; for how long it has been.

        >>> still = Standstill()
        >>> [still.look(True, now) for now in (100.0, 104.0, 3704.0)], still.look(False, 3705.0)
        ([0.0, 4.0, 14.0], 0.0)
        """
        before, self._last = self._last, now if stopped else None
        self.seconds = 0.0 if before is None or not stopped else self.seconds + min(now - before, _LONGEST_LOOK_S)
        return self.seconds


class Channel:
    """One process that writes, and the channel to it.

    Args:
        rank: whose parts it writes.
        lock: that the process holds as long as it lives; this one keeps nothing of it. Default: none.

    Raises:
        CheckpointError: the system does not let it start.
    """

    _left: ClassVar[list[subprocess.Popen[bytes]]] = []  # those that still wrote when they were closed

    def __init__(self, rank: int, lock: Lock | None = None) -> None:
        self.died = False
        """Whether it has ended, as far as `answers` knows."""
        self._received = b""
        self._standstill, self._looks_at = Standstill(), -math.inf
        try:
            with contextlib.ExitStack() as opened:
                self._start(rank, lock, opened)
                opened.pop_all()
        except OSError as error:
            raise CheckpointError(f"rank {rank}: no process that writes checkpoints can be started: {error}") from error
        finally:
            if lock is not None:
                lock.close()
        self.pid = self._popen.pid

    def _start(self, rank: int, lock: Lock | None, opened: contextlib.ExitStack) -> None:
        self._errors = anonymous_file("checkpoint-errors")
        opened.callback(os.close, self._errors)
        self._channel, theirs = map(opened.enter_context, socket.socketpair())
        told = [theirs.fileno(), os.getpid()]
        command = bare_command(
            "lightning_async.engine.checkpoint.writer", told, f"writes the checkpoints of rank {rank}"
        )
        with theirs:
            self._popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._errors,
                pass_fds=[theirs.fileno(), *([lock.descriptor] if lock else [])], start_new_session=True,
            )  # fmt: skip

    def send(self, descriptor: int, offset: int, length: int, again: bool) -> None:
        """Hand over a job; raises OSError where the process has ended."""
        socket.send_fds(self._channel, [MESSAGE.pack(offset, length, again)], [descriptor])

    def answers(self) -> list[dict[str, Any]]:
        """All that have come; notices that no more can."""
        with contextlib.suppress(BlockingIOError):
            while not self.died:
                try:
                    data = self._channel.recv(1 << 16, socket.MSG_DONTWAIT)
                except ConnectionError:
                    data = b""
                self._received += data
                self.died = not data
        *lines, self._received = self._received.split(b"\n")
        return [json.loads(line) for line in lines]

    def wait(self, timeout: float) -> None:
        """Until there is an answer, or the process has ended, or so many seconds are over."""
        wait_for(self._channel, timeout)

    def stopped_s(self) -> float:
        """For how long it has been stopped, by looks at it twice a second; 0 where the system does not say."""
        now = time.monotonic()
        if now >= self._looks_at:
            self._looks_at = now + _LOOK_S
            self._standstill.look(_is_stopped(self.pid), now)
        return self._standstill.seconds

    def kill(self) -> None:
        """End it, also where it is stopped; `answers` notices that it has ended."""
        self._popen.kill()
        self._standstill = Standstill()

    def close(self) -> str:
        """There are no more jobs; how it has ended, if it has."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)  # forks of this process may have it open, too
        self._channel.close()
        try:
            code = self._popen.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self._left[:] = [self._popen, *(each for each in self._left if each.poll() is None)]
            return "it has not ended"
        finally:
            said = os.pread(self._errors, 1 << 16, 0).decode(errors="replace").strip()
            os.close(self._errors)
        return f"signal {-code}" if code < 0 else f"exit status {code}: {said[-1000:]}"


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped, and not by a debugger, which would go on with it."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
        return False

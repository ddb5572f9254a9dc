"""A process that writes checkpoints, as its trainer sees it: how it is started, told, heard, and noticed to be dead."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from typing import Any, ClassVar

from lightning_async.bare import bare_command
from lightning_async.engine.checkpoint.buffers import anonymous_file
from lightning_async.engine.checkpoint.writer import MESSAGE, wait_for
from lightning_async.engine.files import Lock
from lightning_async.errors import CheckpointError

__all__ = ["Channel"]

_EXIT_S = 1.0  # a writer that has nothing to do ends at once; one that is stopped is not waited for


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

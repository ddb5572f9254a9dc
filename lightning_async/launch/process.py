"""One process of a rank: started in a session of its own, told, noticed to have ended, and ended with what it started.

Signals go to the rank alone: its DataLoader workers would die of a SIGTERM, and the rank of that, before it has saved.
When it has ended, what is left in its process group is killed. What shall outlive it needs a session of its own, as the
process that writes checkpoints has.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence

from lightning_async.comm.launched import LONGEST, Death, named, news

__all__ = ["Process", "watched"]

_PR_SET_PDEATHSIG = 1
_MESSAGES = 512  # more than a socket keeps
_prctl = getattr(ctypes.CDLL(None), "prctl", None)


def watched(popen: subprocess.Popen[bytes]) -> int:
    """A descriptor of a process, which becomes readable when it ends.

    Raises:
        OSError: there is none left; then the process is killed.
    """
    try:
        return os.pidfd_open(popen.pid)
    except OSError:
        popen.kill()
        popen.wait()
        raise


class Process:
    """A running process.

    Args:
        command, environment: of the process.
        stdout, stderr: descriptors that it writes to.

    Raises:
        OSError: the system does not let it start.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], stdout: int, stderr: int) -> None:
        launcher = os.getpid()

        def die_with_the_launcher() -> None:
            # SIGTERM, so that it can save. The order excludes that the launcher dies in between.
            _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # pyright: ignore[reportOptionalCall]
            if os.getppid() != launcher:
                os._exit(128 + signal.SIGTERM)

        self.started = time.monotonic()
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        """What it tells is there to read. It is never at its end: others may have inherited the other one."""
        self.channel.setblocking(False)
        self._unread: list[bytes] = []
        with theirs:
            self._name = named(theirs.fileno())
            self._popen = subprocess.Popen(
                command, env={**environment, **self._name}, pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
                start_new_session=True, preexec_fn=die_with_the_launcher,
            )  # fmt: skip
        self.pid = self._popen.pid
        self.pidfd = watched(self._popen)
        """Becomes readable when it ends."""

    def become(self, environment: Mapping[str, str], stdout: int, stderr: int) -> bool:
        """Have a process that stands by be a rank from now on; False where it has died. See `standby`.

        Args:
            environment: variables that it has not been started with.
            stdout, stderr: descriptors that it writes to from now on.
        """
        self.started = time.monotonic()
        try:
            socket.send_fds(self.channel, [json.dumps({**environment, **self._name}).encode()], [stdout, stderr])
        except OSError:
            return False
        return not self.wait(0.0)

    def signal(self, number: int) -> None:
        """Send a signal to it, if it lives; SIGKILL to its whole group."""
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(self.pid, number)
            else:
                signal.pidfd_send_signal(self.pidfd, number)

    def messages(self) -> list[bytes]:
        """What it has told, or others by its channel; see `heard`."""
        self._unread, unread = [], [*self._unread, *self._read()]
        return unread

    def _read(self) -> Iterator[bytes]:
        for _ in range(_MESSAGES):  # others may write without end
            try:
                yield self.channel.recv(LONGEST)
            except OSError:
                return

    def tell(self, death: Death) -> None:
        """Another rank has died. It does not wait: who has read nothing for long hears of it by silence.

        What is sent to one who is gone takes what that one has told along: it is read before, and is among `messages`.
        """
        self._unread += self._read()
        with contextlib.suppress(OSError):
            self.channel.send(news(death, self.pid))

    def wait(self, timeout: float) -> bool:
        """Whether it ends within so many seconds."""
        return bool(select.select([self.pidfd], [], [], timeout)[0])

    def end(self) -> int:
        """It has ended: kill what it leaves behind; its exit status, or minus the signal that has killed it."""
        self.signal(signal.SIGKILL)  # before anybody asks for its status: until then its number is nobody else's
        status = self._popen.wait()
        os.close(self.pidfd)
        self.channel.close()
        return status

"""One process of a rank: started in a session of its own, and ended together with what it has started.

Signals go to the rank alone: its DataLoader workers would die of a SIGTERM, and the rank of that, before it has
saved. When it has ended, what is left in its process group is killed. What shall outlive it needs a session of its
own, as the process that writes checkpoints has. `ErrorFiles` are where ranks write what they have died of, as
torch.distributed.elastic has it, and `report` says in words who has died of what.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_async.launch.state_machine import TRY_AGAIN
from lightning_async.membership.launcher_channel import LONGEST, Death, named, news

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # the environment variable of a rank that names its file
_LONGEST = 300
_MOST_BYTES = 1 << 22
_PR_SET_PDEATHSIG = 1
_MESSAGES = 512  # more than a socket keeps
_prctl = getattr(ctypes.CDLL(None), "prctl", None)
HUNG = 70  # the exit code of `HangWatchdog`


class Process:
    """A running process; `OSError` where the system does not let it start."""

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
        self.pidfd = watched(self._popen)  # becomes readable when it ends

    def become(self, environment: Mapping[str, str], stdout: int, stderr: int) -> bool:
        """Make a process that stands by a rank; return False where it has died. See `warm_spare`."""
        self.started = time.monotonic()
        try:
            socket.send_fds(self.channel, [json.dumps({**environment, **self._name}).encode()], [stdout, stderr])
        except OSError:
            return False
        return not self.wait(0.0)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(self.pid, number)
            else:
                signal.pidfd_send_signal(self.pidfd, number)

    def messages(self) -> list[bytes]:
        """Return what it has told, or others by its channel; see `heard`."""
        self._unread, unread = [], [*self._unread, *self._read()]
        return unread

    def _read(self) -> Iterator[bytes]:
        for _ in range(_MESSAGES):  # others may write without end
            try:
                yield self.channel.recv(LONGEST)
            except OSError:
                return

    def tell(self, death: Death) -> None:
        """Tell it that another rank has died, without waiting: who has read nothing for long notices the silence.

        What is sent to a process that is gone takes its unread messages along: they are read before, for `messages`.
        """
        self._unread += self._read()
        with contextlib.suppress(OSError):
            self.channel.send(news(death, self.pid))

    def wait(self, timeout: float) -> bool:
        return bool(select.select([self.pidfd], [], [], timeout)[0])

    def end(self) -> int:
        self.signal(signal.SIGKILL)  # before anybody asks for its status: until then its number is nobody else's
        status = self._popen.wait()
        os.close(self.pidfd)
        self.channel.close()
        return status


def watched(popen: subprocess.Popen[bytes]) -> int:
    """Return a descriptor that becomes readable when a process ends; kill the process where there is none left."""
    try:
        return os.pidfd_open(popen.pid)
    except OSError:
        popen.kill()
        popen.wait()
        raise


class ErrorFiles:
    """A file for each rank, which is there once the rank has failed: in ``logs``, or where the launcher removes it."""

    def __init__(self, logs: Path | None) -> None:
        self._logs = logs
        self._own: str | None = None

    def begin(self, rank: int) -> dict[str, str]:
        """Delete what an earlier start of a rank has left; return the variable that names its file."""
        path = self._path(rank)
        path.unlink(missing_ok=True)
        return {ERROR_FILE: str(path)}

    def read(self, rank: int) -> str:
        """Return what a rank that has ended has written, in one line; "" where that is nothing."""
        try:
            with self._path(rank).open("rb") as file:
                said = json.loads(file.read(_MOST_BYTES))
        except (OSError, ValueError, RecursionError):
            return ""
        message = _message(said).strip()
        line = message.splitlines()[0] if message else ""
        return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."

    def close(self) -> None:
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)

    def _path(self, rank: int) -> Path:
        if self._logs is not None:
            return (self._logs / f"rank-{rank}.error.json").absolute()
        if self._own is None:
            self._own = tempfile.mkdtemp(prefix="lightning-async-errors-")
        return Path(self._own) / f"rank-{rank}.error.json"


def _message(said: Any) -> str:
    """Read either form: {"message": {"message": ...}}, {"message": ...}."""
    for _ in range(2):
        with contextlib.suppress(TypeError, KeyError):
            said = said["message"]
    return said if isinstance(said, str) else ""


@dataclass(frozen=True)
class Ending:
    """The end of one rank."""

    rank: int
    pid: int  # 0 for a process that was never there
    status: int  # its exit status, or minus the signal that has killed it
    seconds: float  # that it lived
    told: int | None = None  # the signal by which the launcher has told it to end; None where it has not
    tail: Sequence[bytes] = ()  # the last lines of its stderr
    error: str = ""  # the exception that it has written down, see `ErrorFiles`


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def how(ending: Ending) -> str:
    if ending.status == 0:
        text = "ended in order"
    elif ending.status == TRY_AGAIN:
        text = f"has saved and ended with exit code {TRY_AGAIN} (preempted)"
    elif ending.status == HUNG:
        text = f"ended with exit code {HUNG} (of a watchdog: it has hung)"
    elif ending.status > 0:
        text = f"ended with exit code {ending.status}" + (f" ({ending.error})" if ending.error else "")
    else:
        text = f"was killed by {signal_name(-ending.status)}"
    text += f" after {ending.seconds:.1f} s"
    if ending.told is not None and ending.status == -ending.told:
        return f"{text}, by the launcher"
    if ending.told is not None:
        return f"{text}, told by {signal_name(ending.told)}"
    if ending.status == -signal.SIGKILL:
        return f"{text} (by hand, or by the system for want of memory)"
    return text


def report(endings: Sequence[Ending], first: int | None, code: int | None, lost: Collection[int] = frozenset()) -> str:
    """List all ranks in the order of their ends, and the last lines of those that died by themselves.

    ``first`` is the rank that died first, of those that are not ``lost``, without which training went on; ``code`` the
    launcher's exit code, None where the ranks are started again.
    """
    last = {ending.rank: ending for ending in endings}
    lines = []
    for ending in endings:
        lives = "; it was started again" if last[ending.rank] is not ending else ""
        without = "; training went on without it" if not lives and ending.rank in lost else ""
        process = f" (process {ending.pid})" if ending.pid else ""
        lines.append(f"rank {ending.rank}{process} {how(ending)}{lives}{without}")
    for ending in last.values():
        died = ending.rank in (first, *lost) and ending.told is None and ending.status != TRY_AGAIN
        if died and ending.tail:
            lines.append(f"the last that rank {ending.rank} has written to stderr:")
            lines += [f"    {line.decode(errors='replace')}" for line in ending.tail]
    if lost or len(last) < len(endings):
        in_order = sum(ending.status == 0 for ending in last.values())
        lines.append(f"{in_order} of {len(last)} ranks have ended in order")
    if code is not None:
        lines.append(f"exit code {code}")
    return "\n".join(lines)

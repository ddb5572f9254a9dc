"""The process of one rank: started in a session of its own, and ended together with all that it has started.

A signal is sent to the rank's process only, not to its process group: a SIGTERM would end its DataLoader workers, and
thereby the rank, before it has saved. When the rank has ended, the rest of its process group is killed. A process that
must outlive the rank needs a session of its own, such as the process that writes checkpoints.

`ErrorFiles` are files in which ranks write the error that ended them, as in torch.distributed.elastic, and `report`
says in words how ranks have ended.
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
from lightning_async.membership.launcher_channel import LONGEST, Death, Failure, named, news

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # environment variable that names a rank's file
# Largest number of characters of an error in a report.
_LONGEST = 300
# Largest number of bytes of an error file that are read.
_MOST_BYTES = 1 << 22
_PR_SET_PDEATHSIG = 1
_MESSAGES = 512  # largest number of messages that are read at once; more than a socket holds
_prctl = getattr(ctypes.CDLL(None), "prctl", None)
HUNG = 70  # the exit code of `HangWatchdog`


class Process:
    """A running process of a rank.

    Raises:
        OSError: The system does not let it start.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], stdout: int, stderr: int) -> None:
        launcher = os.getpid()

        def die_with_the_launcher() -> None:
            # SIGTERM, so that the rank can save. The check comes second: the launcher may have died just before.
            _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # pyright: ignore[reportOptionalCall]
            if os.getppid() != launcher:
                os._exit(128 + signal.SIGTERM)

        self.started = time.monotonic()
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        """Socket with the rank's messages. Its end is never seen, as other processes may inherit the other side."""
        self.channel.setblocking(False)
        self._unread: list[bytes] = []
        self.failure: Failure | None = None
        with theirs:
            self._popen = subprocess.Popen(
                command, env={**environment, **named(theirs.fileno())}, pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
                start_new_session=True, preexec_fn=die_with_the_launcher,
            )  # fmt: skip
        self.pid = self._popen.pid
        self.pidfd = watched(self._popen)  # becomes readable when the process ends

    def signal(self, number: int) -> None:
        """Send a signal to the process; SIGKILL goes to its whole group."""
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(self.pid, number)
            else:
                signal.pidfd_send_signal(self.pidfd, number)

    def messages(self) -> list[bytes]:
        """Return the messages that came on the process's channel; its children may write there, too, see `heard`."""
        self._unread, unread = [], [*self._unread, *self._read()]
        return unread

    def _read(self) -> Iterator[bytes]:
        for _ in range(_MESSAGES):  # another process may write without end
            try:
                yield self.channel.recv(LONGEST)
            except OSError:
                return

    def tell(self, death: Death) -> None:
        """Send the process the message that another rank has died, without waiting.

        A process that does not read this message notices the death later, because nothing more comes from that rank. If
        the process has ended meanwhile, the system would drop the messages from it that are still unread. So they are
        read first, and stored for `messages`.
        """
        self._unread += self._read()
        with contextlib.suppress(OSError):
            self.channel.send(news(death, self.pid))

    def wait(self, timeout: float) -> bool:
        """Wait until the process has ended; return whether it has, within ``timeout`` seconds."""
        return bool(select.select([self.pidfd], [], [], timeout)[0])

    def end(self) -> int:
        """Kill the rest of the process group, and return the exit status."""
        self.signal(signal.SIGKILL)  # before `wait`, after which another process may get the same id
        status = self._popen.wait()
        os.close(self.pidfd)
        self.channel.close()
        return status


def watched(popen: subprocess.Popen[bytes]) -> int:
    """Return a descriptor that shows the end of a process; if the system has none left, kill it and raise OSError."""
    try:
        return os.pidfd_open(popen.pid)
    except OSError:
        popen.kill()
        popen.wait()
        raise


class ErrorFiles:
    """One error file for each rank, written by the rank when it fails.

    Args:
        logs: Directory of the files. None: a temporary one, which `close` deletes.
    """

    def __init__(self, logs: Path | None) -> None:
        self._logs = logs
        self._own: str | None = None

    def begin(self, rank: int) -> dict[str, str]:
        """Delete a rank's error file of an earlier start; return the environment variable that names the file."""
        path = self._path(rank)
        path.unlink(missing_ok=True)
        return {ERROR_FILE: str(path)}

    def read(self, rank: int) -> str:
        """Return the error of a rank that has ended, in one line; empty if there is none."""
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
    """Return the text of an error file: {"message": {"message": ...}} or {"message": ...}; empty for other forms."""
    for _ in range(2):
        with contextlib.suppress(TypeError, KeyError):
            said = said["message"]
    return said if isinstance(said, str) else ""


@dataclass(frozen=True)
class Ending:
    """The end of a rank's process: its status, how long it lived, and its last output."""

    rank: int
    pid: int  # process id; 0 if there never was a process
    status: int  # exit status, or minus the signal that has killed it
    seconds: float  # seconds that it lived
    told: int | None = None  # signal by which the launcher has told it to end, if any
    tail: Sequence[bytes] = ()  # last lines of its stderr
    error: str = ""  # exception that it has written to its file, see `ErrorFiles`
    failure: Failure | None = None  # exception that it has reported, with the batch


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def how(ending: Ending) -> str:
    """Return in words how a rank has ended."""
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
    """Return a text that lists how the ranks ended, in order, with the last stderr lines of the first and lost ones.

    Args:
        endings: Ends of the ranks.
        first: Rank that died first, of those that are not ``lost``, if any.
        code: Exit code of the launcher; None if the ranks are started again.
        lost: Ranks without which training has continued. Default: none.
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

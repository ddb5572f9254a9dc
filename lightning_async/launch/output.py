r"""The output of ranks: whole lines with the rank as a prefix, to the terminal and to one file for each rank.

    a rank's pipe ---> Stream: whole lines ---> Sink: the terminal, as fast as it accepts output
                                           \--> the rank's file, without prefixes

A rank that is started again writes to the same two pipes. Nothing here blocks. When the terminal accepts no more
output, the pipes are not read, so that the ranks block when they write, as they would without a launcher.
"""

from __future__ import annotations

import errno
import os
import re
import select
import selectors
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

_PIECE = 4096  # bytes that a ready descriptor accepts at once (PIPE_BUF)
# Number of waiting bytes from which ranks are not read any more.
_FULL = 1 << 20
# A line without end is cut after this number of bytes.
_LONGEST_LINE = 1 << 18
# Number of last lines that are kept for the report of a death.
_TAIL = 15
# Seconds between two lines of a progress bar that does not go to a terminal.
_PROGRESS_S = 10.0
_CURSOR = re.compile(rb"\x1b\[\d*(?:;\d*)?[A-HJKSTf]")


class Sink:
    """A terminal, or another descriptor, that output goes to.

    Args:
        fd: The descriptor.
        now: Clock, in seconds. Default: `time.monotonic`.
    """

    def __init__(self, fd: int, now: Callable[[], float] = time.monotonic) -> None:
        self.fd = fd
        self._now = now
        self._is_terminal = os.isatty(fd)
        self._pending = bytearray()
        self._progress = b""
        self._progress_at = -_PROGRESS_S
        self._gone = False

    @property
    def waits(self) -> bool:
        """Whether there is output that the descriptor has not accepted yet."""
        return bool(self._pending)

    @property
    def full(self) -> bool:
        """Whether so much output is pending that the ranks' pipes must not be read."""
        return len(self._pending) >= _FULL

    def lines(self, text: bytes, drawn: bool = False) -> None:
        """Add whole lines.

        Args:
            text: The lines.
            drawn: Whether the first line replaces the one that `progress` has shown last. Default: False.
        """
        if self._gone:
            return
        if self._progress:
            self._progress = b"" if drawn else self._progress
            text = b"\r\x1b[K" + text + self._progress  # a progress bar stays the last line
        self._pending += text

    def progress(self, text: bytes) -> None:
        """Show a line of a progress bar: in place on a terminal; in a file or pipe every 10 s, as a whole line."""
        if self._gone:
            return
        if self._is_terminal:
            self._progress = text[: max(1, self._columns() - 1)]
            self._pending += b"\r" + self._progress + b"\x1b[K"
        elif self._now() - self._progress_at >= _PROGRESS_S:
            self._progress_at = self._now()
            self._pending += text + b"\n"

    def settle(self) -> None:
        """End the line of a progress bar, if one is shown, so that later output begins a new line."""
        if self._progress:
            self._pending += b"\n"
            self._progress = b""

    def write(self) -> None:
        """Write as much of the pending output as the descriptor accepts without blocking."""
        try:
            del self._pending[: os.write(self.fd, self._pending[:_PIECE])]
        except BlockingIOError:
            pass
        except OSError:  # the terminal, or the reader of a pipe, is gone: the ranks continue without it
            self._gone = True
            self._pending.clear()

    def flush(self, timeout: float) -> None:
        """Write all pending output, within ``timeout`` seconds."""
        poll = select.poll()
        until = self._now() + timeout
        poll.register(self.fd, select.POLLOUT)
        while self._pending and (left := until - self._now()) > 0:
            if poll.poll(1000 * left):
                self.write()

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self.fd).columns or 80
        except OSError:
            return 80


class Stream:
    """One of a rank's two output pipes.

    Args:
        fd: Descriptor of the pipe's end for reading.
        prefix: Text before each line.
        sink: Sink that the lines go to.
        log: Descriptor of a file for the lines without the prefix. Default: None.
    """

    def __init__(self, fd: int, prefix: bytes, sink: Sink, log: int | None = None) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.sink = sink
        self.tail: deque[bytes] = deque(maxlen=_TAIL)  # the last lines
        self.open = True  # whether a process may still write to the pipe
        self._prefix = prefix
        self._log = log
        self._rest = b""

    def read(self) -> int:
        """Read what the pipe holds, at most 64 KiB; return the number of bytes."""
        try:
            data = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return 0
        self.open = bool(data)
        self._feed(data)
        return len(data)

    def drain(self) -> None:
        """Read all that is left after the rank has ended, and end a last line that lacks its newline."""
        for _ in range(64):  # a process that the rank has left behind may write without end
            if not self.read():
                break
        if self._rest.strip(b"\r"):
            self._feed(b"\n")
        self._rest = b""

    def note(self, text: str) -> None:
        """Write a line to the rank's file only."""
        self._write_log(f"{text}\n".encode())

    def _feed(self, data: bytes) -> None:
        drawn = self._rest.startswith(b"\r")
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            lines.append(self._rest)
            self._rest = b""
        whole = [_last_drawn(line) for line in lines]
        if whole:
            self.tail.extend(line for line in whole if line.strip())
            self.sink.lines(b"".join(self._prefix + line + b"\n" for line in whole), drawn)
            self._write_log(b"".join(line + b"\n" for line in whole))
        if b"\r" in self._rest:
            line = _last_drawn(self._rest)
            self._rest = b"\r" + line + b"\r" * self._rest.endswith(b"\r")
            if data and line.strip():
                self.sink.progress(self._prefix + line)

    def _write_log(self, text: bytes) -> None:
        if self._log is None:
            return
        try:
            while text:
                text = text[os.write(self._log, text) :]
        except OSError as error:
            self._log = None
            self.sink.lines(
                self._prefix + f"(no more is written to its file: {os.strerror(error.errno or errno.EIO)})\n".encode()
            )


def _last_drawn(line: bytes) -> bytes:
    """Return the text that remains visible in a terminal if parts of a line overwrite each other (a progress bar)."""
    drawn = [part for part in line.split(b"\r") if part]
    return _CURSOR.sub(b"", drawn[-1]) if drawn else b""


class Outputs:
    """The pipes of all ranks, and the destinations of their output.

    Args:
        readers: Two descriptors for each rank, of its stdout and stderr.
        logs: Directory for one file for each rank. Default: None, there are no files.
        stdout: Descriptor for the ranks' stdout. Default: 1.
        stderr: Descriptor for the ranks' stderr. Default: 2.
    """

    def __init__(self, readers: Sequence[int], logs: Path | None = None, *, stdout: int = 1, stderr: int = 2) -> None:
        ranks = len(readers) // 2
        out = Sink(stdout)
        # One sink for one terminal: two could cut each other's lines.
        err = out if os.path.sameopenfile(stdout, stderr) else Sink(stderr)
        self.sinks = (out, err)
        width = len(str(max(0, ranks - 1)))
        self.streams: list[tuple[Stream, Stream]] = []  # stdout and stderr of each rank
        self._logs: list[int] = []
        for rank in range(ranks):
            log = None
            if logs is not None:
                logs.mkdir(parents=True, exist_ok=True)
                log = os.open(logs / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
                self._logs.append(log)
            prefix = f"[{rank:>{width}}] ".encode()
            pair = Stream(readers[2 * rank], prefix, out, log), Stream(readers[2 * rank + 1], prefix, err, log)
            self.streams.append(pair)

    def say(self, text: str) -> None:
        """Write lines of the launcher itself."""
        self.sinks[1].lines("".join(f"[launch] {line}\n" for line in text.splitlines()).encode())

    @property
    def descriptors(self) -> set[int]:
        return {stream.fd for pair in self.streams for stream in pair} | {sink.fd for sink in self.sinks}

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Register pipes that may be read, and sinks with pending output; a key's data is the function to call."""
        wanted: dict[int, tuple[int, Callable[[], object]]] = {}
        for stream in (stream for pair in self.streams for stream in pair):
            if stream.open and not stream.sink.full:
                wanted[stream.fd] = selectors.EVENT_READ, stream.read
        for sink in self.sinks:
            if sink.waits:
                wanted[sink.fd] = selectors.EVENT_WRITE, sink.write
        for fd in self.descriptors:
            known = fd in selector.get_map()
            if known and fd not in wanted:
                selector.unregister(fd)
            elif not known and fd in wanted:
                selector.register(fd, *wanted[fd])

    def flush(self, timeout: float = 5.0) -> None:
        """Write all pending output of the job at its end; wait for each destination ``timeout`` seconds at most."""
        for sink in dict.fromkeys(self.sinks):
            sink.settle()
            sink.flush(timeout)

    def close(self) -> None:
        for log in self._logs:
            os.close(log)

"""What ranks write, through the launcher's streams and sinks, without processes."""

from __future__ import annotations

import fcntl
import os
import pty
import selectors
import struct
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_async.launch.output import Outputs, Sink, Stream


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def sunk(sink: Sink, reader: int) -> bytes:
    """What comes out of a sink."""
    sink.flush(5.0)
    os.set_blocking(reader, False)
    try:
        return os.read(reader, 1 << 16)
    except BlockingIOError:
        return b""


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        ([b"one\ntwo\n"], b"[3] one\n[3] two\n"),
        ([b"o", b"ne", b"\nt", b"wo\n"], b"[3] one\n[3] two\n"),
        ([b"no end"], b"[3] no end\n"),
        ([b"windows\r\nlines\r\n"], b"[3] windows\n[3] lines\n"),
        ([b"\n\n"], b"[3] \n[3] \n"),
        ([b"not \xff\xfe text\0\n"], b"[3] not \xff\xfe text\0\n"),
        ([b"\x1b[31mred\x1b[0m\n\x1b[A\x1b[2Kup\n"], b"[3] \x1b[31mred\x1b[0m\n[3] up\n"),
        ([b"10%\r20%\r", b"100%\ndone\n"], b"[3] 20%\n[3] 100%\n[3] done\n"),
    ],
)
def test_lines_are_whole_and_have_their_rank(pieces: list[bytes], shown: bytes):
    reader, writer = os.pipe()
    out_reader, out = os.pipe()
    try:
        stream = Stream(reader, b"[3] ", Sink(out))
        for piece in pieces:
            os.write(writer, piece)
            assert stream.read() == len(piece)
        stream.drain()
        assert sunk(stream.sink, out_reader) == shown
    finally:
        for fd in (reader, writer, out_reader, out):
            os.close(fd)


def test_a_line_without_end_is_not_kept_for_ever(pipe: tuple[int, int]):
    source, into = os.pipe()
    try:
        stream = Stream(source, b"[0] ", Sink(pipe[1]))
        for _ in range(10):
            os.write(into, b"x" * 60_000)
            stream.read()
        assert stream.sink.waits
        assert len(stream._rest) < 300_000
    finally:
        os.close(source)
        os.close(into)


def test_elsewhere_a_progress_bar_is_shown_now_and_then(pipe: tuple[int, int]):
    clock = Clock()
    sink = Sink(pipe[1], clock)
    for second in range(25):
        clock.now += 1.0
        sink.progress(b"[0] %d" % second)
    assert sunk(sink, pipe[0]) == b"[0] 0\n[0] 10\n[0] 20\n"


def test_on_a_terminal_a_progress_bar_stays_the_last_line():
    ours, theirs = pty.openpty()
    try:
        settings = termios.tcgetattr(theirs)
        settings[1] &= ~termios.OPOST  # as it is written
        termios.tcsetattr(theirs, termios.TCSANOW, settings)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 20, 0, 0))
        sink = Sink(theirs)
        sink.progress(b"[0] 10% of a very long line")
        sink.lines(b"[1] hello\n")
        sink.lines(b"[0] 100%\n", drawn=True)
        sink.lines(b"[0] done\n")
        shown = b"[0] 10% of a very l"  # one less than there are columns: it must not wrap
        assert sunk(sink, ours) == (
            b"\r" + shown + b"\x1b[K" + b"\r\x1b[K[1] hello\n" + shown + b"\r\x1b[K[0] 100%\n" + b"[0] done\n"
        )
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_sink_whose_reader_is_gone_throws_away(pipe: tuple[int, int]):
    reader, writer = os.pipe()
    sink = Sink(writer)
    os.close(reader)
    sink.lines(b"x\n")
    sink.write()
    sink.lines(b"y\n")
    sink.progress(b"z")
    assert not sink.waits
    os.close(writer)


def test_a_rank_is_not_read_while_the_terminal_takes_no_more(pipe: tuple[int, int], tmp_path: Path):
    readers, writers = zip(*(os.pipe() for _ in range(2)), strict=True)
    with selectors.PollSelector() as selector:
        outputs = Outputs(readers, tmp_path / "logs", stdout=pipe[1], stderr=pipe[1])
        assert outputs.sinks[0] is outputs.sinks[1]
        outputs.watch(selector)
        assert set(selector.get_map()) == set(readers)
        outputs.say("x" * (1 << 20))
        outputs.watch(selector)
        assert set(selector.get_map()) == {pipe[1]}
    for stream in outputs.streams[0]:
        os.close(stream.fd)
    for fd in writers:
        os.close(fd)
    outputs.close()


def test_a_full_disk_of_the_files_does_not_matter(pipe: tuple[int, int], tmp_path: Path):
    (tmp_path / "rank-0.log").symlink_to("/dev/full")
    readers, writers = zip(*(os.pipe() for _ in range(2)), strict=True)
    outputs = Outputs(readers, tmp_path, stdout=pipe[1], stderr=pipe[1])
    for text in (b"one\n", b"two\n"):
        os.write(writers[0], text)
        outputs.streams[0][0].read()
    assert sunk(outputs.sinks[0], pipe[0]) == (
        b"[0] one\n[0] (no more is written to its file: No space left on device)\n[0] two\n"
    )
    for fd in (*readers, *writers):
        os.close(fd)
    outputs.close()

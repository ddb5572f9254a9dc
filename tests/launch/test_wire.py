"""What launchers tell each other over real sockets, with somebody between them who changes it."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_async.launch import wire as module
from lightning_async.launch.loop import Loop
from lightning_async.launch.output import Outputs
from lightning_async.launch.wire import Wire

SECRET = "a secret of these tests alone"


class End:
    """One side of a connection, what it has heard, and why it has ended."""

    def __init__(self, loop: Loop, channel: socket.socket, answers: bool, secret: str = SECRET) -> None:
        self.heard: list[dict[str, Any]] = []
        self.why: list[str] = []
        self.wire = Wire(loop, channel, secret, answers, self.heard.append, self.why.append)


class Between:
    """A loop, and whoever sits between two ends of it: it hands lines on, one by one, as a test will have it."""

    def __init__(self) -> None:
        self.now = time.monotonic
        self.loop, self._outputs = Loop(lambda: self.now()), Outputs([])
        self._sockets: list[socket.socket] = []
        self.ends: list[End] = []

    def pair(self) -> tuple[socket.socket, socket.socket]:
        pair = socket.socketpair()
        self._sockets += pair
        return pair

    def end(self, answers: bool, secret: str = SECRET) -> tuple[End, socket.socket]:
        """One, and the other side of its connection."""
        mine, other = self.pair()
        other.setblocking(False)
        self.ends.append(End(self.loop, mine, answers, secret))
        return self.ends[-1], other

    def until(self, true: Callable[[], object]) -> None:
        while not true():
            self.loop.after(0.01, "look", lambda: None)
            self.loop.step(self._outputs)

    def lines(self, channel: socket.socket, count: int) -> list[bytes]:
        """So many that an end has sent."""
        found = b""

        def enough() -> bool:
            nonlocal found
            while found.count(b"\n") < count:
                try:
                    found += channel.recv(1)
                except BlockingIOError:
                    return False
            return True

        self.until(enough)
        return found.splitlines(keepends=True)

    def close(self) -> None:
        for each in self.ends:
            each.wire.close()
        for each in self._sockets:
            each.close()
        self.loop.close()


@pytest.fixture
def between() -> Iterator[Between]:
    made = Between()
    yield made
    made.close()


def greeted(between: Between) -> tuple[End, socket.socket, End, socket.socket]:
    """Two ends that have each other's greeting and first word, by hand."""
    first, to_first = between.end(answers=True)
    second, to_second = between.end(answers=False)
    to_second.sendall(between.lines(to_first, 1)[0])
    to_first.sendall(between.lines(to_second, 1)[0])
    to_second.sendall(between.lines(to_first, 1)[0])
    to_first.sendall(between.lines(to_second, 1)[0])
    between.until(lambda: first.wire.known and second.wire.known)
    return first, to_first, second, to_second


def test_what_is_said_is_heard_in_its_order_also_before_the_greeting(between: Between):
    a, b = between.pair()
    first, second = End(between.loop, a, True), End(between.loop, b, False)
    between.ends += [first, second]
    for number in range(3):
        second.wire.send("number", value=number)
    first.wire.send("long", text="é" * 20_000)
    between.until(lambda: len(first.heard) == 3 and second.heard)
    assert first.heard == [{"what": "number", "value": number} for number in range(3)]
    assert second.heard == [{"what": "long", "text": "é" * 20_000}]
    second.wire.close()
    between.until(lambda: first.why)
    assert first.why == ["the connection was closed"]
    assert not second.why


def test_another_secret_is_noticed_on_both_sides(between: Between):
    a, b = between.pair()
    first, second = End(between.loop, a, True), End(between.loop, b, False, "another one")
    between.ends += [first, second]
    second.wire.send("never heard")
    between.until(lambda: first.why and second.why)
    assert "it does not know this job's secret" in (*first.why, *second.why)
    assert not first.heard
    assert not first.wire.known
    assert not second.wire.known


@pytest.mark.parametrize("what", ["changed", "again", "left out", "sent back", "not signed", "no JSON"])
def test_what_was_changed_on_its_way_ends_the_connection(between: Between, what: str):
    first, to_first, second, to_second = greeted(between)
    first.wire.send("own")
    second.wire.send("one", value=1)
    second.wire.send("two", value=2)
    own = between.lines(to_first, 1)[0]
    one, two = between.lines(to_second, 2)
    sent = {
        "changed": one.replace(b'"value":1', b'"value":3'),
        "again": one + one,
        "left out": two,
        "sent back": own,
        "not signed": json.dumps({"what": "one", "value": 1}).encode() + b"\n",
        "no JSON": b"\xff:\xff\n",
    }[what]
    to_first.sendall(sent)
    between.until(lambda: first.why)
    assert first.why == ["a message was changed on its way"]
    assert first.heard == [{"what": "one", "value": 1}] * (what == "again")


def test_what_was_said_in_one_connection_is_worth_nothing_in_another(between: Between):
    _, _, second, to_second = greeted(between)
    second.wire.send("one")
    (recorded,) = between.lines(to_second, 1)
    other, to_other = between.end(answers=True)
    between.lines(to_other, 1)
    to_other.sendall(b'{"lightning_async": 1, "nonce": "%s"}\n' % (b"0" * 32) + recorded)
    between.until(lambda: other.why)
    assert other.why == ["it does not know this job's secret"]


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"GET / HTTP/1.1\r\n", "what it sends is no greeting of a launcher's"),
        (b'{"lightning_async": 1, "nonce": "short"}\n', "what it sends is no greeting of a launcher's"),
        (b'{"lightning_async": 2, "nonce": "' + b"0" * 32 + b'"}\n', "what it sends is no greeting of a launcher's"),
        (b"[" * 10_000 + b"\n", "what it sends is no greeting of a launcher's"),
        (b"x" * 200_000, "what it sends is no message"),
        (b"", "no greeting within 0.1 s"),
        (b'{"lightning_async": 1, "nonce": "' + b"0" * 32 + b'"}\n', "no greeting within 0.1 s"),
        (b"{", "no greeting within 0.1 s"),
    ],
)
def test_strangers_have_little_time_and_room(between: Between, monkeypatch: pytest.MonkeyPatch, sent: bytes, why: str):
    if "within" in why:
        monkeypatch.setattr(module, "GREETING_S", 0.1)
    end, other = between.end(answers=True)
    other.setblocking(True)
    left = memoryview(sent)

    def ended() -> bool:
        nonlocal left
        other.setblocking(False)
        if left:
            left = left[_send(other, left) :]
        return bool(end.why)

    between.until(ended)
    assert end.why == [why]


def _send(channel: socket.socket, data: memoryview) -> int:
    try:
        return channel.send(data)
    except BlockingIOError:
        return 0
    except OSError:  # it is not listened to any more
        return len(data)


def test_silence_ends_a_connection_and_beats_keep_it(between: Between):
    first, to_first, second, to_second = greeted(between)
    now = time.monotonic()
    between.now = lambda: now
    for _ in range(2 * int(module.SILENCE_S / module.HEARTBEAT_S)):
        now += module.HEARTBEAT_S
        to_first.sendall(between.lines(to_second, 1)[0])
        to_second.sendall(between.lines(to_first, 1)[0])
    first.wire.send("last")
    second.wire.send("last")
    to_second.sendall(between.lines(to_first, 1)[0])
    to_first.sendall(between.lines(to_second, 1)[0])
    between.until(lambda: first.heard and second.heard)
    now += module.SILENCE_S - 0.1
    between.lines(to_second, 1)
    assert not first.why
    assert not second.why
    now += 0.2  # nothing was handed on
    between.until(lambda: first.why and second.why)
    assert first.why == second.why == ["no word for 10 s"]


def test_the_last_words_are_read_though_nobody_reads_the_answer(between: Between):
    first, to_first, second, to_second = greeted(between)
    second.wire.send("last")
    to_second.shutdown(socket.SHUT_WR)
    second.wire.conclude(20.0)  # it hears that nobody will answer
    to_second.setblocking(True)
    to_first.sendall(to_second.recv(1 << 16))
    to_first.close()
    first.wire.send("more")  # which cannot be sent
    between.until(lambda: first.why)
    assert first.heard == [{"what": "last"}]


def test_who_does_not_read_is_not_waited_for(between: Between):
    first, *_ = greeted(between)
    for _ in range(100):
        first.wire.send("much", text="x" * 50_000)
    between.until(lambda: first.why)
    assert first.why == ["it does not read what it is told"]

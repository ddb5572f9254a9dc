"""Where launchers meet, in this process: strangers, who are bounded in number and in time."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

from lightning_async.launch.loop import Loop
from lightning_async.launch.meeting import Meeting
from lightning_async.launch.output import Outputs
from lightning_async.launch.places import Wanted
from lightning_async.launch.wire import GREETING_S


class Host:
    """Hears what is said to people."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def greeted(channel: socket.socket) -> bool:
    """Whether somebody has turned to it."""
    with contextlib.suppress(BlockingIOError):
        return bool(channel.recv(1, socket.MSG_PEEK))
    return False


def ended(channel: socket.socket) -> bool:
    """Whether it is not listened to any more; it has been greeted."""
    with contextlib.suppress(BlockingIOError):
        return not channel.recv(1 << 16) or not channel.recv(1)
    return False


def test_few_strangers_are_listened_to_at_once_and_for_each_further_one_the_oldest_goes():
    now = time.monotonic()
    loop, outputs, host = Loop(lambda: now), Outputs([]), Host()
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    meeting = Meeting(listener, Wanted(least=2, most=2), "a secret", "job", {}, 1)
    unused: Any = host
    meeting.open(loop, unused)

    def until(true: Any) -> None:
        while not true():
            loop.after(0.01, "look", lambda: None)
            loop.step(outputs)

    with contextlib.ExitStack() as stack:
        strangers = []
        for _ in range(40):
            strangers.append(stack.enter_context(socket.create_connection(listener.getsockname())))
            strangers[-1].setblocking(False)
        until(lambda: all(map(greeted, strangers)))
        assert not host.said
        assert list(map(ended, strangers)) == [True] * 8 + [False] * 32
        now += GREETING_S + 0.1
        until(lambda: host.said)
        assert host.said == ["Somebody at 127.0.0.1 is not listened to: no greeting within 5 s."]
        meeting.close(None)
    loop.close()

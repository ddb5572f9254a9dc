"""Who connects to a server's port: a worker is answered whatever strangers do, and the log stays short."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, cast

import pytest

from lightning_async.comm import p2p_gloo
from lightning_async.comm.p2p_gloo import ask
from lightning_async.errors import PeerLost
from lightning_async.membership.signing import SECRET, Seal
from lightning_async.parameter_server import server_main
from lightning_async.parameter_server.server_main import ServerTables, _Calls
from tests.parameter_server.test_server import until

SEAL = Seal("s" * 40, "servers")
ABOUT = {"name": "it", "server": 0}


class Port:
    """A server's port, whose main loop runs on a thread until the end of the test."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.number: int = self.listener.getsockname()[1]
        self.calls = _Calls(cast(ServerTables, None), self.listener, dict(ABOUT))
        self.over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self.over:
            self.calls.see_to(ready=True)
            time.sleep(0.0005)

    @contextmanager
    def strangers(self, number: int) -> Iterator[list[socket.socket]]:
        with ExitStack() as opened:
            yield [opened.enter_context(socket.create_connection(("127.0.0.1", self.number), 5)) for _ in range(number)]

    def close(self) -> None:
        self.over = True
        self._thread.join(10)
        for sock in list(self.calls._greeting):  # pyright: ignore[reportPrivateUsage]
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        until(lambda: not workers())


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "lightning_async worker"]


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[Port]:
    monkeypatch.setenv(SECRET, "s" * 40)
    monkeypatch.setattr(server_main, "_CALLERS", 8)
    found = Port()
    yield found
    found.close()


def test_silent_strangers_keep_no_worker_out(port: Port) -> None:
    with port.strangers(40) as held:
        began = time.monotonic()
        for _ in range(5):
            assert ask("127.0.0.1", port.number, SEAL) == ABOUT
        assert time.monotonic() - began < 5  # none waits until strangers are given up
        until(lambda: len(port.calls._greeting) <= 8)  # pyright: ignore[reportPrivateUsage]
        held[-1].settimeout(5)
        assert len(held[-1].recv(16)) == 16  # the newest ones are still listened to


def test_a_worker_that_is_answered_makes_no_room(port: Port) -> None:
    """Its group is formed over the connection."""
    sizes: Any = [64, 64]
    called = p2p_gloo._called("127.0.0.1", port.number, SEAL, 10, name="it", sizes=sizes)  # pyright: ignore
    with called as (line, _, _), port.strangers(40):
        line.socket.settimeout(0.5)
        with pytest.raises(TimeoutError):  # the server's entries come, and the connection does not end
            all(line.hear() for _ in range(100))


def test_the_log_counts_strangers(port: Port, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(50):
        with socket.create_connection(("127.0.0.1", port.number), 5) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(PeerLost, match=f"{SECRET} must be the same on all hosts"):
        ask("127.0.0.1", port.number, Seal("another", "servers"))
    until(lambda: not workers())  # all connections are counted: those of `ask` were accepted last
    assert len(capfd.readouterr().err.splitlines()) == 1
    number = port.calls._unanswered  # pyright: ignore[reportPrivateUsage]
    assert number >= 50
    port.calls._next_note = 0.0  # pyright: ignore[reportPrivateUsage]
    until(lambda: not port.calls._unanswered)  # pyright: ignore[reportPrivateUsage]
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith(f"And {number - 1} more connections were not answered.")


def test_ask_dials_again_and_blames_no_secret() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ended = []

        def end_all() -> None:
            with suppress(OSError):
                while True:
                    listener.accept()[0].close()
                    ended.append(1)

        thread = threading.Thread(target=end_all)
        thread.start()
        with pytest.raises(PeerLost) as raised:
            ask("127.0.0.1", listener.getsockname()[1], SEAL)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)
    assert len(ended) == 5
    assert "nobody answers at" in str(raised.value) and SECRET not in str(raised.value)

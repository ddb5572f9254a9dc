"""What a rank tells its launcher arrives whole or not at all, and disturbs nobody."""

from __future__ import annotations

import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_async.membership.launcher_channel import (
    CHANNEL,
    LONGEST,
    REJOIN,
    Death,
    attempt,
    came_back,
    heard,
    listen,
    named,
    news,
    tell_generation,
)
from tests.support import ROOT


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The launcher's end, and the rank's, which the variable names."""
    launcher, rank = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with launcher, rank:
        launcher.setblocking(False)
        monkeypatch.setenv(CHANNEL, named(rank.fileno())[CHANNEL])
        yield launcher, rank


def read(launcher: socket.socket) -> bytes | None:
    try:
        return launcher.recv(LONGEST)
    except BlockingIOError:
        return None


def test_each_message_arrives_whole(ends: tuple[socket.socket, socket.socket]):
    launcher, rank = ends
    everybody = [str(number) for number in range(9000)]
    tell_generation(0, everybody)
    tell_generation(7, ("0", "2"))
    assert heard(read(launcher) or b"", os.getpid()) == (0, tuple(everybody))
    message = read(launcher)
    assert message is not None
    assert heard(message, os.getpid()) == (7, ("0", "2"))
    assert heard(message, os.getpid() + 1) is None
    rank.send(b"still open")
    assert read(launcher) == b"still open"


def test_it_never_waits(ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch):
    launcher, rank = ends
    rank.setblocking(True)
    socket.setdefaulttimeout(100)
    try:
        for number in range(2000):  # more than is kept
            tell_generation(number, ["0"])
    finally:
        socket.setdefaulttimeout(None)
    assert heard(read(launcher) or b"", os.getpid()) == (0, ("0",))


def test_what_is_too_long_is_not_sent(ends: tuple[socket.socket, socket.socket]):
    tell_generation(0, [str(number) for number in range(20_000)])
    assert read(ends[0]) is None


def test_nobody_listens_any_more(ends: tuple[socket.socket, socket.socket]):
    ends[0].close()
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as programs do that write into `head`
    try:
        tell_generation(0, ["0"])
    finally:
        signal.signal(signal.SIGPIPE, before)


def test_the_descriptor_is_somebody_elses(ends: tuple[socket.socket, socket.socket], tmp_path: Path):
    """A script has closed all descriptors, and opened others since: a file, another socket, none."""
    launcher, rank = ends
    number = rank.fileno()
    other, its_rank = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with other, its_rank, (tmp_path / "file").open("wb") as file:
        other.setblocking(False)
        for taken in (file.fileno(), its_rank.fileno()):
            os.dup2(taken, number)
            tell_generation(0, ["0"])
        assert read(other) is None
    assert (tmp_path / "file").read_bytes() == b""
    rank.close()
    tell_generation(0, ["0"])
    assert read(launcher) is None


def test_the_variable_is_of_this_module_alone():
    modules = [path for path in (ROOT / "lightning_async").rglob("*.py") if f'"{CHANNEL}"' in path.read_text()]
    assert [path.name for path in modules] == ["launcher_channel.py"]


@pytest.mark.parametrize("value", [None, "", "3", "x:1:2", "-1:0:0", "99999999999999999999:1:1", "0:0:0"])
def test_there_is_no_launcher(value: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(CHANNEL, raising=False)
    if value is not None:
        monkeypatch.setenv(CHANNEL, value)
    tell_generation(0, ["0"])


@pytest.mark.processes
def test_a_forked_child_is_not_the_rank(ends: tuple[socket.socket, socket.socket]):
    """It has the variable and the descriptor; what it says is of another training."""
    child = os.fork()
    if not child:
        tell_generation(9, ["0"])
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    message = read(ends[0])
    assert message is not None
    assert heard(message, child) == (9, ("0",))
    assert heard(message, os.getpid()) is None


@pytest.mark.parametrize(
    ("rejoin", "restarts", "expected"),
    [
        (None, None, (None, "0")),
        (None, "2", (None, "2")),  # all ranks were started again
        ("1", "2", (1, "2")),  # this one alone, after the third start of all
        ("0", "0", (None, "0")),
        ("x", "2", (None, "2")),
        ("torchrun", "0", (None, "0")),
        ("torchrun", "2", (2, "0")),  # its agent counts for this one alone
        ("torchrun", None, (None, "0")),
    ],
)
def test_who_came_back_is_of_the_start_of_those_who_train(
    rejoin: str | None, restarts: str | None, expected: tuple[int | None, str], monkeypatch: pytest.MonkeyPatch
):
    for name, value in ((REJOIN, rejoin), ("TORCHELASTIC_RESTART_COUNT", restarts)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert (came_back(), attempt()) == expected


def in_a_rank(what: Callable[[], None]) -> None:
    """In a child of this process, which is to it what the launcher is to a rank."""
    child = os.fork()
    if not child:
        try:
            signal.alarm(60)
            what()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


DEATHS = [
    Death(2, 4712, "died: its process was killed by SIGKILL"),
    Death(0, 4710, "died"),
    Death(1, 4711, "é" * 99),
]


@pytest.mark.processes
def test_a_rank_hears_of_deaths_until_it_closes_and_the_next_listener_of_those_since(
    ends: tuple[socket.socket, socket.socket],
):
    launcher, rank = ends

    def hears() -> None:
        got: list[Death] = []
        more = threading.Semaphore(0)

        def hear(death: Death) -> None:
            got.append(death)
            more.release()
            raise RuntimeError("this is logged, and the next one is heard")

        process, threads = os.getpid(), threading.active_count()
        listener = listen(hear)
        assert listener is not None
        for message in (b"{}", b"\xff", b"[" * LONGEST, news(DEATHS[1], process + 1), news(DEATHS[0], process)):
            launcher.send(message)
        assert more.acquire(timeout=30)
        rank.close()  # as a script does that closes all descriptors
        launcher.send(news(DEATHS[1], process))
        assert more.acquire(timeout=30)
        for _ in range(2):
            listener.close()
        assert threading.active_count() == threads
        assert got == DEATHS[:2]

    def hears_later() -> None:
        heard_: list[Death] = []
        launcher.send(news(DEATHS[2], os.getpid()))
        done = threading.Event()
        listener = listen(lambda death: (heard_.append(death), done.set())[0])
        assert listener is not None
        assert done.wait(30)
        listener.close()
        tell_generation(3, ["0"])  # which the listener's end has left as it was
        assert heard(read(launcher) or b"", os.getpid()) == (3, ("0",))
        assert heard_ == [DEATHS[2]]

    in_a_rank(hears)
    in_a_rank(hears_later)


@pytest.mark.processes
def test_of_two_listeners_each_hears_of_every_death(ends: tuple[socket.socket, socket.socket]):
    launcher, _ = ends

    def hear() -> None:
        both = [threading.Semaphore(0), threading.Semaphore(0)]
        listeners = [listen(lambda death, one=one: one.release()) for one in both]
        for death in DEATHS * 9:
            launcher.send(news(death, os.getpid()))
            assert [one.acquire(timeout=30) for one in both] == [True, True]
        assert listeners[0] is not None
        assert listeners[1] is not None
        listeners[0].close()
        launcher.send(news(DEATHS[0], os.getpid()))
        assert both[1].acquire(timeout=30)
        listeners[1].close()
        assert not both[0].acquire(blocking=False)

    in_a_rank(hear)


@pytest.mark.processes
def test_a_fork_of_a_rank_takes_nothing_of_what_it_is_told_and_ends_no_listener(
    ends: tuple[socket.socket, socket.socket],
):
    launcher, _ = ends

    def forks() -> None:
        heard_ = threading.Event()
        listener = listen(lambda death: heard_.set())
        assert listener is not None

        def fork() -> None:
            assert listen(lambda death: None) is None
            listener.close()

        in_a_rank(fork)
        launcher.send(news(DEATHS[0], os.getpid()))
        assert heard_.wait(30)
        listener.close()

    in_a_rank(forks)


@pytest.mark.processes
def test_who_has_inherited_the_channel_shuts_it_down_and_the_listener_ends(ends: tuple[socket.socket, socket.socket]):
    _, rank = ends

    def shut_down() -> None:
        threads = threading.active_count()
        listener = listen(lambda death: None)
        assert listener is not None
        rank.shutdown(socket.SHUT_RD)
        listener._thread.join(30)
        assert threading.active_count() == threads
        listener.close()

    in_a_rank(shut_down)


@pytest.mark.processes
def test_nobody_listens_where_no_launcher_has_started_this_process(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
):
    assert listen(lambda death: None) is None  # this process has made the pair
    monkeypatch.delenv(CHANNEL)
    in_a_rank(lambda: None if listen(lambda death: None) is None else os._exit(2))


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xff\x00",
        b"[" * LONGEST,
        b"[]",
        b"1",
        b'{"process":1}',
        b'{"process":1,"generation":0}',
        b'{"process":1,"generation":-1,"members":["0"]}',
        b'{"process":1,"generation":true,"members":["0"]}',
        b'{"process":1,"generation":0.0,"members":["0"]}',
        b'{"process":1,"generation":0,"members":[0]}',
        b'{"process":1,"generation":0,"members":"0"}',
        b'{"generation":0,"members":["0"]}',
        b'{"process":1,"generation":0,"members":["0"]}{}',
    ],
)
def test_other_messages_are_nothing(message: bytes):
    assert heard(message, 1) is None

"""What every channel promises, over shared memory and over Gloo, between two threads; and what only processes show."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial

import pytest
import torch

from lightning_async.comm.p2p import LONGEST, Dial, PeerChannel, ShmDial, answer, listen
from lightning_async.comm.p2p_gloo import PairDial, _called, answer_pair, ask
from lightning_async.errors import ChannelTimeout, PeerLost
from lightning_async.membership.signing import Seal
from tests.support import ROOT

SIZE = 100_000


class Pair:
    """A dial, and the two ends of a channel that it has made."""

    def __init__(self, dial: Dial, accept: Callable[[], PeerChannel]) -> None:
        self.dial, self._accept = dial, accept
        self._pool = ThreadPoolExecutor(1)
        self.mine, self.theirs = self.again()

    def again(self) -> tuple[PeerChannel, PeerChannel]:
        there = self._pool.submit(self._accept)
        return self.dial.connect(10), there.result(10)

    def close(self) -> None:
        self.mine.close()
        self.theirs.close()
        self.dial.close()
        self._pool.shutdown()


@contextmanager
def over_shm() -> Iterator[Pair]:
    listener, name = listen()
    with listener:
        pair = Pair(ShmDial(name, SIZE, SIZE // 2), lambda: answer(listener.accept()[0], "them"))
        yield pair
        pair.close()


@contextmanager
def over_gloo() -> Iterator[Pair]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pair = Pair(PairDial("127.0.0.1", port_of(listener), "it", SIZE, SIZE // 2), lambda: taken(listener))
        yield pair
        pair.close()


def taken(listener: socket.socket, peer: str = "them", name: str = "it", seal: Seal | None = None) -> PeerChannel:
    channel = answer_pair(listener.accept()[0], peer, seal or Seal(), {"name": name})
    assert channel is not None
    return channel


def port_of(listener: socket.socket) -> int:
    return listener.getsockname()[1]


@pytest.fixture(params=[over_shm, over_gloo], ids=["shm", "gloo"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with request.param() as made:
        yield made


@pytest.fixture
def shm() -> Iterator[Pair]:
    with over_shm() as made:
        yield made


def test_headers_and_bytes_go_both_ways(pair: Pair):
    for turn, size in enumerate([0, 1, SIZE // 2, 7]):
        pair.dial.outgoing[:size] = torch.arange(size) % 251 + turn
        pair.mine.send({"turn": turn, "name": "é"}, size)
        assert pair.theirs.receive() == ({"turn": turn, "name": "é"}, size)
        assert torch.equal(pair.theirs.incoming[:size], (torch.arange(size) % 251 + turn).to(torch.uint8))
        pair.theirs.outgoing[:size] = 255 - pair.theirs.incoming[:size]
        pair.theirs.send({"back": [turn, None, 0.5]}, size)
        assert pair.mine.receive() == ({"back": [turn, None, 0.5]}, size)
        assert torch.equal(pair.dial.incoming[:size], 255 - pair.dial.outgoing[:size])


def test_a_part_lies_where_its_header_says(pair: Pair):
    mine, theirs = pair.mine, pair.theirs
    mine.outgoing.fill_(1)
    mine.send({"part": 2, "at": 600}, 400)
    assert theirs.receive(10) == ({"part": 2, "at": 600}, 400)
    theirs.send({})
    mine.receive(10)
    mine.outgoing[:600] = 2
    mine.send({"part": 1}, 600)
    assert theirs.receive(10) == ({"part": 1}, 600)
    assert theirs.incoming[:1000].tolist() == [2] * 600 + [1] * 400
    assert mine.shares_memory == isinstance(pair.dial, ShmDial)
    theirs.send({})
    mine.receive(10)
    for at, size in ((-1, 1), (SIZE, 1), (SIZE - 1, 2)):
        with pytest.raises(ValueError, match=r"must be in \[0, "):
            mine.send({"at": at}, size)


def test_each_direction_has_the_memory_that_was_asked_for(pair: Pair):
    assert (pair.mine.outgoing.numel(), pair.mine.incoming.numel()) == (SIZE, SIZE // 2)
    assert (pair.theirs.outgoing.numel(), pair.theirs.incoming.numel()) == (SIZE // 2, SIZE)
    with pytest.raises(ValueError, match=rf"size={SIZE + 1}.*\[0, {SIZE}\]"):
        pair.mine.send({}, SIZE + 1)
    with pytest.raises(ValueError, match=f"more than {LONGEST}"):
        pair.mine.send({"long": "x" * LONGEST})
    pair.mine.send({"long": "x" * (LONGEST - 30)}, SIZE)  # neither has harmed the channel
    assert pair.theirs.receive()[1] == SIZE


def test_a_deadline_ends_the_channel_on_both_sides(pair: Pair):
    began = time.monotonic()
    with pytest.raises(ChannelTimeout, match=r"has said nothing for 0\.\d s"):
        pair.mine.receive(0.2)
    assert 0.19 <= time.monotonic() - began < 5
    with pytest.raises(PeerLost):
        pair.theirs.receive(10)
    with pytest.raises(PeerLost):
        pair.mine.receive(10)


@pytest.mark.parametrize("end", ["close", "break_off"])
def test_whoever_waits_hears_at_once_that_the_other_end_is_gone(pair: Pair, end: str):
    threading.Timer(0.1, getattr(pair.theirs, end)).start()
    began = time.monotonic()
    with pytest.raises(PeerLost):
        pair.mine.receive(None)
    assert time.monotonic() - began < 2
    with pytest.raises(PeerLost):
        pair.mine.send({})


def test_a_wait_can_be_broken_off_by_another_thread(pair: Pair):
    threading.Timer(0.1, pair.mine.break_off).start()
    with pytest.raises(PeerLost):
        pair.mine.receive(None)


def test_what_was_said_before_the_end_is_heard(shm: Pair):
    shm.dial.outgoing[:3] = 5
    shm.mine.send({"last": 1}, 3)
    shm.mine.close()
    assert shm.theirs.receive() == ({"last": 1}, 3)
    assert shm.theirs.incoming[:3].tolist() == [5, 5, 5]
    with pytest.raises(PeerLost):
        shm.theirs.receive()


def test_the_memory_outlives_a_channel(pair: Pair):
    pair.dial.outgoing.fill_(7)
    pair.mine.close()
    pair.theirs.close()
    pair.mine, pair.theirs = pair.again()
    pair.mine.send({}, SIZE)
    pair.theirs.receive()
    assert int(pair.theirs.incoming.sum()) == 7 * SIZE


def test_an_end_is_closed_twice_and_nothing_is_left_open(pair: Pair):
    descriptors, names = open_descriptors(), os.listdir("/dev/shm")
    for _ in range(5):
        mine, theirs = pair.again()
        for each in (mine, theirs, mine, theirs):
            each.close()
    assert open_descriptors() == descriptors
    assert os.listdir("/dev/shm") == names


def open_descriptors() -> int:
    gc.collect()  # memory that other tests have left has a descriptor each
    return len(os.listdir("/proc/self/fd"))


def test_nobody_is_there():
    listener, name = listen()
    listener.close()
    dial = ShmDial(name, 8, 8)
    with pytest.raises(PeerLost, match=f"nobody answers at {name}"):
        dial.connect(1)
    dial.close()


def test_a_name_is_taken_once():
    listener, name = listen()
    with listener, pytest.raises(OSError, match="in use"):
        listen(name)


def test_what_is_no_message_ends_the_channel(shm: Pair):
    for garbage in (b"\xff\xfe", b"[1]", b"[1, 2]", b"[-1, {}]", b"[1000000000, {}]", b"[" * 9000):
        mine, theirs = shm.again()
        mine._socket.send(garbage)  # type: ignore[attr-defined]
        with pytest.raises(PeerLost, match="no message of this job's"):
            theirs.receive(5)
        with pytest.raises(PeerLost):
            mine.receive(5)
        mine.close()
        theirs.close()


@pytest.mark.parametrize(
    ("said", "memory", "match"),
    [
        (b"[4096, 4096]", "none", "no memory"),
        (b"[4096, 4096]", "unsealed", "not what it says"),
        (b"[4096, 8192]", "sealed", "not what it says"),
        (b"[-1, 4096]", "sealed", "no memory"),
        (b"nonsense", "sealed", "Expecting value"),
        (b"[1, 2, 3]", "sealed", "no memory"),
    ],
)
def test_a_caller_that_hands_over_no_memory_is_not_answered(said: bytes, memory: str, match: str):
    descriptors = open_descriptors()
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    dial = ShmDial("nobody", 4096, 4096)
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, 8192)
    handed = {"none": [], "unsealed": [loose], "sealed": [dial._memory.descriptor]}[memory]
    socket.send_fds(mine, [said], handed)
    with pytest.raises(PeerLost, match=match):
        answer(theirs, "them")
    os.close(loose)
    mine.close()
    dial.close()
    assert open_descriptors() == descriptors


CHILD = """
import os, sys, time
kind, where = sys.argv[1:]
if kind == "shm":
    from lightning_async.comm.p2p import ShmDial
    dial = ShmDial(where, 64 << 20, 64 << 20)
else:
    from lightning_async.comm.p2p_gloo import PairDial
    dial = PairDial("127.0.0.1", int(where), "it", 64 << 20, 64 << 20)
dial.outgoing.fill_(3)
channel = dial.connect(10)
channel.send({"pid": os.getpid()}, 64 << 20)
os.fork()
time.sleep(60)
"""


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_a_killed_process_that_has_forked_is_noticed_and_what_it_has_sent_stays(kind: str):
    listener, where = listen()
    listener.settimeout(60)
    accept = partial(_answered, listener)
    if kind == "gloo":
        listener.close()
        listener = socket.create_server(("127.0.0.1", 0))
        listener.settimeout(60)
        where, accept = str(port_of(listener)), partial(taken, listener)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CHILD, kind, where]
    with listener, subprocess.Popen(command, env=environment, start_new_session=True) as child:
        try:
            channel = accept()
            header, size = channel.receive(60)
            assert header == {"pid": child.pid} and size == 64 << 20
            until = time.monotonic() + 30
            while not _children(child.pid) and time.monotonic() < until:
                time.sleep(0.01)  # a fork is there, which has all that the child had open
            began = time.monotonic()
            os.kill(child.pid, signal.SIGKILL)
            with pytest.raises(PeerLost):
                channel.receive(30)
            assert time.monotonic() - began < 1  # ten milliseconds; a fork that holds the line would take a minute
            assert int(channel.incoming[-1]) == 3
            channel.close()
        finally:
            os.killpg(child.pid, signal.SIGKILL)


def _answered(listener: socket.socket) -> PeerChannel:
    return answer(listener.accept()[0], "a child")


def _children(pid: int) -> str:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read()


def test_only_plain_values_travel(pair: Pair):
    with pytest.raises(TypeError):
        pair.mine.send({"tensor": torch.zeros(1)})


def test_a_peer_that_stops_within_a_message_is_noticed():
    """Gloo does not tell who has received half a message that its connection is gone."""
    with over_gloo() as pair:
        big = torch.zeros(64 << 20, dtype=torch.uint8)
        pair.mine.outgoing = pair.theirs.incoming = big  # type: ignore[misc]
        pair.theirs._expect()  # type: ignore[attr-defined]
        pair.mine.send({}, big.numel())
        pair.mine.break_off()
        began = time.monotonic()
        with pytest.raises(PeerLost, match="is gone"):  # it may have arrived just before; nothing comes after it
            [pair.theirs.receive(6) for _ in range(2)]  # so long torch keeps the memory
        assert time.monotonic() - began < 5


@contextmanager
def answering(name: str = "it", seal: Seal | None = None) -> Iterator[tuple[int, list[BaseException]]]:
    """A port at which everybody is answered, on a thread of its own, and what came of it."""
    failures: list[BaseException] = []

    def answer_one(sock: socket.socket) -> None:
        try:
            if (channel := answer_pair(sock, "them", seal or Seal(), {"name": name, "server": 3})) is not None:
                with closing(channel):
                    channel.send({"said": channel.receive(20)[0]})
                    channel.receive(20)
        except PeerLost as error:
            failures.append(error)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threads.append(threading.Thread(target=answer_one, args=(listener.accept()[0],)))
                threads[-1].start()

    threads = [threading.Thread(target=accept)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads[0].start()
        try:
            yield port_of(listener), failures
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for each in threads:
                each.join(30)
                assert not each.is_alive()


def test_strangers_at_the_port_do_not_disturb_who_is_answered():
    seal, garbage = Seal("the secret of the job"), [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 9000, b"\xff" * 9000]
    descriptors = open_descriptors()
    with answering(seal=seal) as (port, failures):
        held = [socket.create_connection(("127.0.0.1", port)) for _ in garbage]
        for sock, bytes_ in zip(held, garbage, strict=True):
            with suppress(OSError):
                sock.sendall(bytes_)
        with pytest.raises(PeerLost, match="must be the same on all hosts"):
            ask("127.0.0.1", port, Seal("another secret"))
        with pytest.raises(PeerLost, match="must be the same on all hosts"):
            PairDial("127.0.0.1", port, "it", 8, 8).connect(10)
        with pytest.raises(PeerLost, match="it listens there now, and not another"):
            PairDial("127.0.0.1", port, "another", 8, 8, seal).connect(10)
        assert ask("127.0.0.1", port, seal) == {"name": "it", "server": 3}
        channel = PairDial("127.0.0.1", port, None, 8, 8, seal).connect(20)
        channel.send({"a": 1})
        assert channel.receive(20) == ({"said": {"a": 1}}, 0)
        channel.close()
        for sock in held:
            sock.close()
    assert len(failures) >= 6
    failures.clear()  # their tracebacks have what was under way
    assert open_descriptors() <= descriptors


def test_who_asks_for_memory_that_is_not_there_is_told_so():
    with answering() as (port, failures):
        for sizes in ([1 << 60, 8], [-1, 8], [True, 8], "many", [8]):
            called = _called("127.0.0.1", port, Seal(), 10, name=None, sizes=sizes)
            with pytest.raises(PeerLost, match=r"memory (for|of)"), called:
                pass
    assert len(failures) == 5


def test_nobody_listens_there_or_says_anything():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = port_of(listener)
        began = time.monotonic()
        with pytest.raises(ChannelTimeout, match=f"nobody answers at 127.0.0.1:{port}"):
            PairDial("127.0.0.1", port, None, 8, 8).connect(0.3)
        assert time.monotonic() - began < 5
    with pytest.raises(PeerLost, match=f"nobody answers at 127.0.0.1:{port}"):
        PairDial("127.0.0.1", port, None, 8, 8).connect(5)


def test_who_dials_and_dies_is_heard_of_by_who_answers():
    with answering() as (port, failures), _called("127.0.0.1", port, Seal(), 10, name=None, sizes=[8, 8]):
        pass  # and there is no group
    assert len(failures) == 1 and "has ended" in str(failures[0])

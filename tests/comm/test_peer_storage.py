"""What is left with another rank is there whole, or not at all: real sockets, real processes, real kill -9."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from lightning_async.comm import peer_storage
from lightning_async.comm.peer_storage import Address, PeerStore, PeerStoreConnection, deposit, facing, fetch, forget
from lightning_async.membership.join_protocol import JoinBoard
from lightning_async.membership.signing import Seal
from lightning_async.membership.store import HashStore

SEAL = Seal("a secret", "attempt 0")
LARGE = 8 << 20  # more than sockets hold


@pytest.fixture(params=[SEAL, Seal(scope="attempt 0")], ids=["secret", "none"])
def seal(request: pytest.FixtureRequest) -> Seal:
    return request.param


@pytest.fixture
def keeper(seal: Seal) -> Iterator[PeerStore]:
    before = {*threading.enumerate()}
    found = PeerStore("127.0.0.1", seal)
    try:
        yield found
    finally:
        found.close()
    assert {*threading.enumerate()} == before
    with pytest.raises(ConnectionRefusedError):
        fetch(found.address, seal, "1")


def test_what_comes_last_is_kept_until_it_is_forgotten(keeper: PeerStore, seal: Seal) -> None:
    address = Address.of(keeper.address.note())
    assert address is not None and address == keeper.address
    assert fetch(address, seal, "1") is None
    deposit(address, seal, "1", {"step": 3}, memoryview(b"abc"))
    deposit(address, seal, "2", {"step": 4}, memoryview(b""))
    assert fetch(address, seal, "1") == ({"step": 3}, bytearray(b"abc"))
    assert fetch(address, seal, "2") == ({"step": 4}, bytearray())
    for step, data in enumerate((b"x" * LARGE, b"y" * LARGE, b"z" * (LARGE + 1))):
        deposit(address, seal, "1", {"step": step}, memoryview(data))
        assert fetch(address, seal, "1") == ({"step": step}, bytearray(data))
    assert keeper.size == 2 * LARGE + 1  # the last one, and the memory of the one before
    assert keeper.owners == ("1", "2")
    forget(address, seal, "1")
    assert fetch(address, seal, "1") is None
    assert (keeper.size, keeper.owners) == (0, ("2",))


def half(address: Address, seal: Seal, then: Callable[[], None]) -> None:
    """Begin to leave something, up to its half."""
    line = PeerStoreConnection(socket.create_connection((address.host, address.port)), seal)
    line.hear_greeting()
    line.say({"token": address.token, "errand": "deposit", "owner": "1", "label": {}, "size": 2 * LARGE})
    line.hear()
    line.socket.sendall(b"n" * LARGE)
    then()
    line.close()


@pytest.mark.processes
def test_of_an_owner_that_is_killed_as_it_sends_the_copy_before_is_there(keeper: PeerStore, seal: Seal) -> None:
    deposit(keeper.address, seal, "1", {"step": 1}, memoryview(b"o" * 2 * LARGE))
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            half(keeper.address, seal, lambda: os.kill(os.getpid(), signal.SIGKILL))
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert fetch(keeper.address, seal, "1") == ({"step": 1}, bytearray(b"o" * 2 * LARGE))
    deposit(keeper.address, seal, "1", {"step": 2}, memoryview(b"p" * 2 * LARGE))
    assert fetch(keeper.address, seal, "1") == ({"step": 2}, bytearray(b"p" * 2 * LARGE))


@pytest.mark.processes
def test_who_keeps_and_is_gone_is_noticed_at_once() -> None:
    told, tells = os.pipe()
    if (child := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            listener = socket.create_server(("127.0.0.1", 0))
            os.write(tells, b"%d\n" % listener.getsockname()[1])
            line = PeerStoreConnection(listener.accept()[0], SEAL)
            line.greet()
            line.hear()
            line.say({})
            line.receive(LARGE // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)
    address = Address("127.0.0.1", int(os.read(told, 64)), "token")
    with pytest.raises(ConnectionError):
        deposit(address, SEAL, "1", {}, memoryview(bytes(2 * LARGE)))
    os.waitpid(child, 0)
    with pytest.raises(ConnectionRefusedError):
        fetch(address, SEAL, "1")
    os.close(told)
    os.close(tells)


def test_bytes_that_have_changed_on_the_way_are_not_kept(keeper: PeerStore, seal: Seal) -> None:
    deposit(keeper.address, seal, "1", {}, memoryview(b"right"))
    line = PeerStoreConnection(socket.create_connection((keeper.address.host, keeper.address.port)), seal)
    line.hear_greeting()
    line.say({"token": keeper.address.token, "errand": "deposit", "owner": "1", "label": {}, "size": 5})
    line.hear()
    line.socket.sendall(b"wrong")
    line.say({"crc32": 1})
    with pytest.raises(ConnectionError):
        line.hear()
    line.close()
    assert fetch(keeper.address, seal, "1") == ({}, bytearray(b"right"))


def test_what_there_is_no_memory_for_is_refused_before_it_is_sent(keeper: PeerStore, seal: Seal) -> None:
    line = PeerStoreConnection(socket.create_connection((keeper.address.host, keeper.address.port)), seal)
    line.hear_greeting()
    line.say({"token": keeper.address.token, "errand": "deposit", "owner": "1", "label": {}, "size": 1 << 60})
    assert line.hear() == {"refused": "there is no memory for 1099511627776 MiB"}
    line.close()


def test_strangers_are_not_heard(keeper: PeerStore, seal: Seal) -> None:
    deposit(keeper.address, seal, "1", {}, memoryview(b"mine"))
    another = Address(keeper.address.host, keeper.address.port, "of an earlier one, at this port")
    with pytest.raises(ConnectionError):
        fetch(another, seal, "1")
    if seal.signs:
        for other in (Seal("another", "attempt 0"), Seal(scope="attempt 0")):
            with pytest.raises(ConnectionError):
                forget(keeper.address, other, "1")
    with socket.create_connection((keeper.address.host, keeper.address.port)) as port_scanner:
        port_scanner.sendall(b"GET / HTTP/1.1\r\n\r\n" * 8)
    assert fetch(keeper.address, seal, "1") == ({}, bytearray(b"mine"))


def test_one_who_says_nothing_is_given_up_and_holds_up_nobody(keeper: PeerStore, seal: Seal) -> None:
    deposit(keeper.address, seal, "1", {}, memoryview(b"mine"))
    with pytest.MonkeyPatch.context() as patch, socket.create_server(("127.0.0.1", 0)) as silent:
        patch.setattr(peer_storage, "SILENCE_S", 2.0)
        with pytest.raises(TimeoutError):
            fetch(Address("127.0.0.1", silent.getsockname()[1], ""), seal, "1")
        with socket.create_connection((keeper.address.host, keeper.address.port)) as idle:
            assert fetch(keeper.address, seal, "1") == ({}, bytearray(b"mine"))
            idle.settimeout(30.0)
            assert len(idle.recv(64)) == 16  # the nonce
            assert idle.recv(64) == b""  # given up


def test_closing_ends_what_is_under_way(seal: Seal) -> None:
    keeper = PeerStore("127.0.0.1", seal)

    def close() -> None:
        keeper.close()
        keeper.close()

    with contextlib.suppress(OSError):
        half(keeper.address, seal, close)
    assert keeper.size == 0
    assert not [each for each in threading.enumerate() if each.name.startswith("lightning_async")]


@pytest.mark.processes
def test_a_fork_of_the_rank_holds_nothing_open(keeper: PeerStore, seal: Seal) -> None:
    """A worker of a DataLoader: the rank's end is seen by others while that lives."""
    deposit(keeper.address, seal, "1", {}, memoryview(b"mine"))
    if (child := os.fork()) == 0:
        code = 1
        with contextlib.suppress(BaseException):
            keeper.close()  # which is the parent's to do
            inodes = {os.stat(f"/proc/self/fd/{fd}").st_ino for fd in os.listdir("/proc/self/fd") if _is_socket(fd)}
            code = int(_listening_inode(keeper.address.port) in inodes)
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert fetch(keeper.address, seal, "1") == ({}, bytearray(b"mine"))


def _is_socket(fd: str) -> bool:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    return False


def _listening_inode(port: int) -> int:
    with open("/proc/net/tcp") as file:
        rows = [line.split() for line in file][1:]
    return next(int(row[9]) for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A")


def test_an_address_is_that_which_faces_the_store() -> None:
    assert facing("127.0.0.1", 1) == "127.0.0.1"
    for nothing in ({}, {"host": "h"}, {"host": "h", "port": 0, "token": ""}, {"host": 1, "port": 1, "token": ""}):
        assert Address.of(nothing) is None


def test_who_keeps_things_is_known_by_name_and_strangers_are_not(caplog: pytest.LogCaptureFixture) -> None:
    store = HashStore()
    door, other = JoinBoard(store, SEAL), JoinBoard(store, Seal("another", "attempt 0"))
    assert (door.keepers(), door.read_keeper("1")) == ([], {})
    for name, port in (("10", 1), ("2", 2), ("10", 3)):  # it has come back
        door.keep_at(name, Address("127.0.0.1", port, "token").note())
    other.keep_at("4", Address("127.0.0.1", 4, "token").note())
    assert door.keepers() == ["10", "2"]
    assert Address.of(door.read_keeper("10")) == Address("127.0.0.1", 3, "token")
    assert Address.of(door.read_keeper("4")) is None
    assert "is not signed with this job's secret" in caplog.text
    assert door.host == ("127.0.0.1", 1)

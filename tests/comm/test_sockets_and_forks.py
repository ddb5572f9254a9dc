"""What a fork holds of the sockets of the process that it comes from."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_async._sockets import connects, is_open, keep_from_forks, opening, serves_at, snapshot

pytestmark = pytest.mark.processes


def in_a_fork(look: Callable[[], Any], tmp_path: Path) -> Any:
    """What it sees, of JSON's terms."""
    if (pid := os.fork()) == 0:
        (tmp_path / "seen").write_text(json.dumps(look()))
        os._exit(0)
    os.waitpid(pid, 0)
    return json.loads((tmp_path / "seen").read_text())


def inodes(*sockets: socket.socket) -> dict[int, int]:
    return {each.fileno(): os.fstat(each.fileno()).st_ino for each in sockets}


def test_a_fork_lets_go_of_what_is_its_parents_alone_and_of_nothing_else(tmp_path: Path) -> None:
    mine, theirs = socket.socketpair()
    other, another = socket.socketpair()
    with mine, theirs, other, another:
        mine.set_inheritable(True)
        keep_from_forks(inodes(mine))
        assert not mine.get_inheritable()

        def look() -> list[bool]:
            theirs.close()
            held = [is_open(fd, inode) for fd, inode in {**kept, **inodes(other, another)}.items()]
            taken = os.path.exists(f"/proc/self/fd/{mine.fileno()}")  # a library may still close this number
            return [*held, taken]

        kept = inodes(mine)
        assert in_a_fork(look, tmp_path) == [False, True, True, True]
        assert in_a_fork(lambda: in_a_fork(look, tmp_path), tmp_path) == [False, True, True, True]
        mine.send(b"still there")
        assert theirs.recv(64) == b"still there"


def test_a_number_that_is_another_files_by_now_stays(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        closed, peer = socket.socketpair()
        keep_from_forks(inodes(closed))
        number = closed.fileno()
        closed.close()
        peer.close()
        os.dup2(file.fileno(), number)
        assert in_a_fork(lambda: os.path.samestat(os.fstat(number), os.fstat(file.fileno())), tmp_path)
        os.close(number)


def test_a_fork_that_begins_while_sockets_are_opened_lets_go_of_those(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with opening(lambda fd: connects(fd, {port}, set())) as none:
            assert none.sockets() == {}  # it was there before
        with opening(lambda fd: True) as opened, socket.create_connection(("127.0.0.1", port)) as connection:
            (fd,) = inodes(connection)
            assert fd in opened.sockets()
            assert in_a_fork(lambda: fd in snapshot(), tmp_path) is False
            assert in_a_fork(lambda: server.fileno() in snapshot(), tmp_path) is True


def test_who_connects_to_a_port_that_is_served_is_connected_with_no_fork(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        serves_at(server.getsockname()[1])
        with socket.create_connection(server.getsockname()), server.accept()[0] as accepted:
            numbers = [accepted.fileno(), server.fileno(), other.fileno()]
            assert in_a_fork(lambda: [number in snapshot() for number in numbers], tmp_path) == [False, False, True]

"""Where launchers meet, and what guards the place."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from lightning_async.comm.membership.signing import SECRET
from lightning_async.launch.places import Wanted
from lightning_async.launch.rendezvous import address, first, secret_of
from tests.support import free_port

LONG = "0123456789abcdef"


@pytest.mark.parametrize("text", ["host", "host:", ":1", "host:0", "host:65536", "host:x", "host:-1", "[]:1", "h:٣"])
def test_a_place_without_host_or_port_is_none(text: str):
    with pytest.raises(ValueError, match="must be HOST:PORT"):
        address(text)


@pytest.mark.parametrize("text", ["0.0.0.0:1", "[::]:1"])
def test_all_hosts_at_once_are_no_place(text: str):
    with pytest.raises(ValueError, match="give the address of the first node"):
        address(text)


@pytest.mark.parametrize("text", ["", "a", "2:", ":2", "2:1", "0", "0:2", "-1", "1:2:3"])
def test_numbers_of_nodes_that_are_none(text: str):
    with pytest.raises(ValueError, match="must be"):
        Wanted.parse(text)


def test_who_can_listen_there_is_the_first():
    port = free_port()
    listener = first("127.0.0.1", port)
    assert listener is not None
    with listener:
        assert first("127.0.0.1", port) is None  # another launcher of this host has it
        assert listener.getsockname() == ("127.0.0.1", port)
    assert first("192.0.2.1", port) is None  # another host's, see RFC 5737


def test_a_name_that_only_this_host_understands_is_refused(monkeypatch: pytest.MonkeyPatch):
    """As Debian has its own name in /etc/hosts."""
    own = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 1))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: own)
    with pytest.raises(ValueError, match=r"takes node0 for 127\.0\.1\.1, which no other host can reach"):
        first("node0", free_port())


def test_the_secret_is_read_from_a_file_of_this_user_alone(tmp_path: Path):
    file = tmp_path / "secret"
    file.touch(0o600)
    file.write_text(f"{LONG}\n")
    assert secret_of(file, {SECRET: "another one"}) == LONG
    assert secret_of(None, {SECRET: LONG}) == LONG
    for mode in (0o640, 0o604, 0o660):
        file.chmod(mode)
        with pytest.raises(ValueError, match="others can read it"):
            secret_of(file, {})


def test_a_secret_that_is_none_is_refused(tmp_path: Path):
    file = tmp_path / "secret"
    os.close(os.open(file, os.O_CREAT, 0o600))
    for where, environment in ((file, {SECRET: LONG}), (None, {}), (None, {SECRET: ""})):
        with pytest.raises(ValueError, match="--rdzv asks for a secret"):
            secret_of(where, environment)
    with pytest.raises(ValueError, match=f"{SECRET}: the secret is shorter than 16 characters"):
        secret_of(None, {SECRET: LONG[1:]})
    with pytest.raises(OSError, match="nowhere"):
        secret_of(tmp_path / "nowhere", {})

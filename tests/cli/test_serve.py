"""Servers that are started on their own: where they are, what is left of them, and how they end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lightning_async.cli import serve
from lightning_async.cli.serve import main
from lightning_async.comm.p2p_gloo import dial, look_up_all
from lightning_async.errors import PeerLost
from lightning_async.membership.signing import SECRET
from lightning_async.parameter_server.client import Client
from tests.support import ROOT

SECRET_OF_JOB = "the secret of a job, long enough"


@contextmanager
def serving(port: int, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Two servers from this port on, and where they say they are."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), SECRET: SECRET_OF_JOB}
    command = [sys.executable, "-m", "lightning_async.cli.main", "serve", "--listen", f"127.0.0.1:{port}"]
    command += ["--num-servers", "2", *options]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            finally:
                process.kill()


def free_ports() -> int:
    """The first of two."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except OSError:
                continue
        return port


def joined(where: str) -> Client:
    """A worker, over Gloo with one of them."""
    ways = zip(look_up_all(where, timeout_s=90), ("shm", "gloo"), strict=True)
    client = Client("a", [dial(address, 32, 32, via) for address, via in ways], timeout_s=90)
    for gradient in client.gradients:
        gradient.zero_()
    client.start()
    return client


@pytest.mark.processes
def test_servers_are_found_serve_and_come_back_with_their_last_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(SECRET, SECRET_OF_JOB)
    port = free_ports()
    with serving(port, "--snapshots", str(tmp_path), "--mode", "ssp") as (process, where):
        assert where == f"127.0.0.1:{port},127.0.0.1:{port + 1}"
        client = joined(where)
        assert [each["terms"]["mode"] for each in look_up_all(where)] == ["ssp", "ssp"]
        with pytest.raises(ValueError, match=f"at '127.0.0.1:{port + 1}' is server 1, where server 0 is to be"):
            look_up_all(f"127.0.0.1:{port + 1},127.0.0.1:{port}")
        monkeypatch.setenv(SECRET, "another one")
        with pytest.raises(PeerLost, match="must be the same on all hosts"):
            look_up_all(where)
        monkeypatch.setenv(SECRET, SECRET_OF_JOB)
        for value in (1.0, 2.0):
            for gradient in client.gradients:
                gradient.fill_(value)
            client.push()
        assert main_says(port) == 71  # others have the address
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    with serving(port, "--snapshots", str(tmp_path)) as (process, _):
        answer = client.push()  # the same worker finds them again
        assert (answer.versions, answer.lost) == ((3, 3), 0)
        assert [weights.tolist() for weights in client.weights] == [[5.0] * 8] * 2
        supervisors = _children(process.pid)
        os.kill(supervisors[1], signal.SIGKILL)
        assert process.wait(60) == 70
        client.close(leave=False)


def main_says(port: int) -> int:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "lightning_async.cli.main", "serve", "--listen", f"127.0.0.1:{port}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert re.search(r"no parameter server can be started: .*in use", done.stderr), done.stderr
    return done.returncode


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--listen", "somewhere"], "must be HOST:PORT"),
        (["--listen", "0.0.0.0:29500"], "is on every host"),
        (["--listen", "127.0.0.1:29500", "--num-servers", "0"], "--num-servers 0: at least 1"),
        (["--listen", "127.0.0.1:65535", "--num-servers", "2"], "ports up to 65535"),
        (["--listen", "127.0.0.1:29500", "--num-workers", "0"], "num_workers"),
        (["--listen", "127.0.0.1:29500", "--dead-after", "-1"], "dead_after"),
        (["--listen", "127.0.0.1:29500", "--snapshot-every", "0"], "--snapshot-every 0"),
        (["--listen", "10.1.2.3:29500"], "--listen asks for a secret"),
        (["--listen", "10.1.2.3:29500", "--secret-file", "/nowhere"], "No such file"),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(
    options: list[str], match: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv(SECRET, raising=False)
    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == 2
    assert match in capsys.readouterr().err


@pytest.mark.parametrize("text", ["host", "host:", ":1", "host:0", "host:65536", "host:x", "host:-1", "[]:1", "h:٣"])
def test_a_place_without_host_or_port_is_none(text: str):
    with pytest.raises(ValueError, match="must be HOST:PORT"):
        serve._address(text)


@pytest.mark.parametrize("text", ["0.0.0.0:1", "[::]:1"])
def test_all_hosts_at_once_are_no_place(text: str):
    with pytest.raises(ValueError, match="is on every host; give an address of this one"):
        serve._address(text)


def test_the_secret_is_read_from_a_file_of_this_user_alone(tmp_path: Path):
    file = tmp_path / "secret"
    file.touch(0o600)
    file.write_text(f"{SECRET_OF_JOB}\n")
    assert serve._secret_of(file, {SECRET: "another one"}) == SECRET_OF_JOB
    assert serve._secret_of(None, {SECRET: SECRET_OF_JOB}) == SECRET_OF_JOB
    for mode in (0o640, 0o604, 0o660):
        file.chmod(mode)
        with pytest.raises(ValueError, match="others can read it"):
            serve._secret_of(file, {})


def test_a_secret_that_is_none_is_refused(tmp_path: Path):
    file = tmp_path / "secret"
    os.close(os.open(file, os.O_CREAT, 0o600))
    for where, environment in ((file, {SECRET: SECRET_OF_JOB}), (None, {}), (None, {SECRET: ""})):
        with pytest.raises(ValueError, match="--listen asks for a secret"):
            serve._secret_of(where, environment)
    with pytest.raises(ValueError, match=f"{SECRET}: the secret is shorter than 16 characters"):
        serve._secret_of(None, {SECRET: SECRET_OF_JOB[:15]})
    with pytest.raises(OSError, match="nowhere"):
        serve._secret_of(tmp_path / "nowhere", {})

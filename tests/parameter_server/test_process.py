"""A real server: killed with -9 while two workers push, its supervisor killed, its starter gone, told to end."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from lightning_async.algorithms import TwoBit
from lightning_async.comm.p2p import ShmDial, listen
from lightning_async.comm.p2p_gloo import look_up
from lightning_async.errors import AsyncTrainingError, PeerLost
from lightning_async.parameter_server.client import Client, tell_over
from lightning_async.parameter_server.consistency import WorkerRules
from lightning_async.parameter_server.process import ServerProcess
from tests.parameter_server.kills import MOMENTA, Found, final_weights, kill_servers, work
from tests.support import ROOT

pytestmark = pytest.mark.processes

NUMEL = 200_000


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    server = ServerProcess(host="127.0.0.1")
    yield server
    server.close()


def gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it has not come to pass"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("momenta", "compression", "kills"),
    [(False, None, 3), (True, None, 2), (False, TwoBit(1.0), 2)],
    ids=["counted", "momenta", "compressed"],
)
def test_a_killed_server_comes_back_with_all_that_was_acknowledged_once(
    momenta: bool, compression: TwoBit | None, kills: int
):
    """One worker is on its host, the other one talks to it as one from elsewhere would, and so do strangers."""
    stop, seen, found = threading.Event(), [0, 0], Found()
    server = ServerProcess(MOMENTA if momenta else None, host="127.0.0.1")
    where = (server.address["host"], server.address["port"])
    addresses = [server.address, look_up_of(server, MOMENTA if momenta else WorkerRules())]
    strangers = [socket.create_connection(where) for _ in range(3)]
    for sock, garbage in zip(strangers, (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 5000), strict=True):
        sock.sendall(garbage)
    try:
        with ThreadPoolExecutor(2) as pool:
            workers = [
                pool.submit(work, f"{i}", i, 2, addresses[i], NUMEL, stop, seen, via, momenta, compression)
                for i, via in enumerate(("shm", "gloo"))
            ]
            for each in workers:
                each.add_done_callback(lambda _: stop.set())
            try:
                kill_servers(server, seen, kills=kills, seed=0, failed=stop.is_set, found=found)
            finally:
                stop.set()
                resent = sum(each.result(60) for each in workers)  # what went wrong in one of them goes first
        assert found.kills == kills and resent >= 1
        weights, version = final_weights(server.address, NUMEL, momenta)
        assert momenta or weights[:2].tolist() == seen
        assert version == sum(seen)
        assert found.memory_after < 1.2 * found.memory_before
    finally:
        server.close()
        for sock in strangers:
            sock.close()


def look_up_of(server: ServerProcess, terms: WorkerRules) -> dict[str, Any]:
    """As whoever knows no more than where it listens."""
    found = look_up(server.address["host"], server.address["port"], timeout_s=60)
    assert json.loads(json.dumps(found)) == {**server.address, "server": 0, "terms": terms.plain()}
    return found


def test_whoever_is_connected_hears_that_the_supervisor_is_gone_and_nothing_is_left(server: ServerProcess):
    client = Client("a", [ShmDial(server.name, 32, 32)], timeout_s=60)
    client.gradients[0].zero_()
    client.start()
    pid = server.pid
    assert pid is not None
    os.kill(server.supervisor, signal.SIGKILL)
    until(lambda: gone(pid))
    client._timeout_s = 0.5
    with pytest.raises(PeerLost, match=f"nobody answers at {server.name} of this host"):
        client.push()
    client.close()


STARTER = """
import os, sys, time
from lightning_async.parameter_server.process import ServerProcess
server = ServerProcess(linger_s=float(sys.argv[1]))
print(server.name, server.supervisor, flush=True)
time.sleep(100)
"""


def started_and_orphaned(linger_s: str) -> tuple[Client, str, int]:
    """A worker of a server whose starter has died since; the server's name, and its supervisor."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", STARTER, linger_s]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        name, supervisor = starter.stdout.readline().split()
        try:
            client = Client("a", [ShmDial(name, 32, 32)], timeout_s=60)
            client.gradients[0].fill_(1.0)
            client.start()
        finally:
            starter.kill()
            starter.wait()
    return client, name, int(supervisor)


def test_it_outlives_its_starter_as_long_as_it_has_workers():
    client, _, supervisor = started_and_orphaned("0.5")
    time.sleep(1.0)  # twice as long as it would stay alone
    assert client.push().versions == (1,)
    assert not gone(supervisor)
    client.close()
    until(lambda: gone(supervisor))


def test_told_that_the_training_is_over_it_ends_when_its_workers_have_gone():
    """Its starter has died; it would wait for others for longer than this test."""
    client, name, supervisor = started_and_orphaned("1000")
    tell_over(ShmDial(name, 0, 0), 60.0)
    assert client.push().versions == (1,)
    client.close()
    until(lambda: gone(supervisor))


def test_who_says_what_is_no_first_message_harms_no_server(server: ServerProcess):
    client = Client("a", [ShmDial(server.name, 32, 32)], timeout_s=60)
    client.gradients[0].fill_(1.0)
    client.start()
    pid = server.pid
    for header in ({"do": "hello"}, {"do": "hello", "worker": "b", "life": "x"}, {"do": "forget", "workers": 3}, {}):
        with closing(ShmDial(server.name, 8, 8)) as dial, closing(dial.connect(20)) as channel:
            channel.send(header)
            assert "refused" in channel.receive(20)[0], header
    assert client.push().versions == (1,) and server.pid == pid
    client.close()


def test_it_may_open_as_many_files_as_the_system_allows():
    few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(few, 512), most))
    try:
        server = ServerProcess()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))
    try:
        until(lambda: (pid := server.pid) and resource.prlimit(pid, resource.RLIMIT_NOFILE) == (most, most), 60.0)
    finally:
        server.close()


@pytest.mark.parametrize("drain_s", [0.0, 60.0])
def test_where_snapshots_cannot_be_written_that_is_said_at_the_start_or_at_the_end(
    drain_s: float, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """Once: no other server takes the place of one that has ended as it was to, and waits for workers."""
    (tmp_path / "file").touch()
    with pytest.raises(AsyncTrainingError, match=r"no parameter server can be started: .*Not a directory"):
        ServerProcess(snapshots=str(tmp_path / "file" / "folder"))
    server = ServerProcess(snapshots=str(tmp_path / "folder"), snapshot_every=3600.0)
    try:
        client = Client("a", [ShmDial(server.name, 32, 32)], timeout_s=60)
        client.gradients[0].fill_(1.0)
        client.start()
        client.close()
        shutil.rmtree(tmp_path / "folder")
        (tmp_path / "folder").touch()
    finally:
        assert server.close(drain_s) == 1
    said = capfd.readouterr().err
    assert said.count("A parameter server ends without a last snapshot: [Errno 20] Not a directory") == 1
    assert "Traceback" not in said and "has ended with" not in said


def test_with_its_supervisor_gone_another_one_begins_with_what_was_on_disk(tmp_path: Path):
    name = f"lightning_async-test-{os.getpid()}"
    with ExitStack() as opened:

        def server(every_s: float) -> ServerProcess:
            process = ServerProcess(name=name, snapshots=str(tmp_path), snapshot_every=every_s)
            opened.callback(process.close)
            return process

        first = server(0.1)
        client = Client("a", [ShmDial(name, 32, 32)], timeout_s=90)
        opened.callback(client.close, leave=False)
        client.gradients[0].fill_(1.0)
        client.start()
        assert client.push().versions == (1,)
        until(lambda: (answer := client.pull()).durable == answer.versions)
        os.kill(first.supervisor, signal.SIGKILL)
        until(lambda: not taken(name))  # its server has ended, with all that it was writing
        assert first.close() == 1
        second = server(3600.0)
        answer = client.push()
        assert (answer.versions, answer.lost, answer.durable) == ((2,), 0, (1,))
        assert client.weights[0].tolist() == [3.0] * 8
        assert second.close() == 0  # with a last snapshot
        third = server(3600.0)
        assert client.pull().durable == (2,)
        assert third.close() == 0


def taken(name: str) -> bool:
    try:
        listen(name)[0].close()
    except OSError:
        return True
    return False


def test_told_to_end_it_ends_in_the_middle_of_its_start():
    began = time.monotonic()
    server = ServerProcess()
    supervisor = server.supervisor
    server.close()
    server.close()
    assert gone(supervisor) and time.monotonic() - began < 10

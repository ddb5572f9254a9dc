"""One server's process has a table for each group of parameters: each with its own weights, optimizer and pushes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from lightning_async.comm.p2p_gloo import dial
from lightning_async.errors import Evicted, SettingsMismatch
from lightning_async.parameter_server.client import Client, forget
from lightning_async.parameter_server.partition import TABLES
from lightning_async.parameter_server.process import ServerProcess

pytestmark = pytest.mark.processes

SIZES = (5, 3)
OPTIMIZERS = (("SGD", {"lr": 0.5}), ("delta", {}))


def joined(server: ServerProcess, name: str) -> list[Client]:
    """A worker's clients, of two tables with an optimizer each; the first weights are the table's number."""
    clients = []
    for table, (size, optimizer) in enumerate(zip(SIZES, OPTIMIZERS, strict=True)):
        client = Client(name, [dial(server.address, 4 * size, 4 * size)], f"plan {table}", 60.0, table=table)
        client.gradients[0].fill_(table)
        client.start(*optimizer)
        clients.append(client)
    return clients


def pushed(clients: list[Client], value: float) -> list[list[float]]:
    found = []
    for client in clients:
        client.gradients[0].fill_(value)
        client.push()
        found.append(client.weights[0].tolist())
    return found


def closed(clients: list[Client]) -> None:
    for client in clients:
        client.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "snapshots"


def test_tables_of_one_process_know_nothing_of_each_other_and_outlive_a_kill_and_their_host(folder: Path):
    server = ServerProcess(snapshots=str(folder), snapshot_every=3600.0)
    try:
        clients = joined(server, "a")
        assert pushed(clients, 1.0) == [[-0.5] * 5, [2.0] * 3]
        assert pushed(clients[1:], 1.0) == [[3.0] * 3]
        pid = server.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert pushed(clients, 2.0) == [[-1.5] * 5, [5.0] * 3]
        assert [client.pull().versions for client in clients] == [(2,), (3,)]
        closed(clients)
    finally:
        assert server.close() == 0  # with a last snapshot of each
    assert sorted(each.name for each in folder.iterdir()) == ["server-0", "server-0-table-1"]
    server = ServerProcess(snapshots=str(folder), snapshot_every=3600.0)
    try:
        clients = joined(server, "b")
        assert [client.weights[0].tolist() for client in clients] == [[-1.5] * 5, [5.0] * 3]
        assert [client.pull().versions for client in clients] == [(2,), (3,)]
        closed(clients)
    finally:
        server.close()


def test_a_worker_that_is_lost_is_forgotten_by_all_tables_and_one_too_many_is_refused():
    server = ServerProcess()
    try:
        clients = joined(server, "a")
        forget(asked := dial(server.address, 0, 0), ["a"])
        asked.close()
        for client in clients:
            with pytest.raises(Evicted):
                client.push()
        stranger = Client("b", [dial(server.address, 4, 4)], table=TABLES)
        with pytest.raises(SettingsMismatch, match=f"there is no table {TABLES}: the server has {TABLES}"):
            stranger.start()
        closed([*clients, stranger])
    finally:
        server.close()


def test_memory_is_taken_for_the_tables_that_there_are():
    server = ServerProcess()
    try:
        clients = joined(server, "a")
        folder = f"/proc/{server.supervisor}/fd"
        named = [f"{folder}/{each}" for each in os.listdir(folder)]
        files = [
            each for each in named if "memfd:lightning_async-server" in os.readlink(each) and os.stat(each).st_size
        ]
        assert len(files) == len(SIZES)
        closed(clients)
    finally:
        server.close()

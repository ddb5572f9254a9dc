"""A store in a process of its own: real ones, and one that is killed."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
from torch.distributed import DistNetworkError

from lightning_async.membership.startup import WaitWithLog, listen, open_store
from lightning_async.membership.store import TCPStore
from lightning_async.membership.store_process import StoreProcess

pytestmark = pytest.mark.processes

LONG = 30.0


def client(port: int) -> TCPStore:
    patience = WaitWithLog(0, timedelta(seconds=LONG), lambda: None)
    return open_store("127.0.0.1", port, False, patience, timedelta(seconds=LONG))  # type: ignore[return-value]


def rank_0(outlives: bool, has_run: bool = False) -> tuple[int, int]:
    """A process that starts a store and waits to be killed; its number, and the port."""
    read, write = os.pipe()
    with listen("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        if (pid := os.fork()) == 0:
            try:
                process = StoreProcess(listening)
                listening.close()
                client(port).set("who", "rank 0")
                if outlives or has_run:
                    process.outlive()
                if has_run:
                    process.follow()
                os.write(write, b"x")
                time.sleep(LONG)
            finally:
                os._exit(1)
    assert os.read(read, 1) == b"x"
    os.close(read)
    os.close(write)
    return pid, port


def test_it_serves_on_when_rank_0_was_killed_and_ends_with_the_last_client() -> None:
    pid, port = rank_0(outlives=True)
    store = client(port)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    time.sleep(1.5)  # longer than it stays for nobody
    store.set("who", "another")
    assert store.get("who") == b"another"
    del store
    until = time.monotonic() + LONG
    while _listens(port) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _listens(port)


@pytest.mark.parametrize("has_run", [False, True])
def test_before_the_first_run_and_after_the_last_it_ends_with_rank_0(has_run: bool) -> None:
    """Those who wait for rank 0 as they start hear so at once; and the next ranks find the port free."""
    pid, port = rank_0(outlives=False, has_run=has_run)
    store = client(port)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with pytest.raises(DistNetworkError):
        store.wait(["what never comes"], timedelta(seconds=LONG))


def _listens(port: int) -> bool:
    """Without a connection, which would be a client."""
    with open("/proc/net/tcp") as table:
        return any(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A" for line in table)

"""Real servers with replicas: one is killed with -9 together with what holds its memory, while two workers push."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from lightning_async.comm.channel import Dial
from lightning_async.comm.membership.door import Door
from lightning_async.comm.membership.signing import Seal
from lightning_async.comm.membership.stores import HashStore
from lightning_async.comm.reach import dial
from lightning_async.engine.server.client import Client
from lightning_async.engine.server.places import Places
from lightning_async.engine.server.process import ServerProcess
from lightning_async.engine.server.quorum import Terms
from lightning_async.engine.server.views import View, Views
from lightning_async.rules import Dana

NUMEL, PUSHES, LOST_AFTER_S, LIMIT_S = 100_000, 30, 20.0, 150.0


class Pair:
    """Two servers, and workers of the first one's shard.

    Args:
        terms: of both.
        apart: whether all talk as if they were on hosts of their own: over Gloo.
    """

    def __init__(self, terms: Terms, apart: bool) -> None:
        self.servers = [ServerProcess(terms, host="127.0.0.1", server=number) for number in (0, 1)]
        elsewhere = {"machine": "elsewhere"} if apart else {}
        self.addresses = [{**server.address, **elsewhere} for server in self.servers]
        self.views = Views(Door(HashStore(), Seal()), "test")

    def client(self, name: str) -> Client:
        def way(address: Mapping[str, Any], whole: bool) -> Dial:
            return dial(address, 4 * NUMEL * whole, 4 * NUMEL * whole)

        places = Places(0, 0, (0, 1), self.addresses, way, self.views, LOST_AFTER_S)
        return Client(name, [places], "plan", LIMIT_S, LIMIT_S)

    def lose(self) -> None:
        """The first one, and all that it had."""
        while (pid := self.servers[0].pid) is None:
            time.sleep(0.01)
        for each in (self.servers[0].supervisor, pid):
            os.kill(each, signal.SIGKILL)

    def close(self) -> None:
        for server in self.servers:
            server.close()


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(
    ("mode", "apart"), [("async", False), ("async", True), ("sync", False), ("sync", True)],
    ids=["async-shm", "async-gloo", "sync-shm", "sync-gloo"],
)  # fmt: skip
def test_all_that_was_acknowledged_is_there_once(mode: str, apart: bool, opened: ExitStack):
    """Each push adds 1 to all elements but two, and 1 to its worker's."""
    pair = Pair(Terms(mode=mode, num_workers=2, dead_after_s=60.0), apart)
    opened.callback(pair.close)
    half_way = threading.Barrier(3)

    def work(place: int) -> tuple[list[str], int]:
        client = pair.client("ab"[place])
        opened.callback(client.close, leave=False)
        client.gradients[0].zero_()
        client.start()
        survived, lost = [], 0
        for number in range(1, PUSHES + 1):
            gradient = client.gradients[0].fill_(1.0)
            gradient[:2] = 0.0
            gradient[place] = 1.0
            if number == PUSHES // 2:
                half_way.wait(LIMIT_S)  # it is killed while both go on
            answer = client.push()
            bulk = client.weights[0][2:]
            assert bulk.min() == bulk.max() == answer.versions[0]
            assert client.weights[0][place] == (number / 2 if mode == "sync" else number)
            survived.append(answer.survives)
            lost += answer.lost
        return survived, lost

    with ThreadPoolExecutor(2) as pool:
        workers = [pool.submit(work, place) for place in (0, 1)]
        half_way.wait(LIMIT_S)
        pair.lose()
        for survived, lost in (each.result(LIMIT_S) for each in workers):
            assert survived[: PUSHES // 2 - 1] == ["replica"] * (PUSHES // 2 - 1)
            assert survived[-1] == "process" and lost == 0
    assert pair.views.newest(None) == View(1, 1)
    looks = pair.client("who looks")
    opened.callback(looks.close)
    looks.start()
    version = PUSHES if mode == "sync" else 2 * PUSHES
    assert looks.pull().versions == (version,)
    assert looks.weights[0][2:].eq(version).all()
    assert looks.weights[0][:2].tolist() == [PUSHES / 2 if mode == "sync" else PUSHES] * 2


def test_a_server_that_stands_still_is_replaced_and_refused_when_it_wakes(
    opened: ExitStack, capfd: pytest.CaptureFixture[str]
):
    """With a momentum of the worker's own; it is filled with what there is then, and is a replica."""
    pair = Pair(Terms(staleness=Dana()), apart=False)
    opened.callback(pair.close)
    client = pair.client("a")
    opened.callback(client.close, leave=False)
    places = client._lines[0]._places
    assert places is not None
    client.gradients[0].zero_()
    client.start("SGD", {"lr": 1.0, "momentum": 0.5})
    x = momentum = 0.0

    def push() -> str:
        nonlocal x, momentum
        client.gradients[0].fill_(1.0)
        answer = client.push()
        momentum = momentum * 0.5 + 1.0
        x -= momentum
        assert client.weights[0].eq(x - 0.5 * momentum).all()
        return answer.survives

    assert push() == "replica"
    pid = pair.servers[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    places.lost_after_s = 2.0
    try:
        assert push() == "process"
    finally:
        os.kill(pid, signal.SIGCONT)
    places.lost_after_s = LOST_AFTER_S
    until = time.monotonic() + LIMIT_S
    while client.pull().survives != "replica":
        assert time.monotonic() < until, "the server that was lost has no copy"
        time.sleep(0.05)
    assert push() == "replica"
    assert pair.views.newest(None) == View(1, 1)
    pair.servers[1].close()
    assert push() == "process"
    assert pair.views.newest(None) == View(2, 0)
    assert "another one has it, since generation 1" in capfd.readouterr().err

"""What is pulled of several servers is of one version: no push is seen on one of them and absent on another."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lightning_async.errors import ChannelTimeout
from lightning_async.parameter_server.client import Client
from lightning_async.parameter_server.consistency import ConsistentReads
from lightning_async.parameter_server.worker import Worker, plan_of
from tests.parameter_server.running import Running, running
from tests.parameter_server.test_server import on_threads, until
from tests.parameter_server.test_snapshots import lose_host

N = 8
FOREVER_S = 20.0


@contextmanager
def two(gloo: bool = False, **terms: Any) -> Iterator[tuple[Running, Running]]:
    with running(N, gloo, **terms) as first, running(N, gloo, **terms) as second:
        yield first, second


def joined(servers: tuple[Running, Running], name: str, consistent: bool = False, **how: Any) -> Client:
    client = servers[0].worker(name, others=servers[1:], consistent=consistent, **how)
    fill(client, [0.0] * N)
    client.start()
    return client


def fill(client: Client, values: list[float]) -> None:
    for gradient in client.gradients:
        gradient.copy_(torch.tensor(values))


def half(client: Client, server: int) -> None:
    """A push, of which one server only is told."""
    line = client._lines[server]  # pyright: ignore[reportPrivateUsage]
    header = {"do": "push", "compression": None, "lr": None, "weight": 1.0, "pull": False, "sync_point": 0, "skips": ()}
    line.ask({**header, "number": line.pushed + 1, "base": line.base}, 4 * N)
    line.reply(time.monotonic() + FOREVER_S)


def pulled(client: Client) -> list[list[float]]:
    client.pull()
    return [weights.tolist() for weights in client.weights]


@pytest.mark.parametrize("gloo", [False, True], ids=["shm", "gloo"])
def test_a_push_that_has_come_to_one_server_is_waited_for_on_the_other(gloo: bool) -> None:
    with two(gloo) as servers, ThreadPoolExecutor(2) as pool:
        writer, other = joined(servers, "w"), joined(servers, "o")
        plain, reader = joined(servers, "p"), joined(servers, "r", consistent=True)
        fill(writer, [1.0] * N)
        half(writer, 0)
        assert pulled(plain) == [[1.0] * N, [0.0] * N], "each server's own"
        reads = pool.submit(pulled, reader)
        cuts = servers[1].server._cuts  # pyright: ignore[reportPrivateUsage]
        until(lambda: (hold := cuts._holds.get("r")) and hold.cut)  # pyright: ignore[reportPrivateUsage]
        fill(other, [8.0] * N)
        pushes = pool.submit(other.push)  # it is in nobody's cut
        assert not reads.done()
        half(writer, 1)
        assert reads.result(FOREVER_S) == [[1.0] * N] * 2
        pushes.result(FOREVER_S)
        assert pulled(reader) == [[9.0] * N] * 2


@pytest.mark.parametrize("mode", ["async", "sync", "ssp"])
def test_while_pushes_race(mode: str) -> None:
    """Each element counts one worker's pushes; whoever pushes sees its own."""
    many, turns = 3, 40
    with two(mode=mode, num_workers=many) as servers:
        workers = [joined(servers, f"{i}", consistent=True) for i in range(many)]
        start = threading.Barrier(many)

        def work(place: int) -> list[tuple[int, ...]]:
            start.wait(FOREVER_S)
            versions = []
            for turn in range(turns):
                fill(workers[place], [float(many if mode == "sync" else 1) if i == place else 0.0 for i in range(N)])
                versions.append(workers[place].push().versions)
                first, second = (weights.tolist() for weights in workers[place].weights)
                assert first == second
                assert round(first[place]) == turn + 1
            workers[place].close()
            return versions

        for versions in on_threads(*[lambda i=i: work(i) for i in range(many)]):
            assert all(first == second for first, second in versions)


@pytest.mark.parametrize("consistent", [True, False])
def test_weights_as_they_are_and_those_that_are_pulled_are_of_one_version(consistent: bool) -> None:
    """A push that comes between two requests would be in the one, and not in the other."""
    with two(staleness="dana") as servers:
        named = {"a": torch.zeros(2 * N)}
        plan = plan_of(named, 2, 1)
        dials = [each.dial() for each in servers]
        worker = Worker(named, plan, Client("w", dials, plan.fingerprint(), consistent=consistent))
        other = servers[0].worker("o", fingerprint=plan.fingerprint(), others=servers[1:])
        sgd = "SGD", {"lr": 1.0, "momentum": 0.5}
        worker.start(*sgd)
        fill(other, [0.0] * N)
        other.start(*sgd)
        fill(other, [1.0] * N)
        other.push()
        client = worker.client
        ask = client._ask_all  # pyright: ignore[reportPrivateUsage]

        def ask_and_push(header: Any) -> list[dict[str, Any]]:
            replies = ask(header)
            if header["do"] == "pull":
                other.push()
            return replies

        client._ask_all = ask_and_push  # type: ignore[method-assign]  # pyright: ignore[reportPrivateUsage]
        assert worker.meet().versions == (1, 1)
        assert [each.tolist() for each in client.weights] == [[-1.0] * N] * 2, "of version 1, and not ahead of it"
        client._ask_all = ask  # type: ignore[method-assign]  # pyright: ignore[reportPrivateUsage]
        worker.close()


def test_who_holds_and_is_gone_holds_up_nobody() -> None:
    with two() as servers:
        writer, reader = joined(servers, "w"), joined(servers, "r", consistent=True)
        reader._ask_all({"do": "hold", "limit_s": 3600.0})  # pyright: ignore[reportPrivateUsage]
        fill(writer, [1.0] * N)
        with ThreadPoolExecutor(1) as pool:
            pushes = pool.submit(writer.push)
            until(lambda: servers[1].server._sessions._active_at["w"] > 1e9)  # pyright: ignore[reportPrivateUsage]
            assert not pushes.done()
            reader.close(leave=False)
            assert pushes.result(FOREVER_S).versions == (1, 1)


def test_a_hold_ends_by_itself_and_is_asked_for_again() -> None:
    """What another one had to wait for too long is not pulled in two versions."""
    with two() as servers, ThreadPoolExecutor(1) as pool:
        writer, reader = joined(servers, "w"), joined(servers, "r", consistent=True)
        fill(writer, [1.0] * N)
        half(writer, 0)
        asked: list[Any] = []
        ask = reader._ask_all  # pyright: ignore[reportPrivateUsage]

        def short(header: Any) -> Any:
            asked.append(header["do"])
            return ask({**header, "limit_s": 0.05} if header["do"] == "hold" else header)

        reader._ask_all = short  # pyright: ignore[reportPrivateUsage]
        reads = pool.submit(pulled, reader)
        until(lambda: asked.count("hold") > 2)
        half(writer, 1)
        assert reads.result(FOREVER_S) == [[1.0] * N] * 2


@pytest.mark.parametrize("goes", ["is evicted", "leaves"])
def test_what_a_worker_that_is_gone_for_good_has_said_to_one_server_only_counts_there(goes: str) -> None:
    with two(dead_after_s=3600.0) as servers, ThreadPoolExecutor(1) as pool:
        writer, reader = joined(servers, "w"), joined(servers, "r", consistent=True)
        fill(writer, [1.0] * N)
        half(writer, 0)
        reads = pool.submit(pulled, reader)
        cuts = servers[1].server._cuts  # pyright: ignore[reportPrivateUsage]
        until(lambda: (hold := cuts._holds.get("r")) and hold.cut)  # pyright: ignore[reportPrivateUsage]
        if goes == "leaves":
            writer.close()
        else:
            for server in servers:
                server.server.forget(["w"])  # pyright: ignore[reportPrivateUsage]
        assert reads.result(FOREVER_S) == [[1.0] * N, [0.0] * N]


def test_a_server_that_is_started_again_is_held_anew() -> None:
    with two() as servers, ThreadPoolExecutor(1) as pool:
        writer, reader = joined(servers, "w"), joined(servers, "r", consistent=True)
        fill(writer, [1.0] * N)
        half(writer, 0)
        reads = pool.submit(pulled, reader)
        before = servers[1].server
        until(lambda: (hold := before._cuts._holds.get("r")) and hold.cut)  # pyright: ignore[reportPrivateUsage]
        servers[1].begin()
        before.close()
        half(writer, 1)
        assert reads.result(FOREVER_S) == [[1.0] * N] * 2


def test_versions_that_do_not_come_together_are_told() -> None:
    with two() as servers:
        writer, reader = joined(servers, "w"), joined(servers, "r", consistent=True, timeout_s=1.5)
        fill(writer, [1.0] * N)
        half(writer, 0)
        with pytest.raises(ChannelTimeout, match=r"worker 'r': (its 2 servers have not come to one|server 1 has not)"):
            reader.pull()


def test_servers_that_have_lost_pushes_count_on(tmp_path: Any) -> None:
    """One of two comes back with its snapshot: what it has lost is in no cut, and what is said later is."""
    with running(N) as first, running(N, snapshots=tmp_path) as second:
        servers = (first, second)
        writer, reader = joined(servers, "w"), joined(servers, "r", consistent=True)
        fill(writer, [1.0] * N)
        writer.push()
        writer._lines[1].ask({"do": "snapshot"}, 0)  # pyright: ignore[reportPrivateUsage]
        writer._lines[1].reply(time.monotonic() + FOREVER_S)  # pyright: ignore[reportPrivateUsage]
        writer.push()
        writer.push()
        lose_host(second)
        answer = writer.pull()
        assert (answer.lost, answer.versions) == (2, (3, 1))
        assert pulled(reader) == [[3.0] * N, [1.0] * N]
        assert writer.push().versions == (4, 2)
        assert pulled(reader) == [[4.0] * N, [2.0] * N]


def test_holds_of_several_allow_what_all_of_them_want() -> None:
    now = [0.0]
    cuts, workers = ConsistentReads(lambda: now[0]), {"a": {"client": "3f"}, "b": {"client": "9c"}}
    everybody = {"r", "s"}
    assert cuts.allow({"a": 1, "b": 7}, workers, everybody)
    cuts.hold("r", 10.0)
    assert not cuts.allow({"a": 1}, workers, everybody)
    cuts.wants("r", {("a", "3f"): 2, ("b", "1d"): 9})
    assert cuts.allow({"a": 2}, workers, everybody)
    assert not cuts.allow({"a": 3}, workers, everybody)
    assert not cuts.allow({"b": 1}, workers, everybody), "that was another client of this name"
    cuts.hold("s", 20.0)
    cuts.wants("s", {("a", "3f"): 1})
    assert not cuts.allow({"a": 2}, workers, everybody)
    assert cuts.allow({"a": 1}, workers, everybody)
    assert cuts.allow({"a": 2}, workers, {"r"}), "who is not connected holds nothing"
    now[0] = 10.0
    assert not cuts.holds("r")
    assert cuts.allow({"a": 9}, workers, everybody)
    cuts.wants("r", {})  # too late
    assert cuts.allow({"a": 9}, workers, everybody)

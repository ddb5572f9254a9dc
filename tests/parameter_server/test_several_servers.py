"""A worker with several servers: each answers with its own version, and has each push once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lightning_async.parameter_server.client import Client
from lightning_async.parameter_server.worker import Worker, plan_of
from tests.parameter_server.running import Running, running
from tests.parameter_server.test_server import on_threads
from tests.parameter_server.test_snapshots import lose_host

N = 8
FOREVER_S = 20.0


@contextmanager
def two(gloo: bool = False, **terms: Any) -> Iterator[tuple[Running, Running]]:
    with running(N, gloo, **terms) as first, running(N, gloo, **terms) as second:
        yield first, second


def joined(servers: tuple[Running, Running], name: str, **how: Any) -> Client:
    client = servers[0].worker(name, others=servers[1:], **how)
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


@pytest.mark.parametrize("mode", ["async", "sync", "ssp"])
def test_each_worker_sees_its_own_pushes_on_all_servers(mode: str) -> None:
    """Each element counts one worker's pushes. In mode "sync" all servers are at one version."""
    many, turns = 3, 40
    with two(mode=mode, num_workers=many) as servers:
        workers = [joined(servers, f"{i}") for i in range(many)]
        start = threading.Barrier(many)

        def work(place: int) -> list[tuple[int, ...]]:
            start.wait(FOREVER_S)
            versions = []
            for turn in range(turns):
                fill(workers[place], [float(many if mode == "sync" else 1) if i == place else 0.0 for i in range(N)])
                versions.append(workers[place].push().versions)
                for weights in workers[place].weights:
                    assert round(weights[place].item()) == turn + 1
            workers[place].close()
            return versions

        for versions in on_threads(*[lambda i=i: work(i) for i in range(many)]):
            assert mode != "sync" or all(first == second for first, second in versions)


def test_meet_pulls_the_weights_that_its_versions_name() -> None:
    """A push that comes between two requests would be in the one, and not in the other."""
    with two(staleness="dana") as servers:
        named = {"a": torch.zeros(2 * N)}
        plan = plan_of(named, 2, 1)
        dials = [each.dial() for each in servers]
        worker = Worker(named, plan, Client("w", dials, plan.fingerprint()))
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


def test_servers_that_have_lost_pushes_count_on(tmp_path: Any) -> None:
    """One of two comes back with its snapshot, without two pushes; the next ones count on both."""
    with running(N) as first, running(N, snapshots=tmp_path) as second:
        servers = (first, second)
        writer, reader = joined(servers, "w"), joined(servers, "r")
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


@pytest.mark.parametrize("goes", ["is evicted", "leaves"])
def test_half_a_push_counts_on_the_server_that_has_it(goes: str) -> None:
    with two(dead_after_s=3600.0) as servers:
        writer, reader = joined(servers, "w"), joined(servers, "r")
        fill(writer, [1.0] * N)
        half(writer, 0)
        if goes == "leaves":
            writer.close()
        else:
            for server in servers:
                server.server.forget(["w"])
        assert pulled(reader) == [[1.0] * N, [0.0] * N]
        assert reader.pull().versions == (1, 0)

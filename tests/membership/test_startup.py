"""The start: who is missing is said, who does not belong is refused by name."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from lightning_async.errors import AsyncTrainingError, CollectiveTimeout
from lightning_async.membership import startup
from lightning_async.membership.signing import Seal
from lightning_async.membership.startup import StartAgreement, WaitWithLog, greet, is_loopback, open_store
from lightning_async.membership.store import HashStore, TCPStore, connect
from tests.comm.end_within_a_request import HOST
from tests.membership.test_membership import Clock, in_thread, until
from tests.support import free_port


def nothing() -> None:
    return None


def patience(seconds: float = 60.0, check: Callable[[], None] = nothing) -> WaitWithLog:
    return WaitWithLog(0, timedelta(seconds=seconds), check)


def say_hello(store: Any, rank: int, world_size: int, job: str = "", secret: str = "", seconds: float = 60.0) -> None:
    greet(store, rank, world_size, job, Seal(secret), patience(seconds))


@pytest.mark.parametrize("secret", ["", "of the job"])
def test_all_ranks_meet(secret: str) -> None:
    store = HashStore()
    for join in [in_thread(lambda r=r: say_hello(store, r, 3, secret=secret)) for r in range(3)]:
        join()


def test_a_wait_says_what_it_is_for_at_once_and_then_at_growing_intervals(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()

    def sleep(seconds: float) -> None:
        clock.now += seconds

    wait = WaitWithLog(1, timedelta(minutes=30), nothing, clock, sleep)
    caplog.set_level(logging.INFO)

    def forever() -> None:
        while True:
            wait.wait(lambda: "waiting for rank 3")

    with pytest.raises(CollectiveTimeout, match="rank 1: after 1800 s still waiting for rank 3"):
        forever()
    words = [(record.levelname, record.getMessage().split(" s ")[0]) for record in caplog.records]
    assert words == [
        ("INFO", "Rank 1: after 0"),
        *(("WARNING", f"Rank 1: after {s}") for s in (10, 20, 40, 80, 160, 320, 620, 920, 1220, 1520)),
    ]
    assert "giving up in 1790 s" in caplog.records[1].getMessage()


def test_missing_ranks_are_named() -> None:
    store = HashStore()
    join = in_thread(lambda: say_hello(store, 2, 4, seconds=0.3))
    until(lambda: store.check(["lightning_async/start/2"]))
    with pytest.raises(CollectiveTimeout, match=r"still waiting for rank\(s\) \[1, 3\] of 4"):
        say_hello(store, 0, 4, seconds=0.3)
    with pytest.raises(CollectiveTimeout):
        join()


def test_another_number_of_ranks_is_refused_on_both() -> None:
    store = HashStore()
    started = time.monotonic()
    join = in_thread(lambda: say_hello(store, 0, 3))
    with pytest.raises(
        AsyncTrainingError, match=r"rank 1 \(process \d+ .*and rank 0 .* differ in .*ranks there is: 2 and 3\."
    ):
        say_hello(store, 1, 2)
    with pytest.raises(AsyncTrainingError, match=r"rank 0 .*and rank 1 .*: 3 and 2\..*`devices` and `num_nodes`"):
        join()
    assert time.monotonic() - started < 30.0


def test_another_job_is_refused() -> None:
    store = HashStore()
    join = in_thread(lambda: say_hello(store, 0, 2, "job 7"))
    with pytest.raises(AsyncTrainingError, match="what job this is: 'job 8' and 'job 7'"):
        say_hello(store, 1, 2, "job 8")
    with pytest.raises(AsyncTrainingError, match="MASTER_PORT"):
        join()


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_that_are_to_begin_in_different_ways_hear_of_each_other(first: int) -> None:
    store = HashStore()
    seal = Seal("of the job")
    how = {first: "`placement='dedicated'`", 1 - first: "`placement='colocated'`", 2: "`placement='dedicated'`"}

    def begin(rank: int) -> None:
        agreement = StartAgreement(store, rank, how[rank], seal)
        wait = WaitWithLog(rank, timedelta(seconds=30), agreement.check)
        while True:
            wait.wait(lambda: "waiting for the others")

    def joins(rank: int) -> Callable[[], object]:
        return in_thread(lambda: begin(rank))

    waiting = [joins(first), joins(2)]
    time.sleep(0.1)
    began = time.monotonic()
    for join in [*waiting, joins(1 - first)]:
        with pytest.raises(
            AsyncTrainingError,
            match=rf"rank {first} has `placement='dedicated'`, and rank {1 - first} has `placement='colocated'`\.",
        ):
            join()
    assert time.monotonic() - began < 10.0


def test_ranks_that_agree_hear_of_one_that_differs_later() -> None:
    store = HashStore()
    seal = Seal("of the job")
    ranks = [StartAgreement(store, rank, "our way", seal) for rank in range(3)]
    for each in ranks:
        each.check()
    with pytest.raises(AsyncTrainingError, match="rank 0 has our way, and rank 3 has another way"):
        StartAgreement(store, 3, "another way", seal)
    for each in ranks:
        with pytest.raises(AsyncTrainingError, match="rank 0 has our way, and rank 3 has another way"):
            each.check()


def test_a_strangers_word_of_how_to_begin_is_not_heard() -> None:
    store = HashStore()
    seal = Seal("of the job")
    StartAgreement(store, 1, "some way", Seal("another"))
    StartAgreement(store, 0, "our way", seal).check()
    with pytest.raises(AsyncTrainingError, match="rank 0 has our way, and rank 2 has a third way"):
        StartAgreement(store, 2, "a third way", seal)


def test_a_rank_that_is_taken_is_refused_to_the_joining_rank_alone() -> None:
    store = HashStore()
    join = in_thread(lambda: say_hello(store, 1, 3))
    until(lambda: store.check(["lightning_async/start/1"]))
    for _ in range(10):
        with pytest.raises(AsyncTrainingError, match=r"rank 1 is taken: process \d+ on .* has it, and goes on"):
            say_hello(store, 1, 3)
    others = [in_thread(lambda r=r: say_hello(store, r, 3)) for r in (0, 2)]
    for each in (join, *others):
        each()


@pytest.mark.parametrize("value", ["no", "[]", "null", "{}", json.dumps({"world_size": 3, "job": "", "who": "me"})])
def test_a_strangers_greeting_is_nobodys(value: str) -> None:
    store = HashStore()
    store.set("lightning_async/start/1", value)
    join = in_thread(lambda: say_hello(store, 0, 2, secret="of the job"))
    time.sleep(0.1)
    say_hello(store, 1, 2, secret="of the job")
    join()


def test_waiting_ends_when_it_is_in_vain() -> None:
    def check() -> None:
        raise AsyncTrainingError("the launcher is gone")

    with pytest.raises(AsyncTrainingError, match="the launcher is gone"):
        greet(HashStore(), 0, 2, "", Seal(), patience(check=check))


# ---- where the store is ----


@pytest.mark.parametrize(
    ("address", "loopback"),
    [("127.0.0.1", True), ("127.0.1.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("a.b", False)],
)
def test_what_only_this_host_can_reach(address: str, loopback: bool) -> None:
    assert is_loopback(address) == loopback


def test_a_store_on_loopback_is_nowhere_else() -> None:
    port = free_port()
    server = open_store("127.0.0.1", port, True, patience())
    client = open_store("127.0.0.1", port, False, patience())
    client.set("a", "b")
    assert server.get("a") == b"b"
    with pytest.raises(ConnectionRefusedError):  # the same host by another of its addresses
        socket.create_connection(("127.0.0.2", port), 1.0)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            AsyncTrainingError, match=rf"cannot listen on 127.0.0.1, port {port}: .*in use.*MASTER_PORT"
        ):
            open_store("127.0.0.1", port, True, patience())


def test_a_client_may_come_first() -> None:
    port = free_port()
    join = in_thread(lambda: open_store("127.0.0.1", port, False, patience()))
    time.sleep(0.1)
    server = open_store("127.0.0.1", port, True, patience())
    join().set("a", "b")
    assert server.get("a") == b"b"


def test_an_address_where_nobody_answers_is_named() -> None:
    port = free_port()
    with pytest.raises(CollectiveTimeout, match=rf"127.0.0.1, port {port} \(.*refused\): is that rank running"):
        open_store("127.0.0.1", port, False, patience(0.2))


@pytest.mark.parametrize("stays", [False, True], ids=["it goes", "it says nothing"])
def test_what_answers_a_call_and_then_no_client_is_waited_for_in_words(
    stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that goes as a client connects, or what is none: torch would try alone, as long as requests may take."""
    monkeypatch.setattr(startup, "_CONNECTS", timedelta(seconds=0.3))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def listen() -> list[socket.socket]:
            heard = [server.accept()[0]]
            return heard if stays else [*heard, server.close()]  # type: ignore[list-item]

        join = in_thread(listen)
        with pytest.raises(CollectiveTimeout, match=rf"127.0.0.1, port {port} \(.+\): is that rank running") as raised:
            open_store("127.0.0.1", port, False, patience(1.0), timeout=timedelta(seconds=30))
        assert "\n" not in str(raised.value)
        for heard in join()[:1]:
            heard.close()


def test_a_name_that_leads_nowhere_is_named() -> None:
    with pytest.raises(CollectiveTimeout, match=r"no-such-host.invalid, port 1 \(.*known|no-such-host.invalid"):
        open_store("no-such-host.invalid", 1, False, patience(0.2))


def test_a_store_at_no_port_is_not_waited_for() -> None:
    with pytest.raises(AsyncTrainingError, match="MASTER_PORT is 0"):
        open_store("127.0.0.1", 0, False, patience())


@pytest.mark.processes
def test_another_client_of_a_store_that_stands_still_is_not_waited_for_in_torch() -> None:
    """Its host has the connection, and says nothing: torch waited without an end."""
    with subprocess.Popen([sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as host:
        try:
            assert host.stdout is not None
            port = int(host.stdout.readline())
            store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)
            os.kill(host.pid, signal.SIGSTOP)
            began = time.monotonic()
            with pytest.raises(RuntimeError):
                connect(store, timedelta(seconds=0.2))
            assert time.monotonic() - began < 20.0
        finally:
            host.kill()

"""Records of where replicas stand, through a real store."""

from __future__ import annotations

import json
import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, TCPStore

from lightning_async.membership import status
from lightning_async.membership.status import StatusPublisher, StatusRecord, publish, read_standings


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)


def until(condition: object, what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def publisher(store: TCPStore, name: str, steps: list[int], secret: str | None) -> StatusPublisher:
    mine = StatusPublisher(PrefixStore("run", PrefixStore("attempt", store)), secret, timedelta(milliseconds=20))
    mine.follow(lambda: StatusRecord(name=name, step=steps[0], state="trains"))
    return mine


@pytest.mark.parametrize("secret", [None, "a secret"])
def test_each_process_has_a_record_which_follows_it_to_its_end(store: TCPStore, secret: str | None):
    assert read_standings(store, secret) == []
    steps, both = [[3], [5]], []

    def states() -> list[str]:
        return [status.state for status in read_standings(store, secret)]

    for rank in range(2):
        both.append(publisher(store, str(rank), steps[rank], secret))
        until(lambda: len(states()) == len(both), "no record")
    assert [(s.name, s.step) for s in read_standings(store, secret)] == [("0", 3), ("1", 5)]
    assert states() == ["trains", "trains"]
    steps[1][0] = 9
    until(lambda: read_standings(store, secret)[1].step == 9, "it does not go on")
    assert read_standings(store, secret)[1].steps_per_s > 0.0
    both[1].end()
    both[1].end("failed")  # it has ended already
    both[0].end("failed")
    until(lambda: states() == ["failed", "ended"], "it does not end")
    both[0].follow(lambda: StatusRecord(name="0", run=2, state="trains"))
    until(lambda: states() == ["trains", "ended"], "it does not begin anew")
    for each in both:
        each.close()
        each.close()
    assert not [thread.name for thread in threading.enumerate() if "heartbeat" in thread.name]


def test_a_process_has_one_publisher_for_each_store(store: TCPStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(status, "_here", [])
    first = publish(PrefixStore("1", store), lambda: StatusRecord(name="0", run=1), None)
    same = TCPStore("127.0.0.1", store.port, None, False, timedelta(seconds=10), wait_for_workers=False)
    assert publish(PrefixStore("2", same), lambda: StatusRecord(name="0", run=2), None) is first
    until(lambda: [s.run for s in read_standings(store, None)] == [2], "no record")
    other = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)
    second = publish(other, lambda: StatusRecord(name="0", run=3), None)
    until(lambda: [s.run for s in read_standings(other, None)] == [3], "no record")
    assert second is not first
    second.close()
    assert not [thread.name for thread in threading.enumerate() if "heartbeat" in thread.name]


def test_what_strangers_write_is_left_out_and_without_the_secret_signatures_are(store: TCPStore):
    mine = publisher(store, "0", [1], "a secret")
    until(lambda: read_standings(store, "a secret"), "no record")
    mine.close()
    store.add("lightning_async/status/lives", 5)
    store.set("lightning_async/status/2", StatusRecord(name="1").dump().decode())
    store.set("lightning_async/status/3", "[" * 30_000)
    store.set("lightning_async/status/4", json.dumps({"name": "1", "members": "12"}))
    store.set("lightning_async/status/5", json.dumps({"name": "2", "later": 1, "step": 4}))
    assert [s.name for s in read_standings(store, "a secret")] == ["0"]
    assert [s.name for s in read_standings(store, None)] == ["0", "1", "2"]
    store.add("lightning_async/status/lives", 1 << 40)
    assert len(read_standings(store, "a secret")) == 1


def test_a_store_that_is_gone_disturbs_nobody():
    servers = [TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)]
    client = TCPStore("127.0.0.1", servers[0].port, None, False, timedelta(seconds=10), wait_for_workers=False)
    looks: list[float] = []

    def look() -> StatusRecord:
        looks.append(time.monotonic())
        return StatusRecord(name="0")

    mine = StatusPublisher(client, None, timedelta(milliseconds=5))
    mine.follow(look)
    until(lambda: read_standings(servers[0], None), "no record")
    servers.clear()
    seen = len(looks)
    until(lambda: len(looks) > seen + 4, "it does not try again")
    started = time.monotonic()
    mine.close()
    assert time.monotonic() - started < 30.0

"""Workers and dedicated servers find each other, and a server knows when nobody is left to serve."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from lightning_async.comm.p2p_gloo import answers, dial
from lightning_async.errors import AsyncTrainingError, CollectiveTimeout
from lightning_async.membership.join_protocol import JoinBoard
from lightning_async.membership.signing import Seal
from lightning_async.membership.startup import WaitWithLog
from lightning_async.membership.store import HashStore
from lightning_async.parameter_server.client import Client
from lightning_async.parameter_server.consistency import WorkerRules
from lightning_async.parameter_server.discovery import Attendance, DedicatedServer, JobBoard
from lightning_async.parameter_server.process import Shelving


class Heard:
    """What a membership hears."""

    def __init__(self) -> None:
        self.there: set[str] = set()
        self.ended: set[str] = set()

    def visitors(self) -> set[str]:
        return self.there

    def left(self) -> set[str]:
        return self.ended

    def leave(self, *names: str) -> None:
        self.there -= {*names}
        self.ended |= {*names}


class Clock:
    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


def attendance(heard: Any, clock: Clock, workers: int = 2) -> Attendance:
    return Attendance(heard, workers, 30.0, now=clock)


def test_all_have_come_and_ended() -> None:
    heard, clock = Heard(), Clock()
    tested = attendance(heard, clock)
    assert not tested.over(), "nobody has come yet"
    heard.there = {"worker-0.0", "server-1.0"}
    assert not tested.over()
    heard.leave("worker-0.0")
    assert not tested.over(), "one is yet to come"
    heard.there |= {"worker-1.0"}
    assert not tested.over()
    heard.leave("worker-1.0")
    assert tested.over(), "other servers may still be there"


def test_who_was_seen_only_after_its_end_counts() -> None:
    heard, clock = Heard(), Clock()
    tested = attendance(heard, clock)
    heard.ended = {"worker-0.0", "worker-1.0"}
    assert tested.over()


def test_one_that_dies_is_waited_for_as_long_as_it_may_live() -> None:
    heard, clock = Heard(), Clock()
    tested = attendance(heard, clock)
    heard.there = {"worker-0.0", "worker-1.0"}
    assert not tested.over()
    heard.leave("worker-0.0")
    heard.there = set()
    clock.at = 29.0
    assert not tested.over()
    clock.at = 31.0
    assert tested.over()


def test_where_some_have_come_and_nobody_is_heard_any_more() -> None:
    heard, clock = Heard(), Clock()
    tested = attendance(heard, clock, workers=3)
    heard.there = {"worker-0.0"}
    assert not tested.over()
    heard.leave("worker-0.0")
    clock.at = 29.0
    assert not tested.over()
    clock.at = 31.0
    assert tested.over()


def test_who_comes_back_is_served() -> None:
    heard, clock = Heard(), Clock()
    tested = attendance(heard, clock)
    heard.there = {"worker-0.0", "worker-1.0"}
    assert not tested.over()
    heard.leave("worker-1.0")
    heard.there |= {"worker-1.1"}
    assert not tested.over()
    heard.leave("worker-0.0", "worker-1.1")
    assert tested.over()


def test_where_no_worker_has_come_nothing_is_over() -> None:
    heard, clock = Heard(), Clock()
    tested = attendance(heard, clock)
    heard.there = {"server-0.0"}
    assert not tested.over() and tested.came == 0
    clock.at = 50.0
    assert tested.silent_s == 50.0


def board() -> JobBoard:
    return JobBoard(JoinBoard(HashStore(), Seal("a secret")))


def patience(seconds: float = 0.05) -> WaitWithLog:
    return WaitWithLog(0, timedelta(seconds=seconds), check=lambda: None)


def test_a_call_and_its_answers() -> None:
    notes, terms = board(), WorkerRules(mode="ssp", staleness="auto")
    assert notes.called() == {}
    notes.call(3, 2, terms)
    called = notes.called()
    assert (called["run"], called["servers"], called["over"]) == (3, 2, False)
    assert WorkerRules(**called["terms"]).plain() == terms.plain()
    notes.answer(3, 1, {"addresses": [{"name": "b"}]})
    with pytest.raises(CollectiveTimeout, match=r"waiting for server\(s\) \[0\] of 2"):
        notes.answers(3, 2, patience())
    notes.answer(3, 0, {"addresses": [{"name": "a"}]})
    assert notes.answers(3, 2, patience()) == [{"name": "a"}, {"name": "b"}]
    notes.dismiss(3)
    assert notes.called() == {"run": 3, "over": True}


def test_a_server_that_cannot_serve_says_why() -> None:
    notes = board()
    notes.answer(1, 0, {"error": "there is no memory"})
    with pytest.raises(AsyncTrainingError, match="server 0 cannot go on: there is no memory"):
        notes.answers(1, 1, patience())


@pytest.mark.processes
def test_who_serves_again_begins_with_the_snapshot_of_the_one_whose_memory_is_gone(tmp_path: Path) -> None:
    """The process that has started the first one is gone, too: all that it knew is on the board, and in the folder."""
    notes = board()
    notes.call(0, 1, WorkerRules(), Shelving(str(tmp_path), 0.05))
    first, second = DedicatedServer(notes, 0), DedicatedServer(notes, 0)
    try:
        first.follow()
        (address,) = notes.answers(0, 1, patience())
        client = Client("a", [dial(address, 32, 32)], timeout_s=90)
        client.gradients[0].fill_(1.0)
        client.start()
        assert client.push().versions == (1,)
        until = time.monotonic() + 60
        while (answer := client.pull()).durable != answer.versions:
            assert time.monotonic() < until
            time.sleep(0.01)
        ((_, process),) = first._own.items()
        os.kill(process.supervisor, signal.SIGKILL)
        while answers(address):  # its server has ended
            assert time.monotonic() < until
            time.sleep(0.01)
        second.follow()
        assert notes.answers(0, 1, patience()) == [address]
        answer = client.push()
        assert (answer.versions, answer.lost, client.weights[0].tolist()) == ((2,), 0, [3.0] * 8)
        assert client.lags()[0]["lost"] == 0
        client.close()
    finally:
        second.end()
        first.end()
    assert [path.name for path in tmp_path.iterdir()] == ["server-0"]

"""Who is there, and for how long, by a clock of the test's own; what a server does about late and silent workers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_async.algorithms import Bounded, Buffered, Dana, GapAware, described
from lightning_async.errors import AsyncTrainingError, Evicted, SettingsMismatch
from lightning_async.parameter_server.consistency import WorkerRules
from lightning_async.parameter_server.server import WorkerSessions
from lightning_async.parameter_server.store import Store
from tests.parameter_server.running import push, running


class Line:
    """A connection, as far as presence is concerned."""

    def __init__(self) -> None:
        self.broken = False

    def break_off(self) -> None:
        self.broken = True


def hello(presence: WorkerSessions, name: str, life: int | None) -> dict[str, Any] | None:
    header = {"life": life, "said": 0}
    return presence.hello(name, Line(), header)  # pyright: ignore[reportArgumentType]


class Clocked:
    """A store whose workers come and go at times of the test's choice."""

    def __init__(self, dead_after_s: float = 10.0) -> None:
        self.now = 100.0
        self.store = Store(os.memfd_create("test"))
        self.presence = WorkerSessions(self.store, WorkerRules(dead_after_s=dead_after_s), lambda: self.now)

    def begin(self) -> None:
        self.store.initialise(torch.zeros(3), "SGD", {"lr": 0.1, "momentum": 0.5}, policy=Dana(GapAware("gradient")))

    def hello(self, name: str, life: int | None = None) -> dict[str, Any] | None:
        return hello(self.presence, name, life)

    def push(self, name: str, sync_point: int = 0) -> set[str]:
        told = self.store.workers[name]
        self.presence.record_request(name, served=False)
        self.store.push(name, told["push"] + 1, torch.ones(3), 0)
        silent = self.presence.pushed(sync_point)
        self.presence.record_request(name)
        return silent


@pytest.fixture
def clocked() -> Iterator[Clocked]:
    found = Clocked()
    yield found
    found.store.close()


def test_one_that_is_silent_while_others_push_is_found(clocked: Clocked):
    for name in "abc":
        clocked.hello(name)
    clocked.begin()
    silent = set[str]()
    for second in range(1, 16):
        clocked.now += 1.0
        clocked.presence.record_request("c")  # a pull
        silent = clocked.push("a")
        assert silent == ({"b"} if second > 10 else set()), second
    clocked.presence.forget(*silent)
    assert clocked.store.workers.keys() == {"a", "c"}
    assert clocked.hello("b", life=2) is None  # it wakes
    told = clocked.hello("b")
    assert told is not None and told["life"] == 4 and told["push"] == 0


def test_a_pause_of_all_is_nobodys_silence(clocked: Clocked):
    for name in "ab":
        clocked.hello(name)
    clocked.begin()
    clocked.push("a")
    clocked.push("b")
    for _ in range(8):
        clocked.now += 1000.0  # a validation
        assert clocked.push("a") == set()
    for found in (set(), set(), {"b"}):  # by a second at most, each time
        clocked.now += 1.5
        assert clocked.push("a") == found


def test_those_whose_server_is_started_again_in_a_pause_of_all_come_back(clocked: Clocked):
    """As in a validation that takes longer than anybody is waited for."""
    for name in "ab":
        clocked.hello(name)
    clocked.begin()
    clocked.push("a")
    clocked.presence = WorkerSessions(clocked.store, WorkerRules(dead_after_s=10.0), lambda: clocked.now)
    clocked.now += 1000.0
    assert clocked.hello("a", life=1) is not None
    assert clocked.push("a") == set()
    assert not clocked.presence.sweep()
    assert clocked.hello("b", life=2) is not None


def test_one_that_is_being_answered_is_not_silent(clocked: Clocked):
    for name in "ab":
        clocked.hello(name)
    clocked.begin()
    clocked.presence.record_request("b", served=False)  # it waits for others
    for _ in range(30):
        clocked.now += 1.0
        assert clocked.push("a") == set()
    clocked.presence.record_request("b")
    clocked.now += 1.0
    assert clocked.push("a") == set()


def test_one_that_rests_is_silent_only_for_those_who_come_from_beyond(clocked: Clocked):
    for name in "ab":
        clocked.hello(name)
    clocked.begin()
    clocked.presence.rest("b", 3)
    for sync_point, found in ((3, set()), (4, {"b"})):
        for _ in range(11):
            clocked.now += 1.0
            assert not clocked.push("a", sync_point) - found
        assert clocked.push("a", sync_point) == found


def test_one_that_is_away_may_come_back_for_a_while(clocked: Clocked):
    for name in "ab":
        clocked.hello(name)
    clocked.begin()
    clocked.push("a")
    clocked.push("b")
    for _ in range(3):
        clocked.presence.away("b")
        assert not clocked.store.workers["b"]["live"] and clocked.store.workers["b"]["slot"] == 1
        clocked.now += 9.0
        assert not clocked.presence.sweep()
        told = clocked.hello("b", life=2)
        assert told is not None and told["push"] == 1
    clocked.presence.away("b")
    for _ in range(10):
        clocked.now += 1.0
        assert not clocked.presence.sweep()
    clocked.now += 1.0
    assert clocked.presence.sweep() and not clocked.presence.sweep()
    assert clocked.store.workers.keys() == {"a"}
    assert clocked.hello("b", life=2) is None


def test_after_a_restart_all_have_as_long_again_to_come(clocked: Clocked):
    for name in "ab":
        clocked.hello(name)
    clocked.begin()
    clocked.push("a")
    clocked.now += 1000.0
    again = WorkerSessions(clocked.store, WorkerRules(dead_after_s=10.0), lambda: clocked.now)
    for _ in range(9):
        clocked.now += 1.0
        assert not again.sweep()
    assert hello(again, "a", 1) is not None
    swept = []
    for _ in range(2):
        clocked.now += 1.0
        swept.append(again.sweep())
    assert swept == [False, True]
    assert clocked.store.workers.keys() == {"a"}


def test_before_the_first_update_it_is_remembered_who_has_come(clocked: Clocked):
    for name in "ab":
        clocked.hello(name)
    clocked.begin()
    clocked.presence.forget("b")
    assert clocked.store.workers.keys() == {"a", "b"} and not clocked.store.workers["b"]["live"]
    assert clocked.hello("b", life=2) is None
    told = clocked.hello("c")
    assert told is not None and told["life"] == 4


SGD: tuple[str, dict[str, Any]] = ("SGD", {"lr": 0.5, "momentum": 0.5})


def test_a_silent_worker_is_evicted_while_another_pushes_and_fenced_when_it_wakes():
    with running(dead_after_s=0.2, staleness="auto") as server:
        a, b = server.started("a", *SGD), server.started("b", *SGD)
        began = time.monotonic()
        push(b, 1.0)
        slots = server.store.workers["b"]["slot"]
        while "b" in server.store.workers:
            push(a, 1.0)
            assert time.monotonic() - began < 30, "it is not evicted"
        assert time.monotonic() - began >= 0.2
        with pytest.raises(Evicted, match="worker 'b' was taken for dead"):
            push(b, 1.0)
        again = server.started("b", *SGD)
        push(again, 1.0)
        assert server.store.workers["b"]["slot"] == slots


def test_who_begins_anew_fences_those_that_train_with_what_was_there():
    with running() as server:
        a, b = server.started("a"), server.started("b")
        push(a, 1.0)
        push(a, 1.0)
        b.gradients[0].fill_(7.0)
        assert b.start(anew=True).versions == (0,)
        with pytest.raises(Evicted, match="another training has begun anew with the same servers"):
            push(a, 1.0)
        assert push(b, 1.0).tolist() == [8.0] * 8


def test_a_worker_that_leaves_is_forgotten_with_what_it_had():
    with running(staleness=Dana()) as server:
        a, b = server.started("a", *SGD), server.started("b", *SGD)
        for client in (a, b):
            push(client, 1.0)
        size = os.fstat(server.file).st_blocks
        b.close()
        assert server.store.workers.keys() == {"a"}
        assert os.fstat(server.file).st_blocks < size
        assert server.store.state["momentum_buffer"].tolist() == [1.0] * 8  # of a alone
        # x is -0.5 of both, and a's momentum leads a quarter further
        a.pull()
        assert a.weights[0].tolist() == [-1.25] * 8


def test_what_is_pulled_looks_ahead_and_what_is_read_does_not():
    with running(staleness=Dana()) as server:
        a = server.started("a", *SGD)
        assert push(a, 2.0).tolist() == [-1.5] * 8
        (told,) = a.read("params")
        assert a.weights[0].tolist() == [-1.0] * 8
        assert told["fields"] == ["params", "momentum_buffer"]


def test_pushes_that_are_too_late_are_dropped_and_counted():
    with running(staleness=Bounded(2)) as server:
        a, b = server.started("a"), server.started("b")
        for _ in range(3):
            push(a, 1.0)
        b.gradients[0].fill_(5.0)
        answer = b.push()
        assert (answer.lags, answer.dropped, answer.versions) == ((3,), (True,), (3,))
        assert b.weights[0].tolist() == [3.0] * 8
        answer = b.push()
        assert (answer.lags, answer.dropped, answer.versions) == ((0,), (False,), (4,))
        assert a.lags() == ({"counts": {0: 4, 3: 1}, "mean": pytest.approx(0.6), "dropped": 1},)


def test_pushes_are_gathered_until_there_are_enough():
    with running(staleness=Buffered(3)) as server:
        a, b = server.started("a"), server.started("b")
        assert push(a, 1.0).tolist() == push(b, 2.0).tolist() == [0.0] * 8
        before = server.server
        server.begin()  # it is in memory that outlives the server
        before.close()
        assert push(a, 6.0).tolist() == [3.0] * 8
        assert server.store.version == 1


def test_all_must_mean_the_same_policy():
    with running(staleness="auto") as server:
        a = server.worker("a")
        a.gradients[0].zero_()
        a.start(*SGD, staleness="auto")
        assert server.store.contents["staleness"] == described(Dana(GapAware("gradient")))
        server.worker("b").start(*SGD, staleness=Dana(GapAware("gradient")))
        server.worker("c").start(*SGD)
        with pytest.raises(SettingsMismatch, match=r"`staleness` is \{.*'NoCorrection'.* and 'auto' on the server"):
            server.worker("d").start(*SGD, staleness="none")


def test_dana_without_momentum_is_refused_and_the_server_lives():
    with running(staleness="dana") as server:
        with pytest.raises(SettingsMismatch, match="has no momentum that each worker could have"):
            server.worker("a").start("Adam", {})
        push(server.started("a", *SGD), 1.0)


def test_there_may_be_no_memory_for_one_worker_more(monkeypatch: pytest.MonkeyPatch):
    with running(staleness=GapAware()) as server:
        a, b = server.started("a"), server.worker("b")
        push(a, 1.0)

        def full(*where: int) -> None:
            raise OSError("No space left")

        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(AsyncTrainingError, match=r"no memory for what .staleness=GapAware\(.* keeps of 'b'"):
                b.start()
        push(a, 1.0)
        assert push(server.started("c"), 0.0).tolist() == [2.0] * 8


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"mode": "sync", "staleness": "dana"}, ValueError, "pushes of mode='sync' are not late"),
        ({"staleness": "dc"}, ValueError, "`staleness='dc'` must be a policy"),
        ({"staleness": 3}, TypeError, "`staleness=3`"),
    ],
)
def test_terms_that_are_refused(arguments: dict[str, Any], error: type[Exception], match: str):
    with pytest.raises(error, match=match):
        WorkerRules(**arguments)


@pytest.mark.parametrize("staleness", ["none", "auto", Dana(GapAware("gradient")), Bounded(4), "fedbuff"], ids=str)
def test_terms_travel_in_json(staleness: Any):
    terms = WorkerRules(mode="ssp", staleness=staleness)
    again = WorkerRules(**terms.plain())
    assert again.plain() == terms.plain()
    assert again.policy(*SGD) == terms.policy(*SGD)
    assert WorkerRules(mode="sync", staleness="auto").policy(*SGD) == WorkerRules().policy(*SGD)

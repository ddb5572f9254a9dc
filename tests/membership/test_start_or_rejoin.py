"""Who begins with all, and who comes back to others: by what lies in the store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from lightning_async.errors import AsyncTrainingError, CollectiveTimeout
from lightning_async.membership.launcher_channel import REJOIN, attempt, came_back
from lightning_async.membership.startup import Assembly, ProcessRole, WaitWithLog
from lightning_async.membership.status import ENDED, FAILED, StatusPublisher, StatusRecord
from lightning_async.strategies.base import asks_the_store
from tests.membership.test_membership import in_thread

Publish = Callable[..., list[StatusRecord]]


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)


@pytest.fixture
def trains(store: TCPStore) -> Iterator[Publish]:
    """``trains("0", "2")``: rank 0 tells from now on that it trains with rank 2. What it returns can be replaced."""
    publishers: list[StatusPublisher] = []

    def begin(*members: str, state: str = "trains", secret: str | None = None) -> list[StatusRecord]:
        said = [StatusRecord(name=members[0], members=members, state=state)]
        publishers.append(StatusPublisher(store, secret, timedelta(milliseconds=20)))
        publishers[-1].follow(lambda: said[-1])
        return said

    yield begin
    for each in publishers:
        each.close()


def client_of(store: TCPStore) -> TCPStore:
    return TCPStore("127.0.0.1", store.port, None, False, timedelta(seconds=10), wait_for_workers=False)


def patience(rank: int, seconds: float = 60.0) -> WaitWithLog:
    return WaitWithLog(rank, timedelta(seconds=seconds), lambda: None)


def come(store: TCPStore, rank: int, secret: str | None = None, seconds: float = 60.0) -> ProcessRole:
    """Of two."""
    return Assembly(client_of(store), rank, 2, secret).find(patience(rank, seconds))


def both_come(store: TCPStore, secret: str | None = None) -> list[ProcessRole]:
    return [join() for join in [in_thread(lambda r=r: come(store, r, secret)) for r in range(2)]]


@pytest.mark.parametrize("secret", [None, "a secret"])
def test_all_begin_together_each_time_that_all_are_started(store: TCPStore, secret: str | None):
    for number in range(3):
        assert both_come(store, secret) == [ProcessRole(number, 0)] * 2


def test_one_that_waits_is_not_deceived_by_what_a_dead_one_has_left(store: TCPStore):
    with pytest.raises(CollectiveTimeout, match=r"rank 1: .* waiting for rank\(s\) \[0\] of 2 to be started, too"):
        come(store, 1, seconds=0.3)
    with pytest.raises(CollectiveTimeout, match=r"rank 0: .* waiting for rank\(s\) \[1\] of 2 to be started, too"):
        come(store, 0, seconds=0.3)
    assert both_come(store) == [ProcessRole(0, 0)] * 2


@pytest.mark.parametrize("secret", [None, "a secret"])
def test_one_that_was_lost_comes_back_to_those_who_train(store: TCPStore, trains: Publish, secret: str | None):
    both_come(store, secret)
    trains("0", secret=secret)
    assert come(store, 1, secret) == ProcessRole(0, 1)
    assert come(store, 1, secret) == ProcessRole(0, 2)


def test_it_waits_while_it_is_not_lost_yet(store: TCPStore, trains: Publish):
    for _ in range(2):
        both_come(store)
    said = trains("0", "1")
    with pytest.raises(CollectiveTimeout):
        come(store, 1, seconds=1.5)
    said.append(StatusRecord(name="0", members=("0",), state="trains"))
    assert come(store, 1).attempt == 1


@pytest.mark.parametrize("state", [ENDED, FAILED])
def test_those_who_have_ended_train_no_more(store: TCPStore, trains: Publish, state: str):
    trains("0", state=state)
    with pytest.raises(CollectiveTimeout):
        come(store, 1, seconds=1.5)


def test_all_begin_anew_where_those_who_went_on_have_died(store: TCPStore):
    """What they have said is left, and so is that the one that came back to them had waited for a start of all."""
    both_come(store)
    publisher = StatusPublisher(store, None, timedelta(milliseconds=20))
    publisher.follow(lambda: StatusRecord(name="0", members=("0",), state="trains"))
    try:
        assert come(store, 1) == ProcessRole(0, 1)
    finally:
        publisher.close()
    with pytest.raises(CollectiveTimeout, match=r"\[1\]"):
        come(store, 0, seconds=1.5)
    assert both_come(store) == [ProcessRole(1, 0)] * 2


def all_here(store: TCPStore, secret: str | None = None) -> list[Assembly]:
    """Both have come, and begin."""
    assemblies = [Assembly(client_of(store), rank, 2, secret, settle=timedelta(0)) for rank in range(2)]
    for join in [in_thread(lambda a=a, r=r: a.find(patience(r))) for r, a in enumerate(assemblies)]:
        join()
    return assemblies


@pytest.mark.parametrize("secret", [None, "a secret"])
def test_one_that_comes_back_when_all_others_have_ended_in_order_hears_so(store: TCPStore, secret: str | None):
    first, _ = all_here(store, secret)
    with pytest.raises(CollectiveTimeout):
        Assembly(client_of(store), 1, 2, secret, settle=timedelta(0)).find(patience(1, 1.5))  # the other one trains
    first.end()
    with pytest.raises(CollectiveTimeout):
        come(store, 1, secret, seconds=1.5)  # as long as others may be about to be started again
    with pytest.raises(AsyncTrainingError, match=r"rank 1: rank\(s\) \[0\] have ended their training in order"):
        Assembly(client_of(store), 1, 2, secret, settle=timedelta(seconds=0.1)).find(patience(1))
    with pytest.raises(CollectiveTimeout):
        come(store, 0, secret, seconds=0.3)  # a process that was started again, and has ended otherwise
    with pytest.raises(CollectiveTimeout):
        Assembly(client_of(store), 1, 2, secret, settle=timedelta(0)).find(patience(1, 1.5))
    assert both_come(store, secret) == [ProcessRole(1, 0)] * 2


def test_where_all_had_ended_in_order_the_first_that_is_started_again_waits_for_the_others(store: TCPStore):
    for each in all_here(store):
        each.end()
    with pytest.raises(CollectiveTimeout):
        Assembly(client_of(store), 1, 2, None, settle=timedelta(0)).find(patience(1, 1.5))
    assert both_come(store) == [ProcessRole(1, 0)] * 2


def test_an_end_is_told_by_no_fork_and_no_stranger_and_where_the_store_is_gone_by_nobody(store: TCPStore):
    first, _ = all_here(store, "a secret")
    stranger, _ = all_here(store, "another one")
    first._pid += 1
    first.end()
    stranger.end()
    with pytest.raises(CollectiveTimeout):
        Assembly(client_of(store), 1, 2, "a secret", settle=timedelta(0)).find(patience(1, 1.5))
    gone = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)
    lone = Assembly(client_of(gone), 0, 2, None)
    del gone
    lone.end()


def test_a_stranger_is_not_one_of_them(store: TCPStore):
    store.set("lightning_async/assembly/next", "7")
    join = in_thread(lambda: come(store, 0, "a secret", seconds=1.0))
    with pytest.raises(CollectiveTimeout):
        come(store, 1, "another one", seconds=1.0)
    with pytest.raises(CollectiveTimeout, match=r"\[1\]"):
        join()
    assert both_come(store, "a secret") == [ProcessRole(0, 0)] * 2


AGENTS = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("variables", "asks"),
    [
        ({**AGENTS, "WORLD_SIZE": "2"}, True),
        ({**AGENTS, "WORLD_SIZE": "1"}, False),
        ({**AGENTS, "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, False),
        ({**AGENTS, "WORLD_SIZE": "2", REJOIN: "torchrun"}, False),
        ({**AGENTS, "WORLD_SIZE": "2", REJOIN: "0@0"}, False),  # it has said so
        ({**AGENTS, "WORLD_SIZE": "2", "LIGHTNING_ASYNC_LAUNCHER_FD": "3:1:2"}, False),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True"}, False),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True", REJOIN: "2"}, False),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True", REJOIN: "auto"}, True),
        ({}, False),
    ],
)
def test_the_store_is_asked_where_nobody_else_knows(variables: dict[str, str], asks: bool):
    assert asks_the_store(variables) is asks


def test_a_store_that_dies_with_rank_0_cannot_be_asked():
    with pytest.raises(ValueError, match="LIGHTNING_ASYNC_REJOIN=auto needs a store that outlives rank 0"):
        asks_the_store({REJOIN: "auto", "TORCHELASTIC_USE_AGENT_STORE": "False"})


@pytest.mark.parametrize(("told", "expected"), [("0@3", (None, "3")), ("2@0", (2, "0")), ("auto", (None, "7"))])
def test_what_it_has_said_is_what_the_process_is(
    told: str, expected: tuple[int | None, str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(REJOIN, told)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "7")
    assert (came_back(), attempt()) == expected
    assert os.environ[REJOIN] == told

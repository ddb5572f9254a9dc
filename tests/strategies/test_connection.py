"""The end of a run in which another rank has ended before."""

from __future__ import annotations

import logging
import os
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_async.comm.torch_collectives import TorchCollectives
from lightning_async.errors import Evicted, PeerLost, StoreLost
from lightning_async.membership.membership import Membership
from lightning_async.membership.store import HashStore
from lightning_async.strategies.async_strategy import AsyncStrategy
from lightning_async.transports import base
from lightning_async.transports.base import Connection
from tests.membership.test_membership import in_thread, until


def connections() -> list[Connection]:
    store = HashStore()
    memberships = [Membership(store, rank, 2, fresh=True) for rank in range(2)]
    roots = [TorchCollectives(store, rank, 2, timeout=timedelta(seconds=20)) for rank in range(2)]
    for membership in memberships:
        membership.start()
    made = [Connection(root, root, membership) for root, membership in zip(roots, memberships, strict=True)]
    for join in [in_thread(connection.open) for connection in made]:
        join()
    until(
        lambda: all(
            membership._failure_detector.peers[str(1 - rank)].confirmed for rank, membership in enumerate(memberships)
        )
    )
    return made


def test_the_last_barrier_names_who_is_gone_in_one_short_line(caplog: pytest.LogCaptureFixture) -> None:
    first, second = connections()
    second.membership.fail("ValueError: the data ran dry.")
    second.close(in_order=False)
    caplog.clear()
    began = time.monotonic()
    first.close(in_order=True)
    assert time.monotonic() - began < 25.0, "not for as long as the barrier may take"
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line == "Rank 0 has ended its run; another rank has not: rank 1 failed: ValueError: the data ran dry."


def test_the_stores_host_goes_last_where_others_have_to_hear_why() -> None:
    """Else a rank that reads the store a moment later knows only that rank 0 is gone."""
    first, second = connections()
    first.membership.fail("ValueError: the data ran dry.")
    join = in_thread(lambda: first.close(in_order=False))
    until(lambda: second.membership.lost() == ("0",))
    assert first.membership._heartbeat_thread.beats, "it waits for the other one"
    second.close(in_order=False)
    join()
    assert not first.membership._heartbeat_thread.beats
    assert first.membership.left() == {"1"}


def test_the_stores_host_waits_for_nobody_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_OUTLIVES_S", 0.3)
    first, second = connections()
    began = time.monotonic()
    first.close(in_order=False)
    assert time.monotonic() - began >= 0.3
    second.close(in_order=False)


@pytest.mark.parametrize(
    ("error", "waits"), [(StoreLost("no answer"), False), (Evicted("without it"), False), (PeerLost("rank 1"), True)]
)
def test_the_stores_host_waits_for_nobody_who_cannot_hear(error: Exception, waits: bool) -> None:
    connection = SimpleNamespace(world=SimpleNamespace(asynchronous=False), outlives=True)
    strategy: Any = SimpleNamespace(sync_points=None, failed=False, _connection=connection)
    AsyncStrategy.on_exception(strategy, error)
    assert (strategy.failed, connection.world.asynchronous, connection.outlives) == (True, True, waits)


@pytest.mark.processes
def test_a_fork_closes_nothing_of_its_parents() -> None:
    made = connections()
    if (pid := os.fork()) == 0:
        for connection in made:
            connection.close(in_order=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    for join in [in_thread(lambda c=c: c.root.barrier().result()) for c in made]:
        join()
    for join in [in_thread(lambda c=c: c.close(in_order=True)) for c in made]:
        join()

"""What workers tell their servers besides."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
import torch

from lightning_async.comm.p2p_gloo import address_of
from lightning_async.errors import AsyncTrainingError, ChannelTimeout, PeerLost
from lightning_async.parameter_server.client import forget
from lightning_async.parameter_server.partition import ServerPartition
from lightning_async.strategies import server_lifecycle
from lightning_async.strategies.server_lifecycle import Servers
from tests.parameter_server.running import push, running


def test_a_server_that_is_started_again_is_told_who_was_lost_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all would wait for a worker of whom it has kept that it lives."""
    failures = [ChannelTimeout("it is being started."), ChannelTimeout("still.")]

    def failing(*told: Any) -> None:
        if failures:
            raise failures.pop()
        forget(*told)

    monkeypatch.setattr(server_lifecycle, "forget", failing)
    with running(mode="sync", num_workers=2) as server, ThreadPoolExecutor(2) as pool:
        a, b = server.started("a"), server.started("b")
        both = [pool.submit(push, a, 1.0), pool.submit(push, b, 3.0)]
        assert all(each.result(20).tolist() == [2.0] * 8 for each in both)
        waits = pool.submit(push, a, 1.0)
        Servers([address_of(server.name)]).forget(["b"])
        assert waits.result(20).tolist() == [3.0] * 8
    assert not failures


def test_a_server_of_this_training_that_nobody_supervises_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was started elsewhere may come back; who was stopped, and has lost all of them, hears of that first."""
    plan = ServerPartition.of({"weight": torch.zeros(8)}, 1, 10)
    for of_this_run, error, words in (
        (True, AsyncTrainingError, "server 0 is gone for good"),
        (False, PeerLost, "nobody answers"),
    ):
        monkeypatch.setattr(server_lifecycle, "_GONE_S", 10.0)
        (dial,) = Servers([address_of("lightning_async-nobody")], of_this_run=of_this_run).dials(plan)
        with closing(dial):
            with pytest.raises(PeerLost, match="nobody answers"):
                dial.connect(1.0)
            monkeypatch.setattr(server_lifecycle, "_GONE_S", 0.0)
            with pytest.raises(error, match=words) as raised:
                dial.connect(1.0)
        assert type(raised.value) is error

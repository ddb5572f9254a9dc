"""What the launcher of plain `python` says of a process that has ended, where training goes on without its rank."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_async import AsyncAveragingStrategy
from lightning_async.membership.generation import Generation
from lightning_async.strategies import rank_mapping
from lightning_async.strategies.rank_mapping import RankMap
from lightning_async.transports.base import Connection


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_mapping, "_here", [])
    monkeypatch.setattr(rank_mapping, "number_rank", lambda rank: None)


def strategy(min_replicas: int, world_size: int) -> tuple[Any, list[str]]:
    """Rank 0 of so many, in a run, and whose deaths it has reported."""
    own: Any = AsyncAveragingStrategy(min_replicas=min_replicas, transport="torch")
    own.parallel_devices, reported = [None] * world_size, []
    own._environment = SimpleNamespace(node_rank=lambda: 0, world_size=lambda: world_size)
    membership: Any = SimpleNamespace(
        report_death=lambda name, text: reported.append(name),
        check=lambda: None,
        dead_after=timedelta(seconds=1),
        behind=lambda call: (),
    )
    root: Any = SimpleNamespace(fork=lambda name: SimpleNamespace(rank=0, world_size=world_size))
    own.use(Connection(root, root, membership), 1)
    own.live_ranks = RankMap(Generation.first(0, world_size), 1, min_replicas)
    return own, reported


def test_the_end_of_one_without_which_the_others_go_on_already_ends_nobody() -> None:
    own, reported = strategy(2, 3)
    own.live_ranks.go_on(Generation(1, ("0", "2"), 0), "rank 1 failed")  # before its process has ended
    assert own._child_died(1, 1) is None
    own._connection = None  # as after a fit
    assert own._child_died(1, 1) is None
    assert not reported


def test_one_more_than_may_be_lost_ends_the_others() -> None:
    own, reported = strategy(2, 3)
    own.live_ranks.go_on(Generation(1, ("0", "2"), 0), "rank 1 failed")
    assert isinstance(own._child_died(2, 1), timedelta)
    assert reported == ["2"]


def test_in_a_later_run_it_is_reported_by_the_name_that_it_has_there(monkeypatch: pytest.MonkeyPatch) -> None:
    own, reported = strategy(1, 4)
    own.live_ranks.go_on(Generation(1, ("0", "2", "3"), 0), "rank 1 failed")
    connection, names = own._connection, []
    hear_deaths = connection.hear_deaths
    connection.hear_deaths = lambda name_of: names.append(name_of) or hear_deaths(name_of)
    monkeypatch.setattr(type(own), "root_device", None)
    object.__setattr__(own, "transport", SimpleNamespace(connect=lambda *_, **__: connection))
    own.connect_ranks()
    assert own._child_died(2, -9) is None
    assert reported == ["1"]  # "2" would be the name of the rank that was started as 3, and lives
    assert [names[0](rank) for rank in (0, 2, 3)] == ["0", "1", "2"]  # for what another launcher says of them
    with pytest.raises(ValueError, match="not in"):
        names[0](1)
    own.live_ranks = RankMap(Generation.first(0, 3), 2, 1, own.live_ranks)
    assert own._child_died(3, -9) is None
    assert reported == ["1", "2"]

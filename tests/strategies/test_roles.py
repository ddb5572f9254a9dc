"""Who trains and who serves: by number, and by arguments."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_async import ParameterServerStrategy, ServerOptions


class Ranks:
    """What a launcher says."""

    main_address, main_port = "127.0.0.1", 29500

    def __init__(self, rank: int, size: int, started_as: int | None = None) -> None:
        self._rank, self._size = rank, size
        if started_as is not None:
            self.started_as = started_as

    def global_rank(self) -> int:
        return self._rank

    def world_size(self) -> int:
        return self._size


@pytest.mark.parametrize(
    ("environment", "role"),
    [
        (Ranks(0, 5), ("worker", 0)),
        (Ranks(2, 5), ("worker", 2)),
        (Ranks(3, 5), ("server", 0)),
        (Ranks(4, 5), ("server", 1)),
        (Ranks(4, 5, started_as=1), ("worker", 1)),
        (Ranks(4, 5, started_as=3), ("server", 0)),
        (Ranks(5, 5), ("worker", 5)),
    ],
)
def test_the_last_ranks_serve(environment: Ranks, role: tuple[str, int]) -> None:
    roles = ParameterServerStrategy(placement="dedicated", num_servers=2).roles
    assert (roles.num_serving, roles.of(environment)) == (2, role)
    assert roles.reached_at(environment, num_nodes=1) is None
    assert roles.reached_at(environment, num_nodes=2) == "127.0.0.1"
    assert not roles.is_alone(1)


def test_all_ranks_train() -> None:
    roles = ParameterServerStrategy(num_servers=2).roles
    assert not roles.dedicated
    assert (roles.num_serving, roles.of(Ranks(1, 2))) == (0, ("worker", 1))
    assert roles.of(Ranks(2, 2)) == ("worker", 2), "it comes with a number that nobody had"
    assert roles.is_alone(1) and not roles.is_alone(2)
    assert not ParameterServerStrategy(options=ServerOptions(server_address="a:1")).roles.is_alone(1)


@pytest.mark.parametrize("copied", [lambda each: pickle.loads(pickle.dumps(each)), copy.deepcopy])
def test_a_strategy_that_a_spawned_rank_gets_asks_for_its_own_place(copied: Callable[[Any], Any]) -> None:
    first = ParameterServerStrategy(placement="dedicated")
    second = copied(first)
    second._environment = Ranks(1, 2)
    assert second.job._place().global_rank() == 1
    assert first.cluster_environment is None


def test_snapshots_stay_where_they_were_when_the_program_goes_to_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ServerOptions(snapshots="kept")
    monkeypatch.chdir("/")
    assert options.folder == str(tmp_path / "kept")

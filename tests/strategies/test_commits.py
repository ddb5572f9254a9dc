"""Which commit the ranks of a new world go on from, whoever they were; without Horovod, by in-process ranks."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_async import AsyncAveragingStrategy, AsyncGradientStrategy, HorovodStrategy, TorchTransport
from lightning_async.engine.collectives import LightningCollectives
from lightning_async.errors import SettingsMismatch
from lightning_async.horovod.collectives import Committed
from lightning_async.horovod.elastic import Commit, Commits, agree, fit_elastic
from tests.comm.simulated import InProcessWorld
from tests.horovod import needs_horovod


def meet(commits: list[Commit], settings: list[str] | None = None) -> list[Any]:
    told = settings or ["alike"] * len(commits)

    def on_rank(collectives: Any) -> Any:
        try:
            return agree(LightningCollectives(collectives), commits[collectives.rank], told[collectives.rank])
        except SettingsMismatch as error:
            return error

    return InProcessWorld(len(commits)).run(on_rank, timedelta(seconds=40))


def commit(number: int, rank: int, ranks: int) -> Commit:
    resume = {"random": {"torch": bytes([rank])}, "own": torch.tensor([float(rank)])}
    return Commit(number=number, dealt=(rank, ranks), checkpoint={"global_step": number}, resume=resume, weight=0.5)


def test_the_same_ranks_go_on_exactly_each_from_its_own() -> None:
    commits = [commit(3, rank, 3) for rank in range(3)]
    assert meet(commits) == [(each, True) for each in commits]
    fresh = [Commit()] * 2
    assert [each for each, _ in meet(fresh)] == fresh, "before the first commit"


def test_those_that_are_left_keep_their_own_and_are_dealt_to_anew() -> None:
    commits = [commit(3, 0, 3), commit(3, 2, 3)]
    assert meet(commits) == [(each, False) for each in commits]


@pytest.mark.parametrize("other", [Commit(), commit(2, 1, 2), commit(4, 1, 2)], ids=["new", "behind", "ahead"])
def test_one_that_holds_another_commit_takes_that_of_rank_0(other: Commit) -> None:
    (first, exact), (second, also) = meet([commit(3, 0, 2), other])
    assert not exact and not also
    assert first.dealt == (0, 2) and second.number == first.number == 3
    assert second.checkpoint == {"global_step": 3} and second.places == first.places
    assert second.resume is not None and float(second.resume["own"]) == 0.0
    assert set(second.resume["random"]) == {"seed"}, "random numbers of its own"


def test_one_that_trains_otherwise_ends_and_the_others_go_on() -> None:
    first, second, third = meet([commit(1, rank, 3) for rank in range(3)], ["every 5", "every 5", "every 7"])
    assert first[0].number == second[0].number == 1
    assert isinstance(third, SettingsMismatch)
    assert "Rank 2" in str(third) and "every 7" in str(third) and "every 5" in str(third)


def test_commits_are_some_steps_apart() -> None:
    with pytest.raises(ValueError, match=r"fit_elastic\(commit_every=0\)` must be >= 1"):
        fit_elastic(lambda: None, None, commit_every=0)  # type: ignore[arg-type]


@needs_horovod
def test_what_horovod_cannot_carry_is_refused_by_name() -> None:
    def check_carried(strategy: Any) -> None:
        Commits(Committed(Commit()), 1, SimpleNamespace(strategy=strategy))

    check_carried(HorovodStrategy())
    check_carried(AsyncAveragingStrategy(transport="horovod"))
    check_carried(AsyncGradientStrategy(transport="horovod"))
    for other in (AsyncAveragingStrategy(transport=TorchTransport()), object()):
        with pytest.raises(ValueError, match="`make_trainer` chose <"):
            check_carried(other)
    with pytest.raises(ValueError, match=r"AsyncAveragingStrategy\(min_replicas=1\)` under `fit_elastic`.*--min-np"):
        check_carried(AsyncAveragingStrategy(min_replicas=1, transport="horovod"))
    with pytest.raises(ValueError, match="max_replicas=4"):
        check_carried(AsyncAveragingStrategy(max_replicas=4, transport="horovod"))

"""Two ranks go on from a safe point as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.resume.problem import Point, Training
from tests.resume.ranks import LAST_BATCH, POINTS, epoch_loader
from tests.strategies.conftest import ranks as ranks
from tests.strategies.workers import Outcomes

pytestmark = pytest.mark.processes

SCENARIOS = "tests.resume.ranks"


@pytest.mark.parametrize("scenario", ["ddp", "ddp_accumulates", "synchronous", "without_overlap"])
def test_two_ranks(scenario: str, ranks: Outcomes) -> None:
    for names in ranks(scenario):
        assert set(names) == set(POINTS)


def test_the_validation_that_is_due_with_the_last_batch_of_an_epoch(ranks: Outcomes) -> None:
    for names in ranks("synchronous_last_batch"):
        assert names == LAST_BATCH


@pytest.mark.parametrize("scenario", ["none_in_step", "none_on_servers"])
def test_a_batch_without_loss_counts_after_a_resume(scenario: str, ranks: Outcomes) -> None:
    """It came before the save, in the accumulation that goes on."""
    for names in ranks(scenario):
        assert names == ["batch 1:2"]


def test_a_rank_less(ranks: Outcomes, tmp_path: Path) -> None:
    """What two ranks have left of an epoch, one takes: each sample once."""
    first = [index for indices in ranks("two_ranks") for index in indices]
    saved = [torch.load(ranks.folder("two_ranks") / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    point = Point("batch", 1, 2, 0, *saved[0], others=[state for state, _ in saved])
    training = Training(epoch_loader, trainer={"max_epochs": 3})
    rows, _, loader = training.fit(tmp_path, point, wanted=lambda name: False)
    assert len(first) == 12 and sorted(first + loader.dataset.fetched[:11]) == list(range(23))
    assert sorted(loader.dataset.fetched[11:]) == list(range(23))
    assert [row[2] for row in rows if row[0] == "train"] == [4, 5, 6, 7, *range(8)]
    assert [row[1] for row in rows if row[0] == "validate"] == [1, 1, 2, 2]


def test_a_rank_more(ranks: Outcomes) -> None:
    """What one rank has left, two take."""
    (first, mine), (_, others) = ranks("one_rank_then_two")
    assert len(first) == 12 and len(mine) == len(others) == 6  # 11 were left: one is there twice, as torch does it
    assert set(first + mine + others) == set(range(23))

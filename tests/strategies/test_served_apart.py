"""Trainings that know nothing of each other, with the same servers, which were started on their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.strategies.served_apart import BATCHES, BEFORE, WARMUP
from tests.strategies.workers import Outcomes

pytestmark = pytest.mark.processes


def test_each_has_a_worker_of_its_own_and_all_steps_are_in_the_weights(tmp_path: Path) -> None:
    """A rank of one is rank 0, whoever else is. One that goes on from a checkpoint has its warm-up behind it."""
    ((first, other, again),) = Outcomes("tests.strategies.served_apart", tmp_path, nprocs=1)("three")
    assert first["in_step"] == [True] * WARMUP + [False] * (BATCHES - WARMUP)
    assert again["in_step"] == [False] * BATCHES
    assert other["servers/version"] == BEFORE + BATCHES
    assert again["servers/version"] == 3 * BATCHES, "of both, and of the checkpoint"
    assert again["servers/lag"] == 0.0
    assert again["servers/mean_lag"] == BATCHES / (2 * BATCHES), "all steps of the other lie between two of its own"
    assert torch.tensor(again["values"]).isfinite().all()

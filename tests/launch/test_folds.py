"""A cross-validation under the launcher: a rank that is killed in the second fold is there again in the third one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.conftest import Launched

pytestmark = pytest.mark.processes

SCRIPT = str(Path(__file__).with_name("folds.py"))


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        pytest.param("averaging", {}, id="averaging"),
        pytest.param("gradients", {"SHORT": "1"}, id="gradients, and it comes after the fold"),
        pytest.param("server", {"ONE": "1", "DIES": "0"}, id="servers, rank 0, one Trainer"),
    ],
)
def test_a_lost_rank_has_the_results_of_all_folds(
    launch: Callable[..., Launched], tmp_path: Path, strategy: str, settings: dict[str, str]
):
    run = launch("-n", "3", "--max-restarts", "3", SCRIPT, str(tmp_path), strategy, forks=True, **settings)
    run.allow(120)
    assert run.end() == 0, run.out + run.err
    assert "(restart 1 of 3)" in run.err
    assert "(restart 2 of 3)" not in run.err
    results = [json.loads(text) for text in re.findall(r"RESULTS \d (.+)", run.out)]
    assert len(results) == 3
    assert results[0] == results[1] == results[2]
    for last, best, logged, by_hand, path, epoch in results[0]:
        assert (last, logged) == (best, best)
        assert by_hand == pytest.approx(best, rel=1e-5), "the model is not the one that was trained"
        assert path.startswith("fold")
        assert epoch >= 1
    assert len({best for _, best, *_ in results[0]}) == 3, "folds cannot be told apart"
    done = {(rank, fold): (int(size), int(number)) for rank, fold, size, number in _done(run.out)}
    assert sorted(done[rank, "2"] for rank in "012") == [(3, 333), (3, 333), (3, 334)]


def _done(text: str) -> list[tuple[str, str, str, str]]:
    return re.findall(r"DONE (\d) (\d) (\d) (\d+)", text)

"""Scripts that fit several times in one process, and catch exceptions on the way."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import run_ranks

pytestmark = pytest.mark.processes

WORKERS = "tests.strategies.sweep_workers"
LIMIT_S = 200.0


def answers(worker: str, **kwargs: Any) -> list[Any]:
    results = run_ranks(f"{WORKERS}:{worker}", 2, kwargs=kwargs, timeout=LIMIT_S)
    assert all(result.returncode == 0 for result in results), "\n".join(map(str, results))
    return [result.value for result in results]


def assert_together(fits: list[dict[str, Any]]) -> None:
    """Two ranks have trained on each sample of one epoch once, together."""
    assert [fit["error"] for fit in fits] == ["", ""]
    assert sorted(fits[0]["seen"] + fits[1]["seen"]) == list(range(32))
    assert [len(fit["seen"]) for fit in fits] == [16, 16]
    assert [fit["size"] for fit in fits] == [2, 2]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("strategy", ["averaging", "gradients", "servers"])
def test_fits_after_caught_exceptions_train_on_all_ranks(strategy: str) -> None:
    first, second = answers("sweep", strategy=strategy)
    for trial in range(1, len(first), 2):
        assert_together([first[trial], second[trial]])
        assert [first[trial]["rank"], second[trial]["rank"]] == [0, 1]
    assert all(told[trial]["error"] for told in (first, second) for trial in range(0, len(first), 2))


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_raised_alone_comes_back_with_the_next_fit(culprit: int) -> None:
    told = answers("raise_alone", culprit=culprit)
    assert told[culprit][0]["error"] == "RuntimeError: diverged"
    assert told[1 - culprit][0]["error"] == ""
    assert_together([told[0][1], told[1][1]])
    # The first rank gives its model to all, so it is one that has completed the fit before.
    assert told[culprit][1]["rank"] == 1


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_tries_again_alone_raises(culprit: int) -> None:
    errors = (f"PeerLost: rank {culprit}: 1 of 2 replicas are left for this call of the Trainer",)
    if culprit == 1:
        errors += ("StoreLost: rank 1: ",)  # rank 0 ends with its store: either is seen first
    told = answers("try_again_alone", culprit=culprit)
    assert [fit["error"] for fit in told[1 - culprit]] == [""]
    first, second = told[culprit]
    assert first["error"] == "RuntimeError: diverged"
    assert second["error"].startswith(errors)
    assert second["seen"] == []


@pytest.mark.parametrize("strategy", ["averaging", "gradients"])
def test_copies_made_in_a_fit_leave_training_as_it_is(strategy: str) -> None:
    assert_together(answers("copies", strategy=strategy))


def test_all_gather_after_training_has_the_gradient_of_ddp() -> None:
    # Rank r weighs the rows by r + 1; row k has the factor k + 1: (1 + 2) * (k + 1) in all.
    assert [told["gradient"] for told in answers("gather_after_training")] == [3.0, 6.0]

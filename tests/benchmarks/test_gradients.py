"""The time to a loss, as the benchmark of gradients takes it from what the ranks have measured."""

from __future__ import annotations

import pytest

from tests.benchmarks import gradients
from tests.benchmarks.measured import RankResult


def test_the_time_to_a_loss_is_that_of_all_ranks_together() -> None:
    """Rank 1 begins later, and is slower; the mean is over the last three losses of both."""
    fast = RankResult(ends=[1.0, 2.0, 3.0, 4.0], losses=[4.0, 3.0, 2.0, 1.0])
    slow = RankResult(ends=[1.5, 3.5], losses=[4.0, 1.0])
    seconds, losses = zip(*gradients.curve([fast, slow], smooth=3), strict=True)
    assert seconds == (0.5, 1.5, 2.0, 2.5)
    assert losses == pytest.approx((11 / 3, 3.0, 2.0, 4 / 3))
    assert gradients.time_to(2.5, [fast, slow], smooth=3) == 2.0
    assert gradients.time_to(1.0, [fast, slow], smooth=3) is None


def test_what_is_told_of_a_peer_that_did_not_get_there() -> None:
    row = {"seconds": [1.0, None], "last_loss": [2.0], "samples_per_s": [3.0], "error": None}
    failed = {"seconds": [], "last_loss": [], "samples_per_s": [], "error": "rank 1 failed"}
    table = gradients.markdown({"peers": {"a": {**row, "seconds": [1.0, 3.0, 8.0]}, "b": row, "c": failed}})
    rows = ["| a | 3.0 | 2.000 | 3.0 |", "| b | never | 2.000 | 3.0 |", "| c | rank 1 failed | nan | nan |"]
    assert table.splitlines()[2:] == rows


def test_peers_and_their_rate() -> None:
    assert set(gradients.QUICK_PEERS) <= set(gradients.TARGETS)
    assert [gradients.PEERS[f"ddp accumulate={n}"].accumulates for n in (1, 16)] == [1, 16]
    options = gradients.parse(["--out", "x", "--quick"])
    assert (options.repeats, options.peers) == (1, gradients.QUICK_PEERS)

"""The time to a loss, as the benchmark of gradients takes it from what the ranks measure, and a short run of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.benchmarks import gradients
from tests.benchmarks.gradient_peers import PEERS
from tests.benchmarks.language import rate_for
from tests.benchmarks.measured import RankResult
from tests.support import run_ranks


def test_the_time_to_a_loss_is_that_of_all_ranks_together() -> None:
    """Rank 1 begins later, and the ranks take turns to look; the loss is at the target between two looks."""
    fast = RankResult(ends=[1.0, 2.0, 3.0, 4.0], held_out=[(1.0, 4.0), (3.0, 2.0), (4.0, 2.5)])
    slow = RankResult(ends=[1.5, 3.5], held_out=[(2.0, 3.0), (3.5, 1.0)])
    seconds, losses = zip(*gradients.curve([fast, slow]), strict=True)
    assert seconds == (-0.5, 0.5, 1.5, 2.0, 2.5)
    assert losses == (4.0, 3.0, 2.0, 1.0, 2.5)
    assert gradients.time_to(2.25, [fast, slow]) == 1.25
    assert gradients.time_to(1.0, [fast, slow]) == 2.0
    assert gradients.time_to(4.0, [fast, slow]) == -0.5
    assert gradients.time_to(0.5, [fast, slow]) is None


def test_what_is_told_of_a_peer_that_did_not_get_there() -> None:
    row = {"seconds": [1.0, None], "last_loss": [2.0], "samples_per_s": [3.0], "error": None}
    failed = {"seconds": [], "last_loss": [], "samples_per_s": [], "error": "rank 1 failed"}
    peers = {gradients.PLAIN: {**row, "seconds": [4.0, 6.0, 9.0]}, "a": {**row, "seconds": [1.0, 3.0, 8.0]}}
    told = {"slot_ms": [50.0, 150.0], "round_ms": 619.6, "rule": "a rule", "peers": {**peers, "b": row, "c": failed}}
    rows = [
        "| ddp accumulate=1 | 6.0 | 1.00 | 2.000 | 3.0 |",
        "| a | 3.0 | 0.50 | 2.000 | 3.0 |",
        "| b | never |  | 2.000 | 3.0 |",
        "| c | rank 1 failed |  | nan | nan |",
        "",
        "Batches of 50, 150 ms, 620 ms an exchange; a rule.",
    ]
    assert gradients.markdown(told).splitlines()[2:] == rows


def test_seeds_are_compared_at_equal_time() -> None:
    """That of the shortest run, here 2 s: of two repeats with one seed the median, and then over the seeds."""
    first = {
        gradients.PLAIN: [[(0.0, 4.0), (2.0, 3.0), (4.0, 2.0)], [(0.0, 4.0), (4.0, 2.4)]],
        "ours": [[(0.0, 4.0), (2.0, 2.5)], [(1.0, 4.0), (3.0, 3.0)]],
        "failed": [],
    }
    second = {gradients.PLAIN: [[(0.0, 4.0), (2.0, 3.3)]], "ours": [[(0.5, 4.0), (1.5, 3.5), (2.5, 3.0)]], "failed": []}
    told = [
        (
            seed,
            {
                "target": target, "load": ["1"], "slot_ms": [50.0], "round_ms": 600.0, "rule": "a rule",
                "peers": {
                    peer: {
                        "error": None if curves else "rank 1 failed", "curves": curves, "seconds": [1.0] * len(curves),
                        "last_loss": [each[-1][1] for each in curves], "samples_per_s": [3.0] * len(curves),
                    }
                    for peer, curves in peers.items()
                },
            },
        )
        for seed, target, peers in ((3, 2.2, first), (7, 3.3, second))
    ]  # fmt: skip
    whole = gradients.together(told)
    gradients.at_equal_time(whole)
    assert whole["equal_s"] == 2.0 and whole["targets"] == [2.2, 3.3]
    assert whole["peers"][gradients.PLAIN]["seeds"] == [3, 3, 7]
    assert whole["peers"][gradients.PLAIN]["equal_loss"] == pytest.approx({"3": 3.1, "7": 3.3})
    assert whole["peers"]["ours"]["equal_loss"] == pytest.approx({"3": 3.0, "7": 3.25})
    assert gradients.markdown(whole).splitlines()[:8] == [
        "| peer | seconds to 2.200, 3.300 | of plain DDP's | last loss | samples/s | loss at 2 s | spread over seeds | "
        "above DDP's best |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| ddp accumulate=1 | 1.0 | 1.00 | 2.400 | 3.0 | 3.200 | 0.200 | +0.000 |",
        "| ours | 1.0 | 1.00 | 3.000 | 3.0 | 3.125 | 0.250 | -0.075 |",
        "| failed | rank 1 failed |  | nan | nan | | | |",
        "",
        "DDP's best at that time is 'ddp accumulate=1': what is above it by no more than its spread is as good.",
        "",
    ]


def test_peers_and_their_rate() -> None:
    assert set(gradients.QUICK_PEERS) <= set(PEERS)
    assert rate_for((2e-3, 0.5, 0.25), 16, late=True) == pytest.approx(2e-3)
    for name, seconds in {
        "ddp accumulate=4": 0.8,
        "windows of 8": 0.6,
        "windows of 8, no delay": 1.0,
        "windows until reduced": 0.625,
    }.items():
        update_s = PEERS[name].update_s
        assert update_s is not None
        assert update_s(0.05, 0.6) == pytest.approx(seconds), name
    options = gradients.parse(["--out", "x", "--quick"])
    assert (options.repeats, options.peers) == (1, gradients.QUICK_PEERS)


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_quick_run_writes_table_and_numbers(tmp_path: Path) -> None:
    options = {"arguments": ["--quick", "--out", str(tmp_path)]}
    main = "tests.benchmarks.gradients:main"
    (done,) = run_ranks(main, 1, kwargs=options, timeout=220, launched=False, forks=True)
    assert done.value == 0, done
    assert (tmp_path / "gradients.md").read_text() in done.stdout
    told = json.loads((tmp_path / "gradients.json").read_text())
    assert list(told["peers"]) == gradients.QUICK_PEERS
    for peer, row in told["peers"].items():
        ((first, *_, last),) = row["curves"]
        assert first[0] <= last[0], peer
        assert 2.0 < last[1] < 4.2 < math.log(105), (peer, "it has learned that not all characters are as likely")
        assert math.isfinite(row["samples_per_s"][0])

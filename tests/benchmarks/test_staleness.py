"""The simulation of staleness runs, and writes what it promises."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.benchmarks import staleness


def test_it_simulates_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert staleness.main(["--out", str(tmp_path / "a"), "--quick", "--workers", "32"]) == 0
    said = capsys.readouterr().out
    assert "| 32 | auto |" in said and "32 workers, auto: accuracy, where none has" in said
    runs = {run["name"]: run for run in json.loads((tmp_path / "a" / "staleness.json").read_text())}
    assert runs.keys() == {"auto", "none"}
    # a tenth of the way both have begun to learn, where 10% is chance, and one of them goes astray already
    assert runs["auto"]["accuracies"][-1] > runs["none"]["accuracies"][-1] + 0.1 > 0.15
    assert runs["auto"]["updates"] == runs["none"]["updates"] > 500
    assert 20 < runs["auto"]["mean_lag"] < 32
    assert (tmp_path / "a" / "staleness.png").stat().st_size > 10_000


def test_it_is_the_same_when_it_is_repeated():
    task = staleness.Task(1000, 100)
    policy, optimizer = staleness.policies(4)["auto"]
    runs = [staleness.asynchronous("auto", task, policy, optimizer, 4, 20.0, seed, looks=4) for seed in (0, 0, 1)]
    assert runs[0].accuracies == runs[1].accuracies != runs[2].accuracies


def test_slow_workers_finish_a_fifth_as_often():
    done = [worker for _, worker in staleness.events(8, 100.0, random.Random(0))]
    assert [done.count(worker) for worker in (0, 1)] == [pytest.approx(20, abs=2)] * 2
    assert [done.count(worker) for worker in (2, 7)] == [pytest.approx(100, abs=4)] * 2
    moments = [now for now, _ in staleness.events(8, 100.0, random.Random(0))]
    assert moments == sorted(moments) and moments[-1] < 100.0

"""The benchmark of overlap runs on the CPU, and averages. Its timings are not judged here."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tests.benchmarks import overlap_gpu
from tests.strategies.problem import distance

pytestmark = pytest.mark.processes


def test_on_the_cpu_it_averages_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--numel", "500000", "--tokens", "64", "--steps", "2", "--blocks", "2"]
    status = overlap_gpu.main(["--out", str(tmp_path), *options, "--seconds", "180"])
    table, told = (tmp_path / "overlap_gpu.md").read_text(), json.loads((tmp_path / "overlap_gpu.json").read_text())
    assert capsys.readouterr().out == table + "\n"
    assert f"{'FAIL' if status else 'pass'}: slowdown of a step" in table
    assert status == int(not told["held"])

    found, trained, peer = told["found"], told["trained"], told["peer"]
    assert all(math.isfinite(number) for number in found.values()), found
    assert found["rounds"] == 2 and found["alone_steps"] == 2 * 2
    assert trained["rounds"] == peer["rounds"] == 1 + 2  # one to warm up
    assert trained["failed_rounds"] == peer["failed_rounds"] == 0
    assert 500_000 <= trained["numel"] == peer["numel"] < 1_000_000
    assert found["sent_gb"] == pytest.approx(2 * 4 * trained["numel"] / 1e9)
    assert found["exchange_s"] > 0.0
    assert 0.0 < found["in_flight_share"] < 1.0
    for alone, beside in trained["pairs"]:
        assert alone["steps"] == len(alone["step_s"]) == 2
        assert beside["steps"] == len(beside["step_s"]) == beside["merge"] + 1
        assert 0 <= beside["snapshot"] < beside["merge"]
        for block in (alone, beside):
            assert 0.0 < sum(block["step_s"]) <= block["seconds"]


def test_replicas_move_towards_each_other(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--numel", "50000", "--steps", "1", "--blocks", "1", "--seconds", "180"]
    overlap_gpu.main(["--out", str(tmp_path), *options])
    told = json.loads((tmp_path / "overlap_gpu.json").read_text())
    start, trained, peer = told["trained"]["start"], told["trained"]["end"], told["peer"]["end"]
    assert told["peer"]["start"] == start
    # The peer takes no step of its own: all that it has moved, it has moved by averaging.
    assert distance(peer, start) > 0.0
    assert math.dist(peer, trained) < math.dist(start, trained)
    ((before, after),) = told["trained"]["moves"]  # at its first merge the peer still stood at the start
    assert 0.0 < math.dist(after, start) < math.dist(before, start)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the benchmark would run")
def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert overlap_gpu.main(["--out", str(tmp_path)]) == 2
    assert "no GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())

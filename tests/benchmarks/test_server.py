"""The benchmark of the parameter server runs and writes what it promises. Its timings are not judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks import server

pytestmark = pytest.mark.processes


def test_it_measures_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    few = {("Adam", "large", "shm"): 20.0, ("SGD", "small", "gloo"): 0.6}  # to start a process takes seconds
    monkeypatch.setattr(server, "LIMITS_MS", few)
    small = [
        "--large-bytes",
        "80000",
        "--small-bytes",
        "4000",
        "--repeats",
        "3",
        "--held-bytes",
        "1000000",
        "--window-s",
        "0.2",
        "--kills",
        "1",
        "--worker-kills",
        "2",
        "--workers",
        "2",
    ]
    assert server.main(["--out", str(tmp_path), *small]) == 0
    said = capsys.readouterr().out
    assert "load average" in said and said == (tmp_path / "server.md").read_text() + "\n"
    assert "pass: kills, 0 of them in a start: 1.000" in said
    assert "pass: share of the pushes that are in the weights once: 1.000" in said
    assert "pass: messages of a push and pull of 160 small tensors: 1.000" in said
    assert all(f"{what}: " in said for what in ("is noticed, s", "after a worker's death over that before"))
    assert "- two bare processes by shm, Adam, 80000 bytes: " in said
    assert "- two bare processes by gloo, SGD, 4000 bytes: " in said
    numbers = json.loads((tmp_path / "server.json").read_text())
    assert [len(each["seconds"]) for each in numbers["exchanges"]] == [3, 3]
    assert len(numbers["bare_ms"]) == 2 and min(numbers["bare_ms"]) > 0.0 and len(numbers["rates_of_others"]) == 2
    assert numbers["worker_pushes_once"] and numbers["worker_kills"]["kills"] == 2
    assert numbers["exact"] and numbers["kills"]["kills"] == 1

"""The benchmark of the ops runs and writes what it promises. Its timings are not judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks import ops


def test_it_measures_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert ops.main(["--out", str(tmp_path), "--numel", "100000", "--repeats", "2"]) == 0
    said = capsys.readouterr().out
    assert "load average" in said
    numbers = json.loads((tmp_path / "ops.json").read_text())
    assert {op["name"] for op in numbers["ops"]} >= {"apply", "pack, norm", "outer step on buckets"}
    assert all(seconds > 0 for op in numbers["ops"] for seconds in op["seconds"].values())
    assert "repeat with `python -m tests.benchmarks.ops --out" in (tmp_path / "ops.md").read_text()
    assert (tmp_path / "ops.png").stat().st_size > 1000

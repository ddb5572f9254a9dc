"""Workers and servers of a training under the launcher are killed: a short form of what the benchmark does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks import served_kills


def test_what_is_counted_and_what_is_applied() -> None:
    """Of each worker that was killed one push more may be there than it has counted."""
    for applied, exact in ((9.0, False), (10.0, True), (12.0, True), (13.0, False)):
        assert served_kills.Kills(counted=10, applied=applied, lives=2).exact == exact


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_all_come_back_and_each_push_is_there_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--out", str(tmp_path), "--worker-kills", "1", "--server-kills", "1", "--ranks", "2"]
    assert served_kills.main(arguments) == 0, capsys.readouterr()
    assert "pass: whether each push that was answered is in the weights once: 1.000" in capsys.readouterr().out
    told = json.loads((tmp_path / "kills.json").read_text())
    assert (len(told["back"]), len(told["resumed"]), told["code"]) == (1, 1, 0)
    assert 0 < told["counted"] <= told["applied"] <= told["counted"] + 1

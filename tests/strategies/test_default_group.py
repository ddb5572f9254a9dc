"""torch's default group, which user code calls by itself, is that of the live ranks after losses and joins."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.processes
CONSOLE = str(Path(__file__).parents[2] / "lightning_async/cli/bin/lightning-async")
WORKERS = Path(__file__).with_name("default_group_workers.py")


def launch(folder: Path, strategy: str, pause_s: float, *options: str) -> tuple[dict[int, Any], str]:
    """What each rank says at its end, and what all have printed."""
    command = [sys.executable, CONSOLE, "launch", "-n", "3", *options, str(WORKERS)]
    done = subprocess.run(
        [*command, str(folder), strategy, str(pause_s)],
        cwd=WORKERS.parents[2],
        capture_output=True,
        text=True,
        timeout=240,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return {int(path.stem[4:]): json.loads(path.read_text()) for path in folder.glob("told*.json")}, said


@pytest.mark.parametrize("strategy", ["averaging", "windows"])
def test_collectives_of_a_step_go_on_among_live_ranks(strategy: str, tmp_path: Path) -> None:
    told, said = launch(tmp_path, strategy, 0.05, "--max-restarts", "0")
    assert sorted(told) == [0, 1]
    for rank, each in told.items():
        assert (each["rank"], each["size"], each["total"], each["same"]) == (rank, 2, 2.0, True)
        sums = each["sums"]
        assert {tuple(pair) for pair in sums} == {(3, 6.0), (2, 3.0)}, "whole sums of one world only"
        assert sums[:5] == [[3, 6.0]] * 5 and sums[-1] == [2, 3.0]
    assert "This batch is left out on this rank, and training goes on." in said


def test_a_rank_that_returns_is_in_the_default_group(tmp_path: Path) -> None:
    told, said = launch(tmp_path, "averaging", 0.7, "--max-restarts", "1")  # two ranks wait for the third
    assert sorted(told) == [0, 1, 2]
    for each in told.values():
        assert (each["size"], each["total"], each["sums"][-1], each["same"]) == (3, 3.0, [3, 6.0], True)
        assert set(each["sampler_sizes"]) <= {2, 3}
    assert sorted(each["rank"] for each in told.values()) == [0, 1, 2]
    assert said.count("training calls a collective of torch.distributed") >= 3

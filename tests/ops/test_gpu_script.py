"""The script for GPU machines, on a machine without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import ROOT


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: `make gpu` runs the whole script")
def test_without_a_gpu_it_says_so_and_fails(tmp_path: Path):
    done = subprocess.run(
        ["bash", str(ROOT / "tests/gpu/run.sh"), str(tmp_path / "out")],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "no GPU" in done.stderr
    assert "no GPU that this torch can use" in (tmp_path / "out/probe.log").read_text()
    assert (tmp_path / "out/stages.csv").read_text().splitlines()[1].startswith("probe,1,")


def test_all_stages_together_end_within_eight_minutes():
    limits = re.findall(r"^ *(?:if ! )?stage \w+ (\d+) ", (ROOT / "tests/gpu/run.sh").read_text(), flags=re.MULTILINE)
    assert len(limits) == 8
    assert sum(map(int, limits)) <= 8 * 60

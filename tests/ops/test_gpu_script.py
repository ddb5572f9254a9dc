"""The script for GPU machines: on a machine without a GPU, and with stand-ins for all that it calls."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import ROOT

pytestmark = pytest.mark.processes


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: `make gpu` runs the whole script")
def test_without_a_gpu_it_says_so_and_fails(tmp_path: Path):
    done = subprocess.run(
        ["bash", str(ROOT / "tests/gpu/run.sh"), str(tmp_path / "out")],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "no GPU" in done.stderr
    assert "no GPU that this torch can use" in (tmp_path / "out/probe.log").read_text()
    assert (tmp_path / "out/stages.csv").read_text().splitlines()[1].startswith("probe,1,")
    results = (tmp_path / "out/RESULTS.md").read_text()
    assert re.search(r"^- \d{4}-\d\d-\d\d \d\d:\d\d UTC, commit ", results, flags=re.MULTILINE)
    assert "- no GPU that this torch can use" in results
    assert re.search(r"^\| probe \| 1 \| \d+ \|$", results, flags=re.MULTILINE)


PYTHON = """#!/usr/bin/env bash
case "$*" in
  *is_available*) echo "16 cores"; echo "a GPU" ;;
  *triton*) exec {python} "$@" ;;
  *ops_gpu*) echo "| copy | 0.6 |" >"${{@: -1}}/ops_gpu.md" ;;
  *overlap_gpu*) printf '# Title\\n\\n- slowdown\\n' >"${{@: -1}}/overlap_gpu.md"; exit 1 ;;
  *tests/comm*) echo "== 38 passed in 99 s ==" ;;
esac
"""
CUOBJDUMP = """#!/usr/bin/env bash
echo "arch = sm_90"
echo "		Function : _Z3_0_11flat_kernelPf"
echo "        /*0050*/       @P0 LDG.E.128.CONSTANT R4, [R2.64] ;"
echo "		Function : _Z3_0_11list_kernelPf"
echo "        /*0050*/           LD.E.128 R4, [R2.64] ;"
echo "		Function : _Z3_0_10sum_kernelPd"
"""


def stand_in(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_a_failed_stage_stops_no_other_and_all_results_are_in_one_file(tmp_path: Path):
    python = stand_in(tmp_path / "python", PYTHON.format(python=sys.executable))
    stand_in(tmp_path / "path/nvidia-smi", "#!/bin/sh\n")
    stand_in(tmp_path / "path/cuobjdump", CUOBJDUMP)
    stand_in(tmp_path / "toolkit/bin/compute-sanitizer", "#!/bin/sh\necho 0 errors\n")
    env = {"PYTHON": str(python), "CUDA_HOME": str(tmp_path / "toolkit")}
    env["PATH"] = f"{tmp_path / 'path'}:{os.environ['PATH']}"
    command = ["bash", str(ROOT / "tests/gpu/run.sh"), str(tmp_path / "out")]
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1, done.stdout + done.stderr
    stages = [line.split(",")[:2] for line in (tmp_path / "out/stages.csv").read_text().splitlines()[1:]]
    assert [name for name, status in stages if status != "0"] == ["overlap"]
    assert len(stages) == 11
    results = (tmp_path / "out/RESULTS.md").read_text()
    for line in (
        "- 16 cores", "- a GPU", "| copy | 0.6 |", "- slowdown", "- nccl:  38 passed in 99 s ", "- sanitizer: 0 errors",
        "| flat_kernel | sm_90 | 1 | 1 | 0 | 0 |", "| list_kernel | sm_90 | 1 | 0 | 1 | 0 |",
        "| sum_kernel | sm_90 | 1 | 0 | 0 | 1 |",
    ):  # fmt: skip
        assert line in results.splitlines()
    assert "# Title" not in results and str(tmp_path) not in results
    assert "sm_90 LDG.E.128 _Z3_0_11flat_kernelPf" in (tmp_path / "out/sass.log").read_text()


def test_all_stages_together_end_within_eight_minutes():
    limits = re.findall(r"^ *(?:if ! )?stage \w+ (\d+) ", (ROOT / "tests/gpu/run.sh").read_text(), flags=re.MULTILINE)
    assert len(limits) == 11
    assert sum(map(int, limits)) <= 8 * 60

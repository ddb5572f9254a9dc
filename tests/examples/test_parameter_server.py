"""The example of parameter servers runs, in one command, and learns."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.support import ROOT

pytestmark = pytest.mark.processes


def test_a_short_run_learns():
    """As the documentation has it, with fewer steps."""
    command = [sys.executable, "examples/parameter_server.py", "--mode", "async", "--max-steps", "30"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    loss = re.search(r"validation loss (\d+\.\d+)", done.stdout)
    assert loss is not None, done.stdout
    assert float(loss[1]) < 3.6, "it began at 4.6"

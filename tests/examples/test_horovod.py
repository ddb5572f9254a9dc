"""The commands of docs/choose/horovod.md, as a user would type them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.horovod import needs_horovod, needs_horovod_mpi
from tests.support import ROOT, shell_environment

pytestmark = [pytest.mark.processes, needs_horovod]


def run(command: str, folder: Path) -> str:
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # The tests may run as root, and on a machine of one core.
    mpi = {f"OMPI_ALLOW_RUN_AS_ROOT{more}": "1" for more in ("", "_CONFIRM")} | {
        "OMPI_MCA_rmaps_base_oversubscribe": "1"
    }
    own = shell_environment({"PATH": path, **mpi})
    done = subprocess.run(
        shlex.split(command), cwd=folder, env=own, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def test_char_lm_under_horovodrun(tmp_path: Path) -> None:
    """Asynchronous averaging under it: `tests/strategies/test_horovod_averaging.py`."""
    text = run("horovodrun --gloo -np 2 python examples/char_lm.py --strategy horovod --max-steps 8", tmp_path)
    assert "`max_steps=8` reached" in text
    assert text.count("Next character right") == 1


@needs_horovod_mpi
def test_char_lm_under_mpirun(tmp_path: Path) -> None:
    """Synchronous training under it: `tests/strategies/test_horovod_mpi.py`."""
    options = "--strategy async_averaging --transport horovod --max-steps 10 --sync-every 4"
    text = run(f"mpirun -np 2 python examples/char_lm.py {options}", tmp_path)
    assert "Asynchronous averaging, as rank 0 saw it" in text
    assert text.count("Next character right") == 1


def test_elastic(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.sh"
    hosts.write_text("#!/bin/sh\necho localhost:2\n")
    hosts.chmod(0o755)
    # Without the interface horovodrun looks for one that all hosts share by logging in to them.
    launcher = "horovodrun -np 2 --min-np 1 --max-np 4 --host-discovery-script ./hosts.sh --network-interface lo"
    text = run(f"{launcher} python examples/elastic.py --max-steps 20", tmp_path)
    assert "20 steps; loss" in text

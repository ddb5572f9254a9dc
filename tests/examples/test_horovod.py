"""The commands of docs/horovod.md, as a user would type them."""

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

pytestmark = needs_horovod


def run(command: str, folder: Path) -> str:
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # The tests may run as root, and on a machine of one core.
    mpi = {f"OMPI_ALLOW_RUN_AS_ROOT{more}": "1" for more in ("", "_CONFIRM")} | {
        "OMPI_MCA_rmaps_base_oversubscribe": "1"
    }
    own = shell_environment({"PATH": path, **mpi})
    done = subprocess.run(
        shlex.split(command), cwd=folder, env=own, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


GLOO = "horovodrun --gloo -np 2"
MPI = pytest.param("mpirun -np 2", marks=needs_horovod_mpi, id="mpirun")


@pytest.mark.parametrize("launcher", [pytest.param(GLOO, id="horovodrun"), MPI])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--strategy horovod --max-steps 20", "`max_steps=20` reached"),
        ("--strategy async_averaging --transport horovod --max-steps 40", "Asynchronous averaging, as rank 0 saw it"),
    ],
    ids=["horovod", "async_averaging"],
)
def test_char_lm(launcher: str, options: str, said: str, tmp_path: Path) -> None:
    if launcher == GLOO:
        options = options.replace("--transport horovod ", "")  # it is found out there
    text = run(f"{launcher} python examples/char_lm.py {options}", tmp_path)
    assert said in text
    assert text.count("Next character right") == 1


def test_elastic(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.sh"
    hosts.write_text("#!/bin/sh\necho localhost:2\n")
    hosts.chmod(0o755)
    # Without the interface horovodrun looks for one that all hosts share by logging in to them.
    launcher = "horovodrun -np 2 --min-np 1 --max-np 4 --host-discovery-script ./hosts.sh --network-interface lo"
    text = run(f"{launcher} python examples/elastic.py --max-steps 20", tmp_path)
    assert "20 steps; loss" in text

"""One script with a rank that serves, however its ranks are started; it ends with 0, and trains nothing."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch.distributed.run

from tests.horovod import needs_horovod
from tests.strategies.test_launch import launch, launch_forked, lines
from tests.support import ROOT

pytestmark = pytest.mark.processes

SCRIPT = str(ROOT / "tests/strategies/dedicated_script.py")
NEEDS_MPIRUN = pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np"]
HOROVODRUN = [str(Path(sys.executable).with_name("horovodrun")), "--gloo", "-np"]
LAUNCHED = [sys.executable, "-m", "lightning_async.cli.main", "launch", "-n"]
TORCHRUN = [sys.executable, torch.distributed.run.__file__, "--nproc-per-node"]


def fitted(text: str, workers: int) -> None:
    """So many have trained, and have one model."""
    plain = "\n".join(re.sub(r"^\[\d\](<stdout>:| )", "", line) for line in text.splitlines())
    fits = lines(plain, "FIT")
    assert [fit[:2] for fit in fits] == [[str(rank), str(workers)] for rank in range(workers)], text[-6000:]
    assert len({fit[2] for fit in fits}) == 1


def test_plain_python(tmp_path: Path) -> None:
    fitted(launch_forked("3", "dedicated", cwd=tmp_path, script=SCRIPT), 2)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_notebooks_ways_to_start(start: str, tmp_path: Path) -> None:
    fitted(launch_forked("2", "dedicated", start, cwd=tmp_path, script=SCRIPT), 1)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([*LAUNCHED, "2", SCRIPT], id="lightning-async"),
        pytest.param([*TORCHRUN, "2", SCRIPT], id="torchrun"),
        pytest.param([*MPIRUN, "2", sys.executable, SCRIPT], id="mpirun", marks=NEEDS_MPIRUN),
        pytest.param([*HOROVODRUN, "2", sys.executable, SCRIPT], id="horovodrun", marks=needs_horovod),
    ],
)
def test_a_launcher(command: list[str], tmp_path: Path) -> None:
    """One worker, and one server."""
    fitted(launch([*command, "2", "dedicated"], tmp_path), 1)


@needs_horovod
def test_servers_beside_horovods_ranks(tmp_path: Path) -> None:
    """Processes beside the workers, which meet over Horovod."""
    fitted(launch([*HOROVODRUN, "2", sys.executable, SCRIPT, "2", "colocated"], tmp_path), 2)

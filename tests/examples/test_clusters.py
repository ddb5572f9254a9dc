"""The example for Slurm: what it gives each replica is what Lightning and this package read there."""

from __future__ import annotations

import os
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_async.membership.launcher_channel import REJOIN, came_back
from lightning_async.membership.signing import SECRET
from lightning_async.trainer.namespace import fabric
from tests.benchmarks.elastic_trace import alive
from tests.support import ROOT

pytestmark = pytest.mark.processes


def check_replica(given: dict[str, str], number: int, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Lightning sees it, whatever else this test's own environment has."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "TORCHELASTIC_", "LOCAL_", "GROUP_"))]:
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    environments = fabric("plugins.environments")
    assert not environments.SLURMEnvironment.detect()
    environment: Any = environments.LightningEnvironment()
    assert environment.creates_processes_externally
    assert (environment.node_rank(), environment.local_rank()) == (number, 0)
    assert (environment.main_address, environment.main_port) == (host, 29500)


SCONTROL = 'printf "host0\\nhost1\\nhost2\\n"'
SRUN = """
echo "srun $*" >> calls
while [ "${1#--}" != "$1" ]; do shift; done
SLURM_NTASKS=1 exec "$@"
"""
PYTHON = """
[ "$1" = -c ] && echo $$ > store && exec sleep 600
echo "$NODE_RANK $LIGHTNING_ASYNC_REJOIN $MASTER_ADDR $MASTER_PORT $LOCAL_RANK ${SLURM_NTASKS-none} \
$TORCHELASTIC_USE_AGENT_STORE $LIGHTNING_ASYNC_SECRET $*" >> started
[ $NODE_RANK = 0 ] && [ $LIGHTNING_ASYNC_REJOIN = 0 ] && exit 9
while [ $NODE_RANK != 1 ] && ! [ -e over ]; do sleep 0.05; done
[ $NODE_RANK != 1 ] && exit STATUS
[ $LIGHTNING_ASYNC_REJOIN = 2 ] || exit 9
touch over
exec sleep 600
"""


@pytest.mark.parametrize("status", [0, 75])
def test_the_steps_of_slurm_know_who_they_are_and_one_that_dies_is_started_again(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With commands in the place of Slurm's; the one that waits to be taken in ends after the others, and so does the
    store. See `test_slurm`."""
    commands = tmp_path / "bin"
    commands.mkdir()
    python = PYTHON.replace("STATUS", str(status))
    script = (ROOT / "examples/slurm.sh").read_text()
    assert script.count("seconds < 30") == 1
    assert "<(" not in script.replace("<(...)", ""), "bash may miss its end, and `wait` for the store"
    (tmp_path / "slurm.sh").write_text(script.replace("seconds < 30", "seconds < 1"))
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN), ("python", python)):
        (commands / name).write_text(f"#!/bin/bash\n{text}")
        (commands / name).chmod(stat.S_IRWXU)
    environment = {"PATH": f"{commands}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "host[0-2]", SECRET: "known"}
    run = subprocess.run(
        ["bash", "slurm.sh"], cwd=tmp_path, env=environment, timeout=60, capture_output=True, text=True
    )
    assert run.returncode == status, run.stderr
    started = sorted((tmp_path / "started").read_text().splitlines())
    lives = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 0)]
    assert started == [f"{rank} {again} host0 29500 0 none True known -u train.py" for rank, again in lives]
    deadline, store = time.monotonic() + 30.0, int((tmp_path / "store").read_text())
    while alive(store):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert sum("--nodelist=host1 " in line for line in (tmp_path / "calls").read_text().splitlines()) == 3
    for line in started:
        rank, again, host, port, local, *_ = line.split()
        given = {"NODE_RANK": rank, REJOIN: again, "MASTER_ADDR": host, "MASTER_PORT": port, "LOCAL_RANK": local}
        check_replica(given, int(rank), "host0", monkeypatch)
        assert came_back() == (int(again) or None)

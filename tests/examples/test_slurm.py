"""`examples/slurm.sh` under a real Slurm: three nodes of a cluster of its own, all on this host."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import ROOT

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "sinfo")
MISSING = [name for name in NEEDED if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
NODES = 3
CONFIGURATION = """
ClusterName=scratch
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPort={ports[0]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SlurmdParameters=config_overrides
SwitchType=switch/none
PartitionName=all Nodes=h[0-2] Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """Its commands; started by `cluster`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PYTHON"))},
            "SLURM_CONF": str(folder / "slurm.conf"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin", "MASTER_ADDR": "127.0.0.1",
        }  # fmt: skip

    def start(self) -> None:
        sockets = [socket.socket() for _ in range(NODES + 2)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in sockets]
        for each in sockets:
            each.close()
        self.environment["MASTER_PORT"] = str(ports[1])
        host = socket.gethostname().partition(".")[0]
        text = CONFIGURATION.format(host=host, folder=self.folder, ports=ports)
        for number, port in enumerate(ports[2:]):
            (self.folder / f"spool-h{number}").mkdir()
            text += f"NodeName=h{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=1000\n"
        (self.folder / "state").mkdir()
        (self.folder / "slurm.conf").write_text(text)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        paths = {
            "socket": "munge.sock",
            "key-file": "munge.key",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "s",
        }
        self._run("munged", "--force", "-F", *(f"--{name}={self.folder / path}" for name, path in paths.items()))
        wait(lambda: (self.folder / "munge.sock").exists(), "for munged", 30.0)
        self._run("slurmctld", "-D", "-c")
        for number in range(NODES):
            self._run("slurmd", "-D", "-N", f"h{number}")
        wait(lambda: self.ask("sinfo", "-h", "-o", "%T %D").split() == ["idle", "3"], "for the nodes", 60.0)

    def _run(self, *command: str) -> None:
        with (self.folder / "daemons.log").open("ab") as log:
            self._daemons.append(
                subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            )

    def ask(self, *command: str) -> str:
        return subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=60.0
        ).stdout.strip()

    def end(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(20.0)
            daemon.kill()
            daemon.wait()


def wait(done: Callable[[], bool], what: str, seconds: float, said: Callable[[], str] = str) -> None:
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until, f"in vain while waiting {what}\n{said()}"
        time.sleep(0.1)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:  # short: paths of sockets are
        made = Cluster(Path(folder))
        try:
            made.start()
            yield made
        finally:
            if jobs := made.ask("squeue", "-h", "-o", "%A").split():
                made.ask("scancel", "--signal=KILL", "--full", *jobs)
                made.ask("scancel", *jobs)
                wait(lambda: not made.ask("squeue", "-h"), "for jobs to end", 60.0)
            made.end()


@pytest.mark.processes
@pytest.mark.skipif(bool(MISSING) or os.geteuid() != 0, reason=f"needs Slurm ({', '.join(MISSING)}) and root")
@pytest.mark.timeout(600)
def test_the_first_replica_is_killed_and_joins_again_and_a_job_in_the_queue_again_goes_on(cluster: Cluster):
    folder, script = cluster.folder, ROOT / "examples/slurm.sh"
    shutil.copy(ROOT / "tests/examples/slurm_train.py", folder / "train.py")

    def steps(number: int) -> list[tuple[int, int, int]]:
        path = folder / f"steps-{number}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(a), int(b), int(c)) for a, b, c in (line.split() for line in lines if line.count(" ") == 2)]

    def train(number: int, before: int = 0, past: int = 10) -> bool:
        """With all, in another process than that one, past this step."""
        return any(pid != before and size == NODES and step > past for pid, size, step in steps(number))

    def said() -> str:
        return (folder / "out").read_text(errors="replace")[-8000:]

    job = cluster.ask("sbatch", "--parsable", "-o", "out", str(script))
    assert job.isdigit(), job
    wait(lambda: all(map(train, range(NODES))), "for all to train", 180.0, said)
    first = steps(0)[-1][0]
    os.kill(first, signal.SIGKILL)
    wait(lambda: train(0, first), "for the first one to join again", 180.0, said)
    processes = [steps(number)[-1][0] for number in range(NODES)]
    cluster.ask("scontrol", "requeue", job)
    wait(lambda: cluster.ask("squeue", "-h", "-j", job, "-o", "%T") == "PENDING", "for all to save", 60.0, said)
    assert said().count("Exited with exit code 75") == NODES, said()
    there = [steps(number)[-1][2] for number in range(NODES)]
    cluster.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
    went_on = lambda: all(train(n, processes[n], there[n] + 5) for n in range(NODES))  # noqa: E731
    wait(went_on, "for all to go on", 180.0, said)
    for number in range(NODES):
        begun = min(step for pid, _, step in steps(number) if pid == steps(number)[-1][0])
        assert begun == there[number] + 1, "it goes on where it has saved"
    (folder / "stop").touch()
    state: Callable[[], str] = lambda: cluster.ask("scontrol", "show", "job", job)  # noqa: E731
    wait(lambda: "JobState=COMPLETED" in state(), "for the end", 120.0, lambda: said() + state())
    assert "ExitCode=0:0" in state() and "Restarts=1" in state()
    assert sorted(line[-4:] for line in said().splitlines() if line.startswith("replica ")) == ["of 3"] * NODES

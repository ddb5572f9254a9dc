"""Who this rank is, where an mpirun has started it that gives its jobs no name."""

from __future__ import annotations

import contextlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_async.trainer.environment import environments
from lightning_async.trainer.environment.environments import MPIRunEnvironment
from tests.support import ROOT

NAMES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "MASTER_PORT", "MASTER_ADDR")
MPIEXEC = """#!/bin/sh
for rank in 0 1; do PMI_RANK=$rank PMI_SIZE=2 MPI_LOCALRANKID=$rank MPI_LOCALNRANKS=2 "$@" & done
wait
"""
# Without the package, which takes seconds to import.
PORT = f"""
import os
from pathlib import Path
_LAUNCHERS = {environments._LAUNCHERS!r}
{inspect.getsource(environments._launcher_above)}
os.write(1, _launcher_above().replace(" ", "_").encode() + b"\\n")  # at once: two processes write here
"""


@pytest.fixture
def mpich(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The variables of MPICH's mpirun, for rank 1 of 2 on one host."""
    for name in (*NAMES, "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "2")):
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.processes
def test_without_a_jobs_name_mpiruns_own_process_is_one(tmp_path: Path) -> None:
    mpiexec = tmp_path / "mpiexec"
    mpiexec.write_text(MPIEXEC)
    mpiexec.chmod(0o755)
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(
                subprocess.Popen(
                    [str(mpiexec), sys.executable, "-c", PORT], cwd=ROOT, stdout=subprocess.PIPE, text=True
                )
            )
            for _ in range(2)
        ]
        names = [job.communicate(timeout=60)[0].split() for job in jobs]
    assert [len(each) for each in names] == [2, 2]
    assert len({*names[0]}) == len({*names[1]}) == 1
    assert names[0] != names[1] and names[0][0].startswith("mpiexec_")


def test_jobs_that_cannot_be_told_apart_are_refused(mpich: pytest.MonkeyPatch) -> None:
    mpich.setattr(environments, "_LAUNCHERS", ())
    with pytest.raises(RuntimeError, match="export MASTER_PORT"):
        _ = MPIRunEnvironment().main_port
    mpich.setenv("MASTER_PORT", "12345")
    assert MPIRunEnvironment().main_port == 12345


def test_several_hosts_have_no_parent_in_common(mpich: pytest.MonkeyPatch) -> None:
    mpich.setenv("MPI_LOCALNRANKS", "1")
    mpich.setenv("MASTER_ADDR", "10.0.0.1")
    assert MPIRunEnvironment().job == ""


@pytest.mark.parametrize("name", NAMES[:3])
def test_a_jobs_name_is_its_name(name: str, mpich: pytest.MonkeyPatch) -> None:
    ports = []
    for job in ("4711", "4712"):
        mpich.setenv(name, job)
        assert MPIRunEnvironment().job == job
        ports.append(MPIRunEnvironment().main_port)
    assert ports[0] != ports[1]

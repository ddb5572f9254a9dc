"""SLURM tells a job that its time is over: it saves, is put into the queue again, and goes on there."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.callbacks.checkpoint_ranks import At
from tests.callbacks.test_checkpoint import every, in_child, steps_in, train

pytestmark = pytest.mark.processes

SLURM = {
    "SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1", "SLURM_NNODES": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0", "SLURM_NODELIST": "localhost", "SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "4711",
}  # fmt: skip


def on_slurm(folder: Path, *callbacks: At, status: int = 0, more: Mapping[str, str] = SLURM) -> int:
    """The exit code of a job, on a machine whose `scontrol` writes down what it is asked for."""
    (folder / "bin").mkdir(exist_ok=True)
    for name in ("scontrol", "srun"):
        (folder / "bin" / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {folder}/asked\nexit {status}\n')
        (folder / "bin" / name).chmod(0o755)

    def job() -> None:
        torch.set_num_threads(1)  # a fork has no others
        os.environ.update({**SLURM, **more, "PATH": f"{folder}/bin:{os.environ['PATH']}"})
        logging.getLogger("lightning_async").addHandler(logging.FileHandler(folder / "log"))
        module = train(every(folder / "saves", 1000), *callbacks)
        (folder / "first").write_text(str(min(module.losses)))

    return in_child(job)


def tell(number: signal.Signals) -> At:
    return At(9, lambda: os.kill(os.getpid(), number))


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("variables", "job"),
    [({}, "4711"), ({"SLURM_ARRAY_JOB_ID": "4700", "SLURM_ARRAY_TASK_ID": "3"}, "4700_3")],
    ids=["a job", "one of an array"],
)
def test_it_saves_asks_for_another_turn_and_goes_on(tmp_path: Path, variables: dict[str, str], job: str) -> None:
    assert on_slurm(tmp_path, tell(signal.SIGUSR1), more=variables) == 75
    assert (tmp_path / "asked").read_text() == f"scontrol requeue {job}\n"
    assert steps_in(tmp_path / "saves") == [10]
    assert on_slurm(tmp_path, more=variables) == 0
    assert (tmp_path / "first").read_text() == "10"
    assert steps_in(tmp_path / "saves")[0] == 24
    assert (tmp_path / "asked").read_text() == f"scontrol requeue {job}\n", "once"


@pytest.mark.timeout(150)
def test_sigterm_saves_and_asks_for_nothing(tmp_path: Path) -> None:
    assert on_slurm(tmp_path, tell(signal.SIGTERM)) == 75
    assert not (tmp_path / "asked").exists()
    assert steps_in(tmp_path / "saves") == [10]


@pytest.mark.timeout(150)
def test_a_queue_that_refuses_costs_no_checkpoint(tmp_path: Path) -> None:
    assert on_slurm(tmp_path, tell(signal.SIGUSR1), status=1) == 75
    assert steps_in(tmp_path / "saves") == [10]
    assert "SLURM did not take job 4711 into its queue again" in (tmp_path / "log").read_text()

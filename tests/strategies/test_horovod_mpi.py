"""Horovod over MPI: its launchers, Adasum, and a Horovod that cannot see the ranks that mpirun started."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.horovod import needs_horovod_mpi
from tests.strategies.horovod_script import BATCH, LR, STEPS, data, loss, model
from tests.strategies.test_launch import SCRIPT, assert_two_ranks_fitted, launch
from tests.support import ROOT

pytestmark = [
    needs_horovod_mpi,
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed (apt-get install openmpi-bin)"),
]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
HOROVODRUN = [
    str(Path(sys.executable).with_name("horovodrun")), "--mpi", "--mpi-args=--allow-run-as-root --oversubscribe",
    "-np", "2",
]  # fmt: skip
LAUNCHERS = pytest.mark.parametrize("launcher", [MPIRUN, HOROVODRUN], ids=["mpirun", "horovodrun"])
SYNCHRONOUS = [sys.executable, str(ROOT / "tests/strategies/horovod_script.py")]


@LAUNCHERS
def test_averaging(launcher: list[str], tmp_path: Path) -> None:
    text = launch([*launcher, sys.executable, SCRIPT, "horovod", "2", "fit", "test"], tmp_path)
    text = "\n".join(line.partition("<stdout>:")[2] or line for line in text.splitlines())
    assert_two_ranks_fitted(text)
    assert text.count("DONE") == 2


def mean(a: Tensor, b: Tensor) -> Tensor:
    return (a + b) / 2


def adasum(a: Tensor, b: Tensor) -> Tensor:
    """Of two gradients, https://arxiv.org/abs/2006.02924: the sum of orthogonal ones, the mean of parallel ones."""
    dot, square_a, square_b = (a * b).sum(), a.pow(2).sum(), b.pow(2).sum()
    return (1 - dot / (2 * square_a)) * a + (1 - dot / (2 * square_b)) * b


def train(combine: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    """Both ranks' training in this process, in float64."""
    net = model().double()
    parameters = list(net.parameters())
    for step in range(STEPS):
        batch = slice(BATCH * step, BATCH * (step + 1))
        gradients = [
            torch.autograd.grad(loss(net, *(each[batch].double() for each in data(rank))), parameters)
            for rank in range(2)
        ]
        with torch.no_grad():
            for p, a, b in zip(parameters, *gradients, strict=True):
                p -= LR * combine(a, b)
    return [p.detach() for p in parameters]


@LAUNCHERS
def test_synchronous_training_is_that_of_one_process(launcher: list[str], tmp_path: Path) -> None:
    text = launch([*launcher, *SYNCHRONOUS, "mean", "adasum"], tmp_path)
    lines = [json.loads(line.partition("TOLD ")[2]) for line in text.splitlines() if "TOLD " in line]
    for combine in (mean, adasum):
        told = [line for line in lines if line["reduction"] == combine.__name__]
        assert [each["size"] for each in told] == [2, 2]
        assert told[0] == told[1]
        for found, expected in zip(told[0]["weights"], train(combine), strict=True):
            torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected, atol=2e-6, rtol=0)


def test_a_horovod_that_sees_one_rank_under_mpirun_is_refused(tmp_path: Path) -> None:
    """As one without MPI does, which would train as many times alone."""
    blind = ["-x", "HOROVOD_CONTROLLER=gloo", "-x", "HOROVOD_CPU_OPERATIONS=gloo"]
    with pytest.raises(AssertionError, match=r"Horovod sees 1 rank\(s\), but the launcher started 2"):
        launch([*MPIRUN, *blind, *SYNCHRONOUS, "mean"], tmp_path)

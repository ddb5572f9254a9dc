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
from tests.strategies.test_launch import assert_two_ranks_fitted, launch
from tests.support import ROOT

pytestmark = [
    pytest.mark.processes,
    needs_horovod_mpi,
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed (apt-get install openmpi-bin)"),
]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
HOROVODRUN = [
    str(Path(sys.executable).with_name("horovodrun")), "--mpi", "--mpi-args=--allow-run-as-root --oversubscribe",
    "-np", "2",
]  # fmt: skip
SCRIPT = [sys.executable, str(ROOT / "tests/strategies/horovod_script.py")]


@pytest.fixture(scope="module", params=[MPIRUN, HOROVODRUN], ids=["mpirun", "horovodrun"])
def text(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What both ranks wrote: they average, and then train synchronously."""
    what = ("blind", "averaging", "mean", "adasum")
    written = launch([*request.param, *SCRIPT, *what], tmp_path_factory.mktemp("horovod"))
    return "\n".join(line.partition("<stdout>:")[2] or line for line in written.splitlines())


def test_averaging(text: str) -> None:
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


def test_synchronous_training_is_that_of_one_process(text: str) -> None:
    lines = [json.loads(line.partition("TOLD ")[2]) for line in text.splitlines() if "TOLD " in line]
    for combine in (mean, adasum):
        told = [line for line in lines if line["reduction"] == combine.__name__]
        assert [each["size"] for each in told] == [2, 2]
        assert told[0] == told[1]
        for found, expected in zip(told[0]["weights"], train(combine), strict=True):
            torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected, atol=2e-6, rtol=0)


def test_a_horovod_that_sees_one_rank_under_mpirun_is_refused(text: str) -> None:
    """As one without MPI does, which would train as many times alone."""
    refused = [line for line in text.splitlines() if line.startswith("REFUSED ")]
    assert len(refused) == 2
    assert all("Horovod sees 1 rank(s), but the launcher started 2" in line for line in refused), refused

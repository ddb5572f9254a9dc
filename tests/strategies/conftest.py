"""Each test module here has a module of scenarios, which two processes run once for all its tests."""

from __future__ import annotations

import os

import pytest

from lightning_async.membership.process_liveness import STARTER
from tests.strategies.workers import Outcomes


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """The outcomes of the scenarios in the module that the test module calls ``SCENARIOS``."""
    module = request.module.SCENARIOS
    return Outcomes(module, tmp_path_factory.mktemp(module.rpartition(".")[2]))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process trains in a world of one, and its environment is left as it was."""
    lightnings = ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "OMP_NUM_THREADS")
    for variable in (*lightnings, STARTER, "LIGHTNING_ASYNC_SECRET"):
        if variable not in os.environ:  # the launcher sets it
            monkeypatch.setenv(variable, "")
            monkeypatch.delenv(variable)
    monkeypatch.setenv("RANK", "0")  # for the network, which asks for its rank

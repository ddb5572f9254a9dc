"""Each test module here has a module of scenarios, which two processes run once for all its tests."""

from __future__ import annotations

import pytest

from tests.strategies.workers import Outcomes


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """The outcomes of the scenarios in the module that the test module calls ``SCENARIOS``."""
    module = request.module.SCENARIOS
    return Outcomes(module, tmp_path_factory.mktemp(module.rpartition(".")[2]))

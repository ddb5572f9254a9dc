"""The trainings of a library, once for all its tests."""

from __future__ import annotations

import pytest

from tests.projects.compared import Told, run


@pytest.fixture(scope="module")
def trainings(request: pytest.FixtureRequest) -> dict[str, Told]:
    """What the test module's ``train`` tells, by strategy."""
    return run(request.module.__name__)

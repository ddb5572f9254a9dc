"""What cannot be with parameter servers is said on all ranks, at the start, or where it first matters."""

from __future__ import annotations

import pytest

from tests.strategies.workers import Outcomes

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes("tests.strategies.served_unsupported", tmp_path_factory.mktemp("served_refusals"))


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("more_servers", "ValueError", ["num_servers=3", "there are 2 ranks"]),
        ("not_to_be_sharded", "ValueError", ["Adafactor", "cannot be sharded", "update_on_server=False"]),
        ("no_gradients_of_its_own", "ValueError", ["LBFGS", "cannot be sharded", "update_on_server=False"]),
        ("other_models", "LayoutMismatch", ["hold different models", "net.0.weight"]),
        ("other_optimizers", "SettingsMismatch", ["optimizers", "SGD", "Adam"]),
        ("cycled_momentum", "ValueError", ["`OneCycleLR`", "cycle_momentum=False", "update_on_server=False"]),
        (
            "other_momentum_than_at_the_start",
            "ValueError",
            ["SGD's `momentum` was 0.9", "is 0.45 now", "update_on_server=False"],
        ),
        ("other_servers", "SettingsMismatch", ["num_servers", "is 1 on rank 0, 2 on rank 1"]),
    ],
)
def test_all_ranks_say_what_cannot_be(outcomes: Outcomes, name: str, error: str, words: list[str]) -> None:
    for said in outcomes.errors(name):
        assert said.startswith(error), said
        assert all(word in said for word in words), said

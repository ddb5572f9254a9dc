"""Rounds of fragments in int8: ranks are killed, the others go on, and all resume, also with another number of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from lightning_async import AsyncAveragingStrategy, DiLoCo, EveryNSteps
from tests.support import run_ranks


def ended(folder: Path, killed: list[int] | None = None, **kwargs: Any) -> list[dict[str, Any]]:
    """What the ranks say that have ended in order."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
    arguments = {"folder": str(folder), "dies": killed or [], **kwargs}
    results = run_ranks("tests.strategies.fragments:train", 2, kwargs=arguments, env=env, check=False)
    assert [rank for rank, result in enumerate(results) if result.returncode] == (killed or []), results
    return [json.loads(result.stdout.partition("ENDED ")[2]) for result in results if not result.returncode]


@pytest.mark.processes
def test_one_is_killed_and_all_resume_with_as_many_fragments_or_others(tmp_path: Path) -> None:
    (left,) = ended(tmp_path / "saves", killed=[1], epochs=1, dies_at=30)
    assert left["rounds"] > 6 and left["step"] >= 200
    for fragments in (3, 2):
        shutil.copytree(tmp_path / "saves", tmp_path / str(fragments))
        one, other = ended(tmp_path / str(fragments), epochs=2, fragments=fragments)
        assert one["values"] == other["values"] != left["values"]
        assert one["from"] == [left["step"], left["rounds"]]
        assert one["momentum"] == other["momentum"]
        assert len(one["momentum"]) == 65 and all(one["momentum"]), "each fragment has taken outer steps"
        assert one["rounds"] > left["rounds"] and one["step"] >= 400


@pytest.mark.processes
def test_all_are_killed_between_sync_points_and_resume_from_a_round(tmp_path: Path) -> None:
    ended(tmp_path, killed=[0, 1], epochs=1, dies_at=None)
    one, other = ended(tmp_path, epochs=1)
    assert one["values"] == other["values"]
    assert one["momentum"] == other["momentum"]
    assert any(one["momentum"])
    assert one["from"][0] >= 10 and one["from"][1] == other["from"][1] > 0


@pytest.mark.parametrize(
    ("arguments", "fragments", "automatic"),
    [
        ({}, 4, ("rule", "schedule")),
        ({"fragments": 2}, 2, ("rule", "schedule")),
        ({"overlap": False}, 1, ("rule", "schedule")),
        ({"schedule": EveryNSteps(8)}, 1, ("rule",)),
        ({"schedule": EveryNSteps(8), "rule": DiLoCo(), "fragments": 3}, 3, ()),
    ],
)
def test_there_are_several_where_the_schedule_sets_itself_too(
    arguments: Any, fragments: int, automatic: tuple[str, ...]
) -> None:
    strategy = AsyncAveragingStrategy(**arguments)
    assert (strategy.config.fragments, strategy.automatic) == (fragments, automatic)

"""Ranks are killed, and the others go on to the end: real processes, over Gloo, the store in a process of its own."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.strategies.survivor_workers import SAMPLES
from tests.strategies.test_failures import ended
from tests.support import start_ranks

SURVIVE = "tests.strategies.survivor_workers:survive"


def survivors(folder: Path, deaths: dict[str, Any], world_size: int = 3, **kwargs: Any) -> list[dict[str, Any]]:
    """What those say that are left; all of them end with 0."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
    arguments = {"folder": str(folder), "deaths": deaths, **kwargs}
    with start_ranks(SURVIVE, world_size, kwargs=arguments, env=env, timeout=150) as group:
        results = group.join()
    told = []
    for number, result in enumerate(results):
        if str(number) in deaths:
            assert result.returncode == -9, result
        else:
            assert result.returncode == 0 and not result.timed_out, "\n".join(map(str, results))
            told.append(ended(result))
    assert len({each["digest"] for each in told}) == 1, told
    return told


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("place", [("step", 0, 4), ("validation", 0, 2), ("epoch end", 1, 0)], ids=lambda p: p[0])
def test_the_others_go_on_with_all_samples_from_the_next_epoch_on(victim: int, place: Any, tmp_path: Path) -> None:
    told = survivors(tmp_path, {str(victim): place})
    assert [(each["rank"], each["world_size"], each["lost"]) for each in told] == [(0, 2, 1), (1, 2, 1)]
    for what in ("trained", "validated"):
        seen = sorted(sample for each in told for sample in each[what]["2"])
        assert seen == list(range(SAMPLES)), what
    assert {path.name for path in tmp_path.glob("*.ckpt")} >= {"epoch=2.ckpt"}
    with open(tmp_path / "log" / "version_0" / "metrics.csv") as file:
        epochs = {row["epoch"] for row in csv.DictReader(file) if row["val_loss"]}
    assert "2" in epochs

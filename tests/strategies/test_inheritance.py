"""Ranks are killed within an epoch: what they had not shared of it is trained on by the others, each sample once."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.support import start_ranks

INHERIT = "tests.strategies.inheritance_workers:inherit"
Told = dict[str, list[Any]]


def train(folder: Path, deaths: dict[str, Any], ranks: int = 3, **settings: Any) -> tuple[Told, dict[str, Any]]:
    """What each rank says that it has seen, dead or alive; and what those say that are left."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
    arguments = {"folder": str(folder), "deaths": deaths, **settings}
    with start_ranks(INHERIT, ranks, kwargs=arguments, env=env, timeout=150) as group:
        results = group.join()
    told, left = {}, {}
    for number, result in enumerate(results):
        name = str(number)
        if name in deaths:
            told[name] = json.loads((folder / f"{name}.json").read_text())
        else:
            assert result.returncode == 0 and not result.timed_out, "\n".join(map(str, results))
            left[name], told[name] = result.value, result.value["told"]
    assert len({each["digest"] for each in left.values()}) == 1, left
    return told, left


def seen(told: Told, what: str, epoch: int, of: Collection[str], loader: int = 0, upto: int | None = None) -> list[int]:
    """The samples of an epoch, in order; ``upto`` a number of batches for each."""
    found = []
    for name in of:
        batches = [entry[3][loader] for entry in told[name] if entry[:2] == [what, epoch]]
        found += [sample for batch in batches[:upto] for sample in batch]
    return found


def once(told: Told, epoch: int, left: Collection[str], committed: dict[str, int], loader: int = 0) -> list[int]:
    """All that counts: what the living have trained on, and what the dead had shared."""
    counted = seen(told, "train", epoch, left, loader)
    for name, batches in committed.items():
        counted += seen(told, "train", epoch, [name], loader, batches)
    return sorted(counted)


@pytest.mark.parametrize(
    ("victim", "settings"),
    [
        (1, {}),
        (0, {"shuffle": True, "num_workers": 2}),
        (2, {"sampler": "distributed", "shuffle": True, "num_workers": 2, "persistent": True}),
    ],
    ids=["lightnings-sampler", "shuffled-by-workers", "own-sampler-persistent-workers"],
)
def test_each_sample_of_the_epoch_is_in_committed_work_once(victim: int, settings: Any, tmp_path: Path) -> None:
    told, left = train(tmp_path, {str(victim): ["step", 0, 4]}, **settings)
    assert once(told, 0, left, {str(victim): 3}) == list(range(54))
    assert sorted(seen(told, "train", 1, left)) == list(range(54))
    assert {each["epochs_scheduled"] for each in left.values()} == {2}
    batches = [each["batches"] for each in left.values()]
    assert batches == [14, 14]  # of 27 samples
    for each in left.values():
        numbers = [entry[2] for entry in each["told"] if entry[:2] == ["train", 0]]
        assert numbers == list(range(12))
        validated = [index for index, entry in enumerate(each["told"]) if entry[:2] == ["validated", 0]]
        (last,) = [index for index, entry in enumerate(each["told"]) if entry[:3] == ["train", 0, 11]]
        assert len(validated) == 1 and validated[0] > last  # of the model of the whole epoch

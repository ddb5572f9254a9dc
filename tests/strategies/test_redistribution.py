"""Ranks are killed within an epoch: what they had not shared of it is trained on by the others, each sample once."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.strategies.redistribution_workers import PARTITIONS
from tests.support import start_ranks

pytestmark = pytest.mark.processes

INHERIT = "tests.strategies.redistribution_workers:inherit"
Told = dict[str, list[Any]]


def train(
    folder: Path, deaths: dict[str, Any], ranks: int = 3, run: str = INHERIT, **settings: Any
) -> tuple[Told, dict[str, Any]]:
    """What each rank says that it has seen, dead or alive; and what those say that are left."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
    arguments = {"folder": str(folder), "deaths": deaths, **settings}
    with start_ranks(run, ranks, kwargs=arguments, env=env, timeout=150) as group:
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
        (1, {}),  # for training, Lightning's sampler shuffles
        (0, {"num_workers": 2}),
        (2, {"own_sampler": True, "shuffle": True, "num_workers": 2, "persistent": True}),
    ],
    ids=["lightnings-sampler", "workers", "own-sampler-persistent-workers"],
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


@pytest.mark.parametrize(("partition", "workers"), [("weighted", 2), ("by key", 0)])
def test_each_sample_of_a_partition_is_in_committed_work_once(partition: str, workers: int, tmp_path: Path) -> None:
    told, left = train(
        tmp_path, {"1": ["step", 0, 4]}, partition=partition, num_workers=workers, persistent=workers > 0
    )
    assert once(told, 0, left, {"1": 3}) == list(range(54))
    made = PARTITIONS[partition]
    for place, name in enumerate("02"):
        first = made.part(54, "012", int(name), 0).tolist()
        assert seen(told, "train", 0, [name])[: len(first)] == first
        assert seen(told, "train", 1, [name]) == made.part(54, "02", place, 1).tolist()
        if partition == "by key":  # its keys are its own still
            assert set(seen(told, "train", 1, [name])) >= set(first)


@pytest.mark.parametrize("kind", ["averaging", "gradients", "servers"])
def test_a_schedule_ends_with_the_data_after_a_loss(kind: str, tmp_path: Path) -> None:
    """Rank 1 of three is lost in the second of three epochs, of 54 samples in batches of two."""
    run = "tests.strategies.redistribution_workers:scheduled"
    _, left = train(tmp_path, {"1": ["step", 1, 4]}, run=run, kind=kind)
    for each in left.values():
        assert each["total"] == 27
        assert each["steps"] > 33, "9, at least 10, and 14 in the last epoch"
        # Servers count pushes, and what the lost rank had pushed is not trained on again.
        assert each["last_epoch"] in ((26, 27) if kind == "servers" else (27,))


def test_one_who_inherits_is_lost_too(tmp_path: Path) -> None:
    """Of the second one all counts but what it had of the first one's, in no round yet."""
    told, left = train(tmp_path, {"1": ["step", 0, 4], "2": ["step", 0, 10]})
    assert set(left) == {"0"}
    assert once(told, 0, left, {"1": 3, "2": 9}) == list(range(54))
    assert len(seen(told, "train", 0, ["2"])) == 20
    assert [entry[2] for entry in told["0"] if entry[:2] == ["train", 0]] == list(range(15))
    assert sorted(seen(told, "train", 1, left)) == list(range(54))


@pytest.mark.parametrize("ours", [False, True], ids=["lightnings", "ours"])
def test_within_the_last_batches_with_accumulation_and_validations_within_the_epoch(ours: bool, tmp_path: Path) -> None:
    """Three batches are left, which two ranks take; validations go on being counted by batches."""
    trainer: dict[str, Any] = {"val_check_interval": 5, "enable_progress_bar": True}
    settings = {"windows": 2} if ours else {}
    trainer |= {} if ours else {"accumulate_grad_batches": 2}
    told, left = train(tmp_path, {"1": ["step", 0, 8]}, trainer=trainer, epochs=1, **settings)  # pyright: ignore[reportArgumentType]
    assert once(told, 0, left, {"1": 6}) == list(range(54))
    assert sorted(len(seen(told, "train", 0, [name])) for name in left) == [20, 22]
    validated = [sum(entry[:2] == ["validated", 0] for entry in told[name]) for name in left]
    assert sorted(each["bar"] for each in left.values()) == [10, 11]
    assert validated == [3, 3]  # at 5, at 10, and where the one that had 10 batches was at its last


def test_batches_of_several_loaders_and_their_limit_go_together(tmp_path: Path) -> None:
    settings = {"samples": [54, 30], "mode": "max_size_cycle", "own_sampler": True}
    told, left = train(tmp_path, {"1": ["step", 0, 4]}, trainer={"limit_train_batches": 7}, **settings)
    own = [[[3 * (2 * k % most + j) + 1 for j in (0, 1)] for k in range(7)] for most in (18, 10)]
    expected = [list(pair) for pair in zip(*own, strict=True)][3:]
    rest = [entry[3] for name in left for entry in told[name] if entry[:2] == ["train", 0] and entry[2] >= 7]
    assert sorted(rest) == sorted(expected)


def test_synchronous_steps_and_samples_that_are_there_only_to_fill_up(tmp_path: Path) -> None:
    """55 samples among 3 ranks: the samples 0 and 1 are repeated, by the ranks 1 and 2."""
    told, left = train(tmp_path, {"1": ["step", 0, 4]}, samples=[55], own_sampler=True, synchronous=True)
    assert once(told, 0, left, {"1": 4}) == sorted([*range(55), 1])


def test_each_sample_of_a_stream_is_in_committed_work_once(tmp_path: Path) -> None:
    """Keys are unequal in number, as are batches; each worker has samples of its own. Positions are followed, and one
    batch is fetched ahead."""
    told, left = train(tmp_path, {"1": ["step", 0, 4]}, stream="by key", num_workers=2, saved=True)
    assert once(told, 0, left, {"1": 3}) == list(range(54))
    assert len(seen(told, "train", 0, ["1"], upto=3)) == 6
    assert sorted(seen(told, "train", 1, left)) == list(range(54))
    assert not any("are missing in epoch" in text for each in left.values() for text in each["logged"])


def test_one_who_inherits_of_a_stream_is_lost_too(tmp_path: Path) -> None:
    told, left = train(tmp_path, {"1": ["step", 0, 4], "2": ["step", 0, 10]}, stream="in turn")
    assert set(left) == {"0"}
    assert once(told, 0, left, {"1": 3, "2": 9}) == list(range(54))
    assert len(seen(told, "train", 0, ["2"])) == 20
    assert sorted(seen(told, "train", 1, left)) == list(range(54))


def test_where_nobody_can_tell_what_the_lost_had_it_is_said_and_missing(tmp_path: Path) -> None:
    told, left = train(tmp_path, {"1": ["step", 0, 4]}, iterable=True)
    assert {len(seen(told, "train", 0, [name])) for name in left} == {18}
    assert sorted(seen(told, "train", 1, left)) == list(range(54))  # it has asked who is there
    lost = "Batches of rank 1 are missing in epoch 0, from its batch 3 on"
    assert any(lost in text for text in left["0"]["logged"])


@pytest.mark.parametrize(("victim", "workers"), [(0, 0), (2, 2)])
def test_what_was_validated_by_one_that_is_lost_is_validated_by_the_others(
    victim: int, workers: int, tmp_path: Path
) -> None:
    loaders = {"num_workers": workers, "val_workers": workers}
    told, left = train(tmp_path, {str(victim): ["validation", 0, 2]}, epochs=1, **loaders)  # pyright: ignore[reportArgumentType]
    assert sorted(seen(told, "validate", 0, left)) == list(range(24))
    assert once(told, 0, left, {str(victim): 9}) == list(range(54))
    assert {each["mean"] for each in left.values()} == {11.5}

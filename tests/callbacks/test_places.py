"""Directories that belong to hosts, settings that belong to ranks, and torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_async.checkpoint.store import CheckpointStore
from lightning_async.errors import CheckpointError
from lightning_async.trainer.checkpoint.checkpoint_recovery import CheckpointReader
from tests.callbacks.checkpoint_ranks import BATCHES, EPOCHS
from tests.checkpoint.stores import save
from tests.strategies.workers import Outcomes
from tests.support import run_ranks, start_ranks

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes("tests.callbacks.places_ranks", tmp_path_factory.mktemp("places"))


@pytest.mark.parametrize("name", ["ddp_lost", "synchronous_damaged"])
def test_all_go_on_from_the_newest_that_each_host_has(outcomes: Outcomes, name: str) -> None:
    for rank, told in enumerate(outcomes(name)):
        assert told["before"] == [16, 12, 8, 4]
        assert told["ranks"] == [[rank]] * 4, "each directory has a checkpoint of those that see it"
        assert told["first"] == 12
        assert told["exact"] == [True] * (BATCHES * EPOCHS - 12)
        numbers, steps = zip(*told["after"], strict=True)
        assert len(set(numbers)) == len(numbers)
        assert steps[0] == BATCHES * EPOCHS
        assert steps.count(16) == (2 if rank == 0 else 1), "what only one host has stays, behind the newest"
        assert told["aside"] == (name == "synchronous_damaged" and rank == 1)


def test_a_host_that_has_none_is_named(outcomes: Outcomes) -> None:
    for said in outcomes("a_new_host"):
        assert "finds no checkpoint" in said
        assert "There are [2, 0] others, by rank" in said


def test_replicas_that_drift_need_one_directory(outcomes: Outcomes) -> None:
    for rank, said in enumerate(outcomes.errors("apart")):
        assert f"is one directory of ranks [{rank}], and another one elsewhere" in said


def test_other_settings_on_one_rank_are_refused_on_all(outcomes: Outcomes) -> None:
    for told in outcomes("other_settings"):
        assert told.pop("left") == "[]"
        assert len(told) == 4
        for name, said in told.items():
            assert said.startswith("SettingsMismatch: The ranks have different settings for checkpoints: "), name
            assert name.replace("every_n_train_steps", "EveryNTrainSteps(n=3)") in said


@pytest.mark.timeout(230)
def test_killed_where_one_host_has_not_written_its_newest(tmp_path: Path) -> None:
    with start_ranks(
        "tests.callbacks.places_ranks:killed", 2, kwargs={"folder": str(tmp_path)}, timeout=110.0
    ) as group:
        killed = group.join()
    assert [each.returncode for each in killed] == [-9, -9], "\n".join(map(str, killed))
    first, second = run_ranks(
        "tests.callbacks.places_ranks:begun_again", 2, kwargs={"folder": str(tmp_path)}, timeout=110.0
    )
    assert first.value == [[16, 12], 12, 24]
    assert second.value == [[12, 8], 12, 24]


@pytest.mark.parametrize("name", ["reads_ddp", "reads_drifting"])
def test_torchs_own_reader_takes_it_to_the_bit(outcomes: Outcomes, name: str) -> None:
    for told in outcomes(name):
        step, expected = told["step"]
        assert step == expected > 0
        assert told["local"] == [[8, 2], True]
        assert told["not zero"]
        for kind in ("plain", "divided", "moments"):
            assert told[kind]
            assert all(told[kind]), kind


def test_torchs_own_reader_hears_of_damage_on_all_ranks(outcomes: Outcomes) -> None:
    for told in outcomes("reads_damaged"):
        assert "rank-1.bin has the checksum" in told["all"]


def test_a_reader_says_what_it_needs(tmp_path: Path) -> None:
    entry = save(CheckpointStore(tmp_path), 1)
    with pytest.raises(CheckpointError, match="it is a directory of checkpoints; the newest is 000001-step-10"):
        CheckpointReader(tmp_path)
    reader = CheckpointReader(entry.path)
    with pytest.raises(CheckpointError, match=r"/absent'\)` needs the path of a checkpoint: there is none"):
        reader.reset(tmp_path / "absent")
    assert CheckpointReader.validate_checkpoint_id(entry.path)
    assert not CheckpointReader.validate_checkpoint_id(tmp_path)

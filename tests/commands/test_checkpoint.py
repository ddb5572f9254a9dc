"""The command shows, verifies and prunes what training has written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_async.commands.main import main
from lightning_async.engine.checkpoint.store import CheckpointStore
from tests.checkpoint.stores import save, write_ranks


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """Four checkpoints, the second one good, one in quarantine, one unfinished; and what does not belong there."""
    store = CheckpointStore(tmp_path / "run")
    for number in range(1, 5):
        save(store, number, metrics={"loss": 1.0 / number if number < 4 else 9.0})
    store.promote(store.entries()[2])
    store.quarantine(save(store, 5))
    write_ranks(store, store.temporary(6, 60, "dead"), 6, (0,))
    (tmp_path / "run" / "notes.txt").touch()
    return store


def damage(store: CheckpointStore, number: int) -> None:
    path = Path(store.final(number, 10 * number)) / "rank-1.bin"
    path.write_bytes(path.read_bytes()[:-1])


def test_list_shows_all_that_is_there(store: CheckpointStore, capsys: pytest.CaptureFixture[str]):
    (Path(store.final(1, 10)) / "manifest.json").unlink()
    assert main(["checkpoint", "list", store.dirpath]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said] == [
        *("000004-step-40", "000003-step-30", "000002-step-20", "000001-step-10"),
        *("000005-step-50.damaged-1", "000006-step-60.tmp-dead", "notes.txt"),
    ]
    assert "epoch 0  2 of 1 ranks  1.4 KiB    loss 9" in said[0]
    assert said[2].endswith("loss 0.5  good") and "good" not in said[0]
    assert said[3].endswith("damaged: " + store.final(1, 10) + "/manifest.json is missing.")
    assert [line.split(maxsplit=1)[1] for line in said[4:]] == ["in quarantine", "unfinished", "not a checkpoint"]


def test_verify_reads_all_and_fails_where_one_is_damaged(store: CheckpointStore, capsys: pytest.CaptureFixture[str]):
    assert main(["checkpoint", "verify", store.dirpath]) == 0
    assert capsys.readouterr().out.endswith("4 whole, 0 not.\n")
    damage(store, 3)
    assert main(["checkpoint", "verify", store.dirpath, "--number", "2"]) == 0
    assert main(["checkpoint", "verify", store.dirpath, "--number", "3"]) == 1
    assert "damaged: " + store.final(3, 30) + "/rank-1.bin has 500 bytes, 501 were" in capsys.readouterr().out
    assert main(["checkpoint", "verify", store.dirpath, "--quarantine"]) == 1
    assert capsys.readouterr().out.endswith("3 whole, 1 not.\n")
    assert [entry.number for entry in store.entries()] == [4, 2, 1]
    assert main(["checkpoint", "verify", store.dirpath]) == 0
    assert main(["checkpoint", "verify", store.dirpath, "--number", "9"]) == 1
    assert "has no checkpoint of number 9" in capsys.readouterr().err


def test_prune_keeps_what_it_is_told_and_what_is_needed(store: CheckpointStore, capsys: pytest.CaptureFixture[str]):
    before = sorted(os.listdir(store.dirpath))
    assert main(["checkpoint", "prune", store.dirpath, "--best", "loss", "--dry-run"]) == 0
    assert capsys.readouterr().out.split() == ["000001-step-10", "would", "be", "deleted"]
    assert sorted(os.listdir(store.dirpath)) == before
    assert main(["checkpoint", "prune", store.dirpath, "--every", "3"]) == 0
    assert [entry.number for entry in store.entries()] == [4, 3, 2]  # the newest, the third, and the last good one
    assert "000006-step-60.tmp-dead  deleted" in capsys.readouterr().out
    assert main(["checkpoint", "prune", store.dirpath, "--latest", "1", "--damaged"]) == 0
    assert sorted(os.listdir(store.dirpath)) == ["000002-step-20", "000004-step-40", "notes.txt"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["prune", "{}"], "needs to know what to keep"),
        (["prune", "{}", "--latest", "0"], "must be >= 1"),
        (["list", "{}/absent"], "There is no directory"),
    ],
)
def test_what_cannot_be_done_is_said(
    store: CheckpointStore, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
):
    assert main(["checkpoint", *(argument.format(store.dirpath) for argument in arguments)]) == 1
    assert words in capsys.readouterr().err
    assert len(store.entries()) == 4

"""The command shows, verifies and prunes what training has written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_async.callbacks.checkpoint import FaultTolerantCheckpoint
from lightning_async.checkpoint.store import CheckpointStore
from lightning_async.cli.main import main
from lightning_async.trainer.namespace import pl
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


def damage(store: CheckpointStore, number: int, name: str = "rank-1.bin") -> None:
    path = Path(next(entry.path for entry in store.entries() if entry.number == number)) / name
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
    assert sorted(os.listdir(store.dirpath)) == [".claim", ".ranks", "000002-step-20", "000004-step-40", "notes.txt"]
    capsys.readouterr()
    for options in (["--dry-run"], []):
        assert main(["checkpoint", "prune", store.dirpath, "--latest", "2", *options]) == 0
        assert capsys.readouterr().out == "nothing to delete\n"


class Net(pl.LightningModule):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def trainer(folder: Path, steps: int, *callbacks: Any) -> Any:
    return pl.Trainer(
        max_steps=steps, accelerator="cpu", devices=1, callbacks=list(callbacks), default_root_dir=folder,
        logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=bool(callbacks),
    )  # fmt: skip


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_export_is_an_ordinary_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    torch.manual_seed(0)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(12, 4)), batch_size=4)
    net, output = Net(width=4), f"{tmp_path}/out/model.ckpt"
    trainer(tmp_path, 4, FaultTolerantCheckpoint(tmp_path / "run", every_n_train_steps=3, busy="wait")).fit(net, data)
    store = CheckpointStore(tmp_path / "run")
    newest = store.entries()[0]
    assert newest.step == 4
    assert main(["checkpoint", "export", store.dirpath, output]) == 0
    assert capsys.readouterr().out.startswith(f"{newest.name} is in {output}, ")
    assert os.listdir(tmp_path / "out") == ["model.ckpt"]

    checkpoint = torch.load(output, weights_only=True)
    assert checkpoint["global_step"] == 4
    loaded = Net.load_from_checkpoint(output, weights_only=True)
    assert loaded.hparams["width"] == 4
    for one, other in zip(net.state_dict().values(), loaded.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)

    again, there = Net(width=4), trainer(tmp_path, 6)
    there.fit(again, data, ckpt_path=output)
    assert there.global_step == 6
    assert there.optimizers[0].state[again.layers[0].weight]["step"] == 6
    assert there.optimizers[0].param_groups[0]["initial_lr"] == 0.1

    older = store.entries()[1]
    assert main(["checkpoint", "export", older.path, output]) == 0  # the path of one checkpoint
    assert capsys.readouterr().out.startswith(f"{older.name} is in {output}, ")
    assert torch.load(output, weights_only=True)["global_step"] == 3
    assert main(["checkpoint", "prune", older.path, "--latest", "1"]) == 1
    assert f"is one checkpoint: give the directory that it is in, {store.dirpath}" in capsys.readouterr().err

    damage(store, newest.number, "rank-0.bin")
    assert main(["checkpoint", "export", store.dirpath, output]) == 0
    said = capsys.readouterr()
    assert "rank-0.bin has" in said.err and store.entries()[1].name in said.out
    assert torch.load(output, weights_only=True)["global_step"] == 3
    assert main(["checkpoint", "export", store.dirpath, output, "--number", str(newest.number)]) == 1
    assert "no checkpoint to export that is whole" in capsys.readouterr().err


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

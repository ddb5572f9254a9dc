"""`FaultTolerantCheckpoint` where the state, the end of training or the writer is not the usual one."""

from __future__ import annotations

import contextlib
import copy
import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from lightning_async import DivergenceMonitor, FaultTolerantCheckpoint
from lightning_async.algorithms import AnySave, AtEpochEnd, Best, EveryNTrainSteps, Latest
from lightning_async.algorithms.divergence import History
from lightning_async.checkpoint.storage import seal, unseal
from lightning_async.checkpoint.store import CheckpointStore
from lightning_async.cli.main import main
from lightning_async.errors import CheckpointError, DamagedCheckpoint
from lightning_async.trainer.checkpoint import checkpointing
from lightning_async.trainer.checkpoint.checkpoint_recovery import CheckpointReader, WrittenFiles
from lightning_async.trainer.checkpoint.checkpoint_state import TrainerState
from lightning_async.trainer.loops.averaged_models import AveragedModels
from lightning_async.trainer.namespace import pl
from tests.callbacks.checkpoint_ranks import At, Interrupted, Noisy, interrupt
from tests.callbacks.test_checkpoint import (
    BATCHES,
    EPOCHS,
    data,
    every,
    steps_in,
    train,
    trainer_of,
    whole_data,
)
from tests.support import run_ranks

pytestmark = pytest.mark.processes


class Caching(Noisy):
    """Its buffers are made, and made larger, as it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grown", torch.zeros(1), persistent=False)
        self.register_buffer("made", None, persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.grown = torch.full((5,), float(self.trainer.global_step))
        if self.made is None:
            self.made = torch.full((3,), float(self.trainer.global_step))
        return super().training_step(batch, batch_idx)


def test_buffers_that_training_makes_are_there_again(tmp_path: Path) -> None:
    with contextlib.suppress(Interrupted):
        train(every(tmp_path), At(9, interrupt), module=Caching())
    module = train(every(tmp_path), module=Caching())
    assert min(module.losses) == 8
    assert module.made.tolist() == [0.0] * 3
    assert module.grown.tolist() == [BATCHES * EPOCHS - 1.0] * 5


def test_a_training_that_was_ended_after_its_last_step_comes_to_its_end(tmp_path: Path) -> None:
    class Hooks(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append("epoch")

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append("end")

    class Ended(Hooks):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            raise Interrupted

    for end, saved in ((BATCHES, 1), (BATCHES - 2, 1)):  # with the last batch, and before it
        seen: list[str] = []
        folder, limits = tmp_path / str(end), {"max_steps": end, "max_epochs": -1}
        with contextlib.suppress(Interrupted):
            train(every(folder, end), Ended(), **limits)
        assert steps_in(folder) == [end] * saved
        assert train(every(folder, end), Hooks(), **limits).losses == {}
        assert seen == ["epoch", "end"]
        assert steps_in(folder) == [end] * (saved + 1)
        assert train(every(folder, end), Hooks(), **limits).losses == {}
        assert seen == ["epoch", "end"], "what has ended is complete"


class EpochEnds(pl.Callback):
    def __init__(self) -> None:
        self.seen = 0

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen += 1


def test_the_last_save_is_of_the_end_even_where_the_last_step_was_saved(tmp_path: Path) -> None:
    train(every(tmp_path, 4))
    newest, before = CheckpointStore(tmp_path).entries()
    assert newest.step == before.step == BATCHES * EPOCHS
    assert newest.manifest is not None
    assert newest.manifest.reason == "the end"
    train(every(tmp_path, 4), ends := EpochEnds())
    assert ends.seen == 0, "it has ended before"


class Evaluated(Noisy):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.tested = float(self.net[0].weight.detach().sum())  # pyright: ignore

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("late", float(self.trainer.global_step > 12))
        return loss


def test_best_is_by_the_policy_or_the_newest(tmp_path: Path) -> None:
    for name, keep, step in (("newest", Latest(2), 24), ("best", Best("late"), 12)):
        trainer, module = trainer_of(every(tmp_path / name, 12, keep=keep)), Evaluated()
        trainer.fit(module, data())
        trainer.test(dataloaders=whole_data(), ckpt_path="best")
        assert f"-step-{step}" in trainer.ckpt_path


class Sized(Noisy):
    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()


class Data(pl.LightningDataModule):
    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return data()


def test_a_folder_loads_wherever_lightning_loads_a_file(tmp_path: Path) -> None:
    saved, module = every(tmp_path / "run", 12), Sized(5)
    trainer_of(saved).fit(module, datamodule=Data("digits"))
    path = saved.best_model_path
    for name in (path, Path(path), f"{path}/"):
        loaded = Sized.load_from_checkpoint(name)
        assert loaded.hparams.size == 5  # pyright: ignore[reportAttributeAccessIssue]
        for one, other in zip(module.state_dict().values(), loaded.state_dict().values(), strict=True):
            assert torch.equal(one, other)
    assert Sized.load_from_checkpoint(path, map_location="cpu", size=7).hparams.size == 7  # pyright: ignore
    assert Data.load_from_checkpoint(path).hparams.name == "digits"  # pyright: ignore[reportAttributeAccessIssue]
    # In a program that trains nothing, so that no callback of this package reads it.
    trainer_of().test(tested := Evaluated(), whole_data(), ckpt_path=path)
    assert tested.tested == float(module.net[0].weight.detach().sum())  # pyright: ignore
    # A file of Lightning's own still loads.
    torch.save({"state_dict": module.state_dict(), "pytorch-lightning_version": "2.6.0"}, tmp_path / "own.ckpt")
    assert torch.equal(Sized.load_from_checkpoint(tmp_path / "own.ckpt").net[0].weight, module.net[0].weight)  # pyright: ignore


def test_a_folder_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    train(saved := every(tmp_path, 12))
    with pytest.raises(CheckpointError, match=r"is a directory of checkpoints: name one, as .*-step-24"):
        Noisy.load_from_checkpoint(tmp_path)
    (Path(saved.best_model_path) / "rank-0.bin").write_bytes(b"")
    with pytest.raises(DamagedCheckpoint, match="has 0 bytes"):
        Noisy.load_from_checkpoint(saved.best_model_path)


def test_the_other_namespace_loads_folders_as_well(tmp_path: Path) -> None:
    other = "pytorch_lightning" if pl.__name__ == "lightning.pytorch" else "lightning.pytorch"
    train(saved := every(tmp_path, 12))
    program = (
        f"import {pl.__name__}, {other} as other, lightning_async; from torch import nn\n"
        f"lightning_async.FaultTolerantCheckpoint({str(tmp_path / 'unused')!r})\n"
        "class M(other.LightningModule):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))\n"
        f"print('loaded', len(list(M.load_from_checkpoint({saved.best_model_path!r}).parameters())))"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert "loaded 6" in out.stdout, out.stderr


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


class Logged(Sized):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def test_a_csv_file_of_two_lives_is_that_of_one(tmp_path: Path) -> None:
    """Killed after step 14, with steps 13 and 14 logged and the newest checkpoint of step 12."""

    def logger_of(name: str) -> Any:
        return pl.loggers.CSVLogger(tmp_path, name="", version=name, flush_logs_every_n_steps=1)

    def life(name: str, *callbacks: Any) -> None:
        options = {"logger": logger_of(name), "log_every_n_steps": 1}
        train(every(tmp_path / "saved" / name, 4), *callbacks, module=Logged(len(callbacks)), **options)

    life("whole")
    with contextlib.suppress(Interrupted):
        life("parts", At(14, interrupt))
    first = rows_of(tmp_path / "parts")
    assert [int(row["step"]) for row in first] == list(range(14))
    life("parts")
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")
    assert [int(row["step"]) for row in rows_of(tmp_path / "parts")] == list(range(BATCHES * EPOCHS))
    assert "size: 0" in (tmp_path / "parts" / "hparams.yaml").read_text(), "of the life that wrote last"


@pytest.mark.filterwarnings("ignore:Experiment logs directory")
def test_a_fit_from_scratch_begins_a_csv_file_anew(tmp_path: Path) -> None:
    for count in (2, 1):
        logger = pl.loggers.CSVLogger(tmp_path, name="", version="run", flush_logs_every_n_steps=1)
        options = {"logger": logger, "log_every_n_steps": 1, "max_epochs": count}
        train(every(tmp_path / str(count), 4, recover=None), module=Logged(), **options)
        assert len(rows_of(tmp_path / "run")) == count * BATCHES


class Poisoned(Noisy):
    """Not a number from step 30 on. Before, a bit of what was saved at step 24 changes."""

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        self.folder, self.began = folder, {}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        step = self.trainer.global_step
        self.began.setdefault(step, self.net[0].weight.detach().clone())  # pyright: ignore
        if step == 30:
            for path in self.folder.glob("*-step-24/rank-0.bin") if self.folder else ():
                content = bytearray(path.read_bytes())
                content[len(content) // 2] ^= 1
                path.write_bytes(content)
            with torch.no_grad():
                self.net[0].weight.fill_(float("nan"))  # pyright: ignore


def monitor() -> DivergenceMonitor:
    return DivergenceMonitor(remedies=["roll_back"], history=History(warmup=5))


def test_what_has_been_damaged_is_not_rolled_back_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = Poisoned(tmp_path)
    train(every(tmp_path, 4, keep=Latest(9), good_after=3), watch := monitor(), module=module, max_epochs=3)
    assert watch.rollbacks == 1
    assert torch.equal(module.began[31], module.began[20])
    assert "rank-0.bin" in caplog.text
    assert list(tmp_path.glob("*-step-24.damaged-1"))


@pytest.mark.skipif(not hasattr(pl.callbacks, "EMAWeightAveraging"), reason="since Lightning 2.6")
def test_rolling_back_takes_the_weights_and_not_their_average(tmp_path: Path) -> None:
    module, average = Poisoned(), pl.callbacks.EMAWeightAveraging(decay=0.9)
    train(every(tmp_path, 4, good_after=3), watch := monitor(), average, module=module, max_epochs=3)
    assert watch.rollbacks == 1
    assert torch.equal(module.began[31], module.began[24])


class Odd(pl.Callback):
    """Its state cannot be saved, from a step on."""

    def __init__(self) -> None:
        self.state: Any = 0

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.state = object() if trainer.global_step in (8, 12) else 0

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}


def test_a_state_that_cannot_be_saved_any_more_is_a_save_that_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(every(tmp_path, 4, keep=Latest(9)), Odd())
    assert steps_in(tmp_path) == [24, 24, 20, 16, 4]
    assert "Odd" in caplog.text


def test_a_kind_of_hyper_parameters_is_left_out(tmp_path: Path) -> None:
    class Typed(Noisy):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint |= {"hyper_parameters": {"lr": 0.1}, "hparams_type": dict}  # as with OmegaConf

    train(every(tmp_path, 12), module=Typed())
    assert steps_in(tmp_path) == [24, 24]


@pytest.mark.skipif(not hasattr(pl.callbacks, "EMAWeightAveraging"), reason="since Lightning 2.6")
def test_what_averages_weigh_at_the_next_sync_point_goes_back_with_them() -> None:
    """Else a rank that goes back had fewer updates than none."""
    module, callback = Noisy(), pl.callbacks.EMAWeightAveraging(decay=0.9)
    average = torch.optim.swa_utils.AveragedModel(module)
    callback._average_model = average
    trainer: Any = MagicMock(callbacks=[callback], lightning_module=module, strategy=SimpleNamespace())
    averages = AveragedModels(trainer, world=MagicMock())
    trainer.strategy.averaged_models = averages
    for _ in range(5):
        average.update_parameters(module)
    assert averages.updates() == [5]
    checkpoint: dict[str, Any] = {"state_dict": module.state_dict()}
    callback.on_save_checkpoint(trainer, module, checkpoint)
    checkpoint = copy.deepcopy(checkpoint)
    taken = {"unsaved": {"averaged": averages.updates()}}
    averages.go_on([0])  # a sync point
    for _ in range(3):
        average.update_parameters(module)
    for resume, updates in ((taken, 5), (None, 0)):
        TrainerState(trainer).restore(checkpoint, resume)
        assert (int(average.n_averaged), averages.updates()) == (5, [updates])


class Normalizer:
    """An object of a user's, as a module puts it into a checkpoint; counts how often it was loaded."""

    loaded = 0

    def __init__(self, mean: float) -> None:
        self.mean = torch.tensor(mean)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        Normalizer.loaded += 1


class Described(Noisy):
    def __init__(self, scale: Normalizer | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.found: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["dataset_parameters"] = {"normalizer": Normalizer(2.5)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.found = checkpoint["dataset_parameters"]["normalizer"].mean.item()


def test_objects_are_saved_and_loaded_where_both_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(Interrupted):
        train(every(tmp_path / "run", objects="pickle"), At(9, interrupt), module=Described(Normalizer(1.5)))
    newest, before = CheckpointStore(tmp_path / "run").entries()
    assert all(entry.manifest is not None and entry.manifest.pickles for entry in (newest, before))

    # Nothing is loaded without being asked for: by training, by another program, by the command.
    output, module = str(tmp_path / "model.ckpt"), Described(Normalizer(1.5))
    Normalizer.loaded = 0  # Lightning has copied the hyper-parameters
    with pytest.raises(CheckpointError, match="holds pickled objects"):
        train(every(tmp_path / "run"), module=module)
    with pytest.raises(CheckpointError, match="holds pickled objects"):
        CheckpointReader(newest.path).read_metadata()
    assert main(["checkpoint", "export", str(tmp_path / "run"), output]) == 1
    assert "holds pickled objects" in capsys.readouterr().err
    assert Normalizer.loaded == 0

    # Nothing is loaded that is damaged: every byte is verified before.
    data = Path(newest.path, "rank-0.bin")
    data.write_bytes(bytes([data.read_bytes()[0] ^ 1]) + data.read_bytes()[1:])
    with pytest.raises(DamagedCheckpoint, match=r"rank-0\.bin has the checksum"):
        CheckpointReader(newest.path, objects="pickle").read_metadata()
    assert Normalizer.loaded == 0
    assert main(["checkpoint", "export", str(tmp_path / "run"), output, "--objects", "pickle"]) == 0
    assert f"{before.name} is in {output}" in (said := capsys.readouterr().out)
    assert "to load it takes `weights_only=False`" in said
    exported = torch.load(output, weights_only=False)
    assert exported["dataset_parameters"]["normalizer"].mean == 2.5
    assert exported["hyper_parameters"]["scale"].mean == 1.5
    assert CheckpointReader(before.path, objects="pickle").read_metadata().state_dict_metadata
    assert main(["checkpoint", "list", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.count("with pickled objects") == 2

    module = train(every(tmp_path / "run", objects="pickle"), module=Described(Normalizer(1.5)))
    assert module.found == 2.5
    assert min(module.losses) == before.step


def test_a_setting_that_is_none_of_the_two_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"FaultTolerantCheckpoint\(objects='unpickle'\)"):
        every(tmp_path, objects="unpickle")
    with pytest.raises(ValueError, match=r"CheckpointReader\(objects='unpickle'\)"):
        CheckpointReader(tmp_path, objects="unpickle")  # pyright: ignore[reportArgumentType]


def test_who_has_failed_does_not_wait_long_for_a_writer_that_does_not_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpointing, "FAILED_S", 0.5)
    saved, pids = every(tmp_path, busy="skip"), []

    def stop() -> None:
        saved._now.saver.wait(20.0)  # pyright: ignore  (its memory grows)
        pids.append(saved._now.saver._writer.pid)  # pyright: ignore
        os.kill(pids[0], signal.SIGSTOP)

    try:
        began = time.monotonic()
        with pytest.raises(Interrupted):
            train(saved, At(2, stop), At(9, interrupt))
        assert time.monotonic() - began < 60.0, "it waits for ten minutes"
    finally:
        os.kill(pids[0], signal.SIGCONT)
    assert "writes on" in caplog.text
    until = time.monotonic() + 60.0
    while steps_in(tmp_path) != [4] and time.monotonic() < until:
        time.sleep(0.02)
    assert steps_in(tmp_path) == [4]


def test_a_save_at_the_end_of_an_epoch_that_is_put_off_is_made(tmp_path: Path) -> None:
    """Another one is being written meanwhile, which takes until step 15."""
    policy = AnySave(AtEpochEnd(), EveryNTrainSteps(10))
    saved = FaultTolerantCheckpoint(tmp_path, save=policy, keep=Latest(9))

    def signal_writer(number: signal.Signals) -> None:
        saver: Any = saved._now.saver  # pyright: ignore
        if number == signal.SIGSTOP:
            saver.wait(20.0)  # its memory grows
        os.kill(saver._writer.pid, number)
        if number == signal.SIGCONT:
            saver.wait(20.0)

    train(
        saved, At(5, lambda: signal_writer(signal.SIGSTOP)), At(15, lambda: signal_writer(signal.SIGCONT)),
        max_epochs=EPOCHS,
    )  # fmt: skip
    assert steps_in(tmp_path)[-2:] == [16, 10]


@pytest.mark.filterwarnings("ignore:.*multiple `ModelCheckpoint` callbacks")
def test_what_is_best_for_lightning_is_for_the_users_own_checkpoints_to_say(tmp_path: Path) -> None:
    """Wherever ours stands in the list."""
    theirs = pl.callbacks.ModelCheckpoint(tmp_path / "theirs", monitor="late", mode="min")
    trainer = trainer_of(every(tmp_path / "ours", 12), theirs)
    trainer.fit(Evaluated(), data())
    assert trainer.checkpoint_callback is theirs
    trainer.test(dataloaders=whole_data(), ckpt_path="best")
    assert trainer.ckpt_path == theirs.best_model_path


def test_a_training_that_has_ended_says_so_and_one_that_is_longer_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(every(tmp_path, 12))
    train(every(tmp_path, 12))
    assert len(told := [r.getMessage() for r in caplog.records if "nothing is trained" in r.getMessage()]) == 1
    assert "-step-24). To go on with it, raise `max_epochs`" in told[0]
    caplog.clear()
    train(every(tmp_path, 12), max_epochs=EPOCHS + 1)
    assert "nothing is trained" not in caplog.text


def test_what_a_callback_has_stopped_has_ended(tmp_path: Path) -> None:
    class Stops(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = trainer.should_stop or trainer.global_step == BATCHES

    assert len(train(every(tmp_path, 4), Stops(), max_epochs=5).losses) == BATCHES
    assert train(every(tmp_path, 4), Stops(), max_epochs=5).losses == {}
    assert len(train(every(tmp_path, 4), max_epochs=6).losses) == 5 * BATCHES


def test_a_directory_of_checkpoints_is_no_checkpoint(tmp_path: Path) -> None:
    train(every(tmp_path, 4), max_epochs=1)
    with pytest.raises(CheckpointError, match=r"is a directory of checkpoints: name one, as .*-step-12, the newest"):
        trainer_of(every(tmp_path, 4)).fit(Noisy(), data(), ckpt_path=str(tmp_path))


def test_what_a_killed_program_has_left_where_ranks_met_is_gone(tmp_path: Path) -> None:
    (tmp_path / ".0123456789ab-1").touch()
    train(every(tmp_path, 4), max_epochs=1)
    assert sorted(name for name in os.listdir(tmp_path) if name.startswith(".")) == [".claim", ".ranks", ".writer-0"]


@pytest.mark.parametrize("changed", ["model", "loaders"])
def test_a_program_that_does_not_fit_its_checkpoint_is_told_what_to_do(
    changed: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(every(tmp_path, 12))
    module, loaders = Noisy(), data()
    if changed == "model":
        module.net = torch.nn.Sequential(torch.nn.Linear(4, 7))
        message = "Error.* in loading state_dict"
    else:
        loaders = [data(), data()]
        message = "of a training with 1 train dataloaders, and this one has 2"
    with pytest.raises((RuntimeError, ValueError), match=message):
        trainer_of(every(tmp_path, 12), max_epochs=EPOCHS + 1).fit(module, loaders)
    assert "-step-24, or before. If this program's model, optimizers or data are not those" in caplog.text


class Scored(Noisy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("score", float(self.trainer.global_step * 37 % 23))
        return super().training_step(batch, batch_idx)


def lightnings(folder: Path, **options: Any) -> Any:
    return pl.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, **options)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.ckpt"))


several_callbacks = pytest.mark.filterwarnings(
    "ignore:.*multiple `ModelCheckpoint` callbacks", "ignore:Checkpoint directory .* exists and is not empty"
)


def live(folder: str, stop: int) -> list[list[str]]:
    """Train beside four callbacks of Lightning's, die at a step, and return the names of their best and last files."""
    place = Path(folder)
    theirs = [
        lightnings(place / "best", monitor="score", save_top_k=2, save_last=True),
        lightnings(place / "links", monitor="score", mode="max", save_top_k=3, save_last="link"),
        lightnings(place / "all", save_top_k=-1),
        pl.callbacks.ModelCheckpoint(place / "newest", every_n_train_steps=3, save_last=True),
    ]
    kill = At(stop, lambda: os.kill(os.getpid(), signal.SIGKILL))
    train(every(place / "saved", 5), *theirs, kill, module=Scored())
    return [[Path(each.best_model_path).name, Path(each.last_model_path).name] for each in theirs]


def test_model_checkpoints_of_five_lives_are_those_of_one(tmp_path: Path) -> None:
    """Killed at 3, before the first checkpoint of ours, and at three other steps."""
    told = {}
    for name, stop in (("parts", 3), ("parts", 9), ("parts", 14), ("parts", 19), ("parts", -1), ("whole", -1)):
        arguments = {"folder": str(tmp_path / name), "stop": stop}
        (life,) = run_ranks(f"{__name__}:live", 1, kwargs=arguments, timeout=120.0, launched=False, check=False)
        assert life.returncode == (0 if stop == -1 else -signal.SIGKILL), life
        told[name] = life.value
    assert told["parts"] == told["whole"]
    for kind, names in {
        "best": ["last.ckpt", "step=24.ckpt", "step=6.ckpt"],
        "links": ["last.ckpt", "step=14.ckpt", "step=22.ckpt", "step=4.ckpt"],
        "all": sorted(f"step={step}.ckpt" for step in range(2, BATCHES * EPOCHS + 1, 2)),
        "newest": ["epoch=1-step=24.ckpt", "last.ckpt"],
    }.items():
        assert names_in(tmp_path / "whole" / kind) == names_in(tmp_path / "parts" / kind) == names
    last = torch.load(tmp_path / "parts" / "links" / "last.ckpt", weights_only=True)
    assert last["global_step"] == 22


@several_callbacks
def test_files_that_others_wrote_beside_models_stay(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    outside = tmp_path / "outside.ckpt"
    users = [models / "step=6.ckpt", models / "copy.ckpt", models / "notes.txt", outside]
    for path in users:
        path.write_text(path.name)

    def life(*callbacks: Any, **settings: Any) -> list[str]:
        with contextlib.suppress(Interrupted):
            theirs = lightnings(models, save_top_k=-1, save_last=True)
            train(every(tmp_path / "saved", 5, **settings), theirs, *callbacks)
        assert [path.read_text() for path in users] == [path.name for path in users]
        return names_in(models)

    first = ["copy.ckpt", "last.ckpt", "step=2.ckpt", "step=4.ckpt", "step=6-v1.ckpt", "step=6.ckpt"]
    assert life(At(7, interrupt)) == first
    # Whoever writes into the folder of checkpoints chooses no files outside.
    listed = tmp_path / "saved" / "model-checkpoints.json"
    content = unseal(listed.read_bytes(), "list")
    content["paths"] += [str(outside), f"{models}/../outside.ckpt", str(models / "notes.txt")]
    listed.write_bytes(seal(content))
    assert life(At(5, interrupt)) == [name for name in first if name != "step=6-v1.ckpt"]
    whole = life()
    assert len(whole) == 2 + 1 + BATCHES * EPOCHS // 2
    # Another training writes beside them: without a checkpoint after the end of one, or if it is asked for.
    newest = CheckpointStore(tmp_path / "saved").entries()[0]
    for entry in CheckpointStore(tmp_path / "saved").entries():
        CheckpointStore(tmp_path / "saved").remove(entry)
    second = life(At(3, interrupt))
    assert second == sorted([*whole, "last-v1.ckpt", "step=2-v1.ckpt"])
    assert newest.step == BATCHES * EPOCHS
    assert set(second) < set(life(At(3, interrupt), recover=None))


def interrupted(folder: Path, stop: int, **settings: Any) -> list[str]:
    with contextlib.suppress(Interrupted):
        best = lightnings(folder / "models", save_top_k=-1)
        train(every(folder / "saved", 5, **settings), best, At(stop, interrupt))
    return names_in(folder / "models")


@several_callbacks
def test_models_stay_where_checkpoints_are_gone(tmp_path: Path) -> None:
    """The only checkpoint was saved after the last file of `ModelCheckpoint` was written."""
    assert interrupted(tmp_path, 5) == ["step=2.ckpt", "step=4.ckpt"]
    store = CheckpointStore(tmp_path / "saved")
    (entry,) = store.entries()
    store.remove(entry)
    assert interrupted(tmp_path, 1) == ["step=2.ckpt", "step=4.ckpt"]


@several_callbacks
def test_models_stay_after_an_older_checkpoint(tmp_path: Path) -> None:
    first = sorted(f"step={step}.ckpt" for step in range(2, 17, 2))
    assert interrupted(tmp_path, 17, keep=Latest(9)) == first
    assert interrupted(tmp_path, 6, keep=Latest(9), recover="step=5") == sorted([*first, "step=6-v1.ckpt"])


@several_callbacks
def test_a_best_model_that_is_gone_is_not_named(tmp_path: Path) -> None:
    """Replaced after the checkpoint from which training resumes, and others are the best this time."""
    with contextlib.suppress(Interrupted):
        best = lightnings(tmp_path / "models", monitor="score", save_top_k=2)
        train(every(tmp_path / "saved", 7), best, At(8, interrupt), module=Scored())
    assert names_in(tmp_path / "models") == ["step=6.ckpt", "step=8.ckpt"]
    (tmp_path / "models" / "step=6.ckpt").unlink()
    best = lightnings(tmp_path / "models", monitor="score", save_top_k=2)
    train(every(tmp_path / "saved", 7), best, module=Scored(), max_steps=10)
    assert Path(best.best_model_path).name == "step=8.ckpt"
    assert best.best_model_score == 6.0
    assert names_in(tmp_path / "models") == ["step=10.ckpt", "step=8.ckpt"]


@several_callbacks
@pytest.mark.parametrize("kind", ["CSVLogger", "TensorBoardLogger"])
def test_a_new_version_of_a_logger_leaves_all_others(kind: str, tmp_path: Path) -> None:
    """Models stay together: in the folder of the first version, as without an interruption."""
    if kind == "TensorBoardLogger":
        pytest.importorskip("tensorboard", reason="pip install tensorboard")
    folder = tmp_path / "lightning_logs"
    before: dict[Path, bytes] = {}
    for stop in (7, 15, -1):
        best = pl.callbacks.ModelCheckpoint(filename="{step}", monitor="score", every_n_train_steps=2, save_top_k=2)
        with contextlib.suppress(Interrupted):
            options = {"logger": getattr(pl.loggers, kind)(tmp_path), "log_every_n_steps": 1}
            train(every(tmp_path / "saved", 5), best, At(stop, interrupt), module=Scored(), **options)
        logs = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".ckpt"}
        assert {path: logs.get(path) for path in before} == before
        before = logs
    assert sorted(path.name for path in folder.iterdir()) == ["version_0", "version_1", "version_2"]
    assert names_in(folder) == names_in(folder / "version_0" / "checkpoints") == ["step=24.ckpt", "step=6.ckpt"]


def test_a_full_disk_of_ours_stops_no_save_of_model_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    store = CheckpointStore(str(tmp_path))
    monkeypatch.setattr(store, "publish", refuse)
    trainer: Any = SimpleNamespace(callbacks=[pl.callbacks.ModelCheckpoint(tmp_path)], is_global_zero=True)
    saved: list[Any] = []
    WrittenFiles(trainer, store, lambda value: [value])._write(lambda *args: saved.append(args), trainer, "a.ckpt")
    assert saved == [(trainer, "a.ckpt")]
    assert "could not be written ([Errno 28] No space left on device)" in caplog.text

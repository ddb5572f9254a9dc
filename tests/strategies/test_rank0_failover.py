"""Rank 0 is lost: what the next one's loggers and progress bar do, without other ranks."""

from __future__ import annotations

import csv
import logging
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lightning_async.trainer.loops.loggers import LoggingFailover, keep_whole, places, take_places
from lightning_async.trainer.namespace import fabric, pl, pytorch, take_back

loggers, callbacks = pytorch("loggers"), pytorch("callbacks")
DummyLogger = pytorch("loggers.logger").DummyLogger


@pytest.fixture(autouse=True)
def rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``rank(1)``: Lightning believes to be this one."""
    modules = [fabric("utilities.rank_zero"), pytorch("utilities.rank_zero")]

    def set_to(number: int) -> None:
        for module in modules:
            monkeypatch.setattr(module.rank_zero_only, "rank", number)

    set_to(0)
    return set_to


def trainer_with(*own: Any, bar: Any = None, leads: bool = False) -> Any:
    return SimpleNamespace(
        loggers=list(own), progress_bar_callback=bar, is_global_zero=leads, lightning_module=None,
        current_epoch=3, max_epochs=9, num_training_batches=8, global_step=0, max_steps=-1, progress_bar_metrics={},
        state=SimpleNamespace(fn="fit"), sanity_checking=False, training=True,
    )  # fmt: skip


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def log(logger: Any, step: int, **metrics: float) -> None:
    logger.log_metrics(metrics, step)
    logger.save()


def two(folder: Path) -> tuple[Any, Any, Path]:
    """The loggers of rank 0, which has logged twice, and of another one, and where rank 0's writes: version 3."""
    (folder / "log" / "version_2").mkdir(parents=True)
    first, second = (loggers.CSVLogger(folder, name="log") for _ in range(2))
    log(first, 0, loss=1.0)
    log(first, 1, loss=0.5)
    return first, second, folder / "log" / "version_3"


def test_the_next_rank_0_appends_to_what_is_there_whatever_columns_it_has(tmp_path: Path, rank: Any) -> None:
    first, second, folder = two(tmp_path)
    first.log_hyperparams({"lr": 0.1})
    rank(1)
    assert second.version == 4, "asked for too late"
    take_places([second], places([first]))
    assert (second.version, second.log_dir) == (3, str(folder))
    log(second, 7, loss=9.0)
    rank(0)
    log(second, 2, loss=0.25)
    log(second, 3, accuracy=0.75, loss=0.125)
    log(second, 4, accuracy=0.875)
    second.log_hyperparams({"more": 2})
    assert rows(folder) == [
        {"accuracy": "", "loss": "1.0", "step": "0"},
        {"accuracy": "", "loss": "0.5", "step": "1"},
        {"accuracy": "", "loss": "0.25", "step": "2"},
        {"accuracy": "0.75", "loss": "0.125", "step": "3"},
        {"accuracy": "0.875", "loss": "", "step": "4"},
    ]
    assert (folder / "hparams.yaml").read_text() == "lr: 0.1\nmore: 2\n"
    assert sorted(path.name for path in folder.iterdir()) == ["hparams.yaml", "metrics.csv"]


def test_a_row_that_the_lost_one_had_begun_is_missing_and_no_other(tmp_path: Path) -> None:
    first, second, folder = two(tmp_path)
    with (folder / "metrics.csv").open("a", newline="") as file:
        file.write("0.1")
    take_places([second], places([first]))
    log(second, 2, loss=0.25)
    assert [row["step"] for row in rows(folder)] == ["0", "1", "2"]


def test_columns_that_something_else_has_ordered_are_put_in_order(tmp_path: Path) -> None:
    first, second, folder = two(tmp_path)
    (folder / "metrics.csv").write_text("step,loss\n0,1.0\n")
    take_places([second], places([first]))
    log(second, 1, loss=0.5)
    assert rows(folder) == [{"loss": "1.0", "step": "0"}, {"loss": "0.5", "step": "1"}]


def test_a_header_that_is_not_whole_is_written_again(tmp_path: Path) -> None:
    first, second, folder = two(tmp_path)
    (folder / "metrics.csv").write_text("lo")
    take_places([second], places([first]))
    log(second, 2, loss=0.25)
    assert rows(folder) == [{"loss": "0.25", "step": "2"}]


def test_one_that_was_stopped_writes_in_the_columns_of_those_who_have_gone_on(tmp_path: Path) -> None:
    """Until it hears that it is no rank 0 any more."""
    first, second, folder = two(tmp_path)
    undo = keep_whole([first])
    take_places([second], places([first]))
    log(second, 2, accuracy=0.5)
    log(first, 2, loss=0.25)
    log(first, 3, lr=0.1)
    log(second, 3, loss=0.125)
    assert [[row["loss"], row["accuracy"], row["lr"], row["step"]] for row in rows(folder)] == [
        ["1.0", "", "", "0"], ["0.5", "", "", "1"], ["", "0.5", "", "2"], ["0.25", "", "", "2"], ["", "", "0.1", "3"],
        ["0.125", "", "", "3"],
    ]  # fmt: skip
    take_back(undo)


def test_rank_0_may_be_killed_while_it_writes_its_file_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _, folder = two(tmp_path)
    undo = keep_whole([first, DummyLogger()])

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(first.experiment._fs), "mv", killed)
        with pytest.raises(KeyboardInterrupt):
            log(first, 2, loss=0.25, accuracy=0.5)
    assert [row["step"] for row in rows(folder)] == ["0", "1"]
    take_back(undo)
    assert "_rewrite_with_new_header" not in vars(first.experiment)


def test_a_tensorboard_logger_begins_another_file_in_the_same_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: Any
) -> None:
    module: Any = ModuleType("tensorboardX")
    opened: list[tuple[str, str]] = []

    def writer(log_dir: str, filename_suffix: str = "") -> Any:
        opened.append((log_dir, filename_suffix))
        Path(log_dir).mkdir(parents=True, exist_ok=True)
        return SimpleNamespace(add_scalar=lambda *_: None, flush=lambda: None)

    module.SummaryWriter = writer
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    for name, is_there in (("_TENSORBOARDX_AVAILABLE", True), ("_TENSORBOARD_AVAILABLE", False)):
        monkeypatch.setattr(fabric("loggers.tensorboard"), name, is_there)
    first, second = (loggers.TensorBoardLogger(tmp_path, name=name, sub_dir=name) for name in ("a", "b"))
    log(first, 0, loss=1.0)
    rank(1)
    assert second.log_dir == str(tmp_path / "b/version_0/b")
    take_places([None, second], places([DummyLogger(), first]))
    log(second, 1, loss=1.0)
    rank(0)
    log(second, 1, loss=1.0)
    folder = str(tmp_path / "a/version_0/a")
    assert opened == [(folder, ""), (folder, f".{os.getpid()}")], "others of the same second have other names"


class Own(loggers.Logger):
    name = version = "own"

    def log_metrics(self, metrics: Any, step: int | None = None) -> None: ...

    def log_hyperparams(self, params: Any) -> None: ...


def succeed(trainer: Any, told: dict[str, Any], batch_idx: int = 0) -> None:
    """The rank is one that was told this, becomes rank 0, and begins batches."""
    succession = LoggingFailover(trainer)
    undo = succession.install()
    succession.take(told)
    succession.begin_batch(batch_idx)
    trainer.is_global_zero = True
    for following in range(2):
        succession.begin_batch(batch_idx + following)
    for each in reversed(undo):
        each()


def test_a_logger_of_which_nothing_is_known_is_told_of_once(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    told = LoggingFailover(trainer_with(Own(), loggers.CSVLogger(tmp_path), leads=True)).describe()
    succeed(trainer_with(Own(), loggers.CSVLogger(tmp_path)), told)
    (record,) = caplog.records
    assert "and logs with Own. Whether that continues" in record.getMessage()
    caplog.clear()
    succeed(trainer_with(loggers.CSVLogger(tmp_path)), told)
    assert "had the loggers ['Own', 'CSVLogger'], and this one has ['CSVLogger']" in caplog.text
    caplog.clear()
    succeed(trainer_with(), LoggingFailover(trainer_with()).describe())
    assert not caplog.text


def bar_of_rank_1(bar: Any, trainer: Any) -> None:
    trainer.progress_bar_callback = bar
    bar.setup(trainer, None, "fit")
    if isinstance(bar, callbacks.TQDMProgressBar):
        bar.on_train_start(trainer, None)
        bar.on_train_epoch_start(trainer, None)


class Described(callbacks.TQDMProgressBar):
    def init_train_tqdm(self) -> Any:
        bar = super().init_train_tqdm()
        bar.bar_format = "mine {n_fmt}/{total_fmt} {desc}"
        return bar


def test_the_bar_has_its_total_and_is_where_the_epoch_is(capsys: pytest.CaptureFixture[str]) -> None:
    bar, trainer = Described(), trainer_with()
    bar_of_rank_1(bar, trainer)
    assert bar.is_disabled
    succeed(trainer, {"loggers": [], "kinds": [], "bar": True}, batch_idx=5)
    shown = bar.train_progress_bar
    assert (shown.n, shown.initial, shown.total, shown.disable) == (5, 5, 8, False)
    bar.on_train_batch_end(trainer, None, None, None, 5)
    assert shown.n == 6
    shown.close()
    assert "mine 5/8 Epoch 3" in capsys.readouterr().out


def test_a_bar_of_rich_does_too(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    bar, trainer = callbacks.RichProgressBar(), trainer_with()
    bar_of_rank_1(bar, trainer)
    succeed(trainer, {"loggers": [], "kinds": [], "bar": True}, batch_idx=5)
    assert (bar.train_progress_bar.completed, bar.train_progress_bar.total) == (5, 8)
    bar.teardown(trainer, None, "fit")
    assert "Epoch 3/8" in capsys.readouterr().out


@pytest.mark.parametrize(("bar", "rank_0_shows"), [(Described(refresh_rate=0), True), (Described(), False)])
def test_a_bar_that_was_off_stays_off(bar: Any, rank_0_shows: bool, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = trainer_with()
    bar_of_rank_1(bar, trainer)
    succeed(trainer, {"loggers": [], "kinds": [], "bar": rank_0_shows}, batch_idx=5)
    assert bar.train_progress_bar.disable
    assert capsys.readouterr() == ("", "")
    bar.enable()
    assert LoggingFailover(trainer_with(bar=bar, leads=True)).describe()["bar"] is bar.is_enabled


class AsDocumented(callbacks.ProgressBar):
    """As in Lightning's documentation, where a flag has the method's name."""

    def __init__(self) -> None:
        super().__init__()
        self.enable = True  # pyright: ignore[reportAttributeAccessIssue]

    def disable(self) -> None:
        self.enable = False  # pyright: ignore[reportAttributeAccessIssue]


class Half(callbacks.ProgressBar):
    """Can be disabled only."""

    def disable(self) -> None: ...


def test_bars_of_the_users_own(caplog: pytest.LogCaptureFixture) -> None:
    trainer, bar = trainer_with(), AsDocumented()
    bar_of_rank_1(bar, trainer)
    assert not bar.enable
    succeed(trainer, {"loggers": [], "kinds": [], "bar": True})
    assert bar.enable
    assert not caplog.text
    bar_of_rank_1(Half(), trainer := trainer_with())
    with caplog.at_level(logging.WARNING):
        succeed(trainer, {"loggers": [], "kinds": [], "bar": True})
    assert "Rank 0 continues without its progress bar: NotImplementedError" in caplog.text


def test_one_that_comes_is_told_of_the_bar_though_rank_0_has_yet_to_show_it() -> None:
    bar, trainer = callbacks.TQDMProgressBar(), trainer_with()
    bar_of_rank_1(bar, trainer)
    succession = LoggingFailover(trainer)
    succession.take({"loggers": [], "kinds": [], "bar": True})
    trainer.is_global_zero = True
    assert succession.describe() == {"loggers": [], "kinds": [], "bar": True}


def test_the_trainer_of_a_users_has_what_is_asked_for(tmp_path: Path) -> None:
    """Without loggers and without a bar."""
    trainer = pl.Trainer(
        logger=False, enable_progress_bar=False, accelerator="cpu", devices=1, default_root_dir=tmp_path
    )
    assert LoggingFailover(trainer).describe() == {"loggers": [], "kinds": [], "bar": False}

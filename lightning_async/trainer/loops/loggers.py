"""Loggers when rank 0 is lost: those of the next rank 0 write to the same place, and keep what is there.

Lightning's loggers do nothing on other ranks. The next rank 0 opens them with the first row that it logs: a
TensorBoardLogger begins another file of events beside the others; a CSVLogger would delete what it finds, and gets a
writer that does not.
"""

from __future__ import annotations

import contextlib
import csv
import io
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lightning_async.engine.collectives import LightningCollectives
from lightning_async.trainer.namespace import Undo, override_for_users, pytorch, take_back

log = logging.getLogger(__name__)


_PLACE = ("_root_dir", "_save_dir", "_name", "_version", "_sub_dir")
_loggers = pytorch("loggers")
ExperimentWriter: Any = pytorch("loggers.csv_logs").ExperimentWriter


class ContinuedLogger(ExperimentWriter):
    """A writer that appends to the files of a `CSVLogger`, which it opens and reads when it is first used."""

    def __init__(self, log_dir: str) -> None:
        self._place = log_dir
        self.is_open = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self.__dict__.get("is_open", True):
            raise AttributeError(name)
        self.is_open = True
        try:
            super().__init__(log_dir=self._place)
            self._go_on()
        except BaseException:
            self.is_open = False
            raise
        return getattr(self, name)

    def _check_log_dir_exists(self) -> None:
        """Do nothing: what is there stays."""

    def save(self) -> None:
        _save(self, super().save)

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        _rewrite(self)

    def _go_on(self) -> None:
        hparams = os.path.join(self.log_dir, self.NAME_HPARAMS_FILE)
        if self._fs.isfile(hparams):
            with contextlib.suppress(Exception):  # not whole, or of the user's classes: the next save replaces it
                self.hparams.update(pytorch("core.saving").load_hparams_from_yaml(hparams, use_omegaconf=False))
        if not self._fs.isfile(self.metrics_file_path):
            return
        with self._fs.open(self.metrics_file_path, "r", newline="") as file:
            text = file.read()
        whole, end, torn = text.rpartition("\n")
        if not whole:
            self._fs.rm_file(self.metrics_file_path)
        elif torn:  # its writer was killed in the midst of a row
            _write(self, whole + end)


def _save(writer: Any, save: Callable[[], None]) -> None:
    """Save in the columns that the file has: others have changed them if they went on without this process."""
    if not writer.metrics:
        return
    files = writer._fs
    path = writer.metrics_file_path
    if files.isfile(path) and files.size(path) != vars(writer).get("_left_size"):
        with files.open(path, "r", newline="") as file:
            writer.metrics_keys = next(csv.reader(file), [])
        if writer.metrics_keys != sorted(writer.metrics_keys):
            _rewrite(writer)
    save()
    writer._left_size = files.size(path)


def _rewrite(writer: Any) -> None:
    """Add columns; the file is the old one or the new one, whenever this process is killed."""
    with writer._fs.open(writer.metrics_file_path, "r", newline="") as file:
        _write(writer, file.read())


def _write(writer: Any, text: str) -> None:
    """Write these rows, in their columns and the writer's."""
    rows = csv.DictReader(io.StringIO(text, newline=""))
    beside = f"{writer.metrics_file_path}.new"
    writer.metrics_keys = sorted({*writer.metrics_keys, *(rows.fieldnames or ())})
    with writer._fs.open(beside, "w", newline="") as file:
        into = csv.DictWriter(file, writer.metrics_keys, extrasaction="ignore")
        into.writeheader()
        into.writerows(rows)
    writer._fs.mv(beside, writer.metrics_file_path)


def _is_known(logger: Any) -> bool:
    return isinstance(logger, _loggers.CSVLogger | _loggers.TensorBoardLogger)


def places(loggers: Sequence[Any]) -> list[dict[str, Any]]:
    """Return where this rank's loggers write, for `take_places`: plain values, none of a logger of another class."""
    return [_place(each) if _is_known(each) else {} for each in loggers]


def _place(logger: Any) -> dict[str, Any]:
    _ = logger.log_dir  # a version is chosen as it is asked for
    found = {name: getattr(logger, name) for name in _PLACE if hasattr(logger, name)}
    return {name: value for name, value in found.items() if isinstance(value, str | int | None)}


def take_places(loggers: Sequence[Any], told: list[dict[str, Any]]) -> None:
    """Prepare to write there, should this rank become rank 0."""
    for logger, place in zip(loggers, told, strict=False):
        if not place or not _is_known(logger):
            continue
        for name, value in place.items():
            if hasattr(logger, name):
                setattr(logger, name, value)
        if isinstance(logger, _loggers.CSVLogger):
            writer = logger._experiment
            if writer is None or (isinstance(writer, ContinuedLogger) and not writer.is_open):
                logger._experiment = ContinuedLogger(logger.log_dir)
        else:  # tensorboardX names files by the second
            logger._kwargs.setdefault("filename_suffix", f".{os.getpid()}")


def keep_whole(loggers: Sequence[Any]) -> list[Undo]:
    """Have the writers of rank 0 keep all that was written, in its columns, if it is killed, or stopped and overtaken.
    Returns what takes that back."""
    writers = [each._experiment for each in loggers if isinstance(each, _loggers.CSVLogger)]
    undo: list[Undo] = []
    for writer in writers:
        if isinstance(writer, ExperimentWriter) and not isinstance(writer, ContinuedLogger):
            undo.append(override_for_users(writer, "save", partial(_save, writer)))
            rewrite = partial(_rewrite, writer)
            undo.append(override_for_users(writer, "_rewrite_with_new_header", lambda *_, rewrite=rewrite: rewrite()))
    return undo


class LoggingFailover:
    """The change to rank 0 in one fit: the next one logs where the lost one did, and shows the progress bar.

    Loggers know in advance where to write: the training thread may log as soon as the rank is another one. All else
    waits for the next batch.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._leads = trainer.is_global_zero
        self._told: dict[str, Any] = {"loggers": [], "kinds": [], "bar": False}
        self._undo: list[Undo] = []

    def install(self) -> list[Undo]:
        return [partial(take_back, self._undo)]

    def begin(self, world: LightningCollectives) -> None:
        """Begin to train, or begin anew; all ranks call this together."""
        told = world.broadcast(self.describe())
        if not self._leads:
            self.take(told)
        elif not self._undo:
            self._undo += keep_whole(self._trainer.loggers)

    def describe(self) -> dict[str, Any]:
        """Return, on rank 0, what the others must know: plain values."""
        bar = self._trainer.progress_bar_callback
        return {
            "loggers": places(self._trainer.loggers),
            "kinds": self._kinds,
            "bar": bar is not None and (self._told["bar"] or bool(getattr(bar, "is_enabled", True))),
        }

    def take(self, told: dict[str, Any]) -> None:
        """Prepare, on another rank, to become rank 0."""
        self._told = told
        take_places(self._trainer.loggers, told["loggers"])

    @property
    def _kinds(self) -> list[str]:
        return [type(each).__name__ for each in self._trainer.loggers]

    def begin_batch(self, batch_idx: int) -> None:
        """Log, and show the progress bar, if this rank has become rank 0 since the batch before."""
        if not self._leads and self._trainer.is_global_zero:
            self._leads = True
            self._warn_of_loggers()
            if self._told["bar"]:
                self._show_bar(batch_idx)

    def _warn_of_loggers(self) -> None:
        dummy = pytorch("loggers.logger").DummyLogger
        unknown = [each for each in self._trainer.loggers if not _is_known(each) and not isinstance(each, dummy)]
        if unknown:
            log.warning(
                "This rank is rank 0 from here, and logs with %s. How that goes on with what the lost one logged is "
                "not known: it may begin a run of its own. Where it can go on with one, give it that one's id or name, "
                "on every rank.", " and ".join(type(each).__name__ for each in unknown),
            )  # fmt: skip
        if self._told["kinds"] != self._kinds:
            log.warning(
                "This rank is rank 0 from here. The lost one had the loggers %s, and this one has %s: give every rank "
                "the same, they write on rank 0 only.", self._told["kinds"], self._kinds,
            )  # fmt: skip

    def _show_bar(self, batches: int) -> None:
        """Show the progress bar as if it had been there from the beginning of the epoch."""
        trainer = self._trainer
        bar = trainer.progress_bar_callback
        if bar is None:
            return
        try:
            if callable(bar.enable):
                bar.enable()
            else:  # as in the example of Lightning's own documentation
                bar.enable = True
            bar.on_train_start(trainer, trainer.lightning_module)
            bar.on_train_epoch_start(trainer, trainer.lightning_module)
            _advance(bar, batches)
        except Exception as error:  # the user's class, perhaps: that is no reason to end training
            log.warning("Rank 0 goes on without its progress bar: %s: %s", type(error).__name__, error)
            with contextlib.suppress(Exception):
                bar.disable()


def _advance(bar: Any, batches: int) -> None:
    """Advance a bar of Lightning's, or of a class that inherits from it; others follow at the end of the batch."""
    callbacks = pytorch("callbacks")
    if isinstance(bar, callbacks.TQDMProgressBar):
        shown = bar.train_progress_bar
        shown.n = shown.initial = batches  # its rate is that of what follows
        if not shown.disable:
            shown.refresh()
    elif isinstance(bar, callbacks.RichProgressBar):
        bar._update(bar.train_progress_bar_id, batches)

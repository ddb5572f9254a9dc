"""Failover of loggers: the next rank 0, or a resumed fit, writes to the same place, and keeps what is there.

On ranks other than 0, Lightning's loggers do nothing. The next rank 0 opens its loggers with the first row that it
logs. A TensorBoardLogger begins another file of events beside the existing ones. A CSVLogger would delete the existing
files, so it gets a `ContinuedLogger`, which keeps them.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lightning_async.engine.collectives import LightningCollectives
from lightning_async.trainer.namespace import Undo, override, override_for_users, pytorch, take_back

log = logging.getLogger(__name__)


_PLACE = ("_root_dir", "_save_dir", "_name", "_version", "_sub_dir")
_loggers = pytorch("loggers")
ExperimentWriter: Any = pytorch("loggers.csv_logs").ExperimentWriter


class ContinuedLogger(ExperimentWriter):
    """A writer that appends to the files of a `CSVLogger`. It opens and reads these files at its first use.

    Args:
        log_dir: Folder of the files.
        before: Step from which on the rows in the file are dropped, because these steps are trained again. Default:
            infinity, no rows are dropped.
    """

    def __init__(self, log_dir: str, before: float = math.inf) -> None:
        self._place = log_dir
        self._before = before
        self.is_open = False

    def __getattr__(self, name: str) -> Any:
        # The first access opens the files. A rank that never becomes rank 0 must not touch them.
        if name.startswith("__") or self.__dict__.get("is_open", True):
            raise AttributeError(name)
        self.is_open = True
        try:
            super().__init__(log_dir=self._place)
            self._go_on()
        except BaseException:
            # Try again at the next use, because the file system may only have failed for a moment.
            self.is_open = False
            raise
        return getattr(self, name)

    def _check_log_dir_exists(self) -> None:
        """Do nothing, because existing files are kept."""

    def save(self) -> None:
        _save(self, super().save)

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        _rewrite(self)

    def _go_on(self) -> None:
        hparams = os.path.join(self.log_dir, self.NAME_HPARAMS_FILE)
        if self._fs.isfile(hparams):
            # The file may be incomplete, or need the user's classes. The next save replaces it.
            with contextlib.suppress(Exception):
                self.hparams.update(pytorch("core.saving").load_hparams_from_yaml(hparams, use_omegaconf=False))
        if not self._fs.isfile(self.metrics_file_path):
            return
        with self._fs.open(self.metrics_file_path, "r", newline="") as file:
            text = file.read()
        whole, end, torn = text.rpartition("\n")
        if not whole:
            self._fs.rm_file(self.metrics_file_path)
        # Its writer may have been killed within a row, which is dropped.
        elif torn or self._before < math.inf:
            _write(self, whole + end, self._before)


def _save(writer: Any, save: Callable[[], None]) -> None:
    """Call ``save``, the writer's own method, after reading the columns that the CSV file has now.

    Another process may have added columns to the file.
    """
    if not writer.metrics:
        return
    files = writer._fs
    path = writer.metrics_file_path
    # The size shows whether another process has written since. Then its columns are read again.
    if files.isfile(path) and files.size(path) != vars(writer).get("_left_size"):
        with files.open(path, "r", newline="") as file:
            writer.metrics_keys = next(csv.reader(file), [])
        if writer.metrics_keys != sorted(writer.metrics_keys):
            _rewrite(writer)
    save()
    writer._left_size = files.size(path)


def _rewrite(writer: Any) -> None:
    """Rewrite the CSV writer's file, with the columns that the writer has added.

    A new file replaces the old one. If the process is killed, one of the two is complete.
    """
    with writer._fs.open(writer.metrics_file_path, "r", newline="") as file:
        _write(writer, file.read())


def _write(writer: Any, text: str, before: float = math.inf) -> None:
    """Replace the CSV writer's file by a new one with the rows of ``text``, which is CSV with a header.

    Rows of the step ``before`` and of later ones are left out. The new file has the columns of ``text`` and those of
    the writer. The writer then has all these columns, too.
    """
    rows = csv.DictReader(io.StringIO(text, newline=""))
    beside = f"{writer.metrics_file_path}.new"
    writer.metrics_keys = sorted({*writer.metrics_keys, *(rows.fieldnames or ())})
    with writer._fs.open(beside, "w", newline="") as file:
        into = csv.DictWriter(file, writer.metrics_keys, extrasaction="ignore")
        into.writeheader()
        into.writerows(row for row in rows if _step(row) < before)
    writer._fs.mv(beside, writer.metrics_file_path)


def _step(row: Mapping[str, str]) -> float:
    try:
        return float(row.get("step") or -math.inf)
    except ValueError:
        return -math.inf


@functools.cache
def keep_files_until_saved() -> None:
    """Make CSV writers delete an earlier file with their first save, as Lightning's warning says, and not at once.

    Lightning makes the writers before a callback or strategy knows whether the fit is resumed.
    """
    check_now = ExperimentWriter._check_log_dir_exists

    def check(original: Callable[..., None], writer: Any) -> None:
        writer._is_unchecked = writer._fs.isfile(writer.metrics_file_path)
        if not writer._is_unchecked:
            original(writer)

    def save(original: Callable[..., None], writer: Any) -> None:
        if writer.metrics and vars(writer).pop("_is_unchecked", False):
            check_now(writer)
        original(writer)

    override(ExperimentWriter, "_check_log_dir_exists", check)
    override(ExperimentWriter, "save", save)


def continue_files(loggers: Sequence[Any], step: int) -> None:
    """Let the CSV loggers of a resumed fit append to the files of the earlier program, up to ``step``; on rank 0."""
    for logger in loggers:
        writer = vars(logger).get("_experiment")
        if isinstance(writer, ExperimentWriter) and vars(writer).pop("_is_unchecked", False):
            continued: Any = ContinuedLogger(logger.log_dir, step)
            continued.hparams.update(writer.hparams)
            continued.metrics = writer.metrics
            logger._experiment = continued


def _is_known(logger: Any) -> bool:
    return isinstance(logger, _loggers.CSVLogger | _loggers.TensorBoardLogger)


def places(loggers: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the places where this rank's loggers write, for `take_places`; empty for unknown logger classes."""
    return [_place(each) if _is_known(each) else {} for each in loggers]


def _place(logger: Any) -> dict[str, Any]:
    # Reading the property chooses a version, which all ranks must know.
    _ = logger.log_dir
    found = {name: getattr(logger, name) for name in _PLACE if hasattr(logger, name)}
    return {name: value for name, value in found.items() if isinstance(value, str | int | None)}


def take_places(loggers: Sequence[Any], told: list[dict[str, Any]]) -> None:
    """Prepare this rank's loggers, so that they continue in the places of rank 0's loggers if this rank becomes rank 0.

    ``told`` is the result of `places` on rank 0.
    """
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
        else:
            # tensorboardX names files by the second, so two processes might choose one name.
            logger._kwargs.setdefault("filename_suffix", f".{os.getpid()}")


def keep_whole(loggers: Sequence[Any]) -> list[Undo]:
    """Make rank 0's CSV writers keep all rows if this process is killed, or stopped and replaced.

    Returns functions that undo this.
    """
    writers = [each._experiment for each in loggers if isinstance(each, _loggers.CSVLogger)]
    undo: list[Undo] = []
    for writer in writers:
        if isinstance(writer, ExperimentWriter) and not isinstance(writer, ContinuedLogger):
            undo.append(override_for_users(writer, "save", partial(_save, writer)))
            rewrite = partial(_rewrite, writer)
            undo.append(override_for_users(writer, "_rewrite_with_new_header", lambda *_, rewrite=rewrite: rewrite()))
    return undo


class LoggingFailover:
    """The failover of logging to the next rank 0, which logs to the same place and shows the progress bar.

    The loggers of all ranks learn in advance where to write, because the training thread may log as soon as its rank
    has become 0. Warnings and the progress bar follow at the start of the next batch.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._leads = trainer.is_global_zero
        self._told: dict[str, Any] = {"loggers": [], "kinds": [], "bar": False}
        self._undo: list[Undo] = []

    def install(self) -> list[Undo]:
        return [partial(take_back, self._undo)]

    def begin(self, world: LightningCollectives) -> None:
        """Tell all ranks where rank 0 logs, as training begins or begins again. All ranks call this together."""
        told = world.broadcast(self.describe())
        if not self._leads:
            self.take(told)
        elif not self._undo:
            self._undo += keep_whole(self._trainer.loggers)

    def describe(self) -> dict[str, Any]:
        """Return the plain values that `take` needs on the other ranks; called on rank 0."""
        bar = self._trainer.progress_bar_callback
        return {
            "loggers": places(self._trainer.loggers),
            "kinds": self._kinds,
            "bar": bar is not None and (self._told["bar"] or bool(getattr(bar, "is_enabled", True))),
        }

    def take(self, told: dict[str, Any]) -> None:
        """Prepare to become rank 0, with the values that `describe` has returned on the present rank 0."""
        self._told = told
        take_places(self._trainer.loggers, told["loggers"])

    @property
    def _kinds(self) -> list[str]:
        return [type(each).__name__ for each in self._trainer.loggers]

    def begin_batch(self, batch_idx: int) -> None:
        """Take over logging, if this rank has become rank 0 since the last batch.

        Warn of loggers that may not continue the logs of the lost rank 0, and show the progress bar.
        """
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
                "This rank is rank 0 from here, and logs with %s. Whether that continues what the lost rank logged "
                "is not known: it may begin a run of its own. If it can continue a run, pass the run's id or name, "
                "on every rank.", " and ".join(type(each).__name__ for each in unknown),
            )  # fmt: skip
        if self._told["kinds"] != self._kinds:
            log.warning(
                "This rank is rank 0 from here. The lost one had the loggers %s, and this one has %s. Give every rank "
                "the same loggers, which write on rank 0 only.", self._told["kinds"], self._kinds,
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
            else:
                # A progress bar after the example in Lightning's documentation has an attribute here.
                bar.enable = True
            bar.on_train_start(trainer, trainer.lightning_module)
            bar.on_train_epoch_start(trainer, trainer.lightning_module)
            _advance(bar, batches)
        # The bar may be of the user's class, and must not end the training.
        except Exception as error:
            log.warning("Rank 0 continues without its progress bar: %s: %s", type(error).__name__, error)
            with contextlib.suppress(Exception):
                bar.disable()


def _advance(bar: Any, batches: int) -> None:
    """Set one of Lightning's progress bars to ``batches`` completed batches.

    Bars of other classes are left as they are; they are updated at the end of the batch.
    """
    callbacks = pytorch("callbacks")
    if isinstance(bar, callbacks.TQDMProgressBar):
        shown = bar.train_progress_bar
        # With this `initial`, the shown rate is that of the batches to come.
        shown.n = shown.initial = batches
        if not shown.disable:
            shown.refresh()
    elif isinstance(bar, callbacks.RichProgressBar):
        bar._update(bar.train_progress_bar_id, batches)

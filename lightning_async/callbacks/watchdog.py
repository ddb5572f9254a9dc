"""A watchdog that ends a rank whose training thread hangs, so that its supervisor can start it again."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import statistics
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO, Any, NamedTuple

from lightning_async._checks import check_int, check_real
from lightning_async.errors import AsyncTrainingError
from lightning_async.trainer.namespace import Callback
from lightning_async.trainer.strategy_view import view_of

# Number of recent steps whose median is the usual duration.
_RECENT = 51
# Limit for reporting the hang to the other ranks.
_TOLD_S = 5.0


class _Beat(NamedTuple):
    """The last point of training that the training thread has reported, and the time limit until the next one."""

    number: int = 0
    place: str = "before training"
    limit_s: float | None = None


class HangWatchdog(Callback):
    r"""A callback that ends a rank whose training thread makes no progress, with any strategy.

    .. math:: \text{limit} = \max(t_\text{min}, k\, \tilde t)

    :math:`\tilde t` is the median duration of recent steps. If one step, with the loader's time, takes longer than the
    limit, the rank writes the stacks of all threads to stderr and to ``hang-rank-<n>.txt``. With a strategy of this
    package, it then reports the hang to the other ranks. Finally it ends its process with ``exit_code``. The callback's
    own thread does all this. If code in C holds the interpreter's lock, this thread cannot run. Then a timer writes the
    stacks to stderr after twice the limit, and ends the process with exit code 1.

    The first steps, validations, checkpoints and the ends of epochs have no limit unless ``other_s`` is given. Waiting
    at a sync point never has a limit. Time in which the whole process was stopped does not count, but a process that
    was stopped for more than twice the limit may be ended by the timer when it continues. If every step waits for all
    ranks, as with DDP, the hang of one rank ends all ranks, and each writes its stacks; the rank whose stacks do not
    show a wait for the others is the cause.

    Args:
        k: Limit as a multiple of the median step's duration. Default: 20.
        min_s: Smallest limit, in seconds. Default: 60.
        other_s: Limit in seconds for everything that is no step, and for the first steps. Default: None, no limit.
        warmup: Number of first steps, which do not have the step's limit, because compilers and caches slow them down.
            Default: 10.
        dirpath: Directory of ``hang-rank-<n>.txt``. Default: the Trainer's ``default_root_dir``.
        exit_code: Exit code of the process. Default: 70.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        *,
        k: float = 20.0,
        min_s: float = 60.0,
        other_s: float | None = None,
        warmup: int = 10,
        dirpath: str | Path | None = None,
        exit_code: int = 70,
    ) -> None:
        self.k = k
        self.min_s = min_s
        self.other_s = other_s
        self.warmup = warmup
        self.exit_code = exit_code
        check_real(self, "k", above=1.0)
        check_real(self, "min_s", above=0.0)
        if other_s is not None:
            check_real(self, "other_s", above=0.0)
        check_int(self, "warmup", at_least=2)
        check_int(self, "exit_code", at_least=1)
        if exit_code > 255:
            raise ValueError(f"`HangWatchdog(exit_code={exit_code!r})` must be <= 255.")
        self.dirpath = None if dirpath is None else Path(dirpath)
        self._beat = _Beat()
        self._steps: deque[float] = deque(maxlen=_RECENT)
        self._began: float | None = None
        self._stderr: IO[str] | None = None
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None

    @property
    def limit_s(self) -> float | None:
        """The seconds that the next step may take; None: there is no limit.

        Until ``warmup`` steps were measured, the limit is ``other_s``. Afterwards it follows from the measured steps.
        """
        if len(self._steps) < self.warmup:
            return self.other_s
        return max(self.min_s, self.k * statistics.median(self._steps))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._end()
        self._steps.clear()
        self._stderr = _stderr()
        self._elsewhere("the start of training")
        self._stop = threading.Event()
        rank = trainer.global_rank
        path = Path(self.dirpath or trainer.default_root_dir) / f"hang-rank-{rank}.txt"
        name = f"lightning_async-watchdog-{rank}"
        # A daemon, so that a thread that hangs does not keep the process from ending.
        self._thread = threading.Thread(target=self._watch, args=(trainer, path, self._stop), name=name, daemon=True)
        self._thread.start()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        now = time.monotonic()
        if self._began is not None:
            self._steps.append(now - self._began)
        self._began = now
        self._see(f"a step, number {trainer.global_step}", self.limit_s)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        # Asynchronous replicas may wait for other ranks at the end of an epoch.
        if trainer.is_last_batch:
            self._elsewhere("the end of an epoch")
        else:
            self._see(f"waiting for a batch after step {trainer.global_step}", self.limit_s)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._elsewhere("the start of an epoch")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._elsewhere("the end of an epoch")

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._elsewhere("a validation")

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        self._elsewhere("a validation")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._elsewhere("the end of a validation")

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self._elsewhere("saving a checkpoint")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._end()

    def _see(self, place: str, limit_s: float | None) -> None:
        # Between equal limits the watchdog's thread sets the timer, which would cost time at each step here.
        if (self._beat.limit_s is None) is not (limit_s is None):
            _arm(limit_s, self._stderr)
        self._beat = _Beat(self._beat.number + 1, place, limit_s)

    def _elsewhere(self, place: str) -> None:
        self._began = None
        self._see(place, self.other_s)

    def _end(self) -> None:
        if self._stop is not None and self._thread is not None:
            self._stop.set()
            self._thread.join(_TOLD_S)
            _arm(None, None)
            self._beat = _Beat()
        self._stop = self._thread = self._stderr = None

    def _watch(self, trainer: Any, path: Path, stop: threading.Event) -> None:
        # The limit is counted in ticks of this thread, because the process may have been stopped between two of them.
        seen = -1
        waited_s = 0.0
        last = time.monotonic()
        tick_s = min(1.0, self.min_s / 10)
        while not stop.wait(tick_s):
            now = time.monotonic()
            waited_s += min(now - last, 2 * tick_s)
            last = now
            beat = self._beat
            if beat.number != seen or _waits_at_sync_point(trainer.strategy):
                seen = beat.number
                waited_s = 0.0
            _arm(beat.limit_s, self._stderr)
            if beat.limit_s is not None and waited_s > beat.limit_s:
                self._give_up(trainer, path, beat, waited_s)

    def _give_up(self, trainer: Any, path: Path, beat: _Beat, waited_s: float) -> None:
        usual = f"{statistics.median(self._steps):.3g} s" if self._steps else "not known yet"
        text = (
            f"Rank {trainer.global_rank} hangs: no progress for {waited_s:.1f} s in {beat.place} (limit "
            f"{beat.limit_s:.1f} s, a step takes {usual}). Its stacks are in {path}. It ends with exit code "
            f"{self.exit_code}; raise `HangWatchdog(k=)` or `min_s=` if this was no hang."
        )
        # The directory may be on the file system that hangs or is full, and stderr gets the stacks anyway.
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                _dump(text, file)
        if self._stderr is not None:
            _dump(text, self._stderr)
        # The timer must not end the process while it tells the others.
        _arm(_TOLD_S, self._stderr)
        # A thread of its own, because telling the others may hang as well.
        teller = threading.Thread(target=_tell_others, args=(trainer.strategy, text), daemon=True)
        teller.start()
        teller.join(_TOLD_S)
        os._exit(self.exit_code)


def _arm(limit_s: float | None, file: IO[str] | None) -> None:
    """Restart the timer that writes all stacks and ends the process after twice ``limit_s``. None: stop the timer."""
    if limit_s is None or file is None:
        faulthandler.cancel_dump_traceback_later()
    else:
        faulthandler.dump_traceback_later(2 * limit_s, exit=True, file=file)


def _stderr() -> IO[str] | None:
    """Return stderr as a file with a descriptor, even if a notebook or test has replaced it.

    Return None if no such file exists.
    """
    for stream in (sys.stderr, sys.__stderr__):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            if stream is not None and stream.fileno() >= 0:
                return stream
    return None


def _dump(text: str, file: IO[str]) -> None:
    file.write(f"{text}\n")
    file.flush()
    faulthandler.dump_traceback(file, all_threads=True)
    file.flush()


def _waits_at_sync_point(strategy: Any) -> bool:
    """Return whether this rank waits for other ranks at a sync point.

    Such a wait is no hang of this rank. If one of the other ranks hangs, its own watchdog reports it.
    """
    sync_points = view_of(strategy).sync_points
    live_ranks = view_of(strategy).live_ranks
    waits = live_ranks is not None and live_ranks.are_short
    return sync_points is not None and (sync_points.standing or waits)


def _tell_others(strategy: Any, text: str) -> None:
    """Report the hang to the other ranks, in the same way as an exception of this rank."""
    if view_of(strategy).replicated:
        with contextlib.suppress(Exception):
            strategy.on_exception(AsyncTrainingError(text))

"""Preemption by SIGTERM or SLURM's requeue signal: one checkpoint, then exit code 75.

The handler sets a flag, on which all ranks act at a batch boundary. A second SIGTERM ends the process at once.
`timeout`, systemd, Slurm and shells signal whole groups, so a rank's workers die of the same signal. That is noticed
where the rank reads from them, not by an exception wherever the main thread is. The user's own handler runs at the end.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch.utils.data._utils.signal_handling as torch_signals
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lightning_async.trainer.namespace import Undo, override, pytorch, set_for_now

log = logging.getLogger(__name__)


TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h
_SAME_S = 1.0
"""Launchers send a signal to a process and to its group: what comes so soon after the first is no second one."""
_REQUEUE_S = 60.0
_LOOK_S = 0.01


def in_this_process(handle: Callable[[int, Any], None]) -> Callable[[int, Any], None]:
    """Return a handler for this process alone: forks, which inherit it, die of the signal as if there was none."""
    own = os.getpid()

    def handler(number: int, frame: Any) -> None:
        if os.getpid() == own:
            handle(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    return handler


class Preemption:
    """Patches of Lightning's handlers of these signals, on a Trainer that has not registered them yet."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.told = False
        """Whether this rank has received the signal."""
        self._told_at = 0.0
        self._requeues = False
        self._users: Callable[[int, Any], Any] | None = None
        """The handler of SIGTERM that the user had before fit; it is called at the end of the run."""

    def install(self) -> list[Undo]:
        """Patch; return what takes it back, but for `_at_the_end`, which ends by itself."""
        signals = self._trainer._signal_connector
        own = os.getpid()

        def requeue(number: int, frame: Any) -> None:
            if os.getpid() == own:
                self._requeues = True
                self._note(number, frame)

        self._at_the_end(signals)
        return [
            set_for_now(signals, "_sigterm_notifier_fn", self._note),
            set_for_now(signals, "_slurm_sigusr_handler_fn", requeue),
            override(signals, "register_signal_handlers", self._register),
            override(torch_signals, "_error_if_any_worker_fails", _error_but_for_sigterm),
            override(_MultiProcessingDataLoaderIter, "_try_get_data", _read_from_workers),
        ]

    def is_told(self) -> bool:
        """Return whether this rank has received the signal, or does so within a moment: what the same signal has broken
        may be noticed before this process's own handler has run."""
        until = time.monotonic() + _SAME_S
        while not self.told and time.monotonic() < until:
            time.sleep(_LOOK_S)  # signals are handled meanwhile
        return self.told

    def _register(self, original: Any) -> None:
        original()
        handlers = getattr(signal.getsignal(signal.SIGTERM), "signal_handlers", None)
        if handlers is None:  # not in the main thread: Lightning registers nothing
            return
        users = self._trainer._signal_connector._original_handlers.get(signal.SIGTERM)
        if users in handlers:
            handlers.remove(users)
            self._users = users if callable(users) else None
        handlers.insert(0, in_this_process(self._note))

    def _note(self, number: int, frame: Any) -> None:
        """Note the signal, ahead of the other handlers; a second one ends the process at once."""
        if self.told and time.monotonic() - self._told_at > _SAME_S:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        if not self.told:
            self._told_at = time.monotonic()
            self.told = True

    def _at_the_end(self, signals: Any) -> None:
        """Call the user's handler when the run has ended and all handlers are as they were."""

        def teardown() -> None:
            undo()
            signals.teardown()
            users = self._users
            self._users = None
            if users is None or not self.told:
                return
            preempted = isinstance(sys.exc_info()[1], pytorch("utilities.exceptions").SIGTERMException)
            try:
                users(signal.SIGTERM, sys._getframe())
            except BaseException:
                if not preempted:
                    raise
                # It is on its way out, with the code that says that all is saved.
                log.info("What this program's own handler of SIGTERM raised does not take its place:", exc_info=True)

        undo = set_for_now(signals, "teardown", teardown)

    def leave(self, finish: Callable[[], object]) -> NoReturn:
        """Wait by ``finish`` for the save of all ranks; then raise Lightning's SIGTERMException with `TRY_AGAIN`."""
        finish()
        if self._requeues and self._trainer.is_global_zero:
            self._requeue()
        self._trainer._signal_connector.received_sigterm = True
        raise pytorch("utilities.exceptions").SIGTERMException(TRY_AGAIN)

    def _requeue(self) -> None:
        job = os.environ.get("SLURM_JOB_ID", "")
        if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
            job = f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID', '')}"
        try:
            subprocess.run(["scontrol", "requeue", job], check=True, timeout=_REQUEUE_S, capture_output=True, text=True)
        except (OSError, subprocess.SubprocessError) as error:
            log.error("The checkpoint is written, but SLURM did not take job %s into its queue again: %s", job, error)


def _error_but_for_sigterm(original: Callable[[], None]) -> None:
    """Raise for a worker that has died, as torch's handler of SIGCHLD does, but not of SIGTERM.

    That exception comes wherever the main thread is, amid a step or a save. The loader misses the worker by itself, but
    not while it reads: the worker may have left half a message, whose end never comes.
    """
    try:
        original()
    except RuntimeError as error:
        if str(signal.strsignal(signal.SIGTERM)) not in str(error) or _reads(sys._getframe(1)):
            raise


def _reads(frame: Any) -> bool:
    """Return whether the main thread reads from a loader's workers, or ends them."""
    while frame is not None:
        if frame.f_code.co_name in ("_try_get_data", "_shutdown_workers"):
            return True
        frame = frame.f_back
    return False


def _read_from_workers(original: Callable[..., Any], loader: Any, *args: Any, **kwargs: Any) -> Any:
    """Read from workers; fail at once where a signal has ended one: half a message may be left."""
    for lives, worker in zip(loader._workers_status, loader._workers, strict=True):
        if lives and worker.exitcode == -signal.SIGTERM:
            raise RuntimeError(f"DataLoader worker (pid {worker.pid}) was ended by a signal: Terminated.")
    return original(loader, *args, **kwargs)

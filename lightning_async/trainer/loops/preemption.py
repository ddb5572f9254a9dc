"""Preemption by SIGTERM or SLURM's requeue signal: one checkpoint, then exit code 75.

The handler only sets a flag, on which all ranks act at a batch boundary. A second SIGTERM ends the process at once.
`timeout`, systemd, Slurm and shells signal whole process groups, so a rank's loader workers die of the same signal. A
rank learns of a worker's death when it next reads from its workers, and not by an exception at an arbitrary place in
its main thread. The user's own handler of SIGTERM runs after the fit has ended.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch.utils.data._utils.signal_handling as torch_signals
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lightning_async.trainer.namespace import Undo, override, pytorch, set_for_now

log = logging.getLogger(__name__)


TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h
_SAME_S = 1.0
"""Seconds within which a repeated signal is the same one: launchers signal a process and its group."""
_REQUEUE_S = 60.0
_LATE_S = 15.0
"""Seconds until another thread acts in place of the main one; schedulers kill a job half a minute after the signal."""
_LOOK_S = 0.01
_HAS_MORE_TO_DO = "after a fit had ended, and it has more to do"


def in_this_process(handle: Callable[[int, Any], None]) -> Callable[[int, Any], None]:
    """Return a handler that calls ``handle`` in this process only.

    Forks inherit the handler; in a fork, it lets the signal end the process as usual.
    """
    own = os.getpid()

    def handler(number: int, frame: Any) -> None:
        if os.getpid() == own:
            handle(number, frame)
        else:
            _die_of(number)

    return handler


def _die_of(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


class StopSignal:
    """The process's handler of SIGTERM while no fit trains, in place of the default action, from `install` on.

    Before the first fit trains, nothing can be lost, and the process ends at once with exit code `TRY_AGAIN`. Later,
    the program may be about to end: it ends by itself, with its own exit code. If it has more to do, it ends with
    `TRY_AGAIN`: at its next call of the Trainer, or 15 seconds after the signal.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._is_told = False
        self.has_trained = False

    @classmethod
    def install(cls) -> None:
        """Handle SIGTERM from now on, unless the program has a handler of its own; end if the signal has come before.

        This does nothing outside of the main thread, which alone can set handlers.
        """
        now = signal.getsignal(signal.SIGTERM)
        if isinstance(now, cls) and now._process == os.getpid():
            if now._is_told:
                _end(_HAS_MORE_TO_DO)
        elif (now is signal.SIG_DFL or isinstance(now, cls)) and threading.current_thread() is threading.main_thread():
            handler = cls()
            signal.signal(signal.SIGTERM, handler)
            atexit.register(handler._exit)

    def __call__(self, number: int, frame: Any) -> None:
        # A fork inherits the handler, and the signal ends it as usual.
        if os.getpid() != self._process:
            _die_of(number)
        if not self.has_trained:
            _end("before it trained. Nothing is lost")
        # Further signals change nothing, because a limit runs since the first one.
        if not self._is_told:
            self._is_told = True
            late = threading.Timer(_LATE_S, _end, [_HAS_MORE_TO_DO])
            late.daemon = True
            late.start()

    def _exit(self) -> None:
        # Python gives signals their default action while it ends, which would change the exit code of all that is done.
        if self.has_trained and signal.getsignal(signal.SIGTERM) is self and os.getpid() == self._process:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _end(when: str) -> NoReturn:
    """End this process without the program's own handling of exceptions, as the signal's default action does."""
    log.warning("This process was told to stop by SIGTERM %s: it ends with exit code %d.", when, TRY_AGAIN)
    os._exit(TRY_AGAIN)


class Preemption:
    """Patches of Lightning's signal handlers, on a Trainer that has not registered them yet."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.told = False
        """Whether this rank has received the signal."""
        self._acts = False
        """Whether the main thread leaves training because of the signal."""
        self._leaving = threading.Lock()
        self.has_saved = False
        """Whether the last save of the training is written."""
        self.on_late: Callable[[], bool] = lambda: False
        """Function that leaves from another thread; returns False if that is impossible at the moment."""
        self._told_at = 0.0
        self._requeues = False
        self._users: Callable[[int, Any], Any] | None = None
        """The user's handler of SIGTERM from before the fit, which is called at the end of the run."""

    def install(self) -> list[Undo]:
        """Patch the signal handlers; return functions that undo the patches.

        The patch that `_at_the_end` makes is not among them, because it undoes itself.
        """
        signals = self._trainer._signal_connector
        own = os.getpid()

        # Only this process requeues the job, because forks inherit the handler.
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
        """Return whether this rank has received the signal; wait up to a second for the signal.

        A failure that the same signal has caused may be noticed before this process's own handler has run.
        """
        until = time.monotonic() + _SAME_S
        while not self.told and time.monotonic() < until:
            # Python runs signal handlers during the sleep.
            time.sleep(_LOOK_S)
        return self.told

    def _register(self, original: Any) -> None:
        original()
        handlers = getattr(signal.getsignal(signal.SIGTERM), "signal_handlers", None)
        # Lightning registers handlers in the main thread only.
        if handlers is None:
            return
        users = self._trainer._signal_connector._original_handlers.get(signal.SIGTERM)
        if isinstance(users, StopSignal):
            users.has_trained = True
        if users in handlers:
            handlers.remove(users)
            self._users = users if callable(users) else None
        # First in the list, so that the flag is set before any other handler runs.
        handlers.insert(0, in_this_process(self._note))

    def _note(self, number: int, frame: Any) -> None:
        """Record that this rank has received the signal, before the other handlers run.

        A second signal, more than a second later, ends the process at once, unless all is saved.
        """
        if self.told and time.monotonic() - self._told_at > _SAME_S and not self.has_saved:
            _die_of(signal.SIGTERM)
        if not self.told:
            self._told_at = time.monotonic()
            self.told = True
            threading.Thread(target=self._wait_for_main, name="lightning_async-preemption", daemon=True).start()

    def _wait_for_main(self) -> None:
        """Leave from this thread if the main thread stays within one step, such as one that compiles the model."""
        time.sleep(_LATE_S)
        while True:
            with self._leaving:
                if self._acts or self._trainer._signal_connector.received_sigterm or self.on_late():
                    return
            time.sleep(1.0)

    def act(self) -> None:
        """Record that the main thread leaves training; while another thread leaves in place of it, wait."""
        with self._leaving:
            self._acts = True

    def _at_the_end(self, signals: Any) -> None:
        """Patch the teardown of ``signals``, so that it calls the user's own handler of SIGTERM, if a signal came.

        The handler runs when the fit has ended and all handlers are restored. The patch then undoes itself.
        """

        def teardown() -> None:
            undo()
            signals.teardown()
            users = self._users
            self._users = None
            if users is None or not self.told:
                return
            preempted = isinstance(sys.exc_info()[1], pytorch("utilities.exceptions").SIGTERMException)
            # The exception has told the program.
            if preempted and isinstance(users, StopSignal):
                return
            try:
                users(signal.SIGTERM, sys._getframe())
            except BaseException:
                if not preempted:
                    raise
                # The process is about to end with the exit code that says that all is saved, which must not change.
                log.info("The program's own handler of SIGTERM raised an exception, which is ignored:", exc_info=True)

        undo = set_for_now(signals, "teardown", teardown)

    def leave(self, finish: Callable[[], object]) -> NoReturn:
        """Call ``finish``, which waits until all ranks have saved; then end training with exit code `TRY_AGAIN`.

        Rank 0 also requeues a SLURM job if its requeue signal came.

        Raises:
            SIGTERMException: Always.
        """
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
            # The checkpoint is safe, so the exit code still asks for another try.
            log.error("The checkpoint is written, but SLURM did not take job %s into its queue again: %s", job, error)


def _error_but_for_sigterm(original: Callable[[], None]) -> None:
    """Raise an error for a loader's worker that has died, as torch's SIGCHLD handler does, but not for every SIGTERM.

    torch's handler raises wherever the main thread is, for example within a step or a save. If SIGTERM has ended the
    worker, this function raises the error only while the main thread reads from workers: the dead worker may have sent
    half a message, and reading the other half would never end. Elsewhere no error is needed, because the loader itself
    notices at its next read that the worker is missing.
    """
    try:
        original()
    except RuntimeError as error:
        if str(signal.strsignal(signal.SIGTERM)) not in str(error) or _reads(sys._getframe(1)):
            raise


def _reads(frame: Any) -> bool:
    """Return whether the main thread is reading from a loader's workers, or is ending them."""
    while frame is not None:
        if frame.f_code.co_name in ("_try_get_data", "_shutdown_workers"):
            return True
        frame = frame.f_back
    return False


def _read_from_workers(original: Callable[..., Any], loader: Any, *args: Any, **kwargs: Any) -> Any:
    """Read a batch from a loader's workers; raise RuntimeError at once if SIGTERM has ended one of them.

    The dead worker may have sent half a message, and reading the other half would never end.
    """
    for lives, worker in zip(loader._workers_status, loader._workers, strict=True):
        if lives and worker.exitcode == -signal.SIGTERM:
            raise RuntimeError(f"DataLoader worker (pid {worker.pid}) was ended by a signal: Terminated.")
    return original(loader, *args, **kwargs)

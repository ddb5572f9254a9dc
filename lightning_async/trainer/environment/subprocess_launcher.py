"""Launchers of the other ranks if no external launcher started them, and the exit codes of ranks."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any

from lightning_async._subprocess import status_of
from lightning_async.errors import AsyncTrainingError, PeerLost, StoreLost
from lightning_async.membership.process_liveness import STARTER
from lightning_async.membership.signing import SECRET, new_secret
from lightning_async.membership.startup import listen
from lightning_async.trainer.namespace import fabric, pytorch, shorten
from lightning_async.trainer.strategy_view import view_of

log = logging.getLogger(__name__)


STORE_LOST = 69
"""The exit code of a script that ends with `StoreLost`: EX_UNAVAILABLE of sysexits.h, as in this package's launcher."""

_VARIABLE = "TORCHELASTIC_ERROR_FILE"
# Names of the exceptions with which runs of this process have ended.
_ends: list[str] = []


def note_end(exception: BaseException) -> None:
    """Record the exception with which the Trainer ends, so that launchers can show it.

    The exception is written into the error file of torch.distributed.elastic, which torch's ``@record`` around a main
    function may overwrite afterwards. After `StoreLost`, the script will end with exit code `STORE_LOST`. Of a
    `PeerLost` only the message is shown, because another rank has caused it.
    """
    # Servers end by SystemExit without a code. A signal raises a subclass of it.
    if type(exception) is not SystemExit or exception.code:
        _ends.append(type(exception).__name__)
    if isinstance(exception, Exception) and _VARIABLE in os.environ:
        # The record is optional: the file may be read-only, or no file can be opened any more.
        with contextlib.suppress(Exception):
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(exception)
    # This rank is not the cause, so its traceback would mislead.
    if isinstance(exception, PeerLost):
        shorten(exception)
    if isinstance(exception, StoreLost) and not isinstance(sys.excepthook, _Codes):
        sys.excepthook = _Codes(sys.excepthook)


def ended_in_order() -> bool:
    """Return whether no run of the Trainer in this process has ended by an exception or a signal."""
    return not _ends


class _Codes:
    """An exception hook that ends the process with exit code `STORE_LOST` after a `StoreLost`.

    First it calls the previous hook, ``before``, which shows the exception.
    """

    def __init__(self, before: Callable[[type[BaseException], BaseException, TracebackType | None], object]) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        self._before(kind, value, traceback)
        # Leave the exit to a later hook that calls this one. An interactive prompt must not exit at all.
        if isinstance(value, StoreLost) and sys.excepthook is self and not hasattr(sys, "ps1"):
            raise SystemExit(STORE_LOST)


_ChildProcessObserver: Any = fabric("strategies.launchers.subprocess_script")._ChildProcessObserver
_MultiProcessingLauncher: Any = pytorch("strategies.launchers.multiprocessing")._MultiProcessingLauncher
_SubprocessScriptLauncher: Any = pytorch("strategies.launchers.subprocess_script")._SubprocessScriptLauncher
# Seconds before a rank that was not the cause ends, so that the launcher sees the cause first.
_AFTER_THE_CAUSE_S = 2.0
_PORT = "MASTER_PORT"


def check_launcher() -> None:
    """Raise AsyncTrainingError if a launcher of this module has started this rank, and has died."""
    parent = multiprocessing.parent_process()
    pid = os.environ.get(STARTER)
    if (parent is not None and not parent.is_alive()) or (pid is not None and not _lives(int(pid))):
        raise AsyncTrainingError(
            f"Process {os.getpid()}: the process that started this rank ({pid or parent}) has died, so this ends too."
        )


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        # A process that has ended may still be a zombie, to which signals can be sent.
        return status_of(pid)[0] not in ("Z", "X")
    except ProcessLookupError:
        return False
    # The process is another user's, or there is no /proc.
    except OSError:
        return True


def _introduce(num_nodes: int) -> None:
    """Set environment variables for the processes to be started: this process's id and, on a single host, a secret."""
    os.environ[STARTER] = str(os.getpid())
    if num_nodes == 1:
        os.environ.setdefault(SECRET, new_secret())


@contextlib.contextmanager
def _given_back(*names: str) -> Iterator[None]:
    """Restore environment variables at the end of the block."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        # Variables of this launch must not reach processes that the user starts later.
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class ProcessLauncher(_MultiProcessingLauncher):
    """Lightning's launcher for "spawn", "fork" and "forkserver", which also handles errors in the started processes.

    With Lightning's own launcher, `on_exception` is never called in a started process. The other ranks would wait for a
    failed rank until they are killed. Here each process calls `on_exception`. The run's summary is returned to the
    process that launched, because it would be lost with the started processes.
    """

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Run the function in new processes.

        The store of failed ranks keeps its port for a moment after they have ended, so each launch uses another port.
        If the user has set the port, this method returns from a failed launch only when that port is free.
        """
        environment: Any = self._strategy.cluster_environment
        is_users_port = _PORT in os.environ
        with _given_back(_PORT, STARTER, SECRET):
            _introduce(self._strategy.num_nodes)
            try:
                return super().launch(function, *args, trainer=trainer, **kwargs)
            except BaseException:
                # The next launch uses the same port, which the old store may still hold.
                if is_users_port:
                    with contextlib.suppress(AsyncTrainingError):
                        listen(environment.main_address, environment.main_port).close()
                raise
            finally:
                if hasattr(environment, "_main_port") and not is_users_port:
                    # The value of Lightning's constructor, with which the next launch chooses a port.
                    environment._main_port = -1

    def _wrapping_function(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._wrapping_function(*args, **kwargs)
        except BaseException as error:
            # Nothing else tells the other ranks, because Lightning's handler runs in the launcher.
            try:
                self._strategy.on_exception(error)
                self._strategy.teardown()
            except Exception:
                log.exception("Ending this rank after an error failed.")
            if isinstance(error, PeerLost):
                # The launcher shows the error of the process that ends first, which must be the rank that failed.
                time.sleep(_AFTER_THE_CAUSE_S)
            raise

    def get_extra_results(self, trainer: Any) -> dict[str, Any]:
        """Return Lightning's results, and the run's summary on rank 0."""
        return {**super().get_extra_results(trainer), "summary": view_of(self._strategy).summary}

    def update_main_process_results(self, trainer: Any, extra: dict[str, Any]) -> None:
        summary = extra.pop("summary")
        if summary is not None:
            self._strategy.summary = summary
        super().update_main_process_results(trainer, extra)


class ScriptLauncher(_SubprocessScriptLauncher):
    """A launcher like Lightning's launcher of scripts, which gives the other ranks time to end after a rank has died.

    Lightning kills all other ranks within seconds, and does not say what went wrong in training. Here the other ranks
    learn of the death first, so each ends with an error that names the dead rank. A rank that has not ended in time is
    killed.

    ``on_death`` is called with the local rank and the exit status of a process that died. It returns how long the
    others may take to end, or None if they continue. ``run_call`` is called with the Trainer and a function that runs
    the present call of the Trainer, and returns its result; not in ranks of this launcher, which starts none again.
    """

    def __init__(
        self,
        environment: Any,
        num_processes: int,
        num_nodes: int,
        on_death: Callable[[int, int], timedelta | None],
        run_call: Callable[[Any, partial[Any]], Any],
    ) -> None:
        super().__init__(environment, num_processes, num_nodes)
        self._on_death = on_death
        self._run_call = run_call

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the other ranks as Lightning's launcher does, but watch them by `_Watch` instead of its observer."""
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            _introduce(self.num_nodes)
            self._call_children_scripts()
            _Watch(self.procs, self._on_death).start()
        fabric("utilities.distributed")._set_num_threads_if_needed(num_processes=self.num_processes)
        call = partial(function, *args, **kwargs)
        return call() if STARTER in os.environ else self._run_call(trainer, call)


class _Watch(_ChildProcessObserver):
    """A thread that watches processes and reacts as soon as one ends; without pidfds, within a second."""

    def __init__(
        self, children: Sequence[subprocess.Popen[Any]], on_death: Callable[[int, int], timedelta | None]
    ) -> None:
        super().__init__(main_pid=os.getpid(), child_processes=list(children), sleep_period=1)
        self._on_death = on_death
        self._known: set[int] = set()

    def run(self) -> None:
        held = _held(self._child_processes)
        while not self._run():
            if held:
                _wait_for_one(held)
            else:
                time.sleep(self._sleep_period)

    def _run(self) -> bool:
        """React to processes that have ended; return whether there is nothing left to watch.

        If the other ranks are to end, wait as long as they may take, and kill those that are still running.
        """
        dead = [rank for rank, child in enumerate(self._child_processes, start=1) if child.poll()]
        news = [self._tell(rank) for rank in dead if rank not in self._known]
        self._known.update(dead)
        if patience := [left for left in news if left is not None]:
            # Sleeping is harmless: this is a daemon thread, which ends with the process.
            time.sleep(max(patience).total_seconds())
            self._terminate_all()
        return bool(patience) or all(child.returncode is not None for child in self._child_processes)

    def _tell(self, local_rank: int) -> timedelta | None:
        status = self._child_processes[local_rank - 1].returncode
        log.error("The process of local rank %d ended with status %d.", local_rank, status)
        try:
            return self._on_death(local_rank, status)
        except Exception:
            # The others cannot end by themselves if they do not know, so they are killed at once.
            log.exception("The other ranks could not be informed, and are killed.")
            return timedelta(0)


def _held(children: Sequence[subprocess.Popen[Any]]) -> dict[int, subprocess.Popen[Any]]:
    """Return the living processes by their pidfds; nothing on systems without pidfds."""
    held: dict[int, subprocess.Popen[Any]] = {}
    try:
        for child in children:
            # The pid cannot be reused before this thread polls again, so the descriptor is of the same process.
            if child.poll() is None:
                held[os.pidfd_open(child.pid)] = child
    except (AttributeError, OSError):
        while held:
            os.close(held.popitem()[0])
    return held


def _wait_for_one(held: dict[int, subprocess.Popen[Any]]) -> None:
    """Wait until at least one process has ended; close the pidfds of all processes that have ended, and remove them."""
    poll = select.poll()
    for descriptor in held:
        poll.register(descriptor, select.POLLIN)
    for descriptor, _ in poll.poll():
        os.close(descriptor)
        del held[descriptor]

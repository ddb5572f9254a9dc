"""What starts the other ranks where no launcher did: it hands them the job's secret, and hears of their end."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from lightning_async.errors import AsyncTrainingError, PeerLost, StoreLost
from lightning_async.membership.process_liveness import STARTER
from lightning_async.membership.signing import SECRET, new_secret
from lightning_async.membership.startup import listen
from lightning_async.trainer.namespace import fabric, pytorch, shorten
from lightning_async.trainer.strategy_view import view_of

log = logging.getLogger(__name__)


# What a rank has died of, for who has started it: in a file, as torch.distributed.elastic has it; and by its
# code.

STORE_LOST = 69
"""The exit code of a script that ends with `StoreLost`: EX_UNAVAILABLE of sysexits.h, as of our launcher."""

_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_ends: list[str] = []  # of runs of this process, by an exception


def note_end(exception: BaseException) -> None:
    """The Trainer ends with this exception: it is written down. Of `PeerLost` the message alone is shown.

    A program whose main function is under torch's ``@record`` writes it once more, over this.
    """
    if type(exception) is not SystemExit or exception.code:  # what serves ends by that; a signal is a class below it
        _ends.append(type(exception).__name__)
    if isinstance(exception, Exception) and _VARIABLE in os.environ:
        with contextlib.suppress(Exception):  # it cannot be written, has no words, or no file can be opened any more
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(exception)
    if isinstance(exception, PeerLost):  # who lost it is not to blame, and where it stood says nothing
        shorten(exception)
    if isinstance(exception, StoreLost) and not isinstance(sys.excepthook, _Codes):
        sys.excepthook = _Codes(sys.excepthook)


def ended_in_order() -> bool:
    """Whether no run of this process has ended by an exception or a signal: it has nothing left to do."""
    return not _ends


class _Codes:
    """Of a script that nobody has kept from ending: the exception is shown as before, and has a code of its own.

    Args:
        before: shows it.
    """

    def __init__(self, before: Callable[[type[BaseException], BaseException, TracebackType | None], object]) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        self._before(kind, value, traceback)
        # Who calls this from a hook that came later may have more to show; and a prompt is no script.
        if isinstance(value, StoreLost) and sys.excepthook is self and not hasattr(sys, "ps1"):
            raise SystemExit(STORE_LOST)


# A process that has done its part ends its script in order, from within a run.


def leave(trainer: Any) -> NoReturn:
    """End with status 0. Callbacks, loggers and data hear of no exception, as they have not begun.

    Raises:
        SystemExit: which ends the script.
    """
    trainer.callbacks = []
    trainer.loggers = []
    trainer.datamodule = None
    raise SystemExit(0)


if TYPE_CHECKING:
    from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
    from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
    from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
else:
    _ChildProcessObserver = fabric("strategies.launchers.subprocess_script")._ChildProcessObserver
    _MultiProcessingLauncher = pytorch("strategies.launchers.multiprocessing")._MultiProcessingLauncher
    _SubprocessScriptLauncher = pytorch("strategies.launchers.subprocess_script")._SubprocessScriptLauncher
_AFTER_THE_CAUSE_S = 2.0
_PORT = "MASTER_PORT"


def check_launcher() -> None:
    """Whether the process that started this rank still lives, if it was one of the launchers here.

    Raises:
        AsyncTrainingError: it does not.
    """
    parent = multiprocessing.parent_process()
    pid = os.environ.get(STARTER)
    if (parent is not None and not parent.is_alive()) or (pid is not None and not _lives(int(pid))):
        raise AsyncTrainingError(
            f"Process {os.getpid()}: the process that started this rank ({pid or parent}) has died, so this ends too."
        )


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as stat:  # one that has ended may not have been asked for its status yet
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except ProcessLookupError:
        return False
    except OSError:  # another user's, or no /proc
        return True


def _introduce(num_nodes: int) -> None:
    """What the processes to be started inherit: who starts them, and the job's secret where this is its only host."""
    os.environ[STARTER] = str(os.getpid())
    if num_nodes == 1:
        os.environ.setdefault(SECRET, new_secret())


@contextlib.contextmanager
def _given_back(*names: str) -> Iterator[None]:
    """Environment variables are at the end what they were at the beginning."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class ProcessLauncher(_MultiProcessingLauncher):
    """Lightning's launcher for "spawn", "fork" and "forkserver", but for what it does not hear from the processes.

    Lightning calls `on_exception` around the launcher only, so never in a process that was started here: the others
    would wait for its rank until they are killed. And what a strategy has learned stays in the processes.

    Args:
        strategy, start_method: see Lightning's.
    """

    def __init__(self, strategy: Any, start_method: Any) -> None:
        super().__init__(strategy, start_method)

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Run the function in new processes. The next launch of this process finds nothing of this one.

        The store of ranks that failed serves for a moment longer. So each launch has a port of its own; where the user
        has set one, a launch that failed waits until that is free.
        """
        environment: Any = self._strategy.cluster_environment
        is_users_port = _PORT in os.environ
        with _given_back(_PORT, STARTER, SECRET):
            _introduce(self._strategy.num_nodes)  # pyright: ignore[reportAttributeAccessIssue]
            try:
                return super().launch(function, *args, trainer=trainer, **kwargs)
            except BaseException:
                if is_users_port:
                    with contextlib.suppress(AsyncTrainingError):
                        listen(environment.main_address, environment.main_port).close()
                raise
            finally:
                if hasattr(environment, "_main_port") and not is_users_port:
                    environment._main_port = -1  # as Lightning's constructor leaves it: none is chosen

    def _wrapping_function(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._wrapping_function(*args, **kwargs)
        except BaseException as error:
            try:
                self._strategy.on_exception(error)
                self._strategy.teardown()
            except Exception:
                log.exception("Ending this rank after an error failed.")
            if isinstance(error, PeerLost):
                # The launcher shows the error of the process that ends first: that shall be the rank that failed.
                threading.Event().wait(_AFTER_THE_CAUSE_S)
            raise

    def get_extra_results(self, trainer: Any) -> dict[str, Any]:
        """With the summary of the run, as rank 0 saw it."""
        return {**super().get_extra_results(trainer), "summary": view_of(self._strategy).summary}

    def update_main_process_results(self, trainer: Any, extra: dict[str, Any]) -> None:
        """See `get_extra_results`."""
        summary = extra.pop("summary")
        if summary is not None:
            self._strategy.summary = summary  # pyright: ignore[reportAttributeAccessIssue]
        super().update_main_process_results(trainer, extra)


class ScriptLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher, but for what happens when a rank dies.

    Lightning then kills all others within seconds, and does not say what went wrong in training. Here the others are
    told first, so that each ends with an error that names the rank; who has not ended in time is killed.

    Args:
        environment, num_processes, num_nodes: see Lightning's.
        on_death: called with the local rank and the exit status of a process that died; returns how long the others
            may take to end, None where they go on without it.
    """

    def __init__(
        self,
        environment: Any,
        num_processes: int,
        num_nodes: int,
        on_death: Callable[[int, int], timedelta | None],
    ) -> None:
        super().__init__(environment, num_processes, num_nodes)
        self._on_death = on_death

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """See Lightning's, which starts an observer of its own."""
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            _introduce(self.num_nodes)
            self._call_children_scripts()
            _Watch(self.procs, self._on_death).start()
        fabric("utilities.distributed")._set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)


class _Watch(_ChildProcessObserver):
    """Looks after the processes as soon as one ends; once a second where the system does not tell of that."""

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
        """Whether all are looked after."""
        dead = [rank for rank, child in enumerate(self._child_processes, start=1) if child.poll()]
        news = [self._tell(rank) for rank in dead if rank not in self._known]
        self._known.update(dead)
        if patience := [left for left in news if left is not None]:
            threading.Event().wait(max(patience).total_seconds())  # a daemon: it ends with the process
            self._terminate_all()
        return bool(patience) or all(child.returncode is not None for child in self._child_processes)

    def _tell(self, local_rank: int) -> timedelta | None:
        status = self._child_processes[local_rank - 1].returncode
        log.error("The process of local rank %d ended with status %d.", local_rank, status)
        try:
            return self._on_death(local_rank, status)
        except Exception:
            log.exception("The other ranks could not be told; they are ended.")
            return timedelta(0)


def _held(children: Sequence[subprocess.Popen[Any]]) -> dict[int, subprocess.Popen[Any]]:
    """Those that live, each by a descriptor that tells of its end; none where there is no such thing."""
    held: dict[int, subprocess.Popen[Any]] = {}
    try:
        for child in children:
            if child.poll() is None:  # until this thread asks for its status again, its number is its own
                held[os.pidfd_open(child.pid)] = child
    except (AttributeError, OSError):
        while held:
            os.close(held.popitem()[0])
    return held


def _wait_for_one(held: dict[int, subprocess.Popen[Any]]) -> None:
    """Until one has ended; all that have are held no longer."""
    poll = select.poll()
    for descriptor in held:
        poll.register(descriptor, select.POLLIN)
    for descriptor, _ in poll.poll():
        os.close(descriptor)
        del held[descriptor]

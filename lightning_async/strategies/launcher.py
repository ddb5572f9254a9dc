"""Plain ``python``: rank 0 starts the others and watches over them."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lightning_async.namespace import fabric, pytorch

if TYPE_CHECKING:
    from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
    from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
else:
    _ChildProcessObserver = fabric("strategies.launchers.subprocess_script")._ChildProcessObserver
    _SubprocessScriptLauncher = pytorch("strategies.launchers.subprocess_script")._SubprocessScriptLauncher

__all__ = ["ScriptLauncher"]

log = logging.getLogger(__name__)


class ScriptLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher, but for what happens when a rank dies.

    Lightning then kills all others within seconds, without a word of what went wrong in training. Here the others are
    told first, so that each ends with an error that names the rank; who has not ended in time is killed.

    Args:
        environment, num_processes, num_nodes: see Lightning's.
        on_death: called with the local rank and the exit status of a process that died; returns how long the others
            may take to end.
    """

    def __init__(
        self,
        environment: Any,
        num_processes: int,
        num_nodes: int,
        on_death: Callable[[int, int], timedelta],
    ) -> None:
        super().__init__(environment, num_processes, num_nodes)
        self._on_death = on_death

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """See Lightning's, which starts an observer of its own."""
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            self._call_children_scripts()
            _Watch(self.procs, self._on_death).start()
        fabric("utilities.distributed")._set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)


class _Watch(_ChildProcessObserver):
    """Looks after the processes once a second."""

    def __init__(self, children: Sequence[subprocess.Popen[Any]], on_death: Callable[[int, int], timedelta]) -> None:
        super().__init__(main_pid=os.getpid(), child_processes=list(children), sleep_period=1)
        self._on_death = on_death

    def _terminate_all(self) -> None:
        patience = timedelta(0)
        for local_rank, child in enumerate(self._child_processes, start=1):
            if child.returncode:
                log.error("The process of local rank %d ended with status %d.", local_rank, child.returncode)
                patience = max(patience, self._on_death(local_rank, child.returncode))
        threading.Event().wait(patience.total_seconds())  # a daemon: it ends with the process
        super()._terminate_all()

"""The system takes the machine back: SIGTERM, or SLURM's requeue signal. One checkpoint, then exit code 75.

The handler sets a flag; what follows comes at a batch boundary of all ranks. 75 is EX_TEMPFAIL of sysexits.h: to be
tried again. A second SIGTERM ends the process at once.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any, NoReturn

from lightning_async.trainer.namespace import pytorch
from lightning_async.trainer.patches import Undo, replace

__all__ = ["TRY_AGAIN", "Preemption"]

log = logging.getLogger(__name__)

TRY_AGAIN = 75
"""The exit code."""
_SAME_S = 1.0
"""Launchers send a signal to a process and to its group: what comes so soon after the first is no second one."""
_REQUEUE_S = 60.0


class Preemption:
    """Replaces Lightning's handlers of these signals.

    Args:
        trainer: before it registers them.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.told = False
        """This rank was told to go."""
        self._told_at = 0.0
        self._requeues = False

    def install(self) -> list[Undo]:
        """Patch; returns what takes it back."""
        signals = self._trainer._signal_connector
        return [
            replace(signals, "_sigterm_notifier_fn", lambda original: self._on_sigterm),
            replace(signals, "_slurm_sigusr_handler_fn", lambda original: self._on_requeue),
        ]

    def _on_sigterm(self, number: int, frame: Any) -> None:
        if self.told and time.monotonic() - self._told_at > _SAME_S:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        if not self.told:
            self.told, self._told_at = True, time.monotonic()

    def _on_requeue(self, number: int, frame: Any) -> None:
        self._requeues = True
        self._on_sigterm(number, frame)

    def leave(self, finish: Callable[[], object]) -> NoReturn:
        """All ranks have saved: ``finish`` waits until that is on the disk.

        Raises:
            SystemExit: with `TRY_AGAIN`; Lightning's SIGTERMException, so that it ends as after any signal.
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
            log.error("The checkpoint is written, but SLURM did not take job %s into its queue again: %s", job, error)

"""The thread of a heartbeat, from its start to an end in order."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable

__all__ = ["Heart"]

_log = logging.getLogger(__name__)
_GOODBYE_S = 2.0
_started: weakref.WeakSet[Heart] = weakref.WeakSet()


class Heart:
    """Calls ``beat`` at an interval, and at once when it is woken.

    Args:
        beat: what it raises is logged.
        interval_s: between two.
        hang_up: ends a ``beat`` that hangs; called from another thread.
    """

    def __init__(self, beat: Callable[[], None], interval_s: float, hang_up: Callable[[], None]) -> None:
        self._beat, self._interval_s, self._hang_up = beat, interval_s, hang_up
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._stop = False
        self._pid = os.getpid()

    @property
    def started(self) -> bool:
        return self._thread is not None

    @property
    def beats(self) -> bool:
        """Whether the thread runs, in this process."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def inherited(self) -> bool:
        """Whether this is a fork of the process that it beats in."""
        return os.getpid() != self._pid

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="lightning_async heartbeat", daemon=True)
        self._thread.start()
        _started.add(self)

    def wake(self) -> None:
        self._wake.set()

    def stop(self) -> bool:
        """End the thread, within a few seconds; whether it has ended. Idempotent."""
        self._stop = True
        if self._thread is None or self.inherited:  # a fork that leaves: the rank is its parent's
            return not self.inherited
        self._wake.set()
        self._thread.join(_GOODBYE_S)
        if self._thread.is_alive():  # the store's host stands still, say
            self._hang_up()
            self._thread.join(_GOODBYE_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop:
            self._wake.wait(self._interval_s)
            self._wake.clear()
            try:
                self._beat()
            except Exception:
                _log.exception("A heartbeat failed; the next one comes.")


@atexit.register
def _stop_all() -> None:
    # A thread that comes back from torch while the interpreter shuts down aborts the process.
    for heart in list(_started):
        heart.stop()

"""Reading the store where that may be given up: a store that stands still, or whose host is gone, says nothing,
and torch waits for it in C, past every timeout, where nobody hears of a signal.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, TypeVar

from lightning_async.comm.membership.door import Door
from lightning_async.comm.membership.stores import Contact
from lightning_async.errors import StoreLost

__all__ = ["AskingDoor"]

T = TypeVar("T")
_LOOK_S, _GOODBYE_S = 0.05, 2.0


class AskingDoor(Door):
    """A door whose notes are read through a client of its own, and on another thread than the one that waits for them.

    Args:
        door: the same, of the job.
        rank: for messages.
        dead_after: the silence after which the store is lost.
        check: called all the time while the store is silent; raises to give up.

    Raises:
        StoreLost: the store is silent for so long; any reading raises it.
        RuntimeError, ConnectionError: the store is out of reach; as above.
    """

    def __init__(self, door: Door, rank: int, dead_after: timedelta, check: Callable[[], None]) -> None:
        self._rank, self._dead_s, self._check = rank, dead_after.total_seconds(), check
        self._hang_up: Callable[[], None] = lambda: None
        # Its own timeout never decides: the silence is measured by the one who waits.
        self._store, self._hang_up = self.ask(lambda: door.connect(2 * dead_after))
        self.seal = door.seal

    def read(self, key: str) -> dict[str, Any]:
        """See `Door`."""
        read = super().read
        return self.ask(lambda: read(key))

    def ask(self, question: Callable[[], T]) -> T:
        """The answer to any other question to the store; raises what that raises, too."""
        answer: Future[T] = Future()
        thread = threading.Thread(target=_answer, args=(question, answer), name="lightning_async asks", daemon=True)
        contact = Contact(time.monotonic(), self._dead_s)
        thread.start()
        try:
            while not wait([answer], _LOOK_S).done:
                self._check()
                if (silence := contact.lost(time.monotonic())) is not None:
                    raise StoreLost(f"rank {self._rank}: {silence}", () if self._rank == 0 else (0,))
        except BaseException:
            self._hang_up()  # a thread that comes back from torch while the interpreter shuts down aborts the process
            thread.join(_GOODBYE_S)
            raise
        thread.join()
        return answer.result()


def _answer(question: Callable[[], T], answer: Future[T]) -> None:
    try:
        answer.set_result(question())
    except BaseException as error:
        answer.set_exception(error)

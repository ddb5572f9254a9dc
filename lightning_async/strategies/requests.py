"""What one worker asks of its servers: one thing at a time, on a thread of its own, beside training."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from lightning_async.engine.averaging.averager import BackgroundAverager
from lightning_async.engine.server.tables import Tables
from lightning_async.engine.server.totals import PushTotals

__all__ = ["Requests"]


class Requests:
    """Closed by `close`.

    Args:
        averager: has the gates, which end what waits in vain.
        totals: count how long it takes.
    """

    def __init__(self, averager: BackgroundAverager, totals: PushTotals) -> None:
        self._averager, self._totals = averager, totals
        self._thread = ThreadPoolExecutor(1, "lightning_async pushes")
        self._under_way: Future[Any] | None = None

    @property
    def under_way(self) -> bool:
        return self._under_way is not None

    @property
    def answered(self) -> bool:
        """What is under way is done, but for `finish`."""
        return self._under_way is not None and self._under_way.done()

    @property
    def submit(self) -> Callable[..., Any]:
        """Beside a request, in order with it."""
        return self._thread.submit

    def begin(self, ask: Callable[[], Any]) -> None:
        """Nothing is under way."""
        self._under_way = self._thread.submit(self._totals.timed, ask)
        self._under_way.add_done_callback(lambda _: self._averager.control.wake())

    def wait(self) -> None:
        """Until it is answered; it stays under way."""
        if self._under_way is not None:
            self._averager.gates.wait(self._under_way.done)

    def finish(self) -> Any:
        """Until nothing is under way; what was answered."""
        asked = self._under_way
        assert asked is not None
        if not asked.done():
            began = time.monotonic()
            self.wait()
            self._totals.waited_s += time.monotonic() - began
        self._under_way = None
        return asked.result()

    def finish_within(self, timeout_s: float) -> None:
        """The same where training has failed, and no gate is heard; TimeoutError where it takes longer."""
        if self._under_way is not None:
            self._under_way.result(timeout_s)

    def ask_within(self, timeout_s: float, ask: Callable[[], Any]) -> None:
        """What takes longer is under way still: `close` breaks it off."""
        self._under_way = self._thread.submit(ask)
        self._under_way.result(timeout_s)
        self._under_way = None

    def close(self, tables: Tables) -> None:
        """And the way to the servers."""
        if self._under_way is not None:
            tables.give_up()
        self._thread.shutdown()
        tables.close()

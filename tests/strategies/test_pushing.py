"""A worker's end, where its servers do not answer."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from lightning_async.engine.averaging.averager import BackgroundAverager
from lightning_async.parameter_server.metrics import PushTotals
from lightning_async.strategies.server_steps import PushSteps, Requests


class Silent:
    """Tables whose servers answer nothing, until they are given up."""

    def __init__(self) -> None:
        self.given_up = threading.Event()

    def meet(self) -> None:
        self.given_up.wait()

    def give_up(self) -> None:
        self.given_up.set()

    def close(self) -> None: ...


def test_a_worker_that_has_failed_ends_though_its_servers_hang() -> None:
    """What it asks them for its last save is broken off."""
    pushing: Any = object.__new__(PushSteps)
    pushing.tables = tables = Silent()
    pushing._undo, nothing = [], Any
    pushing._requests = Requests(cast(BackgroundAverager, nothing), PushTotals())
    with pytest.raises(TimeoutError):
        pushing.rescue([], 0.01)
    closing = threading.Thread(target=pushing.close, daemon=True)
    closing.start()
    closing.join(20)
    ended = not closing.is_alive()
    tables.given_up.set()
    assert ended

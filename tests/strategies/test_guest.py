"""A newcomer that waits to be taken in."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore

from lightning_async.comm.membership.door import Door
from lightning_async.comm.membership.signing import Seal
from lightning_async.errors import StoreLost
from lightning_async.strategies.guest import Guest
from lightning_async.transports.torch import TorchTransport


def test_one_that_waits_hears_that_the_store_is_lost_by_its_error() -> None:
    """As those who train do: a script that ends with it has 69 for its exit code."""
    server: Any = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=60), wait_for_workers=False)
    looks = threading.Event()

    class Looks(Door):
        def read_notice(self) -> dict[str, Any]:
            found = super().read_notice()
            looks.set()
            return found

    class Transport(TorchTransport):
        def door(self, environment: Any) -> Door:
            return Looks(client, Seal(""))

    strategy: Any = SimpleNamespace(transport=Transport(), cluster_environment=SimpleNamespace(started_as=1))
    raised: list[BaseException] = []

    def join() -> None:
        try:
            Guest(strategy, SimpleNamespace(received_sigterm=False)).join()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    assert looks.wait(30.0)
    del server
    thread.join(60.0)
    with pytest.raises(StoreLost, match="rank 1: while it waited to be taken in, the store failed"):
        raise raised[0]

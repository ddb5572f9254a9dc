"""Clients of torch.distributed's stores: one per thread, each with its own timeout."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

__all__ = ["HashStore", "PrefixStore", "Store", "own_client", "reachable", "read_all"]


def own_client(store: Store, timeout: timedelta) -> Store:
    """A client for the calling thread alone: one that blocks would hold up the other threads' requests.

    Raises:
        RuntimeError: the store is out of reach.
    """
    client: Any = store
    client = client.clone()
    # A HashStore has no clients: its clone is itself, and its timeout everybody's.
    if not isinstance(_base(client), HashStore):
        client.set_timeout(timeout)
    return client


def read_all(store: Store, keys: Sequence[str]) -> list[bytes]:
    """The values of keys that exist, in one request where the store can; blocks for those that do not."""
    client: Any = store
    if keys and client.has_extended_api():
        return client.multi_get(list(keys))
    return [client.get(key) for key in keys]


def reachable(store: Store, timeout: timedelta) -> bool:
    """Whether somebody listens where the store is. A client would try for long, and print stack traces."""
    base = _base(store)
    if not isinstance(base, TCPStore):
        return True
    try:
        socket.create_connection((base.host, base.port), timeout.total_seconds()).close()
    except OSError:
        return False
    return True


def _base(store: Any) -> Any:
    while isinstance(store, PrefixStore):
        store = store.underlying_store  # type: ignore[attr-defined]
    return store

"""What moves between a server's store and the memory of a worker's channel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_async.comm.channel import Channel
from lightning_async.engine.server.feedback import Arrived
from lightning_async.engine.server.quorum import Terms
from lightning_async.engine.server.refused import Refused, memory_for
from lightning_async.engine.server.store import Store

__all__ = ["Exchange"]


class Exchange:
    """Of one server; used under its lock.

    Args:
        store: its shard.
        terms: see there.
    """

    def __init__(self, store: Store, terms: Terms) -> None:
        self._store, self._terms = store, terms
        self._decoded = torch.empty(0)

    def arrived(self, channel: Channel, header: Mapping[str, Any], size: int) -> Arrived:
        """A push, as it came; Refused, where it is of another size."""
        try:
            return Arrived.of(channel.incoming[: header.get("size", size)], header, self._store.contents["numel"])
        except (TypeError, ValueError) as error:
            raise Refused("settings", f"{error}.") from error

    def apply(self, worker: str, channel: Channel, gradient: Arrived, header: Mapping[str, Any]) -> int | None:
        """Apply it; the version that the channel has for the worker now, if any."""
        if gradient.compression is not None and self._decoded.numel() != gradient.numel:
            self._decoded = torch.empty(gradient.numel)
        values, lag = gradient.floats(self._decoded), self._store.version - header["base"]
        target = self._target(channel) if header["pull"] else None
        with memory_for(worker, self._terms):
            there = self._store.push(worker, header["number"], values, lag, header["lr"], target)
        return self._store.version if there else None

    def give(self, worker: str, channel: Channel, field: str | None = None, there: bool = False) -> int:
        """Put what a worker pulls, or a field that it reads, into the channel, unless it is there; how many bytes."""
        target = self._target(channel)
        if field is not None:
            self._store.copy_(target, field)
        elif not there:
            with memory_for(worker, self._terms):
                self._store.pull(worker, target)
        return target.nbytes

    def _target(self, channel: Channel) -> torch.Tensor:
        size = self._store.contents["numel"] * torch.float32.itemsize
        if channel.outgoing.numel() < size:
            raise Refused("settings", f"a shard of {size} bytes is asked for, with memory for fewer.")
        return channel.outgoing[:size].view(torch.float32)

"""What moves between a server's store and the memory of a worker's channel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from lightning_async.comm.channel import Channel
from lightning_async.engine.server.feedback import Arrived
from lightning_async.engine.server.quorum import Terms
from lightning_async.engine.server.refused import Refused, memory_for
from lightning_async.engine.server.store import Store

__all__ = ["Exchange"]


class Exchange:
    """Of one server; used under its lock. What it has made of a channel's memory once, it has for the next push.

    Args:
        store: its shard.
        terms: see there.
    """

    def __init__(self, store: Store, terms: Terms) -> None:
        self._store, self._terms = store, terms
        self._decoded = torch.empty(0)
        self._arrived: WeakKeyDictionary[Channel, tuple[tuple[Any, ...], Arrived]] = WeakKeyDictionary()
        self._targets: WeakKeyDictionary[Channel, torch.Tensor] = WeakKeyDictionary()

    def arrived(self, channel: Channel, header: Mapping[str, Any], size: int) -> Arrived:
        """A push, as it came; Refused, where it is of another size."""
        size, numel = header.get("size", size), self._store.contents["numel"]
        before, arrived = self._arrived.get(channel, ((), None))
        if arrived is not None and before == (size, header["compression"], numel):
            return arrived
        try:
            arrived = Arrived.of(channel.incoming[:size], header, numel)
        except (TypeError, ValueError) as error:
            raise Refused("settings", f"{error}.") from error
        self._arrived[channel] = (size, header["compression"], numel), arrived
        return arrived

    def apply(self, worker: str, channel: Channel, gradient: Arrived, header: Mapping[str, Any]) -> int | None:
        """Apply it; the version that the channel has for the worker now, if any."""
        if gradient.compression is not None and self._decoded.numel() != gradient.numel:
            self._decoded = torch.empty(gradient.numel)
        values, lag = gradient.floats(self._decoded), self._store.version - header["base"]
        target = self._target(channel) if header["pull"] else None
        with memory_for(worker, self._terms):
            there = self._store.push(worker, header["number"], values, lag, header["lr"], target, header["of"])
        return self._store.version if there else None

    def give(self, worker: str, channel: Channel, header: Mapping[str, Any], there: bool = False) -> int:
        """Put what a worker pulls into the channel, unless it is there, or a field in its place; how many bytes."""
        target, field = self._target(channel), header.get("field")
        plain = field == "params"
        if not there:
            with memory_for(worker, self._terms):
                self._store.pull(worker, target, header["to"], plain)
        return target.nbytes if field is None or plain else self.read(channel, field)

    def read(self, channel: Channel, field: str) -> int:
        """Put a field into the channel; how many bytes. Refused, where there is none."""
        fields = self.fields
        if field not in fields:
            raise Refused("request", f"there is no {field!r}; there are {sorted(fields)}.")
        self._store.copy_(self._target(channel), field)
        return self._target(channel).nbytes

    @property
    def fields(self) -> list[str]:
        """That can be read."""
        return ["params", *self._store.state]

    def _target(self, channel: Channel) -> torch.Tensor:
        numel, found = self._store.contents["numel"], self._targets.get(channel)
        if found is None or found.numel() != numel:
            size = numel * torch.float32.itemsize
            if channel.outgoing.numel() < size:
                raise Refused("settings", f"a shard of {size} bytes is asked for, with memory for fewer.")
            found = self._targets[channel] = channel.outgoing[:size].view(torch.float32)
        return found

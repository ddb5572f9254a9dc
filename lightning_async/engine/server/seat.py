"""What one server's process has of one table of a shard: it is the primary, or has a copy, or nothing.

    nothing --- the first weights -----------------------------------> primary
    nothing --- filled by the primary -------------------------------> copy
    copy ------ a worker comes with the generation after the copy's --> primary
    primary --- the primary of a later generation comes -------------> nothing

There are two memories: a copy is filled anew in the one beside what is there, and takes its place when it is whole.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_async.comm.channel import Channel
from lightning_async.engine.server.loop import Server
from lightning_async.engine.server.refused import Refused
from lightning_async.engine.server.store import Store
from lightning_async.errors import PeerLost

__all__ = ["Seat"]

_CHANGES = ("push", "apply", "keep", "remember")


class Seat:
    """Of one table.

    Args:
        memories: two descriptors of anonymous files, see `Store`.
        serve: makes the server of a store.
        home: workers bring their first weights here, and not to where the copy is.
        threads: that work on a large shard. Default: 1.
    """

    def __init__(
        self, memories: Sequence[int], serve: Callable[[Store], Server], home: bool = True, threads: int = 1
    ) -> None:
        self._memories, self._make, self._threads = list(memories), serve, threads
        self._begins_empty = home
        self._lock = threading.Lock()
        self._copy: Store | None = None
        self._filling: tuple[Store, Mapping[str, Tensor]] | None = None
        self._source: Channel | None = None
        self._at = self._filled = 0
        self.server: Server | None = None
        self._find()

    def take(self) -> Server | None:
        """Be a server of what there is, unless that is a copy."""
        with self._lock:
            if self.server is None and self._copy is None and self._begins_empty:
                self.server = self._make(self._store(self._at))
            return self.server

    def lead(self, header: Mapping[str, Any]) -> Server:
        """The server for a worker that says hello.

        Raises:
            Refused: there is none; the worker knows of a copy that is not this one.
        """
        if (server := self.take()) is not None:
            return server
        with self._lock:
            if self._copy is not None and header.get("generation") == self._copy.record["generation"] + 1:
                store, self._copy = self._copy, None
                self._end_source()
                store.note(generation=header["generation"], copied=False, standby=False)
                self.server = self._make(store)
            if self.server is None:
                has = "nothing of it" if self._copy is None else f"generation {self._copy.record['generation']}"
                raise Refused("copy", f"it is no primary of shard {header.get('shard')}, and has a copy of {has}.")
            return self.server

    def stands(self, header: Mapping[str, Any]) -> dict[str, Any]:
        """Whether there is a whole copy of that generation."""
        with self._lock:
            return {"stands": self._copy is not None and self._copy.record["generation"] == header["generation"]}

    def replicate(self, channel: Channel, header: Mapping[str, Any]) -> None:
        """Do what a primary says, until it is gone; on a thread of its own."""
        generation = header["generation"]
        with self._lock:
            newer = self._newer_than(generation)
            if newer is None:
                self._end_source()
                self._source, self._begins_empty = channel, False  # the shard has weights
        try:
            if newer is not None:
                why = f"generation {newer} of its shard has another primary than generation {generation}"
                channel.send({"refused": "fenced", "why": why, "generation": newer})
                return
            channel.send({})
            while True:
                said, size = channel.receive(None)
                with self._lock:
                    if self._source is not channel:
                        raise PeerLost("another primary has come, or this one is taken for lost.")
                    self._do(said, channel.incoming[:size])
                channel.send({})
        except PeerLost:
            pass  # it comes back, or another one does, or a worker that has seen it die
        finally:
            channel.close()

    def close(self) -> None:
        """Let go of the memory; whoever has the files keeps it."""
        with self._lock:
            self._end_source()
            if self._copy is not None:
                self._copy.close()

    # All below are called under the lock

    def _find(self) -> None:
        """What the one before has left: the newer one of what is whole."""
        there = {at: self._store(at) for at, memory in enumerate(self._memories) if os.fstat(memory).st_size}
        whole = {at: store.record.get("filled", 0) for at, store in there.items() if store.ready}
        if whole:
            self._at = max(whole, key=lambda at: whole[at])
            self._filled = whole[self._at]
        for at, store in there.items():
            if whole and at == self._at:
                if store.record.get("standby"):
                    self._copy = store
                else:
                    self.server = self._make(store)
            else:
                store.close()
                _empty(self._memories[at])

    def _newer_than(self, generation: int) -> int | None:
        """The generation by which a primary of that one is none any more; None, where it is one. Here there is none
        then."""
        if self._copy is not None:
            mine = self._copy.record["generation"]
            return mine if mine > generation else None
        if self.server is None:
            return None
        mine = self.server.generation
        if mine is not None and mine >= generation:
            return mine
        self.server.retire(generation)
        self.server = None
        _empty(self._memories[self._at])
        return None

    def _do(self, said: Mapping[str, Any], memory: Tensor) -> None:
        try:
            if said["do"] == "change":
                if self._copy is None or said["method"] not in _CHANGES:
                    raise ValueError(f"there is no copy to {said['method']!r}")
                with_gradient = "arguments" in said
                arguments = dict(said["arguments"]) if with_gradient else _plain(memory)
                if with_gradient:
                    arguments["gradient"] = memory.view(torch.float32)
                getattr(self._copy, said["method"])(**arguments)
            elif said["do"] == "begin":
                self._begin(_plain(memory))
            elif self._filling is not None and said["do"] == "part":
                self._filling[1][said["name"]].copy_(memory.view(torch.float32))
            elif self._filling is not None and said["do"] == "whole":
                self._be_whole(self._filling[0])
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            # The primary fills it anew; where that cannot be, it goes on without a copy.
            raise PeerLost(f"the copy cannot do what was said: {error}.") from error

    def _begin(self, record: Mapping[str, Any]) -> None:
        spare = 1 - self._at
        if self._filling is not None:
            self._filling[0].close()
            self._filling = None
        _empty(self._memories[spare])
        store = self._store(spare)
        self._filling = store, store.lay_out(record)

    def _be_whole(self, store: Store) -> None:
        before, self._filling = self._copy, None
        self._filled += 1
        store.note(standby=True, filled=self._filled)
        self._copy, self._at = store, 1 - self._at
        if before is not None:
            before.close()
        _empty(self._memories[1 - self._at])

    def _end_source(self) -> None:
        if self._source is not None:
            self._source.break_off()
        self._source = None
        if self._filling is not None:
            self._filling[0].close()
            self._filling = None

    def _store(self, at: int) -> Store:
        return Store(os.dup(self._memories[at]), self._threads)


def _plain(memory: Tensor) -> Any:
    return json.loads(memory.numpy().tobytes())


def _empty(memory: int) -> None:
    """Give the memory back, and have zeros there; who still looks at it does no harm."""
    if size := os.fstat(memory).st_size:
        with mmap.mmap(memory, size) as mapping:
            mapping.madvise(mmap.MADV_REMOVE)

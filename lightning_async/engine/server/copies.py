"""A shard's copy on another server, from the side of its primary: whatever is done to the store is done there, too.

    none ------- told where, with the first weights ----------> wanted
    wanted ----- reached, and filled with all there is -------> there: each change goes along, and is answered
    there ------ its connection ends, or a change has failed -> wanted
    wanted ----- for too long: workers hear of it, and one comes with the next generation, see `views` --> none
    none ------- it can be reached again ---------------------> wanted

While it is there or wanted, no worker is answered before the copy has all that the answer may show. So what was
acknowledged is there, and whoever takes the copy in place of a lost primary has lost nothing.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from lightning_async.comm.channel import Channel, Dial, nobody_listens
from lightning_async.comm.reach import dial
from lightning_async.engine.server.journal import ROOM
from lightning_async.engine.server.refused import Refused
from lightning_async.engine.server.store import Store
from lightning_async.errors import PeerLost

__all__ = ["Copies"]

_PAUSE_S, _AGAIN_S = 0.05, 1.0
_CONNECT_S = 5.0
_SLOWEST = 1 << 24  # bytes in a second that a copy takes at least


class Copies:
    """Of one server's store; used under its lock.

    Args:
        store: that is copied.
        lock: that it is used under.
    """

    def __init__(self, store: Store, lock: Any) -> None:
        self._store, self._lock = store, lock
        self._names: dict[str, Any] = {}
        self._place: Mapping[str, Any] | None = None
        self._dial: Dial | None = None
        self._channel: Channel | None = None
        self._given_up = ""
        self._fenced = self._returning = False

    @property
    def wanted(self) -> bool:
        """Whether nobody is answered without it."""
        return bool(self._store.ready and self._store.record.get("copied"))

    @property
    def generation(self) -> int:
        """Of the view that this server goes by."""
        return self._store.record.get("generation", 0)

    def told(self) -> dict[str, Any]:
        """What answers say of it; nothing, where there is to be none."""
        return {} if self._place is None else {"generation": self.generation, "copied": self.wanted}

    def hear(self, header: Mapping[str, Any]) -> None:
        """What a worker brings with its hello.

        Raises:
            Refused: another server is the primary.
        """
        self.check()
        if (generation := header.get("generation")) is None:
            return
        self._place, self._names = header["copy"], {"shard": header["shard"], "table": header["table"]}
        if not self._store.ready:
            return
        if generation > self.generation + 1:
            self.fence(generation)
            self.check()
        elif generation > self.generation:
            self._drop()
            self._given_up = ""
            self._store.note(generation=generation, copied=False)
        if not self.wanted and not self._returning:
            self._returning = True
            threading.Thread(target=self._return, name="lightning_async copies", daemon=True).start()

    def check(self) -> None:
        """Raise Refused where another server is the primary."""
        if self._fenced:
            raise Refused("fenced", "another server has its shard since: it was taken for lost.")

    def fence(self, generation: int) -> None:
        """There is a later view, in which this one has nothing to say."""
        if not self._fenced and self._store.ready:
            why = f"another one has it, since generation {generation}"
            print(f"A parameter server has lost its shard: {why}.", file=sys.stderr)
        self._fenced = True
        self._drop()

    def close(self) -> None:
        """Nothing goes along any more."""
        self._fenced = True
        self._drop()
        if self._dial is not None:
            self._dial.close()
        self._dial = None

    # ---- what is done to the store, see `Copying` ----

    def begun(self) -> None:
        """The store has begun anew: its copy is to have that."""
        self._drop()
        if self._place is not None:
            self._store.note(generation=self.generation, copied=True)

    @contextmanager
    def doing(self, method: str, arguments: Mapping[str, Any]) -> Iterator[None]:
        """Both do it at the same time. What fails on one side only is made good by filling the copy anew."""
        told = self._tell(method, arguments)
        try:
            yield
        except BaseException:
            self._drop()
            raise
        if told:
            self._hear(told)

    def settle(self) -> None:
        """Until the copy has all that there is.

        Raises:
            Refused: it is out of reach for too long; or another server is the primary.
        """
        self.check()
        if not self.wanted or self._channel is not None:
            return
        if self._given_up or self._place is None:
            raise Refused("alone", self._given_up or "nobody has said where its copy is.")
        began, within_s = time.monotonic(), self._place["within_s"]
        while True:
            self.check()
            try:
                self._fill(self._connect())
                return
            except (PeerLost, OSError) as error:
                why, lost = str(error), nobody_listens(error)
            if lost or time.monotonic() - began > within_s:
                self._given_up = f"its copy was out of reach for {time.monotonic() - began:.1f} s: {why}"
                raise Refused("alone", self._given_up)
            time.sleep(_PAUSE_S)

    # ---- the way there ----

    def _tell(self, method: str, arguments: Mapping[str, Any]) -> int:
        """Say that this is done; how many bytes went along, or 0, where nobody hears."""
        channel = self._channel
        if channel is None:
            return 0
        plain = {name: value for name, value in arguments.items() if not isinstance(value, Tensor)}
        header: dict[str, Any] = {"do": "change", "method": method}
        try:
            if (gradient := arguments.get("gradient")) is not None:
                size = gradient.numel() * torch.float32.itemsize
                channel.outgoing[:size].view(torch.float32).copy_(gradient)
                channel.send({**header, "arguments": plain}, size)
            else:
                size = _put(channel, plain)
                channel.send(header, size)
        except (PeerLost, ValueError):
            self._drop()
            return 0
        return size + 1

    def _hear(self, size: int) -> None:
        assert self._place is not None
        channel = self._channel
        try:
            if channel is not None:
                channel.receive(self._place["within_s"] + size / _SLOWEST)
        except PeerLost:
            self._drop()

    def _connect(self) -> Channel:
        assert self._place is not None
        size = max(2 * ROOM, self._store.contents["numel"] * torch.float32.itemsize)
        if self._dial is None or self._dial.outgoing.numel() != size:
            if self._dial is not None:
                self._dial.close()
            self._dial = dial(self._place["address"], size, 0)
        channel = self._dial.connect(min(_CONNECT_S, self._place["within_s"]))
        try:
            channel.send({"do": "replicate", **self._names, "generation": self.generation})
            reply, _ = channel.receive(self._place["within_s"])
        except PeerLost:
            channel.close()
            raise
        if "refused" in reply:
            channel.close()
            if reply["refused"] == "fenced":
                self.fence(reply["generation"])
                self.check()
            raise PeerLost(f"its copy is refused: {reply['why']}")
        return channel

    def _fill(self, channel: Channel) -> None:
        """All that there is goes there; it counts there when all of it is."""
        assert self._place is not None
        limit_s = self._place["within_s"] + channel.outgoing.numel() / _SLOWEST
        self._channel = channel
        try:
            record = {name: value for name, value in self._store.record.items() if name not in ("standby", "filled")}
            channel.send({"do": "begin"}, _put(channel, record))
            channel.receive(limit_s)
            for name, part in self._store.parts.items():
                size = part.numel() * torch.float32.itemsize
                channel.outgoing[:size].view(torch.float32).copy_(part)
                channel.send({"do": "part", "name": name}, size)
                channel.receive(limit_s)
            channel.send({"do": "whole"})
            channel.receive(limit_s)
        except PeerLost:
            self._drop()
            raise

    def _ask(self) -> None:
        """Raise PeerLost where nobody answers: who stands still is connected with, too."""
        assert self._place is not None
        with closing(dial(self._place["address"], 0, 0)) as way, closing(way.connect(_CONNECT_S)) as channel:
            channel.send({"do": "stands", **self._names, "generation": self.generation}, 0, _CONNECT_S)
            channel.receive(_CONNECT_S)

    def _drop(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = None

    def _return(self) -> None:
        """Where the copy was lost: have it again, once there is a server in its place."""
        while True:
            time.sleep(_AGAIN_S)
            with suppress(PeerLost, OSError, Refused):
                # Whoever does not answer is found out beside the work; the pause is for moving all there is.
                self._ask()
                with self._lock:
                    if not self._fenced and not self.wanted:
                        channel = self._connect()
                        self._store.note(copied=True)
                        self._fill(channel)
                        print("A shard of a parameter server has a copy again.", file=sys.stderr)
            with self._lock:
                if self._fenced or self.wanted:
                    self._returning = False
                    return


def _put(channel: Channel, plain: Mapping[str, Any]) -> int:
    data = json.dumps(plain).encode()
    channel.outgoing[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return len(data)

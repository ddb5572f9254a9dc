"""Gradients that are on their way to servers while the backward pass still makes others.

the training thread                              the thread that pushes              a server
a hook: the last parameters' are there
    put where they leave  -------------------->  sent, where memory is not shared -> kept in the channel's memory
a hook: those before them  ------------------->  ...
a step: the rest, and what has changed since  ->  push  ------------------------->   a push, as any other
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lightning_async.engine.backward import Backward, Span
from lightning_async.engine.server.client import Client
from lightning_async.engine.server.plan import Plan
from lightning_async.flat import FlatLayout

__all__ = ["Ahead"]

Send = Callable[[Callable[[], Any]], Any]
"""Has another thread do something, one after the other."""


class Ahead:
    """Of one worker's model; on the training thread. On GPUs gradients leave after the backward pass.

    Where most of what has left changes behind the backward pass (it is clipped), nothing leaves within it any more.

    Args:
        params: of the model, in the plan's order.
        plan: which server has what.
        client: by which it leaves.
        put: puts the gradients of these parameters, by number, where they leave.
    """

    def __init__(self, params: Sequence[Any], plan: Plan, client: Client, put: Callable[[Sequence[int]], None]) -> None:
        self._params, self._plan, self._client, self._put = list(params), plan, client, put
        self._backward: Backward | None = None
        self._send: Send = lambda do: do()
        self._wasted = False

    @property
    def under_way(self) -> bool:
        """`begin` was called, and not `finish`."""
        return self._backward is not None and self._backward.under_way

    def begin(self, send: Send) -> None:
        """A backward pass begins, with no push under way: `finish` follows."""
        if self._wasted or any(p.device.type != "cpu" for p in self._params):
            return
        if self._backward is None:
            self._backward = Backward(self._params, FlatLayout(self._params), self._take)
        self._send = send
        send(self._client.begin_parts)
        self._backward.begin()

    def finish(self) -> None:
        """The gradients are those that are pushed."""
        assert self._backward is not None
        if changed := self._backward.finish():
            self._put(changed)
            sizes = [p.numel() for p in self._params]
            self._wasted = 2 * sum(sizes[i] for i in changed) > sum(sizes)
            for i in () if self._wasted else changed:
                self._send(partial(self._client.leave, self._parts(i, i + 1)))
            if self._wasted:
                self._send(self._client.begin_parts)

    def give_up(self) -> None:
        """The backward pass has failed."""
        if self._backward is not None:
            self._backward.give_up()

    def close(self) -> None:
        """Leave the parameters alone from now on."""
        if self._backward is not None:
            self._backward.close()

    def _take(self, whole: Sequence[Span]) -> None:
        first, last = whole[-1].first, whole[0].last
        self._put(range(first, last))
        self._send(partial(self._client.leave, self._parts(first, last)))

    def _parts(self, first: int, last: int) -> list[tuple[int, int]]:
        """Of each server, where in its shard these parameters lie."""
        found = []
        for pieces, size in zip(self._plan.pieces, self._plan.sizes, strict=True):
            offsets = [next((p.offset for p in pieces if p.key >= key), size) for key in (first, last)]
            found.append((offsets[0], offsets[1]))
        return found

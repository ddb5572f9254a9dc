"""Gradients that leave while the backward pass still makes others.

the training thread                               the engine's thread, see `parts`
begin: a message that is empty  --------------->  headers meet, and decide
a hook: part 0's gradients are there  --------->  its share goes into `received`, and its sum begins
a hook: part 1  ------------------------------->  ...
finish: the rest; which parameters were used,
and which changed after they had left  -------->  where any has doubts all say that, and sum what changed once more
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_async.engine.backward import Backward, Span
from lightning_async.engine.gradients.packing import gradients_of, used_by
from lightning_async.engine.gradients.parts import Outgoing
from lightning_async.engine.replica import Replica
from lightning_async.flat import FlatLayout

__all__ = ["Overlap"]


class Overlap:
    """Tells the engine's thread of gradients while the backward pass makes them, see `Backward`.

    They stay where they are, and whole, until their mean replaces them. What has changed after it had left is summed
    once more.

    Args:
        replica: whose gradients.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._layout: FlatLayout | None = None
        self._params: list[Any] = []
        self._backward: Backward | None = None
        self._out: Outgoing | None = None

    @property
    def possible(self) -> bool:
        """Whether gradients and buckets are on the CPU. On GPUs they leave after the backward pass."""
        on = {p.device.type for p in self._replica.tensors.trained.values()} | {self._replica.device.type}
        return on == {"cpu"}

    @property
    def under_way(self) -> bool:
        """`begin` was called, and not `finish`."""
        return self._out is not None

    def close(self) -> None:
        """Leave the parameters alone from now on."""
        if self._backward is not None:
            self._backward.close()
        self._backward = self._out = self._layout = None

    def begin(self, out: Outgoing) -> None:
        """A backward pass begins: ``out`` is to tell the engine's thread of it."""
        backward = self._follow()
        self._out = out
        backward.begin()

    def _tell(self, whole: Sequence[Span]) -> None:
        assert self._out is not None and self._backward is not None
        for span in whole:
            self._out.gradients[span.first : span.last] = gradients_of(self._params[span.first : span.last])
        self._out.tell(self._backward.filled)

    def finish(self) -> Outgoing:
        """The backward pass is over. Returns what `begin` was given."""
        out, params, backward = self._out, self._params, self._backward
        assert out is not None and backward is not None
        changed = backward.finish()
        self._out = None
        late = torch.zeros(len(params))
        for i in changed:
            late[i] = 1.0
            (out.gradients[i],) = gradients_of([params[i]])
        used = used_by(params) if out.used is None else torch.maximum(used_by(params), out.used)
        out.tell(backward.filled, torch.cat([used, late]))
        return out

    def give_up(self) -> None:
        """The backward pass has failed."""
        self._out = None
        if self._backward is not None:
            self._backward.give_up()

    def _follow(self) -> Backward:
        """Parameters were frozen or unfrozen at a gate."""
        layout = self._replica.layout
        if self._backward is None or self._layout is not layout:
            self.close()
            self._layout, self._params = layout, list(self._replica.tensors.trained.values())
            self._backward = Backward(self._params, layout, self._tell)
        return self._backward

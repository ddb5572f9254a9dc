"""Gradients that leave while the backward pass still makes others.

the training thread                               the engine's thread, see `parts`
begin: a message that is empty  --------------->  headers meet, and decide
a hook: part 0 of `sent` is whole  ------------>  its share goes into `received`, and its sum begins
a hook: part 1  ------------------------------->  ...
finish: the rest; which parameters were used,
and which changed after they had left  -------->  what all say of that; what changed is summed once more
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_async.engine.backward import Backward, Span
from lightning_async.engine.gradients.packing import pack_, used_by
from lightning_async.engine.gradients.parts import Outgoing
from lightning_async.engine.replica import Replica
from lightning_async.flat import FlatLayout

__all__ = ["Overlap"]


class Overlap:
    """Fills the `sent` bucket while the backward pass runs, see `Backward`; on the training thread.

    What has changed after it had left is summed once more.

    Args:
        replica: whose gradients.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._layout: FlatLayout | None = None
        self._params: list[Any] = []
        self._backward: Backward | None = None
        self._out: Outgoing | None = None
        self._sent, self._scale = torch.empty(0), 1.0

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

    def begin(self, out: Outgoing, sent: Tensor, scale: float) -> None:
        """A backward pass begins.

        Args:
            out: tells the engine's thread.
            sent: the parameters' part of the bucket.
            scale: gradients are multiplied by it on their way there.
        """
        backward = self._follow()
        self._out, self._sent, self._scale = out, sent, scale
        backward.begin()

    def _pack(self, whole: Sequence[Span]) -> None:
        assert self._out is not None and self._backward is not None
        for span in whole:
            pack_(self._params[span.first : span.last], self._sent[span.start : span.end], self._scale)
        self._out.tell(self._backward.filled)

    def finish(self) -> Tensor:
        """The backward pass is over. Returns 1.0 for every parameter that has a gradient."""
        out, params, backward, layout = self._out, self._params, self._backward, self._layout
        assert out is not None and backward is not None and layout is not None
        changed = backward.finish()
        self._out = None
        used, late, views = used_by(params), torch.zeros(len(params)), self._sent.split(layout.sizes)
        for i in changed:
            late[i] = 1.0
            with out.lock:
                pack_([params[i]], views[i], self._scale)
        out.tell(backward.filled, torch.cat([used, late]))
        return used

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
            self._backward = Backward(self._params, layout, self._pack)
        return self._backward

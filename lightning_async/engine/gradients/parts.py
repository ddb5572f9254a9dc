"""Gradients on their way in parts, from the last parameter to the first, while others are still made.

They are read where the backward pass has put them, and stay there until all have committed: a reduction that fails is
repeated, by whoever is left.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_async import ops
from lightning_async.comm.protocols import Pending
from lightning_async.engine.backward import spans
from lightning_async.engine.gradients.packing import Plans, pack_
from lightning_async.engine.transfer import Transfer
from lightning_async.flat import ROOM, FlatLayout, with_tag

__all__ = ["InParts", "Outgoing"]

_BEAT_S = 0.1
_LINE = ROOM
"""Elements: a part begins on a multiple of these in its bucket, as that does behind its room."""


class Outgoing:
    """How far this replica's gradients are there; shared by both threads.

    Args:
        changed: the mailbox's condition.
        patience_s: one part is waited for so long; then none is under way until all are there, as sums have deadlines.
        count: of the parameters.
        plans: by which gradients go into a bucket; the engine's thread has them.
        scale: gradients are multiplied by it on their way.
    """

    def __init__(
        self, changed: threading.Condition, patience_s: float, count: int, plans: Plans, scale: float = 1.0
    ) -> None:
        self._changed, self._patience_s, self._plans, self._scale = changed, patience_s, plans, scale
        self.gradients = [torch.empty(0)] * count
        """By parameter; of those parts that are filled."""
        self.filled = 0
        """Parts, from the tail."""
        self.base: Tensor | None = None
        """Flat: what goes with them, of backward passes before."""
        self.used: Tensor | None = None
        """1.0 for every parameter that has a part in that."""
        self.flags: Tensor | None = None
        """Once all are filled: 1.0 for every parameter that is used, then for every one that changed late."""
        self.withdrawn = self.late = False

    @classmethod
    def whole(cls, changed: threading.Condition, gradients: Sequence[Tensor], used: Tensor) -> Outgoing:
        """Of gradients that are all there."""
        out = cls(changed, 0.0, 0, Plans())
        out.gradients = list(gradients)
        out.filled, out.flags = sys.maxsize, torch.cat([used, torch.zeros_like(used)])
        return out

    def put_(self, part: Tensor, first: int, last: int, start: int, share: float) -> None:
        """A share of the gradients of parameters ``first`` to ``last``, into the part of a bucket that begins there."""
        with self._plans.of(self.gradients[first:last], (first, last)) as plan:
            plan.pack_(part, weight=self._scale * share)
        if self.base is not None:
            part.add_(self.base[start : start + part.numel()], alpha=share)

    def all(self) -> Tensor:
        """All of them, flat, once all are filled; on the training thread."""
        flat = torch.empty(sum(gradient.numel() for gradient in self.gradients))
        pack_(self.gradients, flat, self._scale)
        return flat if self.base is None else flat.add_(self.base)

    def all_finite(self) -> bool:
        """Whether none of them is infinite or NaN, once all are filled."""
        held = self.gradients if self.base is None else [*self.gradients, self.base]
        return all(ops.all_finite(gradient) for gradient in held)

    def has(self) -> Tensor:
        """1.0 for every parameter that has a gradient here, once all are filled."""
        assert self.flags is not None
        return self.flags[: len(self.gradients)]

    @property
    def ready(self) -> bool:
        """Whether others can count on these gradients. Under the lock of the mailbox."""
        return self.flags is not None or self.withdrawn or not self.late

    def tell(self, filled: int, flags: Tensor | None = None) -> None:
        """So many parts are filled."""
        with self._changed:
            self.filled, self.flags = filled, flags
            self._changed.notify_all()

    def withdraw(self) -> None:
        """The backward pass has failed: these gradients are none."""
        with self._changed:
            self.withdrawn = True
            self._changed.notify_all()

    def wait(self, there: Callable[[], bool], check: Callable[[], None]) -> bool:
        """Until the training thread is so far; False if it takes too long, or has failed."""
        waited_s = 0.0
        with self._changed:
            while not self.withdrawn and not there():
                check()
                if waited_s >= self._patience_s:
                    self.late = True
                    return False
                waited_s += 0.0 if self._changed.wait(_BEAT_S) else _BEAT_S
            return not self.withdrawn


class InParts:
    """One sum of all replicas' shares; on the engine's thread.

    Args:
        transfer: moves them.
        layout: of the bucket.
        target: overwritten.
        share: what this replica's gradients are multiplied by.
        out: how far they are there; None where this replica has none.
    """

    def __init__(
        self, transfer: Transfer, layout: FlatLayout, target: Tensor, share: float, out: Outgoing | None
    ) -> None:
        self._transfer, self._layout, self._target, self._share, self._out = transfer, layout, target, share, out
        self._flags = torch.zeros(2 * len(layout) + 1)
        """Of `Outgoing`; then 1.0 where the gradients are withdrawn or late."""

    def sum_(self, expected: Tensor, tagged: bool = False) -> bool:
        """Each part leaves as soon as it is filled; whether this replica has more to say, for `settle_`.

        Args:
            expected: 1.0 for every parameter that is used, as all replicas take it.
            tagged: with the last part goes whether it has: what is returned is whether any replica has.
        """
        transfer, out = self._transfer, self._out
        there, pending = out is not None, list[Pending[Tensor]]()

        def check() -> None:
            transfer.check()
            for each in pending:
                each.done()  # what goes in pieces goes on

        all_, end = spans(self._layout), self._layout.numel
        for number, span in enumerate(all_):
            there = there and out is not None and out.wait(lambda n=number: out.filled > n, check)
            self._put_(span.first, span.last, span.start, span.end, there)
            start = min(-(-span.start // _LINE) * _LINE, end)  # what lies before that goes with the next part
            part, end = self._target[start:end], start
            if tagged and number == len(all_) - 1:
                there, part = self._hear(there, check), with_tag(part)
                part[0] = self._doubts(expected)
            pending += [transfer.large.all_reduce(each) for each in FlatLayout.parts(part, transfer.part_bytes)]
        if not tagged:
            self._hear(there, check)
        for each in pending:
            transfer.result(each)
        return bool(with_tag(self._target)[0]) if tagged else self._doubts(expected)

    def _hear(self, there: bool, check: Callable[[], None]) -> bool:
        """Whether all gradients are there; notes which were used, and which changed late."""
        out = self._out
        there = there and out is not None and out.wait(lambda: out.flags is not None, check)
        if there and out is not None and out.flags is not None:
            self._flags[:-1] = out.flags
        else:
            self._flags[-1] = float(out is not None)
        return there

    def _doubts(self, expected: Tensor) -> bool:
        count = len(expected)
        return bool(self._flags[count:].any()) or not torch.equal(self._flags[:count], expected)

    def settle_(self) -> Tensor | None:
        """What has changed after it had left is summed once more; on all ranks, where any has more to say.

        Returns:
            1.0 for every parameter that any replica used; None, and there is nothing of use in the bucket, where a
            replica's gradients are withdrawn or late.
        """
        flags, count = self._flags, len(self._layout)
        self._transfer.largest_(flags)
        if flags[-1]:
            return None
        if flags[count:].any():
            start = 0
            for i, (size, changed) in enumerate(zip(self._layout.sizes, flags[count:-1].tolist(), strict=True)):
                if changed:
                    self._transfer.sum_(self._put_(i, i + 1, start, start + size, self._out is not None))
                start += size
        return flags[:count]

    def _put_(self, first: int, last: int, start: int, end: int, there: bool) -> Tensor:
        part = self._target[start:end]
        if self._out is None or not there or self._share == 0.0:
            part.zero_()
        else:
            self._out.put_(part, first, last, start, self._share)
        return part

"""Gradients on their way in parts, from the last parameter to the first, while others are still made.

`sent` stays whole until all have committed, so that a reduction that fails is repeated, by whoever is left.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_async import ops
from lightning_async.comm.protocols import Pending
from lightning_async.engine.backward import spans
from lightning_async.engine.transfer import Transfer
from lightning_async.flat import FlatLayout

__all__ = ["Outgoing", "sum_in_parts_"]

_BEAT_S = 0.1


class Outgoing:
    """How far this replica's gradients are in the `sent` bucket; shared by both threads.

    Args:
        changed: the mailbox's condition.
        patience_s: one part is waited for so long; then none is under way until all are there, as sums have deadlines.
    """

    def __init__(self, changed: threading.Condition, patience_s: float) -> None:
        self._changed, self._patience_s = changed, patience_s
        self.lock = threading.Lock()
        """Held where what is filled is read, or changed."""
        self.filled = 0
        """Parts, from the tail."""
        self.flags: Tensor | None = None
        """Once all are filled: 1.0 for every parameter that is used, then for every one that changed late."""
        self.withdrawn = self.late = False

    @classmethod
    def whole(cls, changed: threading.Condition, used: Tensor) -> Outgoing:
        """Of gradients that are all there."""
        out = cls(changed, 0.0)
        out.filled, out.flags = sys.maxsize, torch.cat([used, torch.zeros_like(used)])
        return out

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


def sum_in_parts_(
    transfer: Transfer, layout: FlatLayout, target: Tensor, sent: Tensor, share: float, out: Outgoing | None
) -> Tensor | None:
    """The sum of all replicas' shares into ``target``, each part as soon as it is filled; on the engine's thread.

    Args:
        transfer: moves them.
        layout: of both buckets.
        target: overwritten.
        sent: this replica's gradients.
        share: what they are multiplied by.
        out: how far they are there; None where this replica has none.

    Returns:
        1.0 for every parameter that any replica used; None, and nothing of use in ``target``, where a replica's are
        withdrawn or late.
    """
    count, there = len(layout), out is not None
    pending: list[Pending[Tensor]] = []

    def check() -> None:
        transfer.check()
        for each in pending:
            each.done()  # what goes in pieces goes on

    for number, span in enumerate(spans(layout)):
        there = there and out is not None and out.wait(lambda n=number: out.filled > n, check)
        part = target[span.start : span.end]
        _scaled_(part, sent[span.start : span.end], share, out if there else None)
        pending += [transfer.large.all_reduce(each) for each in FlatLayout.parts(part, transfer.part_bytes)]
    flags = torch.zeros(2 * count + 1)
    if there and out is not None and out.wait(lambda: out.flags is not None, check):
        assert out.flags is not None
        flags[:-1] = out.flags
    else:
        flags[-1] = float(out is not None)
    transfer.largest_(flags, late=True)
    for each in pending:
        transfer.result(each)
    if flags[-1]:
        return None
    if flags[count:].any():
        places = zip(target.split(layout.sizes), sent.split(layout.sizes), flags[count:-1].tolist(), strict=True)
        for view, mine, changed in places:
            if changed:
                _scaled_(view, mine, share, out)
                transfer.sum_(view)
    return flags[:count]


def _scaled_(part: Tensor, source: Tensor, share: float, out: Outgoing | None) -> None:
    if out is None or share == 0.0:
        part.zero_()
    else:
        with out.lock:
            ops.scale_(part, source, share)

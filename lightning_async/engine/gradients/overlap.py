"""Gradients that leave while the backward pass still makes others.

the training thread                               the engine's thread, see `InParts`
begin: a message that is empty  --------------->  headers meet, and decide
a hook: part 0's gradients are there  --------->  its share goes into `received`, and its sum begins
a hook: part 1  ------------------------------->  ...
finish: the rest; which parameters were used,
and which changed after they had left  -------->  where any has doubts all say that, and sum what changed once more

`Overlap` runs on the training thread, `InParts` on the engine's; `Outgoing` is what both share. Gradients stay where
the backward pass has put them until all have committed: a reduction that fails is repeated by the live ranks.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_async import ops
from lightning_async.comm.collectives import Pending
from lightning_async.engine.backward import Backward, LayoutSpan, spans
from lightning_async.engine.fingerprint import real, strided
from lightning_async.engine.replica import Replica
from lightning_async.engine.transfer import Transfer
from lightning_async.flat import ROOM, FlatLayout, with_tag

_BEAT_S = 0.1
_LINE = ROOM  # elements: a part begins on a multiple of these in its bucket, as that does behind its room


class Overlap:
    """The training thread's side: it tells the engine's thread of gradients while the backward pass makes them.

    Gradients that have changed after they had left are summed once more.
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
        return self._out is not None

    def close(self) -> None:
        if self._backward is not None:
            self._backward.close()
        self._backward = self._out = self._layout = None

    def begin(self, out: Outgoing) -> None:
        backward = self._follow()
        self._out = out
        backward.begin()

    def _tell(self, whole: Sequence[LayoutSpan]) -> None:
        assert self._out is not None and self._backward is not None
        for span in whole:
            self._out.gradients[span.first : span.last] = gradients_of(self._params[span.first : span.last])
        self._out.tell(self._backward.filled)

    def finish(self) -> Outgoing:
        out = self._out
        params = self._params
        backward = self._backward
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
        self._out = None
        if self._backward is not None:
            self._backward.give_up()

    def _follow(self) -> Backward:
        layout = self._replica.layout
        if self._backward is None or self._layout is not layout:
            self.close()
            self._layout, self._params = layout, list(self._replica.tensors.trained.values())
            self._backward = Backward(self._params, layout, self._tell)
        return self._backward


class Outgoing:
    """The progress of this replica's gradients; shared by both threads.

    Wherever one part takes longer than ``patience_s``, none is under way until all are there, as sums have timeouts.
    The engine's thread puts gradients into a bucket by ``plans``, times ``scale``.
    """

    def __init__(
        self, changed: threading.Condition, patience_s: float, count: int, plans: Plans, scale: float = 1.0
    ) -> None:
        self._changed = changed
        self._patience_s = patience_s
        self._plans = plans
        self._scale = scale
        self.gradients = [torch.empty(0)] * count  # by parameter; of those parts that are filled
        self.filled = 0  # parts, from the tail
        self.base: Tensor | None = None  # flat: what goes with them, of backward passes before
        self.used: Tensor | None = None  # 1.0 for every parameter that has a part in that
        self.flags: Tensor | None = None
        """Once all are filled: 1.0 for every parameter that is used, then for every one that changed late."""
        self.withdrawn = self.late = False

    @classmethod
    def whole(cls, changed: threading.Condition, gradients: Sequence[Tensor], used: Tensor) -> Outgoing:
        out = cls(changed, 0.0, 0, Plans())
        out.gradients = list(gradients)
        out.filled = sys.maxsize
        out.flags = torch.cat([used, torch.zeros_like(used)])
        return out

    def put_(self, part: Tensor, first: int, last: int, start: int, share: float) -> None:
        """Put a share of the gradients of parameters ``first`` to ``last`` where that part of a bucket begins."""
        with self._plans.of(self.gradients[first:last], (first, last)) as plan:
            plan.pack_(part, weight=self._scale * share)
        if self.base is not None:
            part.add_(self.base[start : start + part.numel()], alpha=share)

    def all(self) -> Tensor:
        """Return all of them, flat, once all are filled; on the training thread."""
        flat = torch.empty(sum(gradient.numel() for gradient in self.gradients))
        pack_(self.gradients, flat, self._scale)
        return flat if self.base is None else flat.add_(self.base)

    def all_finite(self) -> bool:
        held = self.gradients if self.base is None else [*self.gradients, self.base]
        return all(ops.all_finite(gradient) for gradient in held)

    def has(self) -> Tensor:
        """Return 1.0 for every parameter that has a gradient here, once all are filled."""
        assert self.flags is not None
        return self.flags[: len(self.gradients)]

    @property
    def ready(self) -> bool:
        """Whether others can count on these gradients. Under the lock of the shared state."""
        return self.flags is not None or self.withdrawn or not self.late

    def tell(self, filled: int, flags: Tensor | None = None) -> None:
        with self._changed:
            self.filled = filled
            self.flags = flags
            self._changed.notify_all()

    def withdraw(self) -> None:
        with self._changed:
            self.withdrawn = True
            self._changed.notify_all()

    def wait(self, there: Callable[[], bool], check: Callable[[], None]) -> bool:
        """Wait for the training thread; return False if it takes too long, or has failed."""
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
    """One sum of all replicas' shares into ``target``; on the engine's thread.

    This replica's gradients are multiplied by ``share``; where ``out`` is None it has none.
    """

    def __init__(
        self, transfer: Transfer, layout: FlatLayout, target: Tensor, share: float, out: Outgoing | None
    ) -> None:
        self._transfer = transfer
        self._layout = layout
        self._target = target
        self._share = share
        self._out = out
        self._flags = torch.zeros(2 * len(layout) + 1)
        """As in `Outgoing`; then 1.0 where the gradients are withdrawn or late."""

    def sum_(self, expected: Tensor, tagged: bool = False) -> bool:
        """Send each part as soon as it is filled; return whether this replica has more to say, for `settle_`.

        ``expected``: 1.0 for every parameter that is used, as all replicas take it. ``tagged``: the last part says
        whether it has more to say; then return whether any replica has.
        """
        transfer = self._transfer
        out = self._out
        there = out is not None
        pending = list[Pending[Tensor]]()

        def check() -> None:
            transfer.check()
            for each in pending:
                each.done()  # what goes in pieces goes on

        all_ = spans(self._layout)
        end = self._layout.numel
        for number, span in enumerate(all_):
            there = there and out is not None and out.wait(lambda n=number: out.filled > n, check)
            self._put_(span.first, span.last, span.start, span.end, there)
            start = min(-(-span.start // _LINE) * _LINE, end)  # what lies before that goes with the next part
            part = self._target[start:end]
            end = start
            if tagged and number == len(all_) - 1:
                there = self._hear(there, check)
                part = with_tag(part)
                part[0] = self._doubts(expected)
            pending += [transfer.large.all_reduce(each) for each in FlatLayout.parts(part, transfer.part_bytes)]
        if not tagged:
            self._hear(there, check)
        for each in pending:
            transfer.result(each)
        return bool(with_tag(self._target)[0]) if tagged else self._doubts(expected)

    def _hear(self, there: bool, check: Callable[[], None]) -> bool:
        """Return whether all gradients are there; note which were used, and which changed late."""
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
        """Sum once more what has changed after it had left; on all ranks, where any has more to say.

        Returns 1.0 for every parameter that any replica used; None, with nothing of use in the bucket, where a
        replica's gradients are withdrawn or late.
        """
        flags = self._flags
        count = len(self._layout)
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


def used_by(params: Sequence[Any]) -> Tensor:
    return torch.tensor([float(p.grad is not None) for p in params])


def mask_of(used: Tensor) -> int:
    """Return a hash of which parameters are used, which a float64 holds exactly."""
    return int.from_bytes(hashlib.sha256(bytes(used.to(torch.uint8).tolist())).digest()[:6], "big")


@torch.no_grad()
def gradients_of(params: Sequence[Any]) -> list[Tensor]:
    """Return their gradients as real numbers; zeros where there is none."""
    return [real(torch.zeros_like(p) if p.grad is None else strided(p.grad)) for p in params]


class Plans:
    """Plans between gradients, other tensors at each step, mostly of the same kinds, and a bucket."""

    def __init__(self) -> None:
        self._known: dict[object, ops.Plan] = {}

    @contextmanager
    def of(self, gradients: Sequence[Tensor], key: object = None) -> Iterator[ops.Plan]:
        """Give the plan of these gradients; each list of which others follow has a ``key``."""
        plan = self._known.get(key)
        if plan is None or not plan.follow(gradients):
            plan = self._known[key] = ops.Plan(FlatLayout(gradients), gradients)
        try:
            yield plan
        finally:
            plan.release()


def pack_(gradients: Sequence[Tensor], part: Tensor, scale: float) -> None:
    ops.Plan(FlatLayout(gradients), gradients).pack_(part, weight=scale)


@torch.no_grad()
def unpack_(replica: Replica, part: Tensor, used: Tensor, scale: float, plans: Plans) -> None:
    """Make the parameters' part of a bucket, times ``scale``, their gradients; ``part`` is multiplied, too.

    Gradients that no replica used stay None, sparse ones become dense.
    """
    trained = replica.tensors.trained.values()
    if scale != 1.0:
        part.mul_(scale)
    gradients = _places(trained)
    with plans.of([real(g) for g in gradients]) as plan:
        plan.apply_(part)
    for p, gradient, any_used in zip(trained, gradients, used.tolist(), strict=True):
        if not any_used or p.grad is not gradient:
            p.grad = gradient if any_used else None


def divide_(layout: FlatLayout, mean: Tensor, behind: Tensor | None, share: float, transfer: Transfer) -> None:
    """Make a mean over all samples one over those of each parameter's gradient. All ranks call this together.

    ``share`` is that of this rank's samples in all ranks', and ``behind`` the part of these that each gradient is of;
    None: it brings nothing.
    """
    total = mean.new_zeros(len(layout))
    if behind is not None:
        total.add_(behind.to(total), alpha=share)
    transfer.sum_(total)
    for view, part in zip(layout.views(mean), total.tolist(), strict=True):
        if part > 0.0:
            view.div_(part)


def _places(trained: Iterable[Any]) -> list[Tensor]:
    """Return memory for a gradient of each parameter: its own, unless autograd gave several the same one."""
    places: list[Tensor] = []
    taken: set[int] = set()
    for p in trained:
        place: Any = p.grad
        if place is None or strided(place) is not place or place.data_ptr() in taken:
            place = torch.empty_like(p)
        places.append(place)
        taken.add(place.data_ptr())
    return places

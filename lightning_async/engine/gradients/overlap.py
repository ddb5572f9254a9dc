"""Gradients that are sent while the backward pass still computes others.

A span is a run of parameters whose gradients are sent together; span 0 has the last layers.

    the training thread                             the engine's thread, see `InParts`
    begin: a message without gradients  --------->  exchanges headers with all ranks, which decide on a reduction
    hook: the gradients of span 0 exist  -------->  packs these gradients into `received`, and starts their sum
    hook: the gradients of span 1 exist  -------->  packs these gradients into `received`, and starts their sum
    ...
    finish: all gradients exist; it is known
    which were used, and which changed after
    they were sent  ----------------------------->  sums those again that have changed on any rank

`Overlap` runs on the training thread, and `InParts` on the engine's thread. They share an `Outgoing`. Gradients stay
where the backward pass has put them until all ranks have committed, so that the live ranks can repeat a failed
reduction.
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
_LINE = ROOM  # elements: a sum begins on a multiple of these in its bucket, aligned like the bucket itself


class Overlap:
    """The training thread's side: it passes gradients to the engine's thread while the backward pass computes others.

    Gradients that change after they were passed on are summed once more.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._layout: FlatLayout | None = None
        self._params: list[Any] = []
        self._backward: Backward | None = None
        self._out: Outgoing | None = None

    @property
    def possible(self) -> bool:
        """Whether gradients can be sent during a backward pass: only if parameters and buckets are on the CPU."""
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
        for span in whole:  # stored before `tell` lets the engine's thread read them
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
    """The gradients of one backward pass, as far as they are computed, for the training and the engine's thread.

    Args:
        changed: Lock that protects the fields which both threads use.
        patience_s: Longest time in seconds for which the engine's thread waits for a span, because sums on other ranks
            have timeouts. After a longer wait, headers announce the gradients again only once all of them exist.
        count: Number of parameters.
        plans: Cache of the plans by which the engine's thread packs gradients.
        scale: Factor of the gradients, applied when they are packed. Default: 1.0.
    """

    def __init__(
        self, changed: threading.Condition, patience_s: float, count: int, plans: Plans, scale: float = 1.0
    ) -> None:
        self._changed = changed
        self._patience_s = patience_s
        self._plans = plans
        self._scale = scale
        self.gradients = [torch.empty(0)] * count  # by parameter; valid for the spans that are filled
        self.filled = 0  # number of spans that are filled, from the end of the layout
        self.base: Tensor | None = None  # flat gradients of earlier backward passes, which are added
        self.used: Tensor | None = None  # 1.0 for every parameter with a gradient in ``base``
        self.flags: Tensor | None = None
        """None until all spans are filled; then two rows of numbers, one after the other, with a number per parameter.

        The first row has 1.0 for each used parameter. The second row has 1.0 for each parameter whose gradient changed
        after it was sent.
        """
        # `withdrawn`: the backward pass has failed. `late`: a span has taken longer than `patience_s`.
        self.withdrawn = self.late = False

    @classmethod
    def whole(cls, changed: threading.Condition, gradients: Sequence[Tensor], used: Tensor) -> Outgoing:
        out = cls(changed, 0.0, 0, Plans())
        out.gradients = list(gradients)
        out.filled = sys.maxsize
        out.flags = torch.cat([used, torch.zeros_like(used)])
        return out

    def put_(self, part: Tensor, first: int, last: int, start: int, share: float) -> None:
        """Write the gradients of parameters ``first`` to ``last - 1``, times ``share``, into ``part``.

        ``part`` is the slice of a bucket that begins at element ``start``.
        """
        with self._plans.of(self.gradients[first:last], (first, last)) as plan:
            plan.pack_(part, weight=self._scale * share)
        if self.base is not None:
            part.add_(self.base[start : start + part.numel()], alpha=share)

    def all(self) -> Tensor:
        """Return all gradients as one flat tensor; call this on the training thread, once `flags` is set."""
        flat = torch.empty(sum(gradient.numel() for gradient in self.gradients))
        pack_(self.gradients, flat, self._scale)
        return flat if self.base is None else flat.add_(self.base)

    def all_finite(self) -> bool:
        held = self.gradients if self.base is None else [*self.gradients, self.base]
        return all(ops.all_finite(gradient) for gradient in held)

    def has(self) -> Tensor:
        """Return one number per parameter, 1.0 if it has a gradient, else 0.0; call this once `flags` is set."""
        assert self.flags is not None
        return self.flags[: len(self.gradients)]

    @property
    def ready(self) -> bool:
        """Whether this rank may announce these gradients to the other ranks. The caller holds `SharedState.changed`.

        False only if the engine's thread has waited too long for a part of the gradients, and the backward pass is not
        complete yet.
        """
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
        """Wait until ``there()`` returns True; return False if that takes too long, or the backward pass has failed.

        ``check`` is called again and again during the wait, and may raise an error. This runs on the engine's thread.
        """
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
    """A sum of all replicas' gradients into ``target``, span by span, on the engine's thread.

    ``out`` holds this replica's gradients, which are multiplied by ``share``; None if this replica has no gradients.
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
        """The numbers in `Outgoing.flags`, then 1.0 if this replica's gradients are withdrawn or late."""

    def sum_(self, expected: Tensor, tagged: bool = False) -> bool:
        """Sum each span as soon as its gradients exist; return whether `settle_` must follow.

        All ranks call this together. `settle_` must follow if this replica's gradients changed after they were sent,
        were withdrawn or came too late, or if the parameters that it used are not the ``expected`` ones (1.0 for each
        of these). With ``tagged``, the last sum also adds up the ranks' answers, and the return value is whether
        `settle_` must follow for any replica.
        """
        transfer = self._transfer
        out = self._out
        there = out is not None
        pending = list[Pending[Tensor]]()

        def check() -> None:
            transfer.check()
            for each in pending:
                each.done()  # lets an operation that moves in pieces start its next piece

        all_ = spans(self._layout)
        end = self._layout.numel
        for number, span in enumerate(all_):
            there = there and out is not None and out.wait(lambda n=number: out.filled > n, check)
            self._put_(span.first, span.last, span.start, span.end, there)
            start = min(-(-span.start // _LINE) * _LINE, end)  # elements before a line begins go with the next span
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
        """Wait until all gradients of this replica exist, and copy `Outgoing.flags`; return whether all of them exist.

        If ``there`` is False, gradients were missing before, and this does not wait.
        """
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
        """Sum again the gradients that changed after they were sent. All ranks call this together.

        Return one number per parameter: 1.0 if any replica used the parameter, else 0.0. Return None if a replica's
        backward pass has failed or took too long; then the bucket holds no valid sum.
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
    """Return a hash of the set of used parameters, as an integer small enough to be exact in a float64."""
    return int.from_bytes(hashlib.sha256(bytes(used.to(torch.uint8).tolist())).digest()[:6], "big")


@torch.no_grad()
def gradients_of(params: Sequence[Any]) -> list[Tensor]:
    """Return the parameters' gradients as dense real tensors; a parameter without a gradient gets zeros."""
    return [real(torch.zeros_like(p) if p.grad is None else strided(p.grad)) for p in params]


class Plans:
    """A cache of plans (`ops.Plan`) for copies between a bucket and gradients.

    Gradients are new tensors at each step. To adapt a known plan to new tensors costs less than to make a new plan.
    """

    def __init__(self) -> None:
        self._known: dict[object, ops.Plan] = {}

    @contextmanager
    def of(self, gradients: Sequence[Tensor], key: object = None) -> Iterator[ops.Plan]:
        """Yield the plan for copies between a bucket and ``gradients``, as a context manager.

        Gradients of the same parameters are given with the same ``key`` at every step, and so use the same plan.
        """
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
    """Multiply ``part``, the parameters' part of a bucket, by ``scale`` in place, and copy it into their gradients.

    ``used`` is 1.0 for every parameter that any replica used; the gradients of all others become None. Sparse gradients
    become dense.
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
    """Divide each parameter's part of ``mean`` by the fraction of all samples that its gradient was computed from.

    So a mean over all samples becomes, for each parameter, a mean over the samples of its own gradient. All ranks call
    this together. ``share`` is this rank's share of all samples. ``behind`` is, for each parameter, the fraction of
    this rank's samples from which the gradient was computed; None if this rank has no gradients.
    """
    total = mean.new_zeros(len(layout))
    if behind is not None:
        total.add_(behind.to(total), alpha=share)
    transfer.sum_(total)
    for view, part in zip(layout.views(mean), total.tolist(), strict=True):
        if part > 0.0:
            view.div_(part)


def _places(trained: Iterable[Any]) -> list[Tensor]:
    """Return a tensor for each parameter's gradient.

    It is the present gradient if that is dense and shares no memory with another one, else a new tensor.
    """
    places: list[Tensor] = []
    taken: set[int] = set()
    for p in trained:
        place: Any = p.grad
        if place is None or strided(place) is not place or place.data_ptr() in taken:
            place = torch.empty_like(p)
        places.append(place)
        taken.add(place.data_ptr())
    return places

"""A watch over backward passes, which reports each part of the gradients once it is complete, the last layers first.

A part of the layout is complete as soon as all of its parameters that had a gradient in an earlier pass have one now;
in the first pass, as soon as all of its parameters have one. Gradients that come or change later (of a parameter that
was never used before, by a second backward pass, by a hook) are found at the end of the pass: each parameter's gradient
is compared with the one that was reported, by identity and by torch's version counter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from lightning_async.flat import FlatLayout

_FIRST_BYTES = 1 << 20
_PART_BYTES = 25 << 20


class LayoutSpan(NamedTuple):
    """A run of consecutive parameters in a layout whose gradients are sent together.

    It consists of the parameters ``first`` to ``last - 1``, which are the elements ``start`` to ``end - 1``.
    """

    first: int
    last: int
    start: int
    end: int


@functools.lru_cache(maxsize=4)
def spans(layout: FlatLayout, part_bytes: int | None = None, kinds: tuple[object, ...] = ()) -> list[LayoutSpan]:
    """Split a layout into spans of whole parameters, from its end to its start.

    The first span is small (1 MiB), so that communication begins early in the backward pass. A span has at most
    ``part_bytes``, unless one parameter alone has more; 0 gives each parameter a span. Default: 25 MiB, as in DDP.
    Parameters with different entries in ``kinds`` never share a span. Default: all parameters are of one kind.

    >>> import torch
    >>> [span[:2] for span in spans(FlatLayout([torch.empty(1 << 20), torch.empty(6 << 20), torch.empty(8)]))]
    [(2, 3), (1, 2), (0, 1)]
    """
    found: list[LayoutSpan] = []
    most = _PART_BYTES if part_bytes is None else part_bytes
    last = len(layout)
    end = layout.numel
    numel = 0
    limit = min(most, _FIRST_BYTES)
    for i in reversed(range(len(layout))):
        full = numel and 4 * (numel + layout.sizes[i]) > limit
        if full or (kinds and i + 1 < last and kinds[i] != kinds[i + 1]):
            found.append(LayoutSpan(i + 1, last, end - numel, end))
            last = i + 1
            end = end - numel
            numel = 0
            limit = most
        numel += layout.sizes[i]
    return [*found, LayoutSpan(0, last, 0, end)]


class Backward:
    """A watch over the backward passes of one model, on the training thread.

    ``take`` is called with the spans of the layout whose gradients have just become complete. In each pass, every span
    is reported once, from the end of the layout to its start. If a gradient changes after that call, `finish` returns
    its parameter.
    """

    def __init__(
        self,
        params: Sequence[Any],
        layout: FlatLayout,
        take: Callable[[Sequence[LayoutSpan]], None],
        parts: Sequence[LayoutSpan] | None = None,
    ) -> None:
        self._params = list(params)
        self._take = take
        self._spans = parts or spans(layout)
        self._span_of = [n for n, span in reversed(list(enumerate(self._spans))) for _ in range(span.first, span.last)]
        self._expected: set[int] = set()
        self._first = True
        self.under_way = False  # `begin` was called, and not `finish`
        self.filled = 0  # number of spans that were taken in this pass
        self._missing: list[set[int]] = []
        self._came: set[int] = set()
        self._taken: list[tuple[Any, int]] = []
        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(self._made, i))
            for i, p in enumerate(self._params)
            if p.requires_grad
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.under_way = False

    def begin(self) -> None:
        self.under_way = True
        self.filled = 0
        self._taken = []
        self._came = set()
        wanted = range(len(self._params)) if self._first else self._expected
        self._missing = [{i for i in wanted if span.first <= i < span.last} for span in self._spans]

    @property
    def begun(self) -> bool:
        """Whether a gradient has come since `begin`."""
        return bool(self._came)

    def _made(self, i: int, _: Any) -> None:
        if not self.under_way:
            return
        self._came.add(i)
        if (number := self._span_of[i]) < self.filled:
            return  # its span has left without it: `finish` finds the change
        missing = self._missing[number]
        missing.discard(i)
        if not missing:
            self._tell()

    def _tell(self) -> None:
        before = self.filled
        while self.filled < len(self._spans) and not self._missing[self.filled]:
            self.filled += 1
        if self.filled > before:
            new = self._spans[before : self.filled]
            self._take(new)
            for span in new:
                self._taken = [*(_mark(p) for p in self._params[span.first : span.last]), *self._taken]

    def finish(self) -> list[int]:
        """End the backward pass: report the spans that were not reported during the pass.

        Returns the indices of the parameters whose gradients changed after their span had been reported.
        """
        for missing in self._missing:
            missing.clear()
        self._tell()
        self.under_way = False
        self._first = False
        taken = self._taken
        self._taken = []
        self._expected |= self._came | {i for i, p in enumerate(self._params) if p.grad is not None}
        self._came = set()
        return [i for i, (p, mark) in enumerate(zip(self._params, taken, strict=True)) if _changed(p, *mark)]

    def give_up(self) -> None:
        self.under_way = False
        self._taken = []
        self._came = set()


def _mark(p: Any) -> tuple[Any, int]:
    return p.grad, 0 if p.grad is None else p.grad._version


def _changed(p: Any, gradient: Any, version: int) -> bool:
    return p.grad is not gradient or (gradient is not None and gradient._version != version)

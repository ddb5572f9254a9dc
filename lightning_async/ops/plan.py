"""Copies between lists of tensors and their flat buckets. The native library makes them, or else the reference."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from lightning_async.flat import FlatLayout
from lightning_async.ops import native
from lightning_async.ops.reference import buckets as reference

Remainders = reference.Remainders
_WRITES_TENSORS = ("copy", "move")


class Plan:
    """A plan for moving a list of tensors into a flat fp32 bucket and back, with all checks of the tensors made once.

    Tensors that the native library cannot take (float64, not contiguous, or on another device than the bucket) go
    through torch, with equal results. If a tensor's memory address has changed since the last call, the plan adapts.

    Args:
        layout: Layout that gives each tensor's place in the bucket.
        tensors: Tensors of any floating dtypes, in the layout's order.
        remainders: For each tensor, the part that its dtype cannot hold (fp32), or None. Default: none at all.

    Raises:
        TypeError: A tensor or a remainder has a dtype that does not fit its role.
        ValueError: The number of tensors, or a shape, differs from the layout.

    >>> x = torch.tensor([1.0, 2.0])
    >>> plan = Plan(FlatLayout([x]), [x])
    >>> bucket, snapshot = torch.zeros(2), torch.zeros(2)
    >>> plan.pack_(bucket, snapshot=snapshot, weight=0.5, norm=True)
    5.0
    >>> bucket, snapshot
    (tensor([0.5000, 1.0000]), tensor([1., 2.]))
    >>> plan.apply_(torch.tensor([3.0, 3.0]), base=snapshot)
    >>> x
    tensor([3., 3.])
    """

    def __init__(self, layout: FlatLayout, tensors: Sequence[Tensor], remainders: Remainders | None = None) -> None:
        self.layout = layout
        self.tensors = list(tensors)
        self.remainders = list(reference.check_lists("Plan", layout, self.tensors, remainders))
        self._tables: dict[tuple[str, torch.device], _Table] = {}
        self._memory = self._pointers()
        self._kinds = _kinds(self.tensors)

    def follow(self, tensors: Sequence[Tensor]) -> bool:
        """Use the plan for other tensors, at a tenth of the cost of a new plan; return whether this was possible.

        It is possible if each tensor has the dtype, shape, device and contiguity of the one that it replaces, and the
        plan has no remainders. Otherwise the plan keeps its tensors. Raises ValueError if the tensors overlap.
        """
        if _kinds(tensors) != self._kinds or any(rest is not None for rest in self.remainders):
            return False
        self.tensors = list(tensors)
        before = self._memory
        self._memory = self._pointers()
        if self._memory != before:
            tables = self._tables
            self._tables = {}
            if any(op in _WRITES_TENSORS for op, _ in tables):
                self._check_distinct()
            self._tables = {key: table for key, table in tables.items() if table.follow(self._memory)}
        return True

    def release(self) -> None:
        """Drop the tensors, so that their memory can be freed."""
        self.tensors = []

    def _check_distinct(self) -> None:
        written = [*self.tensors, *(rest for rest in self.remainders if rest is not None)]
        spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in written if _dense(t))
        pointers = [x.data_ptr() for x in self.tensors if x.numel()]
        if len(set(pointers)) != len(pointers) or any(b[0] < a[1] for a, b in itertools.pairwise(spans)):
            raise ValueError("`tensors` or `remainders` name the same memory twice; pass tied tensors once.")

    def _pointers(self) -> list[int]:
        return [t.data_ptr() for t in self.tensors] + [r.data_ptr() for r in self.remainders if r is not None]

    def _table(self, op: str, device: torch.device) -> _Table:
        if (memory := self._pointers()) != self._memory:
            self._memory = memory
            self._tables = {}
        key = (op, device)
        if key not in self._tables:
            if op in _WRITES_TENSORS:
                self._check_distinct()
            self._tables[key] = _Table(op, device, self)
        return self._tables[key]

    @torch.no_grad()
    def pack_(
        self, bucket: Tensor, *, snapshot: Tensor | None = None, weight: float = 1.0, norm: bool = False
    ) -> float | None:
        r"""Write every tensor into its place in the bucket: cast, snapshot, scale and norm in one pass.

        .. math::
            v_k = \mathrm{fp32}(x_k) + r_k, \qquad b_k \leftarrow \mathrm{fp32}(w)\, v_k, \qquad s_k \leftarrow v_k

        :math:`x_k` is the plan's tensor k, and :math:`r_k` is its remainder, or 0 if the plan has none.

        Args:
            bucket: :math:`b`, flat fp32; overwritten.
            snapshot: :math:`s`, flat fp32; overwritten. Default: None, no snapshot.
            weight: :math:`w`. Default: 1.
            norm: Whether to return :math:`\sum_k \lVert v_k \rVert^2`, which is finite exactly if all elements are.
                On a GPU this waits for the device. Default: False.

        Raises:
            TypeError: A bucket is not fp32.
            ValueError: A bucket has another size than the layout, or the two overlap.
        """
        targets = self._buckets("pack_", bucket=bucket, snapshot=snapshot)
        table = self._table("pack" if snapshot is None else "pack_snapshot", bucket.device)
        total = table.run(targets, [weight], norm)
        if table.others:
            layout, tensors, remainders, places = self._subset(table.others)
            packed = bucket if table.whole else torch.empty(layout.numel, device=bucket.device)
            reference.pack_(packed, layout, tensors, remainders)
            if norm:
                total += reference.sq_norm(packed)
            for view, (start, end) in zip(packed.split(layout.sizes), places, strict=True):
                if snapshot is not None:
                    snapshot[start:end].copy_(view)
                torch.mul(view, weight, out=bucket[start:end])
        increment_version(targets)
        return total if norm else None

    @torch.no_grad()
    def apply_(self, target: Tensor, base: Tensor | None = None) -> None:
        """Move every tensor by ``target - base``, or copy ``target``, as the function `apply_` does.

        Args:
            target: Flat fp32 tensor; stays intact.
            base: Flat fp32 tensor; undefined afterwards. Default: None, copy ``target``.

        Raises:
            TypeError: A bucket is not fp32.
            ValueError: A bucket has another size than the layout, ``base`` overlaps ``target``, or tensors overlap.
        """
        sources = self._buckets("apply_", target=target, base=base)
        table = self._table("copy" if base is None else "move", target.device)
        table.run(sources, [], False)
        if table.others:
            layout, tensors, remainders, places = self._subset(table.others)
            parts = sources
            if not table.whole:
                parts = [torch.cat([bucket[start:end] for start, end in places]) for bucket in sources]
            reference.apply_(tensors, layout, parts[0], parts[1] if base is not None else None, remainders)
        if written := [*(self.tensors[k] for k in table.written), *table.rests]:
            increment_version(written)

    def _buckets(self, op: str, **given: Tensor | None) -> list[Tensor]:
        present = {name: bucket for name, bucket in given.items() if bucket is not None}
        for name, bucket in present.items():
            reference.check_bucket(f"{op}({name}=...)", bucket, self.layout)
        found = list(present.values())
        if len(found) == 2 and found[0].numel():
            a, b = found
            if a.device != b.device:
                raise ValueError(f"`{op}` needs buckets on one device, got {a.device} and {b.device}.")
            if abs(a.data_ptr() - b.data_ptr()) < 4 * a.numel():
                last, first = list(present)[::-1]
                raise ValueError(f"`{op}({last}=...)` overlaps `{first}` and must not be `{first}`.")
        return found

    def _subset(
        self, indices: Sequence[int]
    ) -> tuple[FlatLayout, list[Tensor], list[Tensor | None], list[tuple[int, int]]]:
        tensors = [self.tensors[k] for k in indices]
        layout = FlatLayout(tensors, [self.layout.names[k] for k in indices])
        offsets = _offsets(self.layout)
        places = [(offsets[k], offsets[k] + self.layout.sizes[k]) for k in indices]
        return layout, tensors, [self.remainders[k] for k in indices], places


def _kinds(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    return [(t.dtype, t.shape, t.device, t.is_contiguous()) for t in tensors]


def _dense(t: Tensor) -> bool:
    return t.numel() > 0 and t.is_contiguous()


def _offsets(layout: FlatLayout) -> list[int]:
    return list(itertools.accumulate(layout.sizes, initial=0))[:-1]


class _Table:
    """The table with which the native library runs one op on the plan's tensors on one device.

    `others` has the indices of the tensors that the library cannot take.
    """

    def __init__(self, op: str, device: torch.device, plan: Plan) -> None:
        fast = native.available(device)
        segments: list[native.Segment] = []
        self.others: list[int] = []
        self.written: list[int] = []
        self.rests: list[Tensor] = []
        self._places: list[int] = []
        for k, (x, rest, offset) in enumerate(zip(plan.tensors, plan.remainders, _offsets(plan.layout), strict=True)):
            if not x.numel():
                continue
            present = [x] if rest is None else [x, rest]
            if not (fast and x.dtype in native.FORMATS and all(t.device == device and _dense(t) for t in present)):
                self.others.append(k)
                continue
            number = native.find(device.type, op if rest is None else f"{op}_rest")
            pointer = None if rest is None else rest.data_ptr()
            segments.append(native.Segment(x.data_ptr(), pointer, offset, x.numel(), number, native.FORMATS[x.dtype]))
            self._places.append(k)
            if op in _WRITES_TENSORS:
                self.written.append(k)
                self.rests += present[1:]
        self.whole = not segments and len(self.others) == len(plan.tensors)
        self._table = native.SegmentTable(device, segments) if segments else None

    def follow(self, pointers: Sequence[int]) -> bool:
        """Set the addresses of tensors without remainders to ``pointers``; return False if a new table is needed."""
        return self._table is None or self._table.follow([pointers[k] for k in self._places])

    def run(self, buckets: Sequence[Tensor], scalars: Sequence[float], norm: bool) -> float:
        """Run this table's op in the native library.

        With ``norm``, return the sum of squares over the tensors that the library handles, else 0.0.
        """
        sums = self._table.run(buckets, scalars, norm) if self._table is not None else None
        return 0.0 if sums is None else sums[0].item()


@functools.wraps(reference.pack_)
def pack_(bucket: Tensor, layout: FlatLayout, tensors: Sequence[Tensor], remainders: Remainders | None = None) -> None:
    Plan(layout, tensors, remainders).pack_(bucket)


@functools.wraps(reference.apply_)
def apply_(
    tensors: Sequence[Tensor],
    layout: FlatLayout,
    target: Tensor,
    base: Tensor | None,
    remainders: Remainders | None = None,
) -> None:
    Plan(layout, tensors, remainders).apply_(target, base)


@functools.wraps(reference.scale_)
def scale_(out: Tensor, source: Tensor, weight: float) -> None:
    fits = _fast(out, source) and out.dtype == source.dtype == torch.float32 and out.shape == source.shape
    if fits and not _overlap(out, source):
        native.flat("pack", [source, out], [weight])
        increment_version(out)
    else:
        # In place there is nothing to fuse.
        reference.scale_(out, source, weight)


@functools.wraps(reference.sq_distance)
def sq_distance(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape or not _fast(a, b):
        return reference.sq_distance(a, b)
    return native.square(a, b).item()


@functools.wraps(reference.sq_norm)
def sq_norm(a: Tensor) -> float:
    return native.square(a, None).item() if _fast(a) else reference.sq_norm(a)


@functools.wraps(reference.all_finite)
def all_finite(a: Tensor) -> bool:
    return math.isfinite(native.square(a, None).item()) if _fast(a) else reference.all_finite(a)


def _fast(*tensors: Tensor) -> bool:
    device = tensors[0].device
    return native.available(device) and all(
        t.device == device and t.dtype in native.FORMATS and t.is_contiguous() for t in tensors
    )


def _overlap(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes

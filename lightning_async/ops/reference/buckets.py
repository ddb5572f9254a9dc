"""Lists of tensors and the flat buckets in which they travel, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_async.flat import FlatLayout


@torch.no_grad()
def accumulate_(total: Tensor, source: Tensor, weight: float) -> None:
    r"""Add a weighted tensor, :math:`t \leftarrow t + w\,\mathrm{fp32}(x)`.

    Args:
        total: :math:`t`, fp32; updated in place.
        source: :math:`x`, fp32, bf16 or fp16, of the same shape.
        weight: :math:`w`.

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: Shapes or devices differ, tensors are not contiguous or overlap, or ``total`` requires grad in
            grad mode.

    >>> total = torch.tensor([1.0])
    >>> accumulate_(total, torch.tensor([2.0]), 0.5)
    >>> total
    tensor([2.])
    """
    total.add_(source.float() * weight)


def weighted_sum_(out: Tensor, terms: list[Tensor], weights: Tensor) -> None:
    """Write the weighted sum of ``terms`` into ``out``, added up in their order.

    The sum starts with the first term instead of zero, because adding to zero would turn -0.0 into 0.0.
    """
    for k, term in enumerate(terms):
        if k == 0:
            torch.mul(term, weights[k], out=out)
        else:
            out.add_(term * weights[k])


_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Number of elements in one step of the reductions: float64 temporaries stay in a CPU's cache, or fill a GPU."""

Remainders = Sequence[Tensor | None]


@torch.no_grad()
def pack_(bucket: Tensor, layout: FlatLayout, tensors: Sequence[Tensor], remainders: Remainders | None = None) -> None:
    r"""Write every tensor into its place in the bucket, in fp32.

    .. math:: b_k \leftarrow \mathrm{fp32}(x_k) + r_k

    Args:
        bucket: Flat fp32 tensor of ``layout.numel`` elements; overwritten.
        layout: Layout that gives each tensor's place in the bucket.
        tensors: Tensors of any floating dtypes, in the layout's order.
        remainders: For each tensor, the part that its dtype could not hold (fp32, see `apply_`), or None. Default: none
            at all.

    Raises:
        TypeError: A tensor, a remainder or the bucket has a dtype that does not fit its role.
        ValueError: The number of tensors, or a shape, differs from the layout.

    >>> layout = FlatLayout([torch.zeros(2), torch.zeros(())])
    >>> bucket = layout.empty()
    >>> pack_(bucket, layout, [torch.tensor([1.0, 2.0], dtype=torch.bfloat16), torch.tensor(3.0)])
    >>> bucket
    tensor([1., 2., 3.])
    """
    rests = check_lists("pack_", layout, tensors, remainders)
    check_bucket("pack_(bucket=...)", bucket, layout)
    if not len(layout):
        return
    places = layout.views(bucket)
    torch._foreach_copy_(places, list(tensors))  # pyright: ignore[reportPrivateImportUsage]
    for place, rest in zip(places, rests, strict=True):
        if rest is not None:
            place.add_(rest.to(place.device))


@torch.no_grad()
def apply_(
    tensors: Sequence[Tensor],
    layout: FlatLayout,
    target: Tensor,
    base: Tensor | None,
    remainders: Remainders | None = None,
) -> None:
    r"""Move every tensor by the displacement from ``base`` to ``target``; without a base, copy the target.

    .. math::
        d &= t - b, & v_k &= (\mathrm{fp32}(x_k) + r_k) + d_k \quad\text{or}\quad v_k = t_k \\
        x_k &\leftarrow \mathrm{cast}(v_k), & r_k &\leftarrow v_k - \mathrm{fp32}(x_k)

    Without a base, a float64 tensor takes the target's fp32 values; with a base, it is moved in float64. A value
    beyond float16's range becomes infinite, as it would in any optimizer.

    Args:
        tensors: Tensors of any floating dtypes, in the layout's order; updated in place.
        layout: Layout that gives each tensor's place in a bucket.
        target: Flat fp32 tensor; not modified.
        base: Flat fp32 tensor; its values are undefined afterwards. None: copy ``target``.
        remainders: For each tensor an fp32 tensor of its shape (bf16 and fp16 tensors only), updated in place, or
            None. Without one, a displacement below half a unit in the last place is lost. Default: none at all.

    Raises:
        TypeError: A tensor, a remainder or a bucket has a dtype that does not fit its role.
        ValueError: The number of tensors or a shape differs from the layout, a tensor appears twice, or ``base`` is
            ``target``.

    >>> x = torch.tensor([1.0, 2.0, 3.0])
    >>> apply_([x], FlatLayout([x]), torch.tensor([0.5, 0.5, 0.5]), torch.tensor([0.0, 1.0, 0.5]))
    >>> x
    tensor([1.5000, 1.5000, 3.0000])
    """
    rests = check_lists("apply_", layout, tensors, remainders)
    check_bucket("apply_(target=...)", target, layout)
    pointers = [x.data_ptr() for x in tensors if x.numel()]
    if len(set(pointers)) != len(pointers):
        raise ValueError("`apply_(tensors=...)` names the same memory twice; pass tied tensors once.")
    if base is not None:
        check_bucket("apply_(base=...)", base, layout)
        if base.numel() and base.data_ptr() == target.data_ptr():
            raise ValueError("`apply_(base=...)` is consumed and must not be `target`.")
        torch.sub(target, base, out=base)
    if not len(layout):
        return
    values = layout.views(target if base is None else base)
    plain = [k for k, rest in enumerate(rests) if rest is None]
    if plain:
        _move_([tensors[k] for k in plain], [values[k] for k in plain], add=base is not None)
    for x, value, rest in zip(tensors, values, rests, strict=True):
        # Without a temporary: the new value is built in the remainder's own memory.
        if rest is not None:
            if base is None:
                rest.copy_(value)
            else:
                rest.add_(x).add_(value.to(rest.device))
            x.copy_(rest)
            rest.sub_(x)


def _move_(tensors: list[Tensor], values: list[Tensor], add: bool) -> None:
    """Copy each value into its tensor; with ``add``, add it, in the wider of the two dtypes and with one rounding."""
    if not add:
        torch._foreach_copy_(tensors, values)  # pyright: ignore[reportPrivateImportUsage]
    elif all(x.dtype == v.dtype and x.device == v.device for x, v in zip(tensors, values, strict=True)):
        torch._foreach_add_(tensors, values)  # pyright: ignore[reportPrivateImportUsage]
    else:
        for x, value in zip(tensors, values, strict=True):
            x.add_(value.to(x.device))


@torch.no_grad()
def scale_(out: Tensor, source: Tensor, weight: float) -> None:
    r"""Write the weighted source, :math:`o \leftarrow \mathrm{fp32}(w) \cdot s`; ``out`` may be ``source``.

    Raises:
        TypeError: A tensor is not fp32.
        ValueError: The shapes differ.

    >>> out = torch.zeros(2)
    >>> scale_(out, torch.tensor([1.0, 2.0]), 0.5)
    >>> out
    tensor([0.5000, 1.0000])
    """
    check_flat("scale_", out, source)
    torch.mul(source, weight, out=out)


def _chunks(a: Tensor) -> tuple[Tensor, ...]:
    return a.flatten().split(_CHUNK.get(a.device.type, 1 << 20))


@torch.no_grad()
def sq_distance(a: Tensor, b: Tensor) -> float:
    r"""Return the squared Euclidean distance :math:`\sum_j (a_j - b_j)^2`, accumulated in float64.

    Raises:
        ValueError: The shapes differ.

    >>> sq_distance(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0]))
    4.0
    """
    if a.shape != b.shape:
        raise ValueError(f"`sq_distance` needs equal shapes, got {tuple(a.shape)} and {tuple(b.shape)}.")
    total = torch.zeros((), dtype=torch.float64, device=a.device)
    for x, y in zip(_chunks(a), _chunks(b), strict=True):
        difference = x.to(torch.float64).sub_(y) if x.dtype != torch.float64 else x - y
        total += torch.dot(difference, difference)
    return total.item()


@torch.no_grad()
def sq_norm(a: Tensor) -> float:
    r"""Return the squared Euclidean norm :math:`\sum_j a_j^2`, accumulated in float64.

    >>> sq_norm(torch.tensor([3.0, 4.0]))
    25.0
    """
    total = torch.zeros((), dtype=torch.float64, device=a.device)
    for x in _chunks(a):
        wide = x.to(torch.float64)
        total += torch.dot(wide, wide)
    return total.item()


@torch.no_grad()
def all_finite(a: Tensor) -> bool:
    """Return whether all elements are finite.

    Only the minimum and the maximum are tested, which needs no temporary tensor.

    >>> all_finite(torch.tensor([1.0, float("nan")]))
    False
    """
    if not a.numel():
        return True
    low, high = a.aminmax()  # both are NaN if any element is
    return bool(torch.isfinite(low) & torch.isfinite(high))


def check_lists(
    op: str, layout: FlatLayout, tensors: Sequence[Tensor], remainders: Remainders | None
) -> Sequence[Tensor | None]:
    if len(tensors) != len(layout):
        raise ValueError(f"`{op}(tensors=...)` has {len(tensors)} entries, the layout {len(layout)}.")
    for name, shape, x in zip(layout.names, layout.shapes, tensors, strict=True):
        if x.shape != shape:
            raise ValueError(f"`{op}(tensors=...)`: {name} has shape {tuple(x.shape)}, the layout {tuple(shape)}.")
        if not x.is_floating_point():
            raise TypeError(f"`{op}(tensors=...)`: {name} is {x.dtype}; only real floating tensors can be averaged.")
    if remainders is None:
        return [None] * len(layout)
    if len(remainders) != len(layout):
        raise ValueError(f"`{op}(remainders=...)` has {len(remainders)} entries, the layout {len(layout)}.")
    for name, x, rest in zip(layout.names, tensors, remainders, strict=True):
        if rest is None:
            continue
        if rest.dtype != torch.float32 or x.dtype not in (torch.bfloat16, torch.float16):
            raise TypeError(
                f"`{op}(remainders=...)`: {name} is {x.dtype} with a remainder of {rest.dtype}; "
                "a remainder is float32 and belongs to a bfloat16 or float16 tensor."
            )
        if rest.shape != x.shape or rest.device != x.device:
            raise ValueError(f"`{op}(remainders=...)`: {name}'s remainder differs from it in shape or device.")
    return remainders


def check_bucket(argument: str, bucket: Tensor, layout: FlatLayout) -> None:
    if bucket.dtype != torch.float32:
        raise TypeError(f"`{argument}` must be float32, got {bucket.dtype}.")
    if bucket.shape != (layout.numel,) or not bucket.is_contiguous():
        raise ValueError(
            f"`{argument}` must be flat, contiguous and hold {layout.numel} elements, got shape {tuple(bucket.shape)}."
        )


def check_flat(op: str, *tensors: Tensor) -> None:
    if any(t.dtype != torch.float32 for t in tensors):
        raise TypeError(f"`{op}` needs float32 tensors, got {', '.join(str(t.dtype) for t in tensors)}.")
    if any(t.shape != tensors[0].shape for t in tensors):
        raise ValueError(f"`{op}` needs equal shapes, got {', '.join(str(tuple(t.shape)) for t in tensors)}.")


def momentum_step_(anchor: Tensor, momentum: Tensor, gradient: Tensor, lr: float, mu: float, nesterov: bool) -> None:
    """Write ``m = mu m + g``, then ``a -= lr (g + mu m)`` with ``nesterov``, else ``a -= lr m``."""
    momentum.mul_(mu).add_(gradient)
    anchor.sub_((gradient + momentum * mu if nesterov else momentum) * lr)


@torch.no_grad()
def outer_merge_(
    anchor: Tensor, momentum: Tensor, received: Tensor, sent: Tensor | None, lr: float, mu: float, nesterov: bool
) -> None:
    r"""Take one step of SGD with (Nesterov) momentum on the buckets of a round.

    Afterwards, ``received`` contains the new anchor, and ``sent`` contains the snapshot.

    .. math::
        s &\leftarrow a - s, \qquad m \leftarrow \mu m + r \\
        a &\leftarrow a - \eta\, (r + \mu m) \text{ with nesterov, else } a - \eta\, m, \qquad r \leftarrow a

    Every product and every sum is rounded, on every device. `torch.optim.SGD` rounds some of them together if the
    processor has a fused multiply-add, so the two agree within a few units in the last place and not to the bit.

    Args:
        anchor: Flat fp32 :math:`a`; updated in place.
        momentum: Flat fp32 :math:`m`; updated in place.
        received: Flat fp32 :math:`r`, the mean pseudo-gradient; becomes the new anchor.
        sent: Flat fp32 :math:`s`, this replica's pseudo-gradient; becomes its snapshot, up to rounding. None if this
            replica has sent no message.
        lr: :math:`\eta`.
        mu: :math:`\mu`.
        nesterov: Whether to look ahead along the new momentum.

    Raises:
        TypeError: A tensor is not fp32.
        ValueError: Shapes or devices differ, or tensors are not contiguous or overlap.

    Source: Douillard et al., "DiLoCo", 2023, https://arxiv.org/abs/2311.08105

    >>> anchor, momentum, received, sent = (torch.tensor([v]) for v in (1.0, 0.0, 0.5, 0.25))
    >>> outer_merge_(anchor, momentum, received, sent, lr=0.5, mu=0.5, nesterov=True)
    >>> received, sent
    (tensor([0.6250]), tensor([0.7500]))
    """
    if sent is not None:
        torch.sub(anchor, sent, out=sent)
    momentum_step_(anchor, momentum, received, lr, mu, nesterov)
    received.copy_(anchor)

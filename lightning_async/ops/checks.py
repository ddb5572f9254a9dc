"""What the ops refuse: custom operators of torch check neither overlap nor gradients by themselves."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

__all__ = ["PARAMETERS", "check_flat", "check_no_grad"]

PARAMETERS = (torch.float32, torch.bfloat16, torch.float16)
STATE = (torch.float32,)


def check_no_grad(op: str, written: Mapping[str, Tensor]) -> None:
    """Refuse to overwrite what autograd watches; called in grad mode.

    Raises:
        ValueError: a tensor requires grad.
    """
    for name, tensor in written.items():
        if tensor.requires_grad:
            raise ValueError(
                f"`{op}({name}=...)` requires grad and would be overwritten in grad mode: "
                "call it under `torch.no_grad()`."
            )


def check_flat(
    op: str,
    tensors: Mapping[str, Tensor],
    written: Collection[str],
    dtypes: Mapping[str, tuple[torch.dtype, ...]],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """Check dtypes (fp32 unless ``dtypes`` says more), shapes (the first tensor's unless ``shapes`` says otherwise),
    devices, contiguity, and that what is written overlaps nothing.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: anything else does not.
    """
    first = next(iter(tensors.values()))
    spans: list[tuple[int, int, str]] = []
    for name, tensor in tensors.items():
        allowed = dtypes.get(name, STATE)
        if tensor.dtype not in allowed:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
            raise TypeError(f"`{op}({name}=...)` must be {wanted}, got {tensor.dtype}.")
        shape = first.shape if shapes is None or name not in shapes else shapes[name]
        if tensor.shape != shape:
            raise ValueError(
                f"`{op}` needs equal shapes: `{name}` must have shape {tuple(shape)}, got {tuple(tensor.shape)}."
            )
        if tensor.device != first.device:
            raise ValueError(f"`{op}` needs one device: `{name}` is on {tensor.device}, not on {first.device}.")
        if not tensor.is_contiguous():
            raise ValueError(f"`{op}({name}=...)` must be contiguous, got strides {tensor.stride()}.")
        start = tensor.data_ptr()
        spans.append((start, start + tensor.nbytes, name))
    spans.sort()
    if any(after[0] < before[1] for before, after in itertools.pairwise(spans)):
        _check_overlaps(op, spans, written)


def _check_overlaps(op: str, spans: list[tuple[int, int, str]], written: Collection[str]) -> None:
    for start, end, name in spans:
        for other_start, other_end, other in spans:
            if name in written and other != name and start < other_end and other_start < end:
                raise ValueError(f"`{op}`: `{name}` is written and shares memory with `{other}`.")

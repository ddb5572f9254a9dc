"""Reductions and byte views that are common to the transports. Pure functions on CPU or CUDA tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_async.comm.protocols import ReduceOp

__all__ = ["NATIVE", "as_bytes", "check_buffer", "check_rows", "reducible", "room_for", "sum_rows"]

NATIVE = frozenset(
    {
        torch.float32, torch.float64, torch.float16, torch.bfloat16,
        torch.int8, torch.uint8, torch.int32, torch.int64,
    }
)  # fmt: skip
"""What torch's Gloo, NCCL and MPI reduce alike. Gloo's bool sum would store a 2; its int16 does not exist."""


def check_buffer(buffer: Tensor) -> None:
    """Raise ValueError unless the transport can work on the tensor's memory in place."""
    if not buffer.is_contiguous():
        raise ValueError(f"collectives work in place on contiguous tensors; got strides {buffer.stride()}.")
    if (buffer.requires_grad and not buffer.is_leaf) or buffer.is_sparse:
        raise ValueError("collectives take dense tensors outside of the autograd graph; detach() it.")


def check_rows(buffer: Tensor, world_size: int) -> None:
    """Raise ValueError unless the buffer has one row per rank."""
    check_buffer(buffer)
    if buffer.dim() == 0 or buffer.shape[0] != world_size:
        raise ValueError(f"the first dimension must be world_size={world_size}; got shape {tuple(buffer.shape)}.")


def room_for(row: Tensor, world_size: int, out: Tensor | None) -> Tensor:
    """``out``, or a new tensor: one row per rank, each like ``row``.

    Raises:
        ValueError: ``out`` is another tensor than that.
    """
    shape = (world_size, *row.shape)
    if out is None:
        return row.new_empty(shape)
    if out.shape != shape or out.dtype != row.dtype or out.device != row.device or not out.is_contiguous():
        raise ValueError(
            f"`out` must be contiguous, {row.dtype}, of shape {tuple(shape)}, on {row.device}; got {out.dtype}, shape "
            f"{tuple(out.shape)}, strides {out.stride()}, on {out.device}."
        )
    return out


def as_bytes(tensor: Tensor) -> Tensor:
    """A flat uint8 view of the same memory, for operations that only move."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def reducible(
    buffer: Tensor, op: ReduceOp, native: frozenset[torch.dtype] = NATIVE
) -> tuple[Tensor, ReduceOp, Callable[[Tensor], None]]:
    """What to reduce in place of ``buffer``: ``(wire, op, narrow)``; ``narrow(wire)`` writes the result back.

    Bools are reduced as bytes (SUM and MAX are "any", MIN is "all"), complex numbers as pairs of reals, types that
    are not ``native`` to the backend as fp32 or int64.
    """
    flat = buffer.detach().reshape(-1)
    if flat.dtype is torch.bool:
        flat, op = flat.view(torch.uint8), ReduceOp.MAX if op is ReduceOp.SUM else op
    elif flat.is_complex():
        if op is not ReduceOp.SUM:
            raise ValueError(f"complex numbers have no {op.value}.")
        flat = torch.view_as_real(flat).reshape(-1)

    def back(wire: Tensor) -> None:
        flat.copy_(wire)

    if flat.dtype in native:
        return flat, op, lambda wire: None
    return flat.to(torch.float32 if flat.is_floating_point() else torch.int64), op, back


def sum_rows(rows: Tensor, op: ReduceOp) -> Tensor:
    """Reduce over the first dimension, one row after the other; half types in fp32, rounded once."""
    half = rows.is_floating_point() and rows.element_size() < 4
    if rows.dtype is torch.bool:
        return rows.all(0) if op is ReduceOp.MIN else rows.any(0)
    total = rows[0].to(torch.float32) if half else rows[0].clone()
    for row in rows[1:]:
        if op is ReduceOp.SUM:
            total += row
        elif op is ReduceOp.MIN:
            torch.minimum(total, row.to(total.dtype), out=total)
        else:
            torch.maximum(total, row.to(total.dtype), out=total)
    return total.to(rows.dtype)

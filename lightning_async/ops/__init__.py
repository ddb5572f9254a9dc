"""Arithmetic on lists of tensors and on flat buckets. No I/O, no threads, no autograd."""

from lightning_async.ops.reference import (
    all_finite,
    apply_,
    outer_nesterov_,
    pack_,
    scale_,
    sq_distance,
    sq_norm,
)

__all__ = ["all_finite", "apply_", "outer_nesterov_", "pack_", "scale_", "sq_distance", "sq_norm"]

"""Arithmetic on lists of tensors and on flat buckets. No I/O, no threads, no autograd."""

from lightning_async.ops.flat_ops import (
    accumulate_,
    dequantize_2bit_average_,
    dequantize_average_,
    outer_merge_,
    quantize_,
    quantize_2bit_,
    requantize_average_,
    server_adam_,
    server_add_,
    server_dana_,
    server_sgd_,
    topk_,
    topk_accumulate_,
)
from lightning_async.ops.plan import Plan, all_finite, apply_, pack_, scale_, sq_distance, sq_norm
from lightning_async.ops.reference.compression import BLOCK, blocks

__all__ = [
    "BLOCK", "Plan", "accumulate_", "all_finite", "apply_", "blocks", "dequantize_2bit_average_", "dequantize_average_",
    "outer_merge_", "pack_", "quantize_", "quantize_2bit_", "requantize_average_", "scale_", "server_adam_",
    "server_add_", "server_dana_", "server_sgd_", "sq_distance", "sq_norm", "topk_", "topk_accumulate_",
]  # fmt: skip

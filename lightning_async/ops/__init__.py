"""Fused arithmetic on lists of tensors and on flat buckets. No I/O, no threads, no autograd.

`Plan` moves a list of tensors into a flat fp32 bucket and back, with all checks made once. The functions with a
trailing underscore work on flat buckets in place: outer steps of averaging, compression with error feedback, and the
optimizer steps of parameter servers. Each has a specification in plain torch (`ops.reference`) and a native
implementation (`ops.native` loads the libraries that cuda_ext builds). Results are equal to the bit, so either may run.

Callers may use several threads, on separate memory; nothing here has state, apart from caches of checks and the loaded
libraries. Read `reference` first, then `flat_ops` and `plan`, and `native` last.
"""

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

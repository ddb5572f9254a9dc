"""The flat ops on compressed messages; what each one computes stands in its reference."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_async.ops import calls
from lightning_async.ops.define import Arguments, fused, num_peers
from lightning_async.ops.reference import compression
from lightning_async.ops.reference.compression import blocks

__all__ = [
    "dequantize_2bit_average_", "dequantize_average_", "quantize_", "quantize_2bit_", "requantize_average_", "topk_",
    "topk_accumulate_",
]  # fmt: skip

_CODES = (torch.int8, torch.float8_e4m3fn, torch.bfloat16)


def _check_scales(op: str, codes: Tensor, scales: Tensor | None) -> None:
    if (scales is None) != (codes.dtype == torch.bfloat16):
        raise ValueError(f"`{op}`: int8 and float8_e4m3fn codes have scales, bfloat16 has none.")


def _check_quantize(op: str, given: Arguments) -> Mapping[str, tuple[int, ...]]:
    _check_scales(op, given["codes"], given["scales"])
    numel = given["source"].numel()
    return {"codes": (numel,), "source": (numel,), "residual": (numel,), "scales": (blocks(numel),)}


def _check_average(op: str, given: Arguments) -> Mapping[str, tuple[int, ...]]:
    _check_scales(op, given["codes"], given["scales"])
    again = "out_codes" in given
    if again:
        _check_scales(op, given["out_codes"], given["out_scales"])
        if given["codes"].dtype in _CODES and given["out_codes"].dtype != given["codes"].dtype:
            raise TypeError(f"`{op}(out_codes=...)` must be {given['codes'].dtype}, got {given['out_codes'].dtype}.")
    numel, peers = given["residual" if again else "out"].numel(), num_peers(op, given["codes"])
    return {
        "codes": (peers, numel), "scales": (peers, blocks(numel)), "weights": (peers,), "out": (numel,),
        "out_codes": (numel,), "out_scales": (blocks(numel),), "residual": (numel,),
    }  # fmt: skip


def _check_threshold(op: str, given: Arguments) -> None:
    if not 0 < given["threshold"] < math.inf:
        raise ValueError(f"`{op}(threshold={given['threshold']})` must be positive and finite.")


def _check_2bit(op: str, given: Arguments) -> Mapping[str, tuple[int, ...]]:
    _check_threshold(op, given)
    numel = given["source"].numel()
    return {"codes": (-(-numel // 4),), "source": (numel,), "residual": (numel,)}


def _check_2bit_average(op: str, given: Arguments) -> Mapping[str, tuple[int, ...]]:
    _check_threshold(op, given)
    numel, peers = given["out"].numel(), num_peers(op, given["codes"])
    return {"out": (numel,), "codes": (peers, -(-numel // 4)), "weights": (peers,)}


def _check_topk(op: str, given: Arguments) -> Mapping[str, tuple[int, ...]]:
    k, numel = given["values"].numel(), given["source"].numel()
    if k > numel:
        raise ValueError(f"`{op}(values=...)` has room for {k} elements of {numel}.")
    return {"values": (k,), "indices": (k,), "source": (numel,), "residual": (numel,)}


def _check_accumulate(op: str, given: Arguments) -> Mapping[str, tuple[int, ...]]:
    k = given["values"].numel()
    return {"out": (given["out"].numel(),), "values": (k,), "indices": (k,)}


def _topk(values: Tensor, indices: Tensor, source: Tensor, residual: Tensor) -> None:
    # Selecting on a GPU would need atomics, or torch's own sort.
    (compression.topk_ if source.is_cuda else calls.topk)(values, indices, source, residual)


def _topk_accumulate(out: Tensor, values: Tensor, indices: Tensor, weight: float) -> None:
    (compression.topk_accumulate_ if out.is_cuda else calls.scatter)(out, values, indices, weight)


quantize_ = fused(
    compression.quantize_,
    "(Tensor(a!) codes, Tensor(b!)? scales, Tensor source, Tensor(c!) residual) -> ()",
    calls.quantize,
    dtypes={"codes": _CODES},
    check=_check_quantize,
)
dequantize_average_ = fused(
    compression.dequantize_average_,
    "(Tensor(a!) out, Tensor codes, Tensor? scales, Tensor weights) -> ()",
    lambda out, codes, scales, weights: calls.average(codes, scales, weights, out.numel(), out=out),
    dtypes={"codes": _CODES},
    check=_check_average,
)
requantize_average_ = fused(
    compression.requantize_average_,
    "(Tensor(a!) out_codes, Tensor(b!)? out_scales, Tensor(c!) residual, Tensor codes, Tensor? scales, "
    "Tensor weights) -> ()",
    lambda out_codes, out_scales, residual, codes, scales, weights: calls.average(
        codes, scales, weights, residual.numel(), again=(out_codes, out_scales, residual)
    ),
    dtypes={"codes": _CODES, "out_codes": _CODES},
    check=_check_average,
)
quantize_2bit_ = fused(
    compression.quantize_2bit_,
    "(Tensor(a!) codes, Tensor source, Tensor(b!) residual, float threshold) -> ()",
    lambda codes, source, residual, threshold: calls.quantize(codes, None, source, residual, threshold),
    dtypes={"codes": (torch.uint8,)},
    check=_check_2bit,
)
dequantize_2bit_average_ = fused(
    compression.dequantize_2bit_average_,
    "(Tensor(a!) out, Tensor codes, Tensor weights, float threshold) -> ()",
    lambda out, codes, weights, threshold: calls.average(
        codes, None, weights, out.numel(), threshold=threshold, out=out
    ),
    dtypes={"codes": (torch.uint8,)},
    check=_check_2bit_average,
)
topk_ = fused(
    compression.topk_,
    "(Tensor(a!) values, Tensor(b!) indices, Tensor source, Tensor(c!) residual) -> ()",
    _topk,
    dtypes={"indices": (torch.int64,)},
    check=_check_topk,
)
topk_accumulate_ = fused(
    compression.topk_accumulate_,
    "(Tensor(a!) out, Tensor values, Tensor indices, float weight) -> ()",
    _topk_accumulate,
    dtypes={"indices": (torch.int64,)},
    check=_check_accumulate,
)

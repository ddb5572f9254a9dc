"""The flat ops, as custom operators of torch: the native library where it runs, else the reference.

Each is defined by its reference, which holds its equation, and registered with a fake kernel, so that it can be traced
by `torch.compile`; torch moves the version counters of what an op writes.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from lightning_async.ops import native
from lightning_async.ops.checks import PARAMETERS, check_flat, check_no_grad
from lightning_async.ops.reference import averaging, compression, outer, server
from lightning_async.ops.reference.compression import blocks

__all__ = [
    "accumulate_", "delta_merge_", "delta_merge_norm_", "dequantize_2bit_average_", "dequantize_average_", "elastic_",
    "lerp_norm_", "mean_and_spread_", "nesterov_merge_", "outer_merge_", "outer_nesterov_", "quantize_",
    "quantize_2bit_", "requantize_average_", "server_adam_", "server_dana_", "server_sgd_", "slowmo_merge_", "topk_",
    "topk_accumulate_",
]  # fmt: skip

P, R = ParamSpec("P"), TypeVar("R")
Arguments = Mapping[str, Any]


def _fused(
    reference: Callable[P, R],
    schema: str,
    run: Callable[..., Any],
    *,
    dtypes: Mapping[str, tuple[torch.dtype, ...]] | None = None,
    check: Callable[[str, Arguments], Mapping[str, tuple[int, ...]] | None] | None = None,
    fake: Callable[..., Any] = lambda *args, **kwargs: None,
) -> Callable[P, R]:
    """The op that ``reference`` specifies.

    Args:
        reference: equal results in plain torch; its name, signature and docstring become the op's.
        schema: of the custom operator; what it marks with ``!`` is written.
        run: the native library's way, with the same arguments.
        dtypes: of arguments that may be other than fp32.
        check: looks at the arguments' values, and returns the shapes of those that differ from the first one's.
        fake: what the op returns, for tracing.
    """
    name = reference.__name__
    signature = inspect.signature(reference)
    written = [part.split()[1] for part in schema.partition(") ->")[0].split(",") if "!" in part]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        tensors = {key: value for key, value in bound.arguments.items() if isinstance(value, Tensor)}
        shapes = check(name, bound.arguments) if check is not None else None
        check_flat(name, tensors, written, dtypes or {}, shapes)
        fast = native.available(next(iter(tensors.values())).device)
        return (run if fast else reference)(**bound.arguments)

    operator = torch.library.custom_op(f"lightning_async::{name}", kernel, mutates_args=written, schema=schema)
    operator.register_fake(fake)

    @functools.wraps(reference)
    def op(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = signature.bind(*args, **kwargs)
        check_no_grad(name, {key: bound.arguments[key] for key in written if bound.arguments[key] is not None})
        return operator(*args, **kwargs)

    return op


def _scalar_like(*args: Any, **kwargs: Any) -> Tensor:
    first = args[0] if args else next(iter(kwargs.values()))
    return first.new_empty((), dtype=torch.float64)


def _pair_like(*args: Any, **kwargs: Any) -> Tensor:
    first = args[0] if args else next(iter(kwargs.values()))
    return first.new_empty(2, dtype=torch.float64)


def _present(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


# Averaging


def _delta(params: Tensor, mean: Tensor, snapshot: Tensor, renew: bool, norms: bool) -> Tensor | None:
    return native.flat("move_snapshot" if renew else "move", [params, mean, snapshot], norms=norms)


def _lerp(params: Tensor, target: Tensor, weight: float) -> Tensor:
    sums = native.flat("lerp", [params, target], [weight], norms=True)
    assert sums is not None
    return sums[0].clone()


def _check_replicas(op: str, given: Arguments) -> Mapping[str, tuple[int, ...]]:
    out, replicas = given["out"], given["replicas"]
    peers = _peers(op, replicas)
    return {"out": (out.numel(),), "replicas": (peers, out.numel()), "weights": (peers,)}


def _peers(op: str, rows: Tensor) -> int:
    if rows.dim() != 2 or not len(rows):
        raise ValueError(f"`{op}` needs one row per peer and at least one, got shape {tuple(rows.shape)}.")
    return len(rows)


def _spread(out: Tensor, replicas: Tensor, weights: Tensor) -> Tensor:
    total = native.average(replicas, None, weights, out.numel(), out=out, spread=True)
    assert total is not None
    return total


_PARAMS = {"params": PARAMETERS}
_DELTA = "(Tensor(a!) params, Tensor mean, Tensor(b!) snapshot, bool renew=False)"
delta_merge_ = _fused(
    averaging.delta_merge_, f"{_DELTA} -> ()", lambda **given: _delta(**given, norms=False) and None, dtypes=_PARAMS
)
delta_merge_norm_ = _fused(
    averaging.delta_merge_norm_,
    f"{_DELTA} -> Tensor",
    functools.partial(_delta, norms=True),
    dtypes=_PARAMS,
    fake=_pair_like,
)
lerp_norm_ = _fused(
    averaging.lerp_norm_,
    "(Tensor(a!) params, Tensor target, float weight) -> Tensor",
    _lerp,
    dtypes=_PARAMS,
    fake=_scalar_like,
)
accumulate_ = _fused(
    averaging.accumulate_,
    "(Tensor(a!) total, Tensor source, float weight) -> ()",
    lambda total, source, weight: native.flat("accumulate", [source, total], [weight]),
    dtypes={"source": PARAMETERS},
)
elastic_ = _fused(
    averaging.elastic_,
    "(Tensor(a!) params, Tensor(b!) center, float alpha) -> ()",
    lambda params, center, alpha: native.flat("elastic", [params, center], [alpha]),
    dtypes=_PARAMS,
)
mean_and_spread_ = _fused(
    averaging.mean_and_spread_,
    "(Tensor(a!) out, Tensor replicas, Tensor weights) -> Tensor",
    _spread,
    check=_check_replicas,
    fake=_scalar_like,
)

# Outer optimizers: lr, mu, factor of the gradient, nesterov


def _outer(
    params: Tensor,
    mean: Tensor,
    anchor: Tensor,
    momentum: Tensor,
    snapshot: Tensor | None,
    lr: float,
    mu: float,
    nesterov: bool,
    scale: float = 1.0,
) -> None:
    name = "outer" if snapshot is None else "outer_overlapped"
    native.flat(name, _present(params, mean, anchor, momentum, snapshot), [lr, mu, scale, float(nesterov)])


def _slowmo(*, inner_lr: float, outer_lr: float, beta: float, **tensors: Any) -> None:
    _outer(**tensors, lr=outer_lr * inner_lr, mu=beta, nesterov=False, scale=1.0 / inner_lr)


def _check_inner_lr(op: str, given: Arguments) -> None:
    if not given["inner_lr"] > 0:
        raise ValueError(f"`{op}(inner_lr={given['inner_lr']})` must be positive.")


def _outer_step(
    anchor: Tensor, momentum: Tensor, pseudo_gradient: Tensor, lr: float, mu: float, nesterov: bool
) -> None:
    native.flat("outer_step", [pseudo_gradient, anchor, momentum], [lr, mu, 1.0, float(nesterov)])


def _outer_merge(
    anchor: Tensor, momentum: Tensor, received: Tensor, sent: Tensor | None, lr: float, mu: float, nesterov: bool
) -> None:
    name = "outer_merge" if sent is None else "outer_merge_sent"
    native.flat(name, _present(received, anchor, momentum, sent), [lr, mu, 1.0, float(nesterov)])


_MERGE = "(Tensor(a!) params, Tensor mean, Tensor(b!) anchor, Tensor(c!) momentum, Tensor? snapshot"
outer_nesterov_ = _fused(
    outer.outer_nesterov_,
    "(Tensor(a!) anchor, Tensor(b!) momentum, Tensor pseudo_gradient, float lr, float mu, bool nesterov) -> ()",
    _outer_step,
)
outer_merge_ = _fused(
    outer.outer_merge_,
    "(Tensor(a!) anchor, Tensor(b!) momentum, Tensor(c!) received, Tensor(d!)? sent, float lr, float mu, "
    "bool nesterov) -> ()",
    _outer_merge,
)
nesterov_merge_ = _fused(
    outer.nesterov_merge_, f"{_MERGE}, float lr, float mu, bool nesterov=True) -> ()", _outer, dtypes=_PARAMS
)
slowmo_merge_ = _fused(
    outer.slowmo_merge_,
    f"{_MERGE}, float inner_lr, float outer_lr, float beta) -> ()",
    _slowmo,
    dtypes=_PARAMS,
    check=_check_inner_lr,
)

# Server


def _server(name: str, arrays: list[Tensor], backup: Tensor | None, scalars: list[float]) -> None:
    native.flat(name if backup is None else f"{name}_delay", [*arrays, *_present(backup)], scalars)


def _server_sgd(
    params: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    backup: Tensor | None,
    lr: float,
    mu: float,
    nesterov: bool,
    scale: float,
    delay: float,
) -> None:
    _server("server_sgd", [gradient, params, momentum], backup, [lr, mu, 1.0, float(nesterov), scale, delay])


def _server_dana(
    params: Tensor,
    momentum: Tensor,
    total: Tensor,
    ahead: Tensor,
    gradient: Tensor,
    backup: Tensor | None,
    lr: float,
    mu: float,
    scale: float,
    delay: float,
) -> None:
    _server("server_dana", [gradient, params, momentum, total, ahead], backup, [lr, mu, lr * mu, 0.0, scale, delay])


def _server_adam(
    params: Tensor,
    first: Tensor,
    second: Tensor,
    gradient: Tensor,
    backup: Tensor | None,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    scale: float,
    delay: float,
) -> None:
    size, rest1, rest2, root = server.adam_scalars(step, lr, beta1, beta2)
    scalars = [size, beta1, rest1, beta2, scale, delay, rest2, root, eps]
    _server("server_adam", [gradient, params, first, second], backup, scalars)


def _check_step(op: str, given: Arguments) -> None:
    if given["step"] < 1:
        raise ValueError(f"`{op}(step={given['step']})` counts from 1.")


_GRADIENT, _STALE = {"gradient": PARAMETERS}, "float scale=1.0, float delay=0.0) -> ()"
server_sgd_ = _fused(
    server.server_sgd_,
    "(Tensor(a!) params, Tensor(b!) momentum, Tensor gradient, Tensor? backup, float lr, float mu, bool nesterov, "
    + _STALE,
    _server_sgd,
    dtypes=_GRADIENT,
)
server_dana_ = _fused(
    server.server_dana_,
    "(Tensor(a!) params, Tensor(b!) momentum, Tensor(c!) total, Tensor(d!) ahead, Tensor gradient, Tensor? backup, "
    "float lr, float mu, " + _STALE,
    _server_dana,
    dtypes=_GRADIENT,
)
server_adam_ = _fused(
    server.server_adam_,
    "(Tensor(a!) params, Tensor(b!) first, Tensor(c!) second, Tensor gradient, Tensor? backup, int step, float lr, "
    "float beta1=0.9, float beta2=0.999, float eps=1e-08, " + _STALE,
    _server_adam,
    dtypes=_GRADIENT,
    check=_check_step,
)

# Compression

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
        if given["out_codes"].dtype != given["codes"].dtype:
            raise TypeError(f"`{op}(out_codes=...)` must be {given['codes'].dtype}, got {given['out_codes'].dtype}.")
    numel, peers = given["residual" if again else "out"].numel(), _peers(op, given["codes"])
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
    numel, peers = given["out"].numel(), _peers(op, given["codes"])
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
    (compression.topk_ if source.is_cuda else native.topk)(values, indices, source, residual)


def _topk_accumulate(out: Tensor, values: Tensor, indices: Tensor, weight: float) -> None:
    (compression.topk_accumulate_ if out.is_cuda else native.scatter)(out, values, indices, weight)


quantize_ = _fused(
    compression.quantize_,
    "(Tensor(a!) codes, Tensor(b!)? scales, Tensor source, Tensor(c!) residual) -> ()",
    native.quantize,
    dtypes={"codes": _CODES},
    check=_check_quantize,
)
dequantize_average_ = _fused(
    compression.dequantize_average_,
    "(Tensor(a!) out, Tensor codes, Tensor? scales, Tensor weights) -> ()",
    lambda out, codes, scales, weights: native.average(codes, scales, weights, out.numel(), out=out) and None,
    dtypes={"codes": _CODES},
    check=_check_average,
)
requantize_average_ = _fused(
    compression.requantize_average_,
    "(Tensor(a!) out_codes, Tensor(b!)? out_scales, Tensor(c!) residual, Tensor codes, Tensor? scales, "
    "Tensor weights) -> ()",
    lambda out_codes, out_scales, residual, codes, scales, weights: native.average(
        codes, scales, weights, residual.numel(), again=(out_codes, out_scales, residual)
    ),
    dtypes={"codes": _CODES, "out_codes": _CODES},
    check=_check_average,
)
quantize_2bit_ = _fused(
    compression.quantize_2bit_,
    "(Tensor(a!) codes, Tensor source, Tensor(b!) residual, float threshold) -> ()",
    lambda codes, source, residual, threshold: native.quantize(codes, None, source, residual, threshold),
    dtypes={"codes": (torch.uint8,)},
    check=_check_2bit,
)
dequantize_2bit_average_ = _fused(
    compression.dequantize_2bit_average_,
    "(Tensor(a!) out, Tensor codes, Tensor weights, float threshold) -> ()",
    lambda out, codes, weights, threshold: native.average(
        codes, None, weights, out.numel(), threshold=threshold, out=out
    ),
    dtypes={"codes": (torch.uint8,)},
    check=_check_2bit_average,
)
topk_ = _fused(
    compression.topk_,
    "(Tensor(a!) values, Tensor(b!) indices, Tensor source, Tensor(c!) residual) -> ()",
    _topk,
    dtypes={"indices": (torch.int64,)},
    check=_check_topk,
)
topk_accumulate_ = _fused(
    compression.topk_accumulate_,
    "(Tensor(a!) out, Tensor values, Tensor indices, float weight) -> ()",
    _topk_accumulate,
    dtypes={"indices": (torch.int64,)},
    check=_check_accumulate,
)

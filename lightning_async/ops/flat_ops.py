"""The operations on flat buckets. Each checks its arguments, and runs the native library, or else the reference.

The checks include that a written tensor shares no memory with another one, and does not require grad, because torch's
custom operators check neither.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from lightning_async.ops import native
from lightning_async.ops.reference import buckets, compression, server
from lightning_async.ops.reference.compression import blocks

PARAMETERS = (torch.float32, torch.bfloat16, torch.float16)
STATE = (torch.float32,)


def check_no_grad(op: str, written: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a tensor that the op overwrites requires grad; called in grad mode."""
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
    """Check dtypes, shapes, devices, contiguity, and that written tensors overlap no other.

    A tensor must be fp32, unless ``dtypes`` has other dtypes for it, and must have the shape of the first tensor,
    unless ``shapes`` has another shape for it. Raises TypeError for a wrong dtype, and ValueError for everything else.
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


P = ParamSpec("P")
R = TypeVar("R")
Arguments = Mapping[str, Any]
_MOST = 64
_kernels: dict[Callable[..., Any], Callable[..., Any]] = {}


def fused(
    reference: Callable[P, R],
    schema: str,
    run: Callable[..., Any],
    *,
    dtypes: Mapping[str, tuple[torch.dtype, ...]] | None = None,
    check: Callable[[str, Arguments], Mapping[str, tuple[int, ...]] | None] | None = None,
) -> Callable[P, R]:
    """Return the op that ``reference`` specifies.

    Args:
        reference: Implementation in plain torch with equal results; its name, signature and docstring become the op's.
        schema: Schema of the custom operator, in which ``!`` marks written arguments.
        run: Implementation by the native library, with the same arguments.
        dtypes: Dtypes of arguments that may be other than fp32.
        check: Function that checks the arguments' values, and returns the expected shapes of the tensors by name, or
            None if all tensors must have one shape.
    """
    name = reference.__name__
    by_torch: Callable[..., Any] = reference
    signature = inspect.signature(reference)
    names = tuple(signature.parameters)
    defaults = [parameter.default for parameter in signature.parameters.values()]
    num_required = defaults.count(inspect.Parameter.empty)
    written = [part.split()[1] for part in schema.partition(") ->")[0].split(",") if "!" in part]

    def bind(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        # This takes a fraction of the time of `signature.bind`.
        if not kwargs and num_required <= len(args) <= len(names):
            return dict(zip(names, (*args, *defaults[len(args) :]), strict=True))
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return call(bind(args, kwargs))

    def call(given: dict[str, Any], known: _Known | None = None) -> Any:
        tensors = {key: value for key, value in given.items() if isinstance(value, Tensor)}
        shapes = check(name, given) if check is not None else None
        if known is None or shapes is not None or not known.has(tensors):
            check_flat(name, tensors, written, dtypes or {}, shapes)
            if known is not None and shapes is None:
                known.add(tensors)
        fast = native.available(next(iter(tensors.values())).device)
        return run(**given) if fast else by_torch(**given)

    checked = _Known()

    def at_once(*args: Any, **kwargs: Any) -> Any:
        return call(bind(args, kwargs), checked)

    operator = torch.library.custom_op(f"lightning_async::{name}", kernel, mutates_args=written, schema=schema)
    operator.register_fake(lambda *args, **kwargs: None)

    @functools.wraps(reference)
    def op(*args: P.args, **kwargs: P.kwargs) -> R:
        given = bind(args, kwargs)
        if torch.is_grad_enabled():
            check_no_grad(name, {key: given[key] for key in written if given[key] is not None})
        return operator(*given.values())

    _kernels[op] = at_once
    return op


def eager(op: Callable[P, R]) -> Callable[P, R]:
    """Return a function that runs the op without torch's dispatcher.

    The dispatcher takes 60 microseconds for each call, and a second before the first one. Pass only tensors that
    neither autograd nor torch.compile tracks. If the op needs tensors of one shape, their shapes are compared only when
    the function gets these tensors for the first time.
    """
    return _kernels[op]


class _Known:
    """A record of the tensors that have passed an op's checks together; it does not keep them alive."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, ...], list[weakref.ref[Tensor]]] = {}

    def has(self, tensors: Mapping[str, Tensor]) -> bool:
        # An id may be reused by a new tensor, so the weak references decide.
        found = self._seen.get(tuple(map(id, tensors.values())))
        return found is not None and all(ref() is each for ref, each in zip(found, tensors.values(), strict=True))

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        if len(self._seen) >= _MOST:
            self._seen.clear()
        self._seen[tuple(map(id, tensors.values()))] = [weakref.ref(each) for each in tensors.values()]


def num_peers(op: str, rows: Tensor) -> int:
    """Return the number of peers, one for each row of ``rows``; raise ValueError if it is no matrix or has no row."""
    if rows.dim() != 2 or not len(rows):
        raise ValueError(f"`{op}` needs one row per peer and at least one, got shape {tuple(rows.shape)}.")
    return len(rows)


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
    numel = given["residual" if again else "out"].numel()
    peers = num_peers(op, given["codes"])
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
    numel = given["out"].numel()
    peers = num_peers(op, given["codes"])
    return {"out": (numel,), "codes": (peers, -(-numel // 4)), "weights": (peers,)}


def _check_topk(op: str, given: Arguments) -> Mapping[str, tuple[int, ...]]:
    k = given["values"].numel()
    numel = given["source"].numel()
    if k > numel:
        raise ValueError(f"`{op}(values=...)` has room for {k} elements of {numel}.")
    return {"values": (k,), "indices": (k,), "source": (numel,), "residual": (numel,)}


def _check_accumulate(op: str, given: Arguments) -> Mapping[str, tuple[int, ...]]:
    k = given["values"].numel()
    return {"out": (given["out"].numel(),), "values": (k,), "indices": (k,)}


def _topk(values: Tensor, indices: Tensor, source: Tensor, residual: Tensor) -> None:
    # On a GPU, selecting would need atomics or torch's own sort, so torch does it.
    (compression.topk_ if source.is_cuda else native.topk)(values, indices, source, residual)


def _topk_accumulate(out: Tensor, values: Tensor, indices: Tensor, weight: float) -> None:
    (compression.topk_accumulate_ if out.is_cuda else native.scatter)(out, values, indices, weight)


quantize_ = fused(
    compression.quantize_,
    "(Tensor(a!) codes, Tensor(b!)? scales, Tensor source, Tensor(c!) residual) -> ()",
    native.quantize,
    dtypes={"codes": _CODES},
    check=_check_quantize,
)
dequantize_average_ = fused(
    compression.dequantize_average_,
    "(Tensor(a!) out, Tensor codes, Tensor? scales, Tensor weights) -> ()",
    lambda out, codes, scales, weights: native.average(codes, scales, weights, out.numel(), out=out),
    dtypes={"codes": _CODES},
    check=_check_average,
)
requantize_average_ = fused(
    compression.requantize_average_,
    "(Tensor(a!) out_codes, Tensor(b!)? out_scales, Tensor(c!) residual, Tensor codes, Tensor? scales, "
    "Tensor weights) -> ()",
    lambda out_codes, out_scales, residual, codes, scales, weights: native.average(
        codes, scales, weights, residual.numel(), again=(out_codes, out_scales, residual)
    ),
    dtypes={"codes": _CODES, "out_codes": _CODES},
    check=_check_average,
)
quantize_2bit_ = fused(
    compression.quantize_2bit_,
    "(Tensor(a!) codes, Tensor source, Tensor(b!) residual, float threshold) -> ()",
    lambda codes, source, residual, threshold: native.quantize(codes, None, source, residual, threshold),
    dtypes={"codes": (torch.uint8,)},
    check=_check_2bit,
)
dequantize_2bit_average_ = fused(
    compression.dequantize_2bit_average_,
    "(Tensor(a!) out, Tensor codes, Tensor weights, float threshold) -> ()",
    lambda out, codes, weights, threshold: native.average(
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


def _present(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


accumulate_ = fused(
    buckets.accumulate_,
    "(Tensor(a!) total, Tensor source, float weight) -> ()",
    lambda total, source, weight: native.flat("accumulate", [source, total], [weight]),
    dtypes={"source": PARAMETERS},
)


def _outer_merge(
    anchor: Tensor, momentum: Tensor, received: Tensor, sent: Tensor | None, lr: float, mu: float, nesterov: bool
) -> None:
    name = "outer_merge" if sent is None else "outer_merge_sent"
    native.flat(name, _present(received, anchor, momentum, sent), [lr, mu, float(nesterov)])


outer_merge_ = fused(
    buckets.outer_merge_,
    "(Tensor(a!) anchor, Tensor(b!) momentum, Tensor(c!) received, Tensor(d!)? sent, float lr, float mu, "
    "bool nesterov) -> ()",
    _outer_merge,
)


def _server(name: str, arrays: str, scalars: Callable[..., Sequence[float]]) -> Callable[..., None]:
    """Return a function that takes one optimizer step of a parameter server with the native library.

    Args:
        name: Name of the step in the library.
        arrays: Names of the step's tensor arguments, separated by spaces, in the order in which the library takes them.
        scalars: Function that computes the library's scalars from the step's other arguments.
    """
    keys = arrays.split()

    def run(reply: Tensor | None, whole: int, **given: Any) -> None:
        tensors = [given.pop(key) for key in keys]
        native.flat(name if reply is None else f"{name}_reply", [*tensors, *_present(reply)], scalars(**given), whole)

    return run


def _adam_scalars(
    step: int, lr: float, beta1: float, beta2: float, eps: float, scale: float, weight_decay: float, decoupled: bool
) -> list[float]:
    size, rest1, rest2, root = server.adam_scalars(step, lr, beta1, beta2)
    return [size, beta1, rest1, beta2, rest2, root, eps, scale, *server.decay_scalars(lr, weight_decay, decoupled)]


def _check_step(op: str, given: Arguments) -> None:
    if given["step"] < 1:
        raise ValueError(f"`{op}(step={given['step']})` counts from 1.")


_GRADIENT = {"gradient": PARAMETERS}
server_add_ = fused(
    server.server_add_,
    "(Tensor(a!) params, Tensor(b!)? reply, Tensor old_params, Tensor gradient, float weight, float decay=0.0, "
    "int whole=0) -> ()",
    _server("server_add", "gradient old_params params", lambda weight, decay: [weight, -decay]),
    dtypes=_GRADIENT,
)
server_sgd_ = fused(
    server.server_sgd_,
    "(Tensor(a!) params, Tensor(b!) momentum, Tensor(c!)? reply, Tensor old_params, Tensor old_momentum, "
    "Tensor gradient, float lr, float mu, bool nesterov, float scale=1.0, float weight_decay=0.0, "
    "int whole=0) -> ()",
    _server(
        "server_sgd",
        "gradient old_params old_momentum params momentum",
        lambda lr, mu, nesterov, scale, weight_decay: [lr, mu, float(nesterov), scale, weight_decay],
    ),
    dtypes=_GRADIENT,
)
server_dana_ = fused(
    server.server_dana_,
    "(Tensor(a!) params, Tensor(b!) momentum, Tensor(c!) total, Tensor(d!) ahead, Tensor(e!)? reply, "
    "Tensor old_params, Tensor old_momentum, Tensor old_total, Tensor gradient, float lr, float mu, float scale=1.0, "
    "int whole=0) -> ()",
    _server(
        "server_dana",
        "gradient old_params old_momentum old_total params momentum total ahead",
        lambda lr, mu, scale: [lr, mu, lr * mu, scale],
    ),
    dtypes=_GRADIENT,
)
server_adam_ = fused(
    server.server_adam_,
    "(Tensor(a!) params, Tensor(b!) first, Tensor(c!) second, Tensor(d!)? reply, Tensor old_params, Tensor old_first, "
    "Tensor old_second, Tensor gradient, int step, float lr, float beta1=0.9, float beta2=0.999, float eps=1e-08, "
    "float scale=1.0, float weight_decay=0.0, bool decoupled=False, int whole=0) -> ()",
    _server("server_adam", "gradient old_params old_first old_second params first second", _adam_scalars),
    dtypes=_GRADIENT,
    check=_check_step,
)

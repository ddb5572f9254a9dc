"""How a flat op is made of its reference: checks, the choice of the backend, a custom operator of torch around both."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from lightning_async.ops import native
from lightning_async.ops.checks import check_flat, check_no_grad

__all__ = ["Arguments", "eager", "fused", "num_peers"]

P = ParamSpec("P")
R = TypeVar("R")
Arguments = Mapping[str, Any]
_kernels: dict[Callable[..., Any], Callable[..., Any]] = {}


def fused(
    reference: Callable[P, R],
    schema: str,
    run: Callable[..., Any],
    *,
    dtypes: Mapping[str, tuple[torch.dtype, ...]] | None = None,
    check: Callable[[str, Arguments], Mapping[str, tuple[int, ...]] | None] | None = None,
) -> Callable[P, R]:
    """The op that ``reference`` specifies.

    Args:
        reference: equal results in plain torch; its name, signature and docstring become the op's.
        schema: of the custom operator; what it marks with ``!`` is written.
        run: the native library's way, with the same arguments.
        dtypes: of arguments that may be other than fp32.
        check: looks at the arguments' values, and returns the shapes of those that differ from the first one's.
    """
    name = reference.__name__
    by_torch: Callable[..., Any] = reference
    signature = inspect.signature(reference)
    names = tuple(signature.parameters)
    defaults = [parameter.default for parameter in signature.parameters.values()]
    num_required = defaults.count(inspect.Parameter.empty)
    written = [part.split()[1] for part in schema.partition(") ->")[0].split(",") if "!" in part]

    def bind(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        if not kwargs and num_required <= len(args) <= len(names):  # a fraction of the time of `signature.bind`
            return dict(zip(names, (*args, *defaults[len(args) :]), strict=True))
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = bind(args, kwargs)
        tensors = {key: value for key, value in given.items() if isinstance(value, Tensor)}
        shapes = check(name, given) if check is not None else None
        check_flat(name, tensors, written, dtypes or {}, shapes)
        fast = native.available(next(iter(tensors.values())).device)
        return run(**given) if fast else by_torch(**given)

    operator = torch.library.custom_op(f"lightning_async::{name}", kernel, mutates_args=written, schema=schema)
    operator.register_fake(lambda *args, **kwargs: None)

    @functools.wraps(reference)
    def op(*args: P.args, **kwargs: P.kwargs) -> R:
        given = bind(args, kwargs)
        if torch.is_grad_enabled():
            check_no_grad(name, {key: given[key] for key in written if given[key] is not None})
        return operator(*given.values())

    _kernels[op] = kernel
    return op


def eager(op: Callable[P, R]) -> Callable[P, R]:
    """The op without torch's dispatcher, for memory that neither autograd nor a compiler knows of.

    The dispatcher takes 60 microseconds for each call, and a second before the first one.
    """
    return _kernels[op]


def num_peers(op: str, rows: Tensor) -> int:
    """How many rows there are.

    Raises:
        ValueError: ``rows`` is no matrix, or has no row.
    """
    if rows.dim() != 2 or not len(rows):
        raise ValueError(f"`{op}` needs one row per peer and at least one, got shape {tuple(rows.shape)}.")
    return len(rows)

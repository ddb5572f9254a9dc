"""How a flat op is made of its reference: checks, the choice of the backend, a custom operator of torch around both."""

from __future__ import annotations

import functools
import inspect
import weakref
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
    """The op without torch's dispatcher, for memory that neither autograd nor a compiler knows of, and tensors that
    stay where they are: those that were found right together once are not looked at again.

    The dispatcher takes 60 microseconds for each call, and a second before the first one.
    """
    return _kernels[op]


class _Known:
    """Tensors that an op was called with, and that it takes together; they are forgotten with their end."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, ...], list[weakref.ref[Tensor]]] = {}

    def has(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether these are such."""
        found = self._seen.get(tuple(map(id, tensors.values())))
        return found is not None and all(ref() is each for ref, each in zip(found, tensors.values(), strict=True))

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """They are."""
        if len(self._seen) >= _MOST:
            self._seen.clear()
        self._seen[tuple(map(id, tensors.values()))] = [weakref.ref(each) for each in tensors.values()]


def num_peers(op: str, rows: Tensor) -> int:
    """How many rows there are.

    Raises:
        ValueError: ``rows`` is no matrix, or has no row.
    """
    if rows.dim() != 2 or not len(rows):
        raise ValueError(f"`{op}` needs one row per peer and at least one, got shape {tuple(rows.shape)}.")
    return len(rows)

"""What changes a store changes its copy on another server: the same methods, with the same arguments, in one order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import wraps
from inspect import signature
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

__all__ = ["Copying", "copied"]

P = ParamSpec("P")
R = TypeVar("R")


class Copying(Protocol):
    """Who keeps a store's copy."""

    @property
    def wanted(self) -> bool:
        """Whether there is one, or is to be."""
        ...

    def doing(self, method: str, arguments: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Around what is done to the store."""
        ...

    def begun(self) -> None:
        """The store has other weights, which have come of nothing before."""
        ...


class _Store(Protocol):
    copies: Copying | None


S = TypeVar("S", bound=_Store)


def copied(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method of a store that is done to its copy, too; memory that it fills is this side's."""
    takes = signature(method)

    @wraps(method)
    def do(store: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if store.copies is None or not store.copies.wanted:
            return method(store, *args, **kwargs)
        given = takes.bind(store, *args, **kwargs).arguments
        given.pop("self")
        with store.copies.doing(method.__name__, given):
            return method(store, *args, **kwargs)

    return do

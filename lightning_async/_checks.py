"""Checks of constructor arguments, which raise errors with one style of message, and of received bytes.

In each function that raises, ``owner`` is the class whose argument is checked (its name, or an object of the class),
and ``argument`` is the argument's name. Both appear in the error message.
"""

from __future__ import annotations

import json
import math
from datetime import timedelta
from typing import Any


def parse_json(data: bytes | None) -> Any:
    """Return the value of JSON text that anybody may have written; None if ``data`` is None, or no JSON.

    >>> parse_json(b'{"a": 1}'), parse_json(b"{"), parse_json(b"[" * 100_000)
    ({'a': 1}, None, None)
    """
    try:
        return None if data is None else json.loads(data)
    except (ValueError, RecursionError):
        return None


def check_choice(owner: str, argument: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise ValueError unless ``value`` equals one of ``allowed`` and has the same type as that one.

    1.0 and True are refused where 1 is allowed.
    """
    alike = [each for each in allowed if isinstance(value, type(each)) and not isinstance(value, bool)]
    if value not in alike:
        raise ValueError(f"`{owner}({argument}={value!r})` must be one of {allowed}.")


def check_bool(owner: str, argument: str, value: object) -> None:
    """Raise TypeError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"`{owner}({argument}={value!r})` must be True or False.")


def check_protocol(owner: str, argument: str, value: object, protocol: type, what: str) -> None:
    """Raise TypeError unless ``value`` is an object with all public members of ``protocol``.

    ``what`` says in the error message which objects are valid.
    """
    names = [name for name in {**protocol.__annotations__, **vars(protocol)} if not name.startswith("_")]
    lacks = [name for name in names if not hasattr(value, name)]
    shown = f"`{owner}({argument}={value!r})` must be {what}."
    if isinstance(value, type) or len(lacks) == len(names):
        raise TypeError(shown)
    if lacks:
        raise TypeError(f"{shown} Of what `{protocol.__name__}` asks for, {type(value).__name__} lacks {lacks}.")


def check_int(owner: object, argument: str, at_least: int) -> None:
    """Raise TypeError or ValueError unless an attribute of ``owner`` is an ``int`` of at least ``at_least``.

    ``argument`` is the name of the attribute. A ``bool`` does not count as an ``int``.
    """
    check_number(type(owner).__name__, argument, getattr(owner, argument), at_least)


def check_number(owner: str, argument: str, value: object, at_least: int) -> None:
    """Raise TypeError or ValueError unless ``value`` is an ``int`` (and not a ``bool``) of at least ``at_least``."""
    shown = f"`{owner}({argument}={value!r})`"
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{shown} must be an int, got {type(value).__name__}.")
    if value < at_least:
        raise ValueError(f"{shown} must be >= {at_least}.")


def check_time(owner: str, argument: str, value: object) -> None:
    """Raise TypeError or ValueError unless ``value`` is a ``timedelta`` above zero."""
    shown = f"`{owner}({argument}={value!r})`"
    if not isinstance(value, timedelta):
        raise TypeError(f"{shown} must be a timedelta.")
    if value <= timedelta(0):
        raise ValueError(f"{shown} must be > 0.")


def check_real(
    owner: object, argument: str, *, above: float | None = None, at_least: float | None = None, below: float = math.inf
) -> None:
    """Raise TypeError or ValueError unless an attribute of ``owner`` is a finite number within the bounds.

    Args:
        owner: Object with the attribute.
        argument: Name of the attribute.
        above: Bound that the number must exceed. Default: None, no such bound.
        at_least: Smallest allowed number. Default: None, no such bound.
        below: Bound that the number must not reach. Default: infinity.
    """
    value = getattr(owner, argument)
    shown = f"`{type(owner).__name__}({argument}={value!r})`"
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{shown} must be a number, got {type(value).__name__}.")
    if not math.isfinite(value):
        raise ValueError(f"{shown} must be finite.")
    if above is not None and not value > above:
        raise ValueError(f"{shown} must be > {above:g}.")
    if at_least is not None and not value >= at_least:
        raise ValueError(f"{shown} must be >= {at_least:g}.")
    if not value < below:
        raise ValueError(f"{shown} must be < {below:g}.")

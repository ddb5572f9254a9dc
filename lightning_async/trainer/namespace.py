"""The one place that chooses between ``lightning.pytorch`` and ``pytorch_lightning``.

Both hold the same code under different names, and objects of one do not work with the other. The one that the program
has imported first wins; else the one that is installed, ``lightning`` first. Where the program has imported both, the
other one's Trainer says why it cannot use this package, and what to do.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any, NoReturn

__all__ = ["check_object", "fabric", "name", "pl", "pytorch", "refuse_elsewhere"]

_NAMESPACES = ("lightning.pytorch", "pytorch_lightning")


def _choose() -> str:
    for module in list(sys.modules):  # in the order in which they were imported
        if module in _NAMESPACES:
            return module
    for candidate in _NAMESPACES:
        if importlib.util.find_spec(candidate.partition(".")[0]) is not None:
            return candidate
    raise ModuleNotFoundError(
        "lightning_async needs PyTorch Lightning: `pip install lightning` (or pytorch-lightning)."
    )


name = _choose()
"""``"lightning.pytorch"`` or ``"pytorch_lightning"``."""

_OTHER = next(each for each in _NAMESPACES if each != name)

pl = importlib.import_module(name)
"""The package itself."""


@functools.cache
def pytorch(module: str) -> ModuleType:
    """A module below ``lightning.pytorch`` (or ``pytorch_lightning``), by its path there."""
    return importlib.import_module(f"{name}.{module}")


@functools.cache
def fabric(module: str) -> ModuleType:
    """A module below ``lightning.fabric`` (or ``lightning_fabric``), by its path there."""
    root = "lightning.fabric" if name == "lightning.pytorch" else "lightning_fabric"
    return importlib.import_module(f"{root}.{module}")


def refuse_elsewhere(strategy: type, names: Iterable[str]) -> None:
    """Let the Trainer of the other namespace, where the program has imported it, name the cause of its refusal.

    Its registry holds the names, with a function that raises. It takes a strategy's class for one of its own, so that
    `check_object` is reached in place of "invalid strategy name".

    Args:
        strategy: a class of this package.
        names: under which it is registered.
    """
    other = sys.modules.get(f"{_OTHER}.strategies")
    if other is None:
        return

    def refuse(**_: Any) -> NoReturn:
        raise TypeError(_refusal(strategy.__name__))

    for each in names:
        other.StrategyRegistry.register(each, refuse, description=f"not from {_OTHER}", override=True)
    other.Strategy.register(strategy)


def check_object(owner: object, thing: object) -> None:
    """Refuse a Trainer, or a part of it, that is of the other namespace.

    Raises:
        TypeError: it is; says what to do.
    """
    roots = {"lightning"} if name == "pytorch_lightning" else {"pytorch_lightning", "lightning_fabric"}
    if any(kind.__module__.partition(".")[0] in roots for kind in type(thing).__mro__):
        raise TypeError(_refusal(type(owner).__name__))


def _refusal(owner: str) -> str:
    return (
        f"`{owner}` works with the Trainer of `{name}`, and was given to that of `{_OTHER}`. "
        "This program imports both, and the one that is imported first is taken. "
        f"Import `{_OTHER}` before everything else, or lightning_async right behind it; or use `{name}.Trainer`."
    )

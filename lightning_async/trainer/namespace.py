"""The one place that chooses between ``lightning.pytorch`` and ``pytorch_lightning``.

Both hold the same code under different names, and objects of one do not work with the other. The one that is
imported already wins; else the one that is installed, ``lightning`` first.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

__all__ = ["fabric", "name", "pl", "pytorch"]


def _choose() -> str:
    candidates = ("lightning.pytorch", "pytorch_lightning")
    for candidate in candidates:
        if candidate in sys.modules:
            return candidate
    for candidate in candidates:
        if importlib.util.find_spec(candidate.partition(".")[0]) is not None:
            return candidate
    raise ModuleNotFoundError(
        "lightning_async needs PyTorch Lightning: `pip install lightning` (or pytorch-lightning)."
    )


name = _choose()
"""``"lightning.pytorch"`` or ``"pytorch_lightning"``."""

pl = importlib.import_module(name)
"""The package itself."""


def pytorch(module: str) -> ModuleType:
    """A module below ``lightning.pytorch`` (or ``pytorch_lightning``), by its path there."""
    return importlib.import_module(f"{name}.{module}")


def fabric(module: str) -> ModuleType:
    """A module below ``lightning.fabric`` (or ``lightning_fabric``), by its path there."""
    root = "lightning.fabric" if name == "lightning.pytorch" else "lightning_fabric"
    return importlib.import_module(f"{root}.{module}")

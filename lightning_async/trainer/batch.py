"""How many samples a batch holds."""

from __future__ import annotations

import functools
import logging
from typing import Any

from lightning_async.trainer.namespace import pytorch

__all__ = ["batch_size"]

log = logging.getLogger(__name__)


def batch_size(batch: Any) -> float:
    """Samples in ``batch``, as Lightning counts them for its logs; 1 where it cannot tell."""
    try:
        return float(pytorch("utilities.data").extract_batch_size(batch))
    except Exception:  # Lightning raises what it likes on types that it does not know
        _warn(type(batch).__name__)
        return 1.0


@functools.cache
def _warn(kind: str) -> None:
    log.warning("The number of samples in a batch of type %s cannot be told; each counts as one sample.", kind)

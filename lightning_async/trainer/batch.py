"""How many samples a batch holds."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any

from lightning_async.trainer.namespace import pytorch

__all__ = ["batch_size", "counting", "pulled", "pulls"]

log = logging.getLogger(__name__)


def batch_size(batch: Any) -> float:
    """Samples in ``batch``, as Lightning counts them for its logs; 1 where it cannot tell."""
    try:
        return float(pytorch("utilities.data").extract_batch_size(batch))
    except Exception:  # Lightning raises what it likes on types that it does not know
        _warn(type(batch).__name__)
        return 1.0


def counting(owner: str, function: Callable[[Any], float]) -> Callable[[Any], float]:
    """Return a user's function of a batch as one that returns a finite number >= 0, or raises.

    Args:
        owner: the strategy's name, for messages.
        function: what a batch counts.
    """

    def count(batch: Any) -> float:
        counted = float(function(batch))
        if not 0.0 <= counted < math.inf:
            raise ValueError(
                f"`{owner}(weighting={function!r})` returned {counted} for a batch: a weight must be a number >= 0."
            )
        return counted

    return count


def pulls(module: Any) -> bool:
    """Whether `training_step` takes its batches from the loader by itself, so that nobody knows them before."""
    signature = pytorch("utilities.signature_utils")
    return signature.is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True)


def pulled(trainer: Any) -> Any:
    """The batch that such a `training_step` has taken last."""
    return trainer.fit_loop._data_fetcher._batch


@functools.cache
def _warn(kind: str) -> None:
    log.warning("The number of samples in a batch of type %s cannot be told; each counts as one sample.", kind)

"""How many samples a batch holds."""

from __future__ import annotations

import functools
import logging
from typing import Any

from lightning_async.trainer.namespace import pytorch

__all__ = ["batch_size", "pulled", "pulls"]

log = logging.getLogger(__name__)


def batch_size(batch: Any) -> float:
    """Samples in ``batch``, as Lightning counts them for its logs; 1 where it cannot tell."""
    try:
        return float(pytorch("utilities.data").extract_batch_size(batch))
    except Exception:  # Lightning raises what it likes on types that it does not know
        _warn(type(batch).__name__)
        return 1.0


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

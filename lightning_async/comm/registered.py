"""GPU memory that NCCL's communicators know, so that they move it without copies through buffers of their own."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

__all__ = ["RegisteredMemory"]

log = logging.getLogger(__name__)
_UNREGISTERED = "NCCL moves memory that it does not know, which may cost it a copy and more of the GPU: %s"


class RegisteredMemory:
    """A pool of memory from NCCL's allocator, registered with each communicator that is to move it.

    It outlives communicators: after a failure the next generation's are told of the same memory. Registering changes no
    result. Where torch, NCCL or the driver cannot, memory stays as it is, with one INFO line that says why.

    Source: "user buffer registration" in NCCL's user guide, through `torch.cuda.MemPool`.
    """

    def __init__(self) -> None:
        self._pool: Any = None

    def copy(self, pg: Any, buffer: Tensor) -> Tensor:
        """A copy of ``buffer`` in registered memory, or ``buffer`` itself where there can be none.

        Args:
            pg: torch's process group object, connected.
            buffer: on the group's device.
        """
        try:
            pool = self._pool or torch.cuda.MemPool(pg.mem_allocator)
            with torch.cuda.use_mem_pool(pool, buffer.device):
                out = torch.empty_like(buffer).copy_(buffer)
        except (RuntimeError, AttributeError) as error:
            log.info(_UNREGISTERED, error)
            return buffer
        self._pool = pool
        self.register(pg)
        return out

    def register(self, pg: Any) -> None:
        """Make a communicator know the pool, where there is one; what it knows already does no harm."""
        if self._pool is None:
            return
        try:
            pg.register_mem_pool(self._pool)
        except RuntimeError as error:
            log.info(_UNREGISTERED, error)

"""Settings that only NCCL needs: how its communicators connect, and memory that they know."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_async.comm.collectives import Where
from lightning_async.membership.store import Store

log = logging.getLogger(__name__)


_UNREGISTERED = "NCCL moves memory that it does not know, which may cost it a copy and more of the GPU: %s"
_VARIABLES = {
    # Timeouts are ours; torch's watchdog would end the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # When a peer breaks off, torch's watchdog would otherwise wait a minute for a dump that no default group writes,
    # and whoever destroys the group waits for the watchdog.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    # Connect when the group is formed: at its first use, the call would wait for the peers, and no deadline end it.
    "NCCL_RUNTIME_CONNECT": "0",
}


def set_variables() -> None:
    """Set what NCCL and torch read before the first communicator of this process, unless the user has set it."""
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)


def connect(store: Store, where: Where, timeout: timedelta, device: torch.device | None, max_ctas: int) -> Any:
    """Return torch's process group object, connected where ``device`` is given."""
    set_variables()
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.max_ctas = max_ctas
    group = dist.ProcessGroupNCCL(store, where.rank, where.world_size, options)
    if device is not None:
        group.eager_connect_single_device(device)
    return group


class RegisteredMemory:
    """A pool of memory from NCCL's allocator, registered with each communicator that is to move it: without copies.

    It outlives communicators: after a failure the next generation's are told of the same memory. Registering changes no
    result. Where torch, NCCL or the driver cannot, memory stays as it is, with one INFO line that says why.

    Source: "user buffer registration" in NCCL's user guide, through `torch.cuda.MemPool`.
    """

    def __init__(self) -> None:
        self._pool: Any = None

    def copy(self, pg: Any, buffer: Tensor) -> Tensor:
        """Return a copy of ``buffer`` in memory registered with ``pg``, or itself where there can be none."""
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

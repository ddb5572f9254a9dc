"""Settings that only NCCL needs: how its communicators connect, and memory that is registered with them."""

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


_UNREGISTERED = "NCCL moves memory that is not registered with it, which may cost a copy and more of the GPU: %s"
_VARIABLES = {
    # This package has timeouts of its own; torch's watchdog would end the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # When a peer breaks off, torch's watchdog would otherwise wait a minute for a dump that no default group writes,
    # and destroying the group waits for the watchdog.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    # Connect when the group is formed: a connection at the first use would wait for peers without a deadline.
    "NCCL_RUNTIME_CONNECT": "0",
}


def set_variables() -> None:
    """Set variables that NCCL and torch read before a process's first communicator, unless the user has."""
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)


def connect(store: Store, where: Where, timeout: timedelta, device: torch.device | None, max_ctas: int) -> Any:
    """Return torch's NCCL process group for the communicator ``where``, connected at once if ``device`` is given."""
    set_variables()
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.max_ctas = max_ctas
    group = dist.ProcessGroupNCCL(store, where.rank, where.world_size, options)
    if device is not None:
        group.eager_connect_single_device(device)
    return group


class RegisteredMemory:
    """A pool of memory from NCCL's allocator that is registered with each communicator that moves it, to save copies.

    The pool outlives communicators: after a failure, it is registered with those of the next generation. Registration
    changes no result. If torch, NCCL or the driver does not support it, buffers stay in ordinary memory, and one INFO
    line says why.

    Source: "user buffer registration" in NCCL's user guide, through `torch.cuda.MemPool`.
    """

    def __init__(self) -> None:
        self._pool: Any = None

    def copy(self, pg: Any, buffer: Tensor) -> Tensor:
        """Return a copy of ``buffer`` in memory registered with ``pg``; ``buffer`` itself if registration fails."""
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
        """Register the pool with a communicator, if there is a pool; repeated registration does no harm."""
        if self._pool is None:
            return
        try:
            pg.register_mem_pool(self._pool)
        except RuntimeError as error:
            log.info(_UNREGISTERED, error)

"""Collectives for tensors of a GPU, over a transport that moves memory of the host only."""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from lightning_async.comm.collectives import (
    CommunicatorWrapper,
    ElasticCollectives,
    Pending,
    ReduceOp,
    check_buffer,
    check_rows,
    room_for,
)
from lightning_async.membership.generation import Generation

T = TypeVar("T")


class StagedCollectives(CommunicatorWrapper):
    """An `ElasticCollectives` that moves a device's tensors through pinned memory of the host.

    The GPU's copy engines make the copies, in the order of the current stream, so a thread that uses a stream of its
    own does not delay other threads. Submitting an operation blocks until its tensor has been copied to the host. The
    copy of the result to the device is queued when the result is taken.

    Args:
        inner: Collectives for host memory. Nothing else may use them.
        device: Device of the tensors.
    """

    def __init__(self, inner: ElasticCollectives, device: torch.device) -> None:
        self.inner: Any = inner
        self.device = device

    def all_reduce(self, buffer: Tensor, op: ReduceOp = ReduceOp.SUM) -> Pending[Tensor]:
        return self._in_place(buffer, lambda host: self.inner.all_reduce(host, op))

    def broadcast(self, buffer: Tensor, src: int = 0) -> Pending[Tensor]:
        return self._in_place(buffer, lambda host: self.inner.broadcast(host, src))

    def all_gather(self, buffer: Tensor, out: Tensor | None = None) -> Pending[Tensor]:
        out = room_for(buffer, self.world_size, out)
        return self._anew(buffer, lambda host: self.inner.all_gather(host, self._host_namespace(out)), out)

    def all_to_all(self, buffer: Tensor, out: Tensor | None = None) -> Pending[Tensor]:
        check_rows(buffer, self.world_size)
        out = room_for(buffer[0], self.world_size, out)
        return self._anew(buffer, lambda host: self.inner.all_to_all(host, self._host_namespace(out)), out)

    def barrier(self) -> Pending[None]:
        return self.inner.barrier()

    def fork(self, name: str, timeout: timedelta | None = None) -> StagedCollectives:
        return StagedCollectives(self.inner.fork(name, timeout), self.device)

    def split(self, ranks: Collection[int], name: str, timeout: timedelta | None = None) -> StagedCollectives | None:
        inner = self.inner.split(ranks, name, timeout)
        return None if inner is None else StagedCollectives(inner, self.device)

    def registered(self, buffer: Tensor) -> Tensor:
        return buffer

    def open(self) -> None:
        self.inner.open()

    def reconfigure(self, generation: Generation) -> None:
        self.inner.reconfigure(generation)

    def abort(self) -> None:
        self.inner.abort()

    def close(self) -> None:
        self.inner.close()

    def _in_place(self, buffer: Tensor, operation: Callable[[Tensor], Pending[Tensor]]) -> Pending[Tensor]:
        return _Landing(operation(self._to_host(buffer)), lambda host: _back(buffer, host))

    def _anew(self, buffer: Tensor, operation: Callable[[Tensor], Pending[Tensor]], out: Tensor) -> Pending[Tensor]:
        return _Landing(operation(self._to_host(buffer)), lambda host: _back(out, host))

    def _to_host(self, buffer: Tensor) -> Tensor:
        check_buffer(buffer)
        host = self._host_namespace(buffer)
        # Queued on the current stream, after the kernels that compute the buffer.
        host.copy_(buffer.detach(), non_blocking=True)
        if self.device.type == "cuda":
            copied = torch.cuda.Event(blocking=True)  # otherwise the wait would keep a core busy
            copied.record(torch.cuda.current_stream(self.device))
            copied.synchronize()
        return host

    def _host_namespace(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=self.device.type == "cuda")


def _back(device: Tensor, host: Tensor) -> Tensor:
    device.detach().copy_(host, non_blocking=True)
    return device


class _Landing(Generic[T]):
    """An operation whose result is copied back to the device when it is first taken."""

    def __init__(self, inner: Pending[T], land: Callable[[T], T]) -> None:
        self._inner = inner
        self._land = land
        self._landed: list[T] = []

    def done(self) -> bool:
        return self._inner.done()

    def wait(self, timeout: timedelta) -> bool:
        return self._inner.wait(timeout)

    def result(self, timeout: timedelta | None = None) -> T:
        value = self._inner.result(timeout)
        # Several callers may take the result, but it is copied back once.
        if not self._landed:
            self._landed.append(self._land(value))
        return self._landed[0]

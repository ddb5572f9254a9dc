"""Large copies within the host's memory, by several threads, see `engine.pieces`."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_async.engine.parallel import share_out

__all__ = ["LARGE", "copy_", "uncollected"]

PIECE = 4 << 20
"""Bytes that a thread copies at a time: so much may be waited for at the end."""
LARGE = 32 << 20
"""Bytes from which on a second thread is worth its start."""
_MOST = 4  # threads; more do not make the memory faster


def copy_(views: Sequence[Tensor], tensors: Sequence[Tensor], non_blocking: bool = False) -> None:
    """Copy ``tensors`` into contiguous ``views`` of their shapes and dtypes in the host's memory.

    Args:
        views: to be written.
        tensors: of any device, contiguous or not.
        non_blocking: copies from devices may arrive later. Default: False.
    """
    by_torch: list[int] = []
    pieces: list[tuple[int, int, int]] = []
    for i, (view, tensor) in enumerate(zip(views, tensors, strict=True)):
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            by_torch.append(i)
            continue
        to, source, size = view.data_ptr(), tensor.data_ptr(), tensor.nbytes
        pieces.extend((to + at, source + at, min(PIECE, size - at)) for at in range(0, size, PIECE))
    with torch.no_grad():
        if by_torch:
            torch._foreach_copy_([views[i] for i in by_torch], [tensors[i] for i in by_torch], non_blocking)
    threads = min(_MOST, max(2, torch.get_num_threads()), os.cpu_count() or 1)
    if sum(size for _, _, size in pieces) < LARGE:
        threads = 1
    share_out(lambda piece: ctypes.memmove(*piece), pieces, threads)  # without the interpreter's lock


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without garbage collection: the many small objects that describe a state set it off, for longer than the copy."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

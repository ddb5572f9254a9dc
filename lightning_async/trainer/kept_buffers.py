"""Buffers as they were at a safe point: a forward pass changes them, long before a step does parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["KeptBuffers"]

SMALL = 1 << 16
"""Bytes; what is smaller is copied each time, for BatchNorm's kernels do not count what they write."""

_Place = tuple[dict[str, Any], str]
"""A module's buffers, and the name of one there."""


class KeptBuffers:
    """Copies of a module's buffers; of large ones, from when they are seen to change.

    Args:
        module: to be followed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._copies: dict[str, Tensor] = {}
        self._seen: dict[str, tuple[Tensor, int | None]] = {}
        """Large ones, and how many writes each had counted."""

    @torch.no_grad()
    def keep(self) -> None:
        """As they are now."""
        copies, old, new = {}, [], []
        for name, buffer in self._module.named_buffers():
            if buffer.nbytes > SMALL and not self._moves(name, buffer):
                if name in self._copies:
                    copies[name] = self._copies[name]
                continue
            copy = self._copies.get(name)
            if copy is None or copy.shape != buffer.shape or copy.dtype != buffer.dtype or copy.device != buffer.device:
                copies[name] = buffer.detach().clone()
            else:
                copies[name] = copy
                old.append(copy)
                new.append(buffer)
        if old:
            torch._foreach_copy_(old, new)
        self._copies = copies

    def _moves(self, name: str, buffer: Tensor) -> bool:
        """Whether it has changed since the last time; not at the first."""
        version = None if buffer.is_inference() else buffer._version
        seen = self._seen.get(name)
        self._seen[name] = buffer, version
        return seen is not None and (seen[0] is not buffer or version is None or seen[1] != version)

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Inside, the module has the copies in their place."""
        live: list[tuple[dict[str, Any], str, Tensor]] = []
        for name, copy in self._copies.items():
            path, _, last = name.rpartition(".")
            buffers = self._module.get_submodule(path)._buffers
            if isinstance(now := buffers.get(last), Tensor):
                live.append((buffers, last, now))
                buffers[last] = copy
        try:
            yield
        finally:
            for buffers, last, now in live:
                buffers[last] = now

"""Buffers as they were at a safe point: a forward pass changes them, long before a step does parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

__all__ = ["KeptBuffers"]

SMALL = 1 << 16
"""Bytes; what is smaller is copied each time, for BatchNorm's kernels do not count what they write."""


class KeptBuffers:
    """Copies of a module's buffers; of large ones, from when they are seen to change.

    Args:
        module: to be followed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._owners: list[tuple[str, dict[str, Tensor | None]]] = []
        self._copies: dict[str, Tensor] = {}
        self._seen: dict[str, tuple[Tensor, int | None]] = {}
        """Large ones, and how many writes each had counted."""

        self.look()

    def look(self) -> None:
        """Look for modules with buffers."""
        modules = self._module.named_modules()
        self._owners = [(f"{path}." if path else "", each._buffers) for path, each in modules if each._buffers]

    @torch.no_grad()
    def keep(self) -> None:
        """As they are now."""
        copies, old, new = {}, [], []
        for name, buffer in self._all():
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
        live = [dict(buffers) for _, buffers in self._owners]
        for path, buffers in self._owners:
            buffers.update({name: self._copies.get(path + name, now) for name, now in buffers.items()})
        try:
            yield
        finally:
            for (_, buffers), now in zip(self._owners, live, strict=True):
                buffers.update(now)

    def _all(self) -> list[tuple[str, Tensor]]:
        return [
            (path + name, buffer)
            for path, buffers in self._owners
            for name, buffer in buffers.items()
            if buffer is not None
        ]

"""Order between the training thread's CUDA stream and the engine's. Nothing, where the buckets are on the CPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = ["Handover", "side_stream"]


class Handover:
    """Passes buckets from the work queued on one thread's stream to another's, without stopping either.

    Args:
        device: of the buckets.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: Any = None

    def give(self) -> None:
        """What this thread's stream holds by now comes first."""
        if self._device.type == "cuda":
            self._event = torch.cuda.current_stream(self._device).record_event()

    def take(self, *tensors: Tensor) -> None:
        """What this thread's stream does from now on comes after; ``tensors`` live for as long as it uses them."""
        if self._event is None:
            return
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._event)
        for tensor in tensors:
            tensor.record_stream(stream)


def side_stream(device: torch.device) -> AbstractContextManager[object]:
    """A stream beside the training's, for the engine's thread."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()

"""Sums of which only the elements of largest magnitude travel."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_async import ops
from lightning_async.engine.transfer import Transfer
from lightning_async.flat import FlatLayout

__all__ = ["TopKSum"]

_LARGEST_PART = 1 << 30
"""Bytes: places in a part are numbers of 32 bits."""


class TopKSum:
    """See `CompressedSum`: every rank gathers all ranks' largest elements, and adds them up in the order of ranks.

    Args:
        fraction: of the elements of each part.
        numel: of what is added up.
        transfer: moves them.
    """

    def __init__(self, fraction: float, numel: int, transfer: Transfer) -> None:
        self._fraction, self._numel, self._transfer = fraction, numel, transfer

    def move_(self, out: Tensor, present: bool, residual: Tensor) -> None:
        part_bytes = self._part_bytes
        for part, rest in zip(FlatLayout.parts(out, part_bytes), FlatLayout.parts(residual, part_bytes), strict=True):
            count = math.ceil(self._fraction * len(part))
            values, places = out.new_zeros(count), torch.arange(count, device=out.device)
            if present:
                ops.topk_(values, places, part, rest)
            large = self._transfer.large
            pending = large.all_gather(values), large.all_gather(places.int())
            everyones, where = (self._transfer.result(each) for each in pending)
            part.zero_()
            for row, row_places in zip(everyones, where.long(), strict=True):
                ops.topk_accumulate_(part, row, row_places, 1.0)

    @property
    def _part_bytes(self) -> int:
        return min(self._transfer.part_bytes, _LARGEST_PART)

    @property
    def message_bytes(self) -> int:
        """A value and a place for each element that travels."""
        whole, rest = divmod(self._numel, self._part_bytes // 4)
        return 8 * (whole * math.ceil(self._fraction * (self._part_bytes // 4)) + math.ceil(self._fraction * rest))

    def commit(self) -> None:
        """Nothing but the residual is kept."""

"""The mean of all replicas' messages, moved as codes: half or a quarter of the bytes, and nothing is lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_async import ops
from lightning_async.comm.protocols import Collectives, Pending
from lightning_async.flat import FlatLayout

__all__ = ["CODES", "CompressedMean", "Compression"]

log = logging.getLogger(__name__)

Compression = Literal["none", "bf16", "fp8", "int8"]
CODES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
_GATHERED = 4
"""Up to so many ranks everyone gets every message: fewer bytes than an uncompressed ring moves, and one trip less."""
_BLOCK = ops.BLOCK


class CompressedMean:
    r"""Compressed messages whose error each replica keeps, and brings along with its next message.

    .. math:: q_i = \mathrm{decode}(\mathrm{encode}(u_i)), \qquad \bar q = \sum_i w_i q_i

    The message :math:`u_i` is overwritten by :math:`q_i`: the replica then counts as one that stood where :math:`q_i`
    says, and moves by the displacement from there. What the codes could not hold, :math:`u_i - q_i`, so stays in its
    parameters and is part of its next message. That is error feedback without a buffer for the error: the mean over
    replicas moves as if nothing had been rounded, and nothing has to be kept in step when a round fails.

    Up to four ranks every rank gathers all messages and averages them. Beyond, each rank receives its part of all
    messages, averages that, encodes it again for all, and owes its part's rounding error to the next round.

    Args:
        collectives: moves the codes.
        result: waits for one operation.
        compression: "int8" or "fp8" with a scale per 256 elements, or "bf16".
        numel: elements of a message.
        part_bytes: codes move in parts of at most this size.
        device: where the messages are.

    Source: error feedback as in Karimireddy et al., 2019, https://arxiv.org/abs/1901.09847; the second encoding as in
    Tang et al., "DoubleSqueeze", 2019, https://arxiv.org/abs/1905.05957
    """

    def __init__(
        self,
        collectives: Collectives,
        result: Callable[[Pending[Tensor]], Tensor],
        compression: Compression,
        numel: int,
        part_bytes: int,
        device: torch.device,
    ) -> None:
        self._collectives, self._result = collectives, result
        self._world_size = collectives.world_size
        self._dtype = CODES[compression]
        self._gathered = self._world_size <= _GATHERED
        self._part = max(_BLOCK, part_bytes // self._dtype.itemsize)
        sizes = [min(self._part, numel - start) for start in range(0, numel, self._part)]
        widths = [] if self._gathered else [self._width(size) for size in sizes]
        room = max(self._world_size * width for width in widths) if widths else max(sizes, default=0)
        self._codes = torch.zeros(room, dtype=self._dtype, device=device)
        self._scales = torch.zeros(_blocks(room), device=device)
        self._own = torch.ones(1, device=device)
        self.owed = torch.zeros(sum(widths), device=device)
        """What this rank's part of the means has lost to their encoding and the next ones will bring."""
        self.message_bytes = numel * self._dtype.itemsize + self._scaled * 4 * sum(map(_blocks, sizes))

    @property
    def _scaled(self) -> bool:
        return self._dtype is not torch.bfloat16

    def _width(self, numel: int) -> int:
        """Elements of each rank's part of ``numel``: whole blocks."""
        return _blocks(-(-numel // self._world_size)) * _BLOCK

    def move_(self, out: Tensor, message: Tensor | None, weights: Sequence[float]) -> Tensor:
        """The weighted mean of all ranks' messages into ``out``, the same bits everywhere.

        Args:
            out: flat fp32; overwritten.
            message: this rank's, flat fp32, finite; overwritten by what its codes decode to. None: it has none.
            weights: every rank's; zero for one without a message.

        Returns:
            What `owed` becomes when the round commits.
        """
        shares = torch.tensor(weights, dtype=torch.float32, device=out.device)
        owed, start = self.owed.clone(), 0
        for i, part in enumerate(FlatLayout.parts(out, 4 * self._part)):
            mine = None if message is None else message[i * self._part :][: len(part)]
            if self._gathered:
                self._encode(part, mine, len(part))
                peers = self._move(self._collectives.all_gather, len(part), (len(part),))
                ops.dequantize_average_(part, *peers, shares)
            else:
                width = self._width(len(part))
                self._average_a_part(part, mine, shares, owed[start : start + width])
                start += width
        return owed

    def _average_a_part(self, part: Tensor, message: Tensor | None, shares: Tensor, owed: Tensor) -> None:
        """Each rank averages its own columns of all messages, and everyone gathers the averages."""
        width, room = len(owed), self._world_size * len(owed)
        self._encode(part, message, room)
        peers = self._move(self._collectives.all_to_all, room, (self._world_size, width))
        codes, scales = self._views(width, (width,))
        ops.requantize_average_(codes, scales, owed, *peers, shares)
        codes, scales = self._move(self._collectives.all_gather, width, (width,))
        codes = codes.view(1, -1)[:, : len(part)]
        if scales is not None:
            scales = scales.view(1, -1)[:, : _blocks(len(part))]
        ops.dequantize_average_(part, codes, scales, self._own)

    def _encode(self, part: Tensor, message: Tensor | None, room: int) -> None:
        """The first ``room`` codes, of the message and then zeros; the message becomes what they decode to."""
        numel = len(part) if message is not None else 0
        codes, scales = self._views(room, (room,))
        codes[numel:].view(torch.uint8).zero_()
        if scales is not None:
            scales[_blocks(numel) :].zero_()
        if message is None:
            return
        codes, scales = self._views(numel, (numel,))
        part.zero_()
        ops.quantize_(codes, scales, part, message)  # leaves in the message what the codes lack
        ops.dequantize_average_(message, codes[None], None if scales is None else scales[None], self._own)

    def _views(self, numel: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """The first ``numel`` codes in this shape, and their scales."""
        scales = self._scales[: _blocks(numel)].view(*shape[:-1], -1) if self._scaled else None
        return self._codes[:numel].view(shape), scales

    def _move(
        self, operation: Callable[[Tensor], Pending[Tensor]], numel: int, shape: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Move the first ``numel`` codes and their scales; both are under way at once."""
        pending = [operation(each) for each in self._views(numel, shape) if each is not None]
        moved = [self._result(each) for each in pending]
        return moved[0], moved[1] if self._scaled else None

    def state_dict(self) -> dict[str, Tensor]:
        """What is this rank's own, for a checkpoint."""
        return {"owed": self.owed} if self.owed.numel() else {}

    def load_state_dict(self, saved: dict[str, Tensor]) -> None:
        """Go on from there; what was owed in another division of the messages is dropped."""
        owed = saved.get("owed", self.owed.new_empty(0))
        if owed.shape != self.owed.shape:
            log.warning(
                "The checkpoint's compressed means were divided otherwise (number of replicas, `part_mb`, "
                "`compression`): the rounding error of the last one is dropped."
            )
            return
        self.owed.copy_(owed)


def _blocks(numel: int) -> int:
    return -(-numel // _BLOCK)

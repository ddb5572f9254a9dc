"""The mean of all replicas' messages, moved as codes or by their largest elements: fewer bytes, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from lightning_async import ops
from lightning_async.comm.collectives import Collectives, Pending
from lightning_async.flat import FlatLayout

Compression = Literal["none", "bf16", "fp8", "int8"]
CODES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
_GATHERED = 4
"""Up to so many ranks everyone gets every message: fewer bytes than an uncompressed ring moves, and one trip less."""
Rows = tuple[Tensor, Tensor | None]  # codes, and the scales of their blocks: none for bf16


class CompressedMean:
    r"""Compressed messages whose error each replica keeps, and brings along with its next message.

    .. math:: q_i = \mathrm{decode}(\mathrm{encode}(u_i)), \qquad \bar q = \sum_i w_i q_i

    The message :math:`u_i` is overwritten by :math:`q_i`: the replica then counts as one that stood where :math:`q_i`
    says, and moves by the displacement from there. The rest, :math:`u_i - q_i`, stays in its parameters and is part of
    its next message: error feedback without a buffer, and with nothing to keep in step when a round fails. Gradients
    have no parameters to stay in: their errors go into a ``residual``, and the message is left as it is.

    Codes are "int8" or "fp8" with a scale per 256 elements, or "bf16". Up to four ranks every rank gathers all messages
    and averages them. Beyond, each rank receives its part of all messages, averages that and encodes it again for all;
    the next round brings its part's rounding error, unless a sync point ends it.

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
        self._collectives = collectives
        self._result = result
        self.world_size = collectives.world_size  # of the generation that this has room for
        self._dtype = CODES[compression]
        self._gathered = self.world_size <= _GATHERED
        self._part = max(ops.BLOCK, part_bytes // self._dtype.itemsize)
        sizes = [min(self._part, numel - start) for start in range(0, numel, self._part)]
        widths = [] if self._gathered else [self._width(size) for size in sizes]
        room = max(self.world_size * width for width in widths) if widths else max(sizes, default=0)
        self._sent = _CodeMemory(1, room, self._dtype, device)
        self._received = _CodeMemory(self.world_size if self._gathered else 1, room, self._dtype, device)
        self._own = torch.ones(1, device=device)
        self.carried_residual = torch.zeros(sum(widths), device=device)
        """The loss of this rank's part of the means to their encoding, which the next ones will bring."""
        scales = 0 if self._dtype is torch.bfloat16 else sum(map(ops.blocks, sizes))
        self.message_bytes = numel * self._dtype.itemsize + 4 * scales

    def _width(self, numel: int) -> int:
        return ops.blocks(-(-numel // self.world_size)) * ops.BLOCK

    def move_(
        self, out: Tensor, message: Tensor | None, weights: Sequence[float], residual: Tensor | None = None
    ) -> Tensor:
        """Put the weighted mean of all ranks' messages into ``out``, flat fp32, the same bits everywhere.

        Args:
            message: this rank's, finite; overwritten by what its codes decode to. None: it has none. With a residual it
                is left as it is, and may be ``out``.
            weights: every rank's; zero for one without a message.
            residual: added to the message; becomes what of both, and of this rank's part of the means, is yet to be
                delivered. With weights of 1, sum and residuals together are what they were.

        Returns the next `carried_residual`, for when the round commits; zeros with a residual.
        """
        shares = torch.tensor(weights, dtype=torch.float32, device=out.device)
        carried_residual = self.carried_residual.clone()
        start = 0
        for i, part in enumerate(FlatLayout.parts(out, 4 * self._part)):
            here = slice(i * self._part, i * self._part + len(part))
            mine, rest = (None if each is None else each[here] for each in (message, residual))
            if self._gathered:
                self._average(part, mine, shares, rest)
            else:
                width = self._width(len(part))
                debt = carried_residual[start : start + width]
                self._average_by_columns(part, mine, shares, debt, rest)
                if rest is not None:
                    columns = rest[self._collectives.rank * width :][:width]
                    columns.add_(debt[: len(columns)])
                    debt.zero_()
                start += width
        return carried_residual

    def _average(self, part: Tensor, message: Tensor | None, shares: Tensor, residual: Tensor | None) -> None:
        self._encode(part, message, len(part), residual)
        peers = self._received.rows(self.world_size, len(part))
        self._move(self._collectives.all_gather, self._sent.row(len(part)), peers)
        ops.dequantize_average_(part, *peers, shares)

    def _average_by_columns(
        self, part: Tensor, message: Tensor | None, shares: Tensor, carried_residual: Tensor, residual: Tensor | None
    ) -> None:
        """Average this rank's own columns of all messages, and gather all averages."""
        width = len(carried_residual)
        self._encode(part, message, self.world_size * width, residual)
        peers = self._received.rows(self.world_size, width)
        average = self._sent.row(width)
        self._move(self._collectives.all_to_all, self._sent.rows(self.world_size, width), peers)
        ops.requantize_average_(*average, carried_residual, *peers, shares)
        self._move(self._collectives.all_gather, average, peers)
        ops.dequantize_average_(part, *self._received.rows(1, len(part)), self._own)

    def _encode(self, part: Tensor, message: Tensor | None, room: int, residual: Tensor | None) -> None:
        """Encode ``room`` elements, the message and then zeros; without a residual it becomes their decoding."""
        numel = len(part) if message is not None else 0
        codes, scales = self._sent.row(room)
        codes[numel:].view(torch.uint8).zero_()
        if scales is not None:
            scales[ops.blocks(numel) :].zero_()
        if message is not None and residual is not None:
            ops.quantize_(*self._sent.row(numel), message, residual)
        elif message is not None:
            ops.quantize_(*self._sent.row(numel), message, part.zero_())
            ops.dequantize_average_(message, *self._sent.rows(1, numel), self._own)

    def _move(self, operation: Callable[[Tensor, Tensor], Pending[Tensor]], mine: Rows, out: Rows) -> None:
        pending = [operation(a, b) for a, b in zip(mine, out, strict=True) if a is not None and b is not None]
        for each in pending:
            self._result(each)


class SparseCode(Protocol):
    """An encoding of a part of a message, such as `TopK`."""

    def message_bytes(self, numel: int) -> int: ...

    def encode_(self, message: Tensor, source: Tensor, residual: Tensor) -> None: ...

    def add_(self, out: Tensor, message: Tensor, weight: float = 1.0) -> None: ...


class SparseMean:
    r"""A `CompressedMean` of messages of which a part travels, from every rank to all, which average them.

    .. math:: q_i = \mathrm{C}(u_i), \qquad \bar q = \sum_i w_i q_i

    What :math:`q_i` lacks stays where it does there. A message that is encoded again, as after a failure, is the same.

    Source: Stich et al., "Sparsified SGD with Memory", 2018, https://arxiv.org/abs/1809.07599
    """

    def __init__(
        self,
        collectives: Collectives,
        result: Callable[[Pending[Tensor]], Tensor],
        code: SparseCode,
        numel: int,
        part_bytes: int,
        device: torch.device,
    ) -> None:
        self._collectives = collectives
        self._result = result
        self._code = code
        self._part_bytes = part_bytes
        self.world_size = collectives.world_size
        self.carried_residual = torch.zeros(0, device=device)
        """Nothing: every rank averages what all have sent."""
        part = max(1, part_bytes // 4)
        whole, rest = divmod(numel, part)
        self.message_bytes = whole * code.message_bytes(part) + code.message_bytes(rest)

    def move_(
        self, out: Tensor, message: Tensor | None, weights: Sequence[float], residual: Tensor | None = None
    ) -> Tensor:
        """Put the weighted mean of all ranks' messages into ``out``; see `CompressedMean.move_`."""
        start = 0
        for part in FlatLayout.parts(out, self._part_bytes):
            here = slice(start, start + len(part))
            start = here.stop
            own = torch.zeros(self._code.message_bytes(len(part)), dtype=torch.uint8, device=out.device)
            if message is not None and residual is not None:
                self._code.encode_(own, message[here], residual[here])
            elif message is not None:
                self._code.encode_(own, message[here], part.zero_())
                self._code.add_(message[here].zero_(), own)
            everyones = self._result(self._collectives.all_gather(own))
            part.zero_()
            for row, weight in zip(everyones, weights, strict=True):
                if weight:
                    self._code.add_(part, row, weight)
        return self.carried_residual


def mean_of(
    collectives: Collectives,
    result: Callable[[Pending[Tensor]], Tensor],
    compression: Compression | SparseCode,
    numel: int,
    part_bytes: int,
    device: torch.device,
) -> CompressedMean | SparseMean:
    """Return the mean of messages of ``numel`` elements that are compressed in this way."""
    if isinstance(compression, str):
        return CompressedMean(collectives, result, compression, numel, part_bytes, device)
    return SparseMean(collectives, result, compression, numel, part_bytes, device)


class _CodeMemory:
    """Memory for so many rows of codes and, but for bf16, one scale per block."""

    def __init__(self, count: int, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._codes = torch.zeros(count * numel, dtype=dtype, device=device)
        self._scales = None if dtype is torch.bfloat16 else torch.zeros(count * ops.blocks(numel), device=device)

    def rows(self, count: int, numel: int) -> Rows:
        codes = self._codes[: count * numel].view(count, numel)
        return codes, None if self._scales is None else self._scales[: count * ops.blocks(numel)].view(count, -1)

    def row(self, numel: int) -> Rows:
        codes, scales = self.rows(1, numel)
        return codes[0], None if scales is None else scales[0]

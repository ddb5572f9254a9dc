"""The mean of all replicas' messages, sent compressed: as codes of 8 or 16 bits, or as their largest elements only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from lightning_async import ops
from lightning_async.comm.collectives import Collectives, Pending

Compression = Literal["none", "bf16", "fp8", "int8"]
CODES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
_GATHERED = 2
"""Up to this many ranks each rank gathers all messages: as few bytes as by columns, one trip less, encoded once."""
Result = Callable[[Pending[Tensor]], Tensor]  # waits for one part of a payload, see `Transfer.result`
Rows = tuple[Tensor, Tensor | None]  # codes, and the scale of each block; bf16 has no scales


class CompressedMean(ABC):
    r"""A mean of compressed messages, with error feedback: each replica sends the error with its next message.

    .. math:: q_i = \mathrm{C}(u_i), \qquad \bar q = \sum_i w_i q_i

    :math:`u_i` is the message of replica :math:`i`, and :math:`q_i` is what the other ranks decode from its compressed
    form. For parameters, the message is overwritten by :math:`q_i`. The replica then adds the difference between the
    mean and :math:`q_i` to its parameters. So the error :math:`u_i - q_i` stays in its parameters and becomes part of
    its next message. This is error feedback without a buffer, and a round that fails leaves nothing to undo. Gradients
    do not stay anywhere, so their errors are added to a ``residual``, and the message is not changed.

    Messages are sent in parts of the given ``sizes``. In each part, this rank averages and encodes ``num_carried``
    elements of the mean for all others. This second encoding has errors, too: they are added to the ``residual``, or,
    if there is none, to `carried_residual`.

    Source: Karimireddy et al., "Error Feedback Fixes SignSGD", 2019, https://arxiv.org/abs/1901.09847
    """

    message_bytes: int  # size of this rank's message on the wire

    def __init__(
        self, collectives: Collectives, result: Result, sizes: list[int], num_carried: list[int], device: torch.device
    ) -> None:
        self._collectives = collectives
        self._result = result
        self._sizes = sizes
        self._num_carried = num_carried
        self.world_size = collectives.world_size  # ranks of the generation that this mean was made for
        self.carried_residual = torch.zeros(sum(num_carried), device=device)
        """The error of encoding this rank's part of the mean, which the next mean adds."""

    def move_(
        self, out: Tensor, message: Tensor | None, weights: Sequence[float], residual: Tensor | None = None
    ) -> Tensor:
        """Put the weighted mean of all ranks' messages into ``out``, with the same bits on every rank.

        All ranks call this together.

        Args:
            out: Flat fp32 tensor for the mean.
            message: Message of this rank, finite, or None if it has none. Without a
                ``residual``, it is overwritten by its decoded values. With a ``residual`` it is only read, and may be
                the same tensor as ``out``.
            weights: Weight of each rank; zero for a rank without a message.
            residual: Errors of this rank's earlier messages, which are added to this message. It is overwritten by the
                error of encoding this sum, plus the error of encoding this rank's part of the mean. With weights of 1,
                the messages and residuals of all ranks before the call add up to the result plus the residuals after.

        Returns:
            The new `carried_residual`, which the caller keeps when the round commits. With a ``residual``: zeros.
        """
        carried_residual = self.carried_residual.clone()
        start = 0
        for size, carried in zip(self._sizes, carried_residual.split(self._num_carried), strict=True):
            here = slice(start, start + size)
            start = here.stop
            mine, rest = (None if each is None else each[here] for each in (message, residual))
            self._average(out[here], mine, weights, carried, rest)
        return carried_residual

    @abstractmethod
    def _average(
        self, part: Tensor, message: Tensor | None, weights: Sequence[float], carried: Tensor, residual: Tensor | None
    ) -> None:
        """Average one part of the messages as `move_` does. The result is written into ``part``.

        Args:
            part: This part of the bucket for the mean.
            message: This part of this rank's message; None if it has none.
            weights: Weight of each rank.
            carried: This part of `carried_residual`, which is updated.
            residual: This part of `move_`'s ``residual``; None if there is none.
        """
        ...


class CodedMean(CompressedMean):
    """A mean of messages whose elements are sent as codes: "int8" or "fp8" with a scale per 256 elements, or "bf16".

    Two ranks gather both messages and average them. With more ranks, each rank receives one part of all messages,
    averages it, and encodes the average for all others. The rounding error of this second encoding is added in the next
    round, unless a sync point clears it.

    Source: the second encoding as in Tang et al., "DoubleSqueeze", 2019, https://arxiv.org/abs/1905.05957
    """

    def __init__(
        self, collectives: Collectives, result: Result, dtype: torch.dtype, sizes: list[int], device: torch.device
    ) -> None:
        world_size = collectives.world_size
        self._gathered = world_size <= _GATHERED
        widths = [0 if self._gathered else ops.blocks(-(-size // world_size)) * ops.BLOCK for size in sizes]
        super().__init__(collectives, result, sizes, widths, device)
        room = max(sizes if self._gathered else [world_size * width for width in widths], default=0)
        self._sent = _CodeMemory(1, room, dtype, device)
        self._received = _CodeMemory(world_size if self._gathered else 1, room, dtype, device)
        self._own = torch.ones(1, device=device)
        scales = 0 if dtype is torch.bfloat16 else sum(map(ops.blocks, sizes))
        self.message_bytes = sum(sizes) * dtype.itemsize + 4 * scales

    def _average(
        self, part: Tensor, message: Tensor | None, weights: Sequence[float], carried: Tensor, residual: Tensor | None
    ) -> None:
        shares = torch.tensor(weights, dtype=torch.float32, device=part.device)
        if not self._gathered:
            self._average_by_columns(part, message, shares, carried, residual)
            return
        self._encode(part, message, len(part), residual)
        peers = self._received.rows(self.world_size, len(part))
        self._move(self._collectives.all_gather, self._sent.row(len(part)), peers)
        ops.dequantize_average_(part, *peers, shares)

    def _average_by_columns(
        self, part: Tensor, message: Tensor | None, shares: Tensor, carried: Tensor, residual: Tensor | None
    ) -> None:
        """Average this rank's columns of all ranks' messages, and gather the averages of all ranks.

        The messages are the rows of a table, and each rank averages other columns of it. The arguments are those of
        `_average`, with ``shares`` as weights.
        """
        width = len(carried)
        self._encode(part, message, self.world_size * width, residual)
        peers = self._received.rows(self.world_size, width)
        average = self._sent.row(width)
        self._move(self._collectives.all_to_all, self._sent.rows(self.world_size, width), peers)
        ops.requantize_average_(*average, carried, *peers, shares)
        self._move(self._collectives.all_gather, average, peers)
        ops.dequantize_average_(part, *self._received.rows(1, len(part)), self._own)
        if residual is not None:
            columns = residual[self._collectives.rank * width :][:width]
            columns.add_(carried[: len(columns)])
            carried.zero_()

    def _encode(self, part: Tensor, message: Tensor | None, room: int, residual: Tensor | None) -> None:
        """Encode ``message`` into the buffer of codes to send, padded with zeros to ``room`` codes.

        Args:
            part: Scratch memory of the message's size, which may be overwritten.
            message: One part of this rank's message; None for zeros. Without a ``residual`` it is overwritten by its
                decoded values. With a ``residual`` it stays, and the residual takes the error.
            room: Number of codes.
            residual: Errors of earlier messages, see `move_`; None if there is none.
        """
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
    """An interface for codes that keep only the largest elements of a part of a message, such as `TopK`."""

    def message_bytes(self, numel: int) -> int: ...

    def encode_(self, message: Tensor, source: Tensor, residual: Tensor) -> None: ...

    def add_(self, out: Tensor, message: Tensor, weight: float = 1.0) -> None: ...


class SparseMean(CompressedMean):
    """A mean of messages of which only the largest elements are sent; every rank gathers and averages them.

    Encoding a message a second time, after a failure, gives the same elements again.

    Source: Stich et al., "Sparsified SGD with Memory", 2018, https://arxiv.org/abs/1809.07599
    """

    def __init__(
        self, collectives: Collectives, result: Result, code: SparseCode, sizes: list[int], device: torch.device
    ) -> None:
        super().__init__(collectives, result, sizes, [0] * len(sizes), device)
        self._code = code
        self.message_bytes = sum(map(code.message_bytes, sizes))

    def _average(
        self, part: Tensor, message: Tensor | None, weights: Sequence[float], carried: Tensor, residual: Tensor | None
    ) -> None:
        own = torch.zeros(self._code.message_bytes(len(part)), dtype=torch.uint8, device=part.device)
        if message is not None and residual is not None:
            self._code.encode_(own, message, residual)
        elif message is not None:
            self._code.encode_(own, message, part.zero_())
            self._code.add_(message.zero_(), own)
        everyones = self._result(self._collectives.all_gather(own))
        part.zero_()
        for row, weight in zip(everyones, weights, strict=True):
            if weight:
                self._code.add_(part, row, weight)


def mean_of(
    collectives: Collectives,
    result: Result,
    compression: Compression | SparseCode,
    numel: int,
    part_bytes: int,
    device: torch.device,
) -> CompressedMean:
    """Return a `CodedMean` if ``compression`` is a string, else a `SparseMean` with ``compression`` as its code.

    Args:
        collectives: Communicator for the messages.
        result: Function that waits for one part of a payload.
        compression: Compression of the messages; not "none".
        numel: Number of elements of each message.
        part_bytes: Approximate size of the parts in which messages are sent: of the codes of a part, or, for a
            `SparseCode`, of its fp32 elements.
        device: Device of the messages.
    """
    if isinstance(compression, str):
        dtype = CODES[compression]
        part = max(ops.BLOCK, part_bytes // dtype.itemsize)
        return CodedMean(collectives, result, dtype, _sizes(numel, part), device)
    return SparseMean(collectives, result, compression, _sizes(numel, max(1, part_bytes // 4)), device)


def _sizes(numel: int, part: int) -> list[int]:
    return [min(part, numel - start) for start in range(0, numel, part)]


class _CodeMemory:
    """Memory for ``count`` rows of ``numel`` codes, with one scale for each block unless the codes are bf16."""

    def __init__(self, count: int, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._codes = torch.zeros(count * numel, dtype=dtype, device=device)
        self._scales = None if dtype is torch.bfloat16 else torch.zeros(count * ops.blocks(numel), device=device)

    def rows(self, count: int, numel: int) -> Rows:
        codes = self._codes[: count * numel].view(count, numel)
        return codes, None if self._scales is None else self._scales[: count * ops.blocks(numel)].view(count, -1)

    def row(self, numel: int) -> Rows:
        codes, scales = self.rows(1, numel)
        return codes[0], None if scales is None else scales[0]

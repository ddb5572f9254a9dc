"""Pushes that travel compressed: a worker keeps what each lacks, for the next one; a server decodes what has come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_async.rules.compression import PushCompression, from_description

__all__ = ["Arrived", "Feedback"]


class Feedback:
    r"""What compression has yet to deliver of one worker's pushes to one server.

    .. math:: v_n = g_n + r_{n-1}, \qquad q_n = \mathrm{C}(v_n), \qquad r_n = v_n - q_n

    So :math:`\sum_n q_n + r_n = \sum_n g_n`, whatever the compression. A message is made once, and lies in memory that
    outlives the server: one that is said again is the same to the bit. It takes the room of two fp32 copies of the
    shard.

    Args:
        compression: C.
        numel: of the shard.

    Source: Karimireddy et al., "Error Feedback Fixes SignSGD", 2019, https://arxiv.org/abs/1901.09847
    """

    def __init__(self, compression: PushCompression, numel: int) -> None:
        self._compression = compression
        self.source, self.residual = torch.zeros(numel), torch.zeros(numel)

    def encode_(self, memory: Tensor) -> int:
        """Put what travels of `source` at the beginning of ``memory``, uint8; how many bytes it is."""
        size = self.message_bytes
        self._compression.encode_(memory[:size], self.source, self.residual)
        return size

    @property
    def message_bytes(self) -> int:
        """Of what travels."""
        return self._compression.message_bytes(self.source.numel())


@dataclass(frozen=True)
class Arrived:
    """What a server has been pushed, as it came; the memory is the worker's, who does not touch it before the answer.

    Args:
        message: uint8.
        compression: by which it was made; None: it is fp32.
        numel: of the shard.

    Raises:
        ValueError: it is of another size.
    """

    message: Tensor
    compression: PushCompression | None
    numel: int

    def __post_init__(self) -> None:
        itemsize = torch.float32.itemsize
        size = self.numel * itemsize if self.compression is None else self.compression.message_bytes(self.numel)
        if self.message.numel() != size:
            raise ValueError(
                f"a push has {self.message.numel()} bytes, and is to have {size} for {self.numel} elements"
            )

    @classmethod
    def of(cls, message: Tensor, header: Mapping[str, Any], numel: int) -> Arrived:
        """What came with a header.

        Raises:
            TypeError, ValueError: it says nothing that is known, or something else than what came.
        """
        return cls(message, from_description(header["compression"]), numel)

    def floats(self, room: Tensor) -> Tensor:
        """fp32, flat: what came, or what it decodes to in ``room``."""
        if self.compression is None:
            return self._plain
        self.compression.decode_(room, self.message)
        return room

    @cached_property
    def _plain(self) -> Tensor:
        return self.message.view(torch.float32)

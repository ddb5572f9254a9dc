"""Compressions of messages: by codes of fewer bits, by the largest elements, or by thin matrices.

The residual (the error of one message) is added to the next message. `encode_` and `decode_` are for pushes to a
server.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_async import ops
from lightning_async._checks import check_choice, check_int, check_real
from lightning_async.flat import FlatLayout
from lightning_async.ops.flat_ops import eager

_LARGEST_PART = 1 << 30
"""Largest size of a part in bytes of fp32, so that the place of an element fits 32 bits."""
_SECTION = 1 << 16
"""Number of elements in a section, in which the place of an element fits 16 bits."""
_quantize_ = eager(ops.quantize_)
_dequantize_ = eager(ops.dequantize_average_)
_quantize_2bit_ = eager(ops.quantize_2bit_)
_dequantize_2bit_ = eager(ops.dequantize_2bit_average_)
_topk_ = eager(ops.topk_)
_topk_accumulate_ = eager(ops.topk_accumulate_)


class _Codes:
    """A base for compressions to 8 or 16 bits per element.

    An 8-bit message begins with its scales, one for each 256 elements; the codes follow. A 16-bit message has no
    scales.
    """

    dtype: torch.dtype

    def message_bytes(self, numel: int) -> int:
        return self._scale_bytes(numel) + numel * self.dtype.itemsize

    def encode_(self, message: Tensor, source: Tensor, residual: Tensor) -> None:
        scales, codes = self._halves(message, source.numel())
        _quantize_(codes, scales, source, residual)

    def decode_(self, out: Tensor, message: Tensor) -> None:
        scales, codes = self._halves(message, out.numel())
        one = torch.ones(1)
        _dequantize_(out, codes[None], None if scales is None else scales[None], one)

    def _scale_bytes(self, numel: int) -> int:
        return 0 if self.dtype is torch.bfloat16 else torch.float32.itemsize * ops.blocks(numel)

    def _halves(self, message: Tensor, numel: int) -> tuple[Tensor | None, Tensor]:
        at = self._scale_bytes(numel)
        scaled = self.dtype is not torch.bfloat16
        return message[:at].view(torch.float32) if scaled else None, message[at:].view(self.dtype)


@dataclass(frozen=True)
class Bf16(_Codes):
    r"""Compression to half the bytes: each element as bf16.

    .. math:: q = \mathrm{bf16}(v)

    >>> Bf16().message_bytes(1000)
    2000
    """

    dtype = torch.bfloat16


@dataclass(frozen=True)
class Fp8(_Codes):
    r"""Compression to a quarter of the bytes: each element as fp8 (e4m3), with a scale for each 256 elements.

    .. math:: q = \sigma_b\, \mathrm{fp8}(v / \sigma_b), \qquad \sigma_b = \max_{j \in b} |v_j| / 448

    >>> Fp8().message_bytes(1000)
    1016
    """

    dtype = torch.float8_e4m3fn


@dataclass(frozen=True)
class Int8(_Codes):
    r"""Compression to a quarter of the bytes: each element as an integer, with a scale for each 256 elements.

    .. math:: q = \sigma_b\, \mathrm{round}(v / \sigma_b), \qquad \sigma_b = \max_{j \in b} |v_j| / 127

    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022, https://arxiv.org/abs/2110.02861

    >>> Int8().message_bytes(1000)
    1016
    """

    dtype = torch.int8


@dataclass(frozen=True)
class TwoBit:
    r"""Compression to a sixteenth of the bytes: plus or minus the threshold for each element that reaches it, else 0.

    .. math:: q = t\,[v \ge t] - t\,[v \le -t]

    :math:`v` is the gradient plus the residual. One push moves an element by at most the threshold. If gradients are
    mostly larger than the threshold, the residual grows without end. If they are mostly smaller, the element moves
    rarely.

    Args:
        threshold: :math:`t`, in the units of the gradient. Default 0.5, as in MXNet.

    Raises:
        TypeError: If ``threshold`` is not a number.
        ValueError: If ``threshold`` is not above 0.

    Source: MXNet's gradient compression, after Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud
    Computing", 2015

    >>> TwoBit(0.1).message_bytes(1000)
    250
    """

    threshold: float = 0.5

    def __post_init__(self) -> None:
        check_real(self, "threshold", above=0)

    def message_bytes(self, numel: int) -> int:
        return -(-numel // 4)

    def encode_(self, message: Tensor, source: Tensor, residual: Tensor) -> None:
        _quantize_2bit_(message, source, residual, self.threshold)

    def decode_(self, out: Tensor, message: Tensor) -> None:
        _dequantize_2bit_(out, message[None], torch.ones(1), self.threshold)


@dataclass(frozen=True)
class TopK:
    r"""Compression to the elements of largest magnitude and their indices, in 6 bytes each (2.3 with ``bits=2``).

    .. math:: q = Q\big(v \odot [\,|v| \ge |v|_{(k)}\,]\big), \qquad k = \lceil \text{fraction} \cdot n \rceil

    Without ``bits``, :math:`Q` leaves the selected values as they are. With 2 bits, the selected values are split into
    blocks of 256. Each block has two magnitudes: the mean of the magnitudes that are larger than the block's mean
    magnitude, and the mean of the others. Each value is sent as its sign and one of these two. In a block that
    contains zeros, the two magnitudes are 0 and the mean of the nonzero ones. The error is never larger than the
    vector: :math:`\|v - q\|^2 = \|v\|^2 - \|q\|^2`.

    Args:
        fraction: Fraction of the elements that is sent. Default 0.01.
        bits: Number of bits of a value: 2, or None for fp32. Default None.

    Raises:
        TypeError: If ``fraction`` is not a number.
        ValueError: If ``fraction`` is not in (0, 1], or ``bits`` is neither 2 nor None.

    Source: Stich et al., "Sparsified SGD with Memory", 2018, https://arxiv.org/abs/1809.07599; with 2 bits: Sarfi et
    al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025, https://arxiv.org/abs/2508.15706

    >>> [TopK(0.1, bits).message_bytes(100_000) for bits in (None, 2)]
    [60008, 22828]
    """

    fraction: float = 0.01
    bits: Literal[2] | None = None

    def __post_init__(self) -> None:
        check_real(self, "fraction", above=0)
        if self.fraction > 1:
            raise ValueError(f"`TopK(fraction={self.fraction!r})` must be <= 1.")
        check_choice("TopK", "bits", self.bits, (None, 2))

    def count(self, numel: int) -> int:
        return math.ceil(self.fraction * numel)

    def message_bytes(self, numel: int) -> int:
        return sum(self._part_bytes(size) for size in _part_sizes(numel))

    def encode_(self, message: Tensor, source: Tensor, residual: Tensor) -> None:
        for part, own, rest in self._parts(message, source, residual):
            starts, values, places, codes = self._fields(part, own.numel())
            found = torch.empty(len(places), dtype=torch.int64, device=own.device)
            taken = values if codes is None else torch.empty(len(places), device=own.device)
            _topk_(taken, found, own, rest)
            if codes is not None:
                rest[found] = _encode_magnitudes_(codes, values, taken)
            starts.copy_(torch.searchsorted(found, _SECTION * torch.arange(len(starts), device=own.device)))
            places.copy_(found)  # the lower 16 bits

    def decode_(self, out: Tensor, message: Tensor) -> None:
        self.add_(out.zero_(), message)

    def add_(self, out: Tensor, message: Tensor, weight: float = 1.0) -> None:
        """Add the decoded message, times ``weight``, to ``out``."""
        for part, total in self._parts(message, out):
            starts, values, places, codes = self._fields(part, total.numel())
            order = torch.arange(len(places), dtype=torch.int32, device=out.device)
            sections = torch.searchsorted(starts, order, right=True) - 1
            taken = values if codes is None else _decode_magnitudes(codes, values, len(places))
            _topk_accumulate_(total, taken, _SECTION * sections + (places.long() & (_SECTION - 1)), weight)

    def _field_bytes(self, numel: int) -> list[int]:
        """Return the size in bytes of each field of the message for a part of ``numel`` elements.

        A part is divided into sections. The fields are, one after the other: for each section, the position of its
        first value among the values; the values of the selected elements (with ``bits=2``, two magnitudes for each
        block of values); the indices of the selected elements within their sections; and with ``bits=2``, the codes.
        """
        count = self.count(numel)
        sections = -(-numel // _SECTION)
        if self.bits is None:
            return [4 * sections, 4 * count, 2 * count]
        return [4 * sections, 4 * 2 * ops.blocks(count), 2 * count, -(-count // 4)]

    def _part_bytes(self, numel: int) -> int:
        return -(-sum(self._field_bytes(numel)) // 4) * 4

    def _parts(self, message: Tensor, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
        sizes = [self._part_bytes(size) for size in _part_sizes(tensors[0].numel())]
        parts = [FlatLayout.parts(each, _LARGEST_PART) for each in tensors]
        return list(zip(message.split(sizes) if sizes else [], *parts, strict=True))

    def _fields(self, message: Tensor, numel: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        sizes = self._field_bytes(numel)
        fields = message[: sum(sizes)].split(sizes)
        codes = fields[3] if self.bits is not None else None
        return fields[0].view(torch.int32), fields[1].view(torch.float32), fields[2].view(torch.int16), codes


def _encode_magnitudes_(codes: Tensor, magnitudes: Tensor, values: Tensor) -> Tensor:
    """Encode each value by its sign and one of the two magnitudes of its block; return the errors."""
    numel = values.numel()
    room = ops.blocks(numel) * ops.BLOCK
    # In fp64 the mean of equal magnitudes is exact, so that encoding a decoded message gives the same message again.
    sizes = torch.nn.functional.pad(values.abs().double(), (0, room - numel)).view(-1, ops.BLOCK)
    present = (torch.arange(room, device=values.device) < numel).view(-1, ops.BLOCK)
    bound = sizes.sum(1) / present.sum(1)
    bound.masked_fill_(((sizes == 0.0) & present).any(1), 0.0)  # zeros stay zeros: their parameters may be unused
    large = sizes > bound[:, None]
    for row, chosen in zip(magnitudes.view(2, -1), (present & ~large, large), strict=True):
        row.copy_(torch.where(chosen, sizes, 0.0).sum(1) / chosen.sum(1).clamp(min=1))
    each = large.flatten()[:numel].to(torch.uint8) + 2 * values.signbit().to(torch.uint8)
    quads = torch.nn.functional.pad(each, (0, -numel % 4)).view(-1, 4)
    codes.copy_(quads[:, 0] | quads[:, 1] << 2 | quads[:, 2] << 4 | quads[:, 3] << 6)
    rest = values - _decode_magnitudes(codes, magnitudes, numel)
    return torch.where(rest.isfinite(), rest, 0.0)


def _decode_magnitudes(codes: Tensor, magnitudes: Tensor, numel: int) -> Tensor:
    each = torch.stack([(codes >> shift) & 3 for shift in (0, 2, 4, 6)], dim=1).flatten()[:numel]
    small, large = (row.repeat_interleave(ops.BLOCK)[:numel] for row in magnitudes.view(2, -1))
    sizes = torch.where((each & 1).bool(), large, small)
    return torch.where((each & 2).bool(), -sizes, sizes)


def _part_sizes(numel: int) -> list[int]:
    largest = _LARGEST_PART // torch.float32.itemsize
    return [min(largest, numel - at) for at in range(0, numel, largest)]


@dataclass(frozen=True)
class PowerSGD:
    r"""Compression of each gradient matrix to two thin matrices, by one step of power iteration per message.

    .. math:: P = \mathrm{orth}\Big(\sum_i M_i Q\Big), \qquad Q \leftarrow \sum_i M_i^\top P, \qquad \hat M = P Q^\top

    Gradients of one-dimensional parameters, and matrices that would not become smaller, are sent uncompressed.

    Args:
        rank: Number of columns of :math:`P` and :math:`Q`. Default 1.

    Raises:
        TypeError: If ``rank`` is no int.
        ValueError: If ``rank`` is less than 1.

    Source: Vogels et al., "PowerSGD", NeurIPS 2019, https://arxiv.org/abs/1905.13727

    >>> PowerSGD(2)
    PowerSGD(rank=2)
    """

    rank: int = 1

    def __post_init__(self) -> None:
        check_int(self, "rank", at_least=1)


PushCompression = Bf16 | Fp8 | Int8 | TwoBit | TopK
r"""A compression of pushes from a worker to a server: :math:`v = g + r`, :math:`r \leftarrow v - \mathrm{C}(v)`.

`encode_` writes a message of `message_bytes` for a flat fp32 source plus its residual, which becomes the error.
`decode_` writes the decoded message into a flat fp32 tensor. Messages are flat uint8, in memory that is aligned for
fp32. Numbers that are not finite are sent as NaN, and their residual becomes zero.
"""
PushCompressionName = Literal["none", "bf16", "fp8", "int8", "2bit", "topk"]
PUSHES: dict[str, type[Any]] = {"bf16": Bf16, "fp8": Fp8, "int8": Int8, "2bit": TwoBit, "topk": TopK}
"""The compressions of pushes to a parameter server, by short name."""


def make_compression(owner: str, compression: object) -> PushCompression | None:
    """Return the compression with a given short name and its default arguments; None for the name "none".

    If ``compression`` is a compression already, return it unchanged. ``owner`` is the class that takes the argument,
    for error messages.

    Raises:
        ValueError: If no compression has this name.
        TypeError: If ``compression`` is neither a name nor a compression of pushes.

    >>> make_compression("Strategy", "2bit"), make_compression("Strategy", "none")
    (TwoBit(threshold=0.5), None)
    """
    if isinstance(compression, str):
        if compression not in ("none", *PUSHES):
            raise ValueError(f"`{owner}(compression={compression!r})` must be one of {('none', *PUSHES)}.")
        return None if compression == "none" else PUSHES[compression]()
    if type(compression) not in PUSHES.values():
        names = ", ".join(f"`{cls.__name__}`" for cls in PUSHES.values())
        raise TypeError(
            f"`{owner}(compression={compression!r})` must be one of {('none', *PUSHES)}, or one of {names}."
        )
    return compression  # pyright: ignore[reportReturnType]


def described(compression: PushCompression | None) -> list[Any] | None:
    """Describe a compression by values that JSON can hold: its short name and its arguments. Return None for None.

    >>> described(TwoBit(0.25))
    ['2bit', {'threshold': 0.25}]
    """
    if compression is None:
        return None
    (name,) = [name for name, cls in PUSHES.items() if type(compression) is cls]
    return [name, asdict(compression)]


def from_description(description: Sequence[Any] | None) -> PushCompression | None:
    """Return the compression that `described` has described; None for None.

    Raises ValueError or TypeError for any value that `described` does not return.

    >>> from_description(["topk", {"fraction": 0.5}])
    TopK(fraction=0.5, bits=None)
    """
    if description is None:
        return None
    name, arguments = description
    if name not in PUSHES:
        raise ValueError(f"{name!r} is none of {tuple(PUSHES)}.")
    return PUSHES[name](**arguments)

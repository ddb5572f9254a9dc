"""One row per flat op: how to make arguments for it. Every law of tests/ops runs over every row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_async import ops
from lightning_async.ops.reference import buckets, compression, server

HALVES = (torch.float32, torch.bfloat16, torch.float16)
FP32 = (torch.float32,)
SPECIAL = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-45, -1e-42, 3e38, -3e38, 65520.0, 6e-8, 1.0, 448.0)
REPEATED = 1_000_003
"""More elements than these repeat themselves, at other places of a chunk: chance takes longer than any op."""
Values = Callable[..., Tensor]


class Case(NamedTuple):
    """An op, its reference, the dtypes it is tested with, and its arguments for ``n`` elements."""

    op: Callable[..., Any]
    reference: Callable[..., Any]
    dtypes: Sequence[torch.dtype]
    make: Callable[[Values, int, torch.dtype], list[Any]]

    def __repr__(self) -> str:
        return self.reference.__name__


def values(seed: int, special: bool = True, offset: int = 0) -> Values:
    """Makes tensors of normal values, with some special ones among them, that start ``offset`` elements behind an
    allocation's start."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int, dtype: torch.dtype = torch.float32, positive: bool = False) -> Tensor:
        numel = int(torch.Size(shape).numel())
        some = min(numel, REPEATED)
        x = torch.randn(some, generator=generator) * 10.0 ** torch.randint(-3, 3, (some,), generator=generator)
        x = x.repeat(-(-numel // max(1, some)))[:numel]
        if special and numel:
            where = torch.randint(numel, (1 + numel // 50,), generator=generator)
            which = torch.randint(len(SPECIAL), where.shape, generator=generator)
            x[where] = torch.tensor(SPECIAL)[which]
        if positive:
            x = x.abs()
        out = torch.empty(numel + offset, dtype=dtype)[offset:]
        return out.copy_(x).view(shape)

    return make


def codes(make: Values, peers: int, n: int, dtype: torch.dtype) -> Tensor:
    """Messages of ``peers``."""
    if dtype in (torch.int8, torch.uint8):
        return (make(peers, n).nan_to_num(0, 0, 0) * 1000).to(torch.int64).to(dtype)
    return make(peers, n).clamp(-448, 448).to(dtype)


def scales(make: Values, dtype: torch.dtype, *shape: int) -> Tensor | None:
    """Their scales: none for bfloat16."""
    return None if dtype == torch.bfloat16 else make(*shape, positive=True)


def blocks(n: int) -> int:
    return -(-n // 256)


CODES = (torch.int8, torch.float8_e4m3fn, torch.bfloat16)


def server_case(name: str, writes: int, reads: int, reply: bool, *scalars: Any) -> Case:
    """What it writes, a reply or none, what it reads, a gradient, and scalars."""

    def make(v: Values, n: int, dtype: torch.dtype) -> list[Any]:
        written, read = [v(n) for _ in range(writes)], [v(n) for _ in range(reads)]
        if name == "server_adam_":
            read[2].abs_()
        return [*written, v(n) if reply else None, *read, v(n, dtype=dtype), *scalars]

    return Case(getattr(ops, name), getattr(server, name), HALVES, make)


def of(module: Any, name: str, dtypes: Sequence[torch.dtype], make: Callable[..., list[Any]]) -> Case:
    return Case(getattr(ops, name), getattr(module, name), dtypes, make)


CASES = [
    of(buckets, "accumulate_", HALVES, lambda v, n, d: [v(n), v(n, dtype=d), 0.7]),
    of(buckets, "outer_merge_", FP32, lambda v, n, d: [v(n), v(n), v(n), v(n), 0.7, 0.9, True]),
    of(buckets, "outer_merge_", FP32, lambda v, n, d: [v(n), v(n), v(n), None, 0.7, 0.9, False]),
    server_case("server_add_", 1, 1, False, 0.7),
    server_case("server_add_", 1, 1, True, -0.1),
    server_case("server_add_", 1, 1, True, -0.1, 0.001),
    server_case("server_sgd_", 2, 2, False, 0.1, 0.9, True, 0.5),
    server_case("server_sgd_", 2, 2, True, 0.1, 0.9, False, 0.25),
    server_case("server_sgd_", 2, 2, True, 0.1, 0.9, True, -0.5, 0.01),
    server_case("server_dana_", 4, 3, False, 0.1, 0.9, 0.5),
    server_case("server_dana_", 4, 3, True, 0.1, 0.9, 1.0),
    server_case("server_adam_", 3, 3, False, 3, 0.1, 0.9, 0.99, 1e-6, 0.5),
    server_case("server_adam_", 3, 3, True, 1, 0.1, 0.9, 0.999, 1e-8, 1.0),
    server_case("server_adam_", 3, 3, True, 2, 0.1, 0.9, 0.999, 1e-8, -1.0, 0.01),
    server_case("server_adam_", 3, 3, True, 2, 0.1, 0.9, 0.999, 1e-8, 0.5, 0.01, True),
    of(
        compression, "quantize_", CODES,
        lambda v, n, d: [torch.zeros(n, dtype=d), scales(v, d, blocks(n)), v(n), v(n)],
    ),
    of(
        compression, "dequantize_average_", CODES,
        lambda v, n, d: [v(n), codes(v, 3, n, d), scales(v, d, 3, blocks(n)), torch.tensor([0.2, 0.3, 0.5])],
    ),
    of(
        compression, "requantize_average_", CODES,
        lambda v, n, d: [
            torch.zeros(n, dtype=d), scales(v, d, blocks(n)), v(n), codes(v, 2, n, d), scales(v, d, 2, blocks(n)),
            torch.tensor([0.25, 0.75]),
        ],
    ),
    of(
        compression, "quantize_2bit_", (torch.uint8,),
        lambda v, n, d: [torch.zeros(-(-n // 4), dtype=d), v(n), v(n), 0.5],
    ),
    of(
        compression, "dequantize_2bit_average_", (torch.uint8,),
        lambda v, n, d: [v(n), codes(v, 3, -(-n // 4), d), torch.tensor([0.2, 0.3, 0.5]), 0.5],
    ),
    of(
        compression, "topk_", FP32,
        lambda v, n, d: [torch.zeros(n // 3), torch.zeros(n // 3, dtype=torch.int64), v(n), v(n)],
    ),
    of(
        compression, "topk_accumulate_", FP32,
        lambda v, n, d: [v(n), v(n // 3), torch.randperm(n)[: n // 3].sort().values, 0.3],
    ),
]  # fmt: skip
ROWS = [(case, dtype) for case in CASES for dtype in case.dtypes]


def cloned(arguments: Sequence[Any], device: str | torch.device = "cpu") -> list[Any]:
    """Copies that lie as the originals do, unaligned ones too."""

    def clone(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        offset = x.storage_offset()
        memory = torch.empty(x.numel() + offset, dtype=x.dtype, device=device)
        return memory[offset:].view(x.shape).copy_(x)

    return [clone(x) for x in arguments]


def bits(x: Tensor) -> Tensor:
    """The bits, with one pattern for all NaN."""
    x = x.detach().cpu()
    if not x.is_floating_point():
        return x
    ints = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return torch.where(x.float().isnan(), torch.full_like(x, torch.nan).view(ints), x.view(ints))


def difference(mine: Sequence[Any], theirs: Sequence[Any]) -> str:
    """What differs between two lists of arguments; empty where all bits agree."""
    for k, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if isinstance(a, Tensor) and not torch.equal(bits(a), bits(b)):
            where = (bits(a) != bits(b)).flatten().nonzero().flatten()[:3].tolist()
            return f"argument {k} at {where}: {[(a.flatten()[i].item(), b.flatten()[i].item()) for i in where]}"
    return ""

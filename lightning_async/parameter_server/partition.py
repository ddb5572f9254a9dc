"""A partition of parameters (keys) into one flat shard for each server.

    keys:      weight (6 elements, split)   bias (2)   scale (1)
    server 0:  weight[0:3]                  bias[0:2]
    server 1:  weight[3:6]                             scale[0:1]

The partition depends on shapes alone, so that all workers make the same plan.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from torch import Tensor

from lightning_async._checks import check_int

TABLES = 8
"""Largest number of tables of a server; each table holds one group of parameters, which has settings of its own."""
_BYTES = 4  # bytes of an element on a server: fp32
Spans = Sequence[tuple[int, int]]
"""Spans of a shard, each as the index of its first element and the index after its last one; sorted and disjoint."""


@dataclass(frozen=True)
class Piece:
    """A run of consecutive elements of one tensor (key), as a server's shard holds them.

    Args:
        key: Index of the tensor.
        start: Index of the first element in the flat tensor.
        stop: Index after the last element in the flat tensor.
        offset: Index of the first element in the shard.
    """

    key: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class ServerPartition:
    r"""A division of keys (tensors) among servers.

    Keys of ``bigarray_bound`` elements or more are split evenly among all servers. Each other key goes to the server
    that has the fewest elements, the largest key first. With :math:`l_s` elements on server :math:`s`, and :math:`k`
    elements in the largest key that is not split,

    .. math:: \max_s l_s - \min_s l_s \le \max(1, k)

    Args:
        names: Names of the keys.
        shapes: Shapes of the keys, in the sequence of ``names``.
        num_servers: Number of servers, at least 1. Default: 1.
        bigarray_bound: Number of elements from which a key is split. Default: 1,000,000, as MXNet's
            ``MXNET_KVSTORE_BIGARRAY_BOUND``.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range.

    Source: the key-value store of MXNet, https://github.com/apache/mxnet (src/kvstore/kvstore_dist.h); Graham, "Bounds
    on Multiprocessing Timing Anomalies", 1969, for the order of keys.

    >>> plan = ServerPartition(("weight", "bias", "scale"), ((2, 3), (2,), (1,)), num_servers=2, bigarray_bound=6)
    >>> plan.sizes
    (5, 4)
    >>> plan.pieces[1]
    (Piece(key=0, start=3, stop=6, offset=0), Piece(key=2, start=0, stop=1, offset=3))
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    num_servers: int = 1
    bigarray_bound: int = 1_000_000

    def __post_init__(self) -> None:
        check_int(self, "num_servers", at_least=1)
        check_int(self, "bigarray_bound", at_least=1)

    @classmethod
    def of(cls, named: Mapping[str, Tensor], num_servers: int = 1, bigarray_bound: int = 1_000_000) -> ServerPartition:
        """Return the partition of named tensors.

        A tensor of ``bigarray_bound`` elements or more is split over all servers.
        """
        shapes = tuple(tuple(tensor.shape) for tensor in named.values())
        return cls(tuple(named), shapes, num_servers, bigarray_bound)

    @cached_property
    def pieces(self) -> tuple[tuple[Piece, ...], ...]:
        """The pieces of each server's shard, sorted by their offset in the shard."""
        servers = range(self.num_servers)
        # Elements of each server so far, which the loops below keep balanced.
        load = [0] * self.num_servers
        found: list[list[tuple[int, int, int]]] = [[] for _ in servers]
        sizes = [math.prod(shape) for shape in self.shapes]
        for key, size in enumerate(sizes):
            if size >= self.bigarray_bound:
                each, rest = divmod(size, self.num_servers)
                # Servers with the fewest elements get one more.
                more = sorted(servers, key=lambda server: (load[server], server))[:rest]
                ends = [0]
                for server in servers:
                    ends.append(ends[-1] + each + (server in more))
                for server, (start, stop) in enumerate(pairwise(ends)):
                    found[server].append((key, start, stop))
                    load[server] += stop - start
        # The largest first, which bounds the imbalance; the number breaks ties, so that all workers agree.
        for key in sorted(range(len(sizes)), key=lambda key: (-sizes[key], key)):
            if 0 < sizes[key] < self.bigarray_bound:
                server = min(servers, key=lambda server: (load[server], server))
                found[server].append((key, 0, sizes[key]))
                load[server] += sizes[key]
        placed = []
        for of_server in found:
            offset = 0
            pieces = []
            for key, start, stop in sorted(of_server):
                if stop > start:
                    pieces.append(Piece(key, start, stop, offset))
                    offset += stop - start
            placed.append(tuple(pieces))
        return tuple(placed)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of elements of each server's shard."""
        return tuple(sum(piece.stop - piece.start for piece in pieces) for pieces in self.pieces)

    def spans_of(self, server: int, keys: Collection[int]) -> list[tuple[int, int]]:
        """Return the spans of a server's shard that hold these keys; adjacent spans are joined.

        >>> ServerPartition(("weight", "bias", "scale"), ((2, 3), (2,), (1,))).spans_of(0, {1, 2})
        [(6, 9)]
        """
        found: list[tuple[int, int]] = []
        for piece in self.pieces[server]:
            if piece.key in keys:
                joins = bool(found) and found[-1][1] == piece.offset
                start = found.pop()[0] if joins else piece.offset
                found.append((start, piece.offset + piece.stop - piece.start))
        return found

    def fingerprint(self) -> str:
        """Return a text that is equal for all workers with the same plan."""
        names = ("names", "shapes", "num_servers", "bigarray_bound")
        return hashlib.sha256(json.dumps({name: getattr(self, name) for name in names}).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        lines = [f"{len(self.names)} keys on {self.num_servers} server(s)"]
        for server, (pieces, size) in enumerate(zip(self.pieces, self.sizes, strict=True)):
            split = sum(piece.stop - piece.start < math.prod(self.shapes[piece.key]) for piece in pieces)
            lines.append(
                f"server {server}: {size * _BYTES / 2**20:.1f} MiB, {len(pieces)} keys, {split} of them in part"
            )
        return "\n".join(lines)


def common_spans(spans: Sequence[Spans]) -> list[tuple[int, int]]:
    """Return the spans that are in all of these.

    >>> common_spans([[(0, 4), (6, 8)], [(2, 7)]])
    [(2, 4), (6, 7)]
    """
    edges = sorted((at, change) for each in spans for start, stop in each for at, change in ((start, 1), (stop, -1)))
    found = []
    depth = 0
    since = 0
    for at, change in edges:
        depth += change
        if change > 0 and depth == len(spans):
            since = at
        elif change < 0 and depth == len(spans) - 1:
            found.append((since, at))
    return found

"""How many nodes there are to be, when they start, and which ranks each of them has: values, without clocks.

A node is a host with a launcher of its own. Ranks are numbered node by node, and nodes as they have come.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_async.arguments import check_int, check_real

__all__ = ["Place", "Wanted", "places"]


@dataclass(frozen=True)
class Place:
    """Of one node's ranks among all.

    Args:
        node: its number.
        first: of its ranks.
        ranks: how many it has.
        world: how many there are on all nodes.
        nodes: how many nodes.
    """

    node: int
    first: int
    ranks: int
    world: int
    nodes: int

    @classmethod
    def alone(cls, ranks: int) -> Place:
        """On the only node."""
        return cls(0, 0, ranks, ranks, 1)

    @property
    def all(self) -> range:
        """The numbers of its ranks."""
        return range(self.first, self.first + self.ranks)


def places(counts: Sequence[int]) -> list[Place]:
    """Of nodes with so many ranks each.

    >>> [list(place.all) for place in places([2, 1, 2])]
    [[0, 1], [2], [3, 4]]
    """
    firsts = [sum(counts[:node]) for node in range(len(counts))]
    return [Place(node, firsts[node], ranks, sum(counts), len(counts)) for node, ranks in enumerate(counts)]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which nodes are waited for.

    Args:
        least: without so many there is no start.
        most: with so many it is at once.
        last_call_s: seconds that others have, once the least are there. Default: 30.
        timeout_s: seconds within which the least have to come. Default: 600.

    Raises:
        TypeError, ValueError: an argument is out of range.
    """

    least: int
    most: int
    last_call_s: float = 30.0
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        check_int(self, "least", at_least=1)
        check_int(self, "most", at_least=self.least)
        for name in ("last_call_s", "timeout_s"):
            check_real(self, name, at_least=0.0)

    @classmethod
    def parse(cls, text: str, last_call_s: float = 30.0) -> Wanted:
        """``MIN:MAX``, or one number for both.

        >>> Wanted.parse("2:4").most
        4

        Raises:
            ValueError: it is neither.
        """
        found = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text)
        if found is None:
            raise ValueError(f"{text!r} must be MIN:MAX, or one number.")
        return cls(least=int(found[1]), most=int(found[2] or found[1]), last_call_s=last_call_s)

    @property
    def text(self) -> str:
        return f"{self.least}:{self.most}" if self.least < self.most else str(self.most)

    def wait_s(self, here: int) -> float:
        """How long to wait for more nodes, from the last moment on in which one has come or gone.

        >>> [Wanted(least=2, most=3).wait_s(here) for here in (1, 2, 3)]
        [600.0, 30.0, 0.0]
        """
        if here < self.least:
            return self.timeout_s
        return self.last_call_s if here < self.most else 0.0

"""One generation of the process groups: its members, and their ranks.

A rank has a stable name, and a rank number only within a generation. Numbers change when ranks leave, are lost, or
join.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

_NOBODYS = -1
# Names are parts of keys in the store.
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,100}")


@dataclass(frozen=True)
class Generation:
    """A generation of the process groups, as one of its members sees it.

    >>> Generation.first(rank=2, world_size=3).only({"0", "2"})
    Generation(number=0, members=('0', '2'), rank=1)
    """

    number: int  # counts up with every reconfiguration, and names the groups' keys in the store
    members: tuple[str, ...]  # the members' stable names, in rank order
    rank: int  # this rank's place among the members

    @classmethod
    def first(cls, rank: int, world_size: int) -> Generation:
        """Return generation 0, of all ranks that start together; each rank's stable name is its rank number."""
        return cls(0, tuple(map(str, range(world_size))), rank)

    @classmethod
    def joining(cls, name: str) -> Generation:
        """Return the generation of a joining rank before it is admitted; it has no other member."""
        return cls(_NOBODYS, (name,), 0)

    @property
    def name(self) -> str:
        return self.members[self.rank]

    @property
    def world_size(self) -> int:
        return len(self.members)

    def rank_of(self, name: str) -> int:
        if name not in self.members:
            raise ValueError(f"'{name}' is not in generation {self.number}: its members are {listed(self.members)}.")
        return self.members.index(name)

    def name_of(self, rank: int) -> str:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"`rank={rank}` is not in generation {self.number}, of {self.world_size} ranks.")
        return self.members[rank]

    def only(self, names: Collection[str]) -> Generation | None:
        """Return the generation with only ``names``, in the same order; None if this rank is not among them."""
        members = tuple(name for name in self.members if name in names)
        return Generation(self.number, members, members.index(self.name)) if self.name in members else None


def at_start(who: str, rank: int, world_size: int, member: str | None) -> Generation:
    """Return a rank's first generation of the process groups.

    Args:
        who: Name of the class or function that got the arguments, for error messages.
        rank: Number of the rank.
        world_size: Number of ranks. Without ``member``, the generation has all of them.
        member: Name of a joining rank, which is then the only member. None: the rank does not join.

    Raises:
        ValueError: The arguments do not fit together.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"`{who}(rank={rank}, world_size={world_size})`: rank must be in [0, world_size).")
    if member is None:
        return Generation.first(rank, world_size)
    if not is_name(member):
        raise ValueError(f"`{who}(member={member!r})` must be of 1 to 100 letters, digits, '_', '.', ':' and '-'.")
    if world_size != 1:
        raise ValueError(f"`{who}(member={member!r}, world_size={world_size})`: a joining rank is alone at first.")
    return Generation.joining(member)


def is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def in_order(names: Iterable[str]) -> list[str]:
    """Return names sorted by length and then by text: numbers come in numerical order, the same on all ranks."""
    return sorted(names, key=lambda name: (len(name), name))


def listed(names: Iterable[str]) -> str:
    return f"[{', '.join(names)}]"

"""Which of two places has a shard: decided once for each generation, in the job's store, by whoever comes first.

    generation 0    the first place                 its copy is in the second one
    generation 1    the second: the first is lost   without a copy, until the first one is back and filled again
    generation 2    the second, still               that copy was lost, too; or the first again, if the second was

A server takes no such decision: a worker that cannot reach a shard, or hears that its copy is lost, claims the next
generation, and brings the servers word of it. So two that are cut off from each other never both go on.
"""

from __future__ import annotations

from typing import NamedTuple

from lightning_async.comm.membership.door import Door
from lightning_async.errors import PeerLost

__all__ = ["View", "Views"]


class View(NamedTuple):
    """Args:
    generation: from 0 on.
    primary: of the two places, the one that has the shard.
    """

    generation: int = 0
    primary: int = 0


class Views:
    """Of one shard's table.

    Args:
        door: to the job's notes.
        key: of the shard and its table, for as long as its weights last.
    """

    def __init__(self, door: Door, key: str) -> None:
        self._door, self._key = door, key

    def newest(self, since: View | None) -> View | None:
        """The newest one that was claimed, from one on that is known; None where there is none.

        Raises:
            PeerLost: the store is out of reach.
        """
        try:
            while note := self._door.read(self._of(0 if since is None else since.generation + 1)):
                since = View(note["generation"], note["primary"])
        except (RuntimeError, OSError) as error:
            raise _out_of_reach(error) from error
        return since

    def claim(self, view: View, by: str) -> tuple[View, bool]:
        """The view of that generation: this one, or another that was claimed before; and whether it is this claim's.

        Raises:
            PeerLost: the store is out of reach.
        """
        try:
            note = self._door.claim(self._of(view.generation), {**view._asdict(), "by": by})
        except (RuntimeError, OSError) as error:
            raise _out_of_reach(error) from error
        if not note:
            raise PeerLost(
                f"what the job's store has for generation {view.generation} of a shard is none of this job's."
            )
        return View(note["generation"], note["primary"]), note["by"] == by

    def _of(self, generation: int) -> str:
        return f"shard/{self._key}/{generation}"


def _out_of_reach(error: Exception) -> PeerLost:
    return PeerLost(
        f"the job's store, which has who serves which shard, is out of reach ({str(error).splitlines()[0]})."
    )

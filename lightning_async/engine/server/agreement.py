"""Gates of workers: one opens when all have pulled what the last push has made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from lightning_async.engine.buckets import Message
from lightning_async.engine.control import ControlPlane
from lightning_async.engine.header import Header

__all__ = ["Agreement"]


class Part(NamedTuple):
    """What a worker says in headers.

    Args:
        restored: grows whenever a server has begun with a snapshot, see `Answer`: what was before is no newer then,
            whatever its version.
        version: of the weights that it has, the sum over all servers.
    """

    restored: float = 0.0
    version: float = 0.0


class Agreement:
    """A wing, see `Wing`, that moves nothing itself: weights come from the servers.

    Whoever comes to a gate has no push under way, and pulls after its last one. So the last of them has what all
    pushes have made, on every server; it is the one with the highest version, and who has the same has the same bits.
    Where a server has lost what it had and begun with a snapshot, versions that are lost with it count no more.

    Args:
        control: the control plane; this registers with it.
    """

    blank = Part()

    def __init__(self, control: ControlPlane) -> None:
        self._box = control.mailbox
        self._mine = self._newest = Part()
        control.register(self)

    # ---- the training thread ----

    def pulled(self, versions: Sequence[int], restored: int = 0) -> None:
        """This worker has these weights now."""
        with self._box.changed:
            self._mine = Part(float(restored), float(sum(versions)))

    @property
    def behind(self) -> bool:
        """Whether another worker has said that it has newer weights."""
        with self._box.changed:
            return self._newest > self._mine

    # ---- the engine's thread, see `Wing` ----

    def is_indispensable(self) -> bool:
        return False

    def compose(self) -> Part:
        return self._mine

    def complete(self, part: Part, message: Message | None, compare: bool) -> Part:
        return part

    def is_due(self, parts: Sequence[Part]) -> bool:
        """Weights are to be pulled before a gate can open."""
        with self._box.changed:
            self._newest = max(parts)
        return any(part < self._newest for part in parts)

    def plan(self, priority: int, headers: Sequence[Header], parts: Sequence[Part]) -> None: ...

    def settle(self, headers: Sequence[Header], parts: Sequence[Part]) -> tuple[bool, Any]:
        return True, None

    def opened(self, here: bool) -> None: ...

    def drop(self) -> None: ...

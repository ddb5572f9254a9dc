"""Scripts of faults: what `FaultyCollectives` does in which call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["Corrupt", "Delay", "Fail", "Fault", "Hang", "Kill", "Script"]

_OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "exchange", "barrier", "*")


@dataclass(frozen=True)
class Fail:
    """The operation fails here. Its peers' fails too; with ``after``, theirs completes: the data has moved."""

    after: bool = False
    text: str = "scripted failure"


@dataclass(frozen=True)
class Hang:
    """This rank never comes: the operation ends by its deadline, or by `FaultyCollectives.abort`."""


@dataclass(frozen=True)
class Delay:
    """This rank comes late: when the event is set, or after so many seconds. The operation returns at once."""

    until: threading.Event | float


@dataclass(frozen=True)
class Corrupt:
    """The result arrives wrong: ``how`` changes it in place, by default all bits of the first element."""

    how: Callable[[Tensor], None] | None = None


@dataclass(frozen=True)
class Kill:
    """Calls the function given to `FaultyCollectives`; should that return, this rank's communicators are aborted."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of a script.

    Args:
        op: the method's name, or "*" for any.
        nth: strikes in the nth call, from 1, of those that match.
        action: what happens.
        name: only on the communicator of this name, "world/payload"; by default on any.
    """

    op: str
    nth: int = 1
    action: Fail | Hang | Delay | Corrupt | Kill = field(default_factory=Fail)
    name: str | None = None

    def __post_init__(self) -> None:
        if self.op not in _OPS:
            raise ValueError(f"`Fault(op={self.op!r})` must be one of {_OPS}.")
        if self.nth < 1:
            raise ValueError(f"`Fault(nth={self.nth})` counts from 1.")


class Script:
    """Counts calls, over a communicator and all of its forks."""

    def __init__(self, faults: Sequence[Fault], kill: Callable[[], None] | None) -> None:
        self.kill = kill
        self._counts = [(fault, [0]) for fault in faults]
        self._lock = threading.Lock()

    def strike(self, op: str, name: str) -> Fault | None:
        struck = None
        with self._lock:
            for fault, count in self._counts:
                if fault.op in (op, "*") and fault.name in (name, None):
                    count[0] += 1
                    if count[0] == fault.nth and struck is None:
                        struck = fault
        return struck

"""The peers' processes: that one has ended is seen, and not concluded from its silence.

Each rank says in its record where its process is found. Who finds it there, on its own host, holds on to it, and knows
from then on whether it lives, however busy, stopped or silent it is. Others are called when they are silent, see
`lifeline`; where both tell nothing, silence has to.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from lightning_async.comm.launched import CHANNEL
from lightning_async.comm.membership.lifeline import Calls, Lifeline
from lightning_async.comm.membership.roster import UP, VISITING, Record

__all__ = ["STARTER", "Neighbours", "place_of"]

STARTER = "LIGHTNING_ASYNC_LAUNCHER"
"""The environment variable of ranks that another one has started: its process, which tells of their ends."""
_WORD_S = 2.0
_BEGAN = 19  # of the fields behind the name in /proc/PID/stat


def place_of(process: int) -> str:
    """Where the process is found: by what boot of which host, in which namespace, its number, and when it began there.

    Two that are equal are of one process. "" where the system does not say.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        number, _, rest = Path(f"/proc/{process}/stat").read_text().partition(" (")
        if int(number) != process or os.readlink("/proc/self") != str(os.getpid()):  # of another namespace
            return ""
        namespace, began = os.readlink("/proc/self/ns/pid"), rest.rpartition(")")[2].split()[_BEGAN]
    except (OSError, ValueError, IndexError):
        return ""
    return f"{boot} {namespace} {process} {began}"


class Neighbours:
    """Whether the processes of peers live. Used by one thread, that of the heartbeat.

    Args:
        patience_s: how long whoever has started a process may take to tell of its end, in better words. Default: for
            a while where somebody does, and no time elsewhere.
        now: monotonic seconds.
    """

    def __init__(self, patience_s: float | None = None, now: Callable[[], float] = time.monotonic) -> None:
        told = any(name in os.environ for name in (CHANNEL, STARTER))
        self._patience_s, self._now = (_WORD_S if told else 0.0) if patience_s is None else patience_s, now
        self._place = place_of(os.getpid())
        self._lives: dict[str, str] = {}
        self._calls, self._apart = Calls(), False
        self._lifeline: Lifeline | None = None
        self._held: dict[str, int] = {}  # a descriptor, which stands for this process for good
        self._ended: dict[str, float] = {}

    def gone(self, records: Mapping[str, Record | None]) -> list[str]:
        """Those who were here, have not said goodbye, and whose processes have ended."""
        here = {name: each for name, each in records.items() if each is not None and each.state in (UP, VISITING)}
        for name, record in here.items():
            if self._lives.get(name) != record.life:
                self._look_for(name, record)
        if self._lifeline is not None:
            self._lifeline.hang_up()
        apart = {name: each for name, each in here.items() if name not in self._held and each.place != self._place}
        self._apart = self._apart or bool(apart)
        now, ended = self._now(), [name for name, descriptor in self._held.items() if _has_ended(descriptor)]
        for name in (*ended, *self._calls.refused(apart)):
            self._ended.setdefault(name, now)
        return [name for name, at in self._ended.items() if name in here and now - at >= self._patience_s]

    def introduce(self, mine: Record, host: str | None) -> Record:
        """The own record, with where this process is found, and reached where some do not find it on their own host.

        Args:
            mine: the record.
            host: an address that others may reach this host at.
        """
        if self._lifeline is None and self._apart and host is not None:
            with contextlib.suppress(OSError):
                self._lifeline = Lifeline(host)
        return replace(mine, place=self._place, line="" if self._lifeline is None else self._lifeline.place)

    def close(self) -> None:
        """Let go of all; idempotent."""
        while self._held:
            os.close(self._held.popitem()[1])
        self._calls.close()
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None
        self._lives.clear()
        self._ended.clear()

    def _look_for(self, name: str, record: Record) -> None:
        self._lives[name] = record.life
        self._ended.pop(name, None)
        if (before := self._held.pop(name, None)) is not None:
            os.close(before)
        if (found := _find(record.place)) is not None:
            self._held[name] = found


def _find(place: str) -> int | None:
    """A descriptor of the process, where it is one of this host and lives; None else: nothing is known then."""
    try:
        process = int(place.split()[-2])
        descriptor = os.pidfd_open(process)
    except (AttributeError, OSError, ValueError, IndexError):  # no such system, no such process, no place
        return None
    # In this order: the number may have gone to another process, which began later, but not while this one lives.
    if process != os.getpid() and place_of(process) == place and not _has_ended(descriptor):
        return descriptor
    os.close(descriptor)
    return None


def _has_ended(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))

"""Where workers and servers that are ranks find each other: notes in the store, and who of the workers is there.

the first worker                          each server, from start to end
call: training 3 wants servers  ------->  starts its own
                                <-------  answer: training 3, server 0: they are here
all workers dial, and train
call: training 3 is over        ------->  ends them, once nobody is connected any more
(the workers' processes end)              hears no worker any more: ends
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from lightning_async.comm.membership.door import Door
from lightning_async.comm.membership.start import Patience
from lightning_async.engine.server.quorum import Terms
from lightning_async.engine.server.replacing import Shelving
from lightning_async.errors import AsyncTrainingError

__all__ = ["ROOM", "Attendance", "Board", "guest_name"]

ROOM = "lightning_async/attendance"
"""Where all that are there beat, by names of their own, see `Membership`."""
_WORKER = "worker"


def guest_name(role: str, number: int, restarts: int = 0) -> str:
    """What a process is called there.

    >>> guest_name("server", 1)
    'server-1.0'
    """
    return f"{role}-{number}.{restarts}"


class Board:
    """The notes of one job.

    Args:
        door: of the job.
    """

    def __init__(self, door: Door) -> None:
        self._door = door

    # ---- the workers ----

    def call(self, run: int, num_servers: int, terms: Terms, shelving: Shelving | None = None) -> None:
        """So many servers are wanted for this run, on these terms; with snapshots, where that says so."""
        numbers, kept = {"run": run, "servers": num_servers}, (shelving or Shelving())._asdict()
        self._door.write("call", {**numbers, "terms": terms.plain(), "snapshots": kept, "over": False})

    def dismiss(self, run: int) -> None:
        """That run is over."""
        self._door.write("call", {"run": run, "over": True})

    def answers(self, run: int, num_servers: int, patience: Patience) -> list[dict[str, Any]]:
        """The addresses of all servers.

        Raises:
            AsyncTrainingError: one of them cannot serve; names it, and says why.
            CollectiveTimeout: one of them has not answered in time.
        """
        told: dict[int, dict[str, Any]] = {}
        while missing := [server for server in range(num_servers) if server not in told]:
            for server in missing:
                if note := self.check(run, server):
                    told[server] = note
            if len(told) < num_servers:
                patience.wait(lambda: f"waiting for server(s) {missing} of {num_servers}")
        return [address for server in range(num_servers) for address in told[server]["addresses"]]

    def check(self, run: int, server: int) -> dict[str, Any]:
        """What a server has answered; empty where it has not.

        Raises:
            AsyncTrainingError: that it cannot serve.
        """
        note = self.answered(run, server)
        if "error" in note:
            raise AsyncTrainingError(f"server {server} cannot go on: {note['error']}")
        return note

    # ---- a server ----

    def called(self) -> dict[str, Any]:
        """The last call; empty where there was none."""
        return self._door.read("call")

    def answer(self, run: int, server: int, note: Mapping[str, Any]) -> None:
        """Its ``addresses``, or an ``error``."""
        self._door.write(f"answer/{run}/{server}", note)

    def answered(self, run: int, server: int) -> dict[str, Any]:
        """What a server has answered; empty where it has not."""
        return self._door.read(f"answer/{run}/{server}")


class Beats(Protocol):
    """See `Membership`."""

    def guests(self) -> Iterable[str]: ...

    def left(self) -> Iterable[str]: ...


class Attendance:
    """Whether those whom a process serves have ended, by what it has heard of them.

    Args:
        beats: of all that are there.
        num_workers: that are to come.
        dead_after_s: who says nothing for so long has died.
        now: seconds. Default: the system's clock.
    """

    def __init__(
        self, beats: Beats, num_workers: int, dead_after_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._beats, self._num_workers, self._dead_after_s, self._now = beats, num_workers, dead_after_s, now
        self._heard: dict[str, float] = {}
        """Of each worker that ever was there, when it last was."""
        self._began = now()

    @property
    def silent_s(self) -> float:
        """For how long no worker has been there."""
        return self._now() - max(self._heard.values(), default=self._began)

    @property
    def came(self) -> int:
        """Workers that ever were there."""
        return len(self._heard)

    def over(self) -> bool:
        """Whether all have come, and ended since; or some, and nobody was heard of for too long."""
        now, left = self._now(), {name for name in self._beats.left() if name.startswith(_WORKER)}
        self._heard |= {name: self._heard.get(name, now) for name in left}
        self._heard |= {name: now for name in self._beats.guests() if name.startswith(_WORKER)}
        if not self.came:
            return False
        if self.silent_s > self._dead_after_s:
            return True
        gone = left | {name for name, at in self._heard.items() if now - at > self._dead_after_s}
        return self.came >= self._num_workers and gone >= self._heard.keys()

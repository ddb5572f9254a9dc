"""A job as its replicas tell of it: one row for each, and what all rows say together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lightning_async.comm.membership.generation import in_order
from lightning_async.comm.membership.standing import ENDED, FAILED, Standing

__all__ = ["LOST", "SILENT", "Job", "Replica"]

LOST, SILENT = "lost", "silent"
_SILENT_S = 4.0
"""Without a record for so long, of which one comes each second, a replica is stopped, dead, or cut off."""


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One replica.

    Args:
        standing: what it has said last.
        state: what it does; `LOST` where the others go on without it, `SILENT` where nothing is heard of it.
        heard_ago_s: seconds since it has said something.
        lag: steps behind the one that has taken most.
        restarts: of this rank, together with the others or alone.
    """

    standing: Standing
    state: str
    heard_ago_s: float
    lag: int
    restarts: int

    @property
    def trains(self) -> bool:
        """Whether it takes part."""
        return self.state not in (LOST, SILENT, ENDED, FAILED)


@dataclass(frozen=True, kw_only=True)
class Job:
    """All replicas of one store.

    Args:
        where: its address.
        replicas: by name.
    """

    where: str
    replicas: tuple[Replica, ...]

    @classmethod
    def of(cls, where: str, standings: Sequence[Standing], now: float) -> Job:
        """What all records say together.

        Args:
            where: the address of the store that they were in.
            standings: in the order in which their processes came.
            now: seconds since 1970. Where hosts' clocks differ, so does how long ago something was.
        """
        last = {standing.name: standing for standing in standings}
        newest = max(((s.run, s.generation) for s in last.values()), default=(0, 0))
        members = {name for s in last.values() if (s.run, s.generation) == newest for name in s.members}
        here = {name for name, s in last.items() if now - s.at < _SILENT_S and name in members}
        most = max((last[name].step for name in here), default=0)
        replicas = []
        for name in in_order(last):
            standing, lives = last[name], {s.process for s in standings if s.name == name}
            silent = now - standing.at >= _SILENT_S
            state = standing.state
            if state not in (ENDED, FAILED) and (silent or name not in members):
                state = LOST if name not in members else SILENT
            replicas.append(
                Replica(
                    standing=standing, state=state, heard_ago_s=max(0.0, now - standing.at),
                    lag=max(0, most - standing.step) if name in here else 0,
                    restarts=standing.restarts + len(lives) - 1,
                )
            )  # fmt: skip
        return cls(where=where, replicas=tuple(replicas))

    @property
    def generation(self) -> int:
        """The newest that any of them is in."""
        return max((replica.standing.generation for replica in self.replicas if replica.trains), default=0)

    @property
    def training(self) -> int:
        """How many take part."""
        return sum(replica.trains for replica in self.replicas)

    def table(self) -> str:
        """For people."""
        title = f"{self.where}: {self.training} of {len(self.replicas)} replicas train, in generation {self.generation}"
        if not self.replicas:
            return f"{self.where}: no replica has trained yet"
        rows = [_HEAD, *(_cells(replica) for replica in self.replicas)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        left = (0, 2)
        lines = [
            "  ".join(
                cell.ljust(width) if index in left else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        return "\n".join([title, *(line.rstrip() for line in lines)])

    def json(self) -> str:
        """For programs: one line."""
        replicas = [
            {
                **asdict(replica.standing), "state": replica.state, "heard_ago_s": round(replica.heard_ago_s, 3),
                "lag": replica.lag, "restarts": replica.restarts,
            }
            for replica in self.replicas
        ]  # fmt: skip
        return json.dumps(
            {"store": self.where, "generation": self.generation, "training": self.training, "replicas": replicas}
        )


_HEAD = ("rank", "now", "state", "epoch", "step", "steps/s", "lag", "rounds", "last", "took", "failed", "hidden",
         "restarts", "process")  # fmt: skip


def _cells(replica: Replica) -> tuple[str, ...]:
    standing, takes_part = replica.standing, replica.trains
    state = replica.state
    if state in (LOST, SILENT):
        state = f"{state} ({replica.heard_ago_s:.0f} s)"
    elif takes_part and standing.slow:
        state = f"{state} ({standing.slow})"
    last = f"{standing.round_ago_s + replica.heard_ago_s:.1f} s" if standing.round_ago_s >= 0.0 else "-"
    return (
        standing.name,
        str(standing.rank) if takes_part else "-",
        state,
        str(standing.epoch),
        str(standing.step),
        f"{standing.steps_per_s:.1f}" if takes_part else "-",
        str(replica.lag) if takes_part else "-",
        str(standing.rounds),
        last,
        f"{1e3 * standing.round_s:.0f} ms",
        str(standing.failed_rounds),
        f"{100 * standing.hidden_share:.0f}%",
        str(replica.restarts),
        f"{standing.process} on {standing.host}",
    )

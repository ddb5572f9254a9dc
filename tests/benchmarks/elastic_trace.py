"""What ranks have written down while others died, and what follows from it: numbers of each death."""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "BATCH", "Death", "Life", "Return", "Traces", "Writer", "alive", "measure_death", "measure_return", "percentile",
]  # fmt: skip

BATCH = 8
"""Samples of a step."""
Event = dict[str, Any]
RECENT = 12
"""Rounds before a death by which its period is told."""


class Writer:
    """Writes down what one process sees, a line for each event: on its way to the file when `note` returns."""

    def __init__(self, folder: str, name: str) -> None:
        flags = os.O_APPEND | os.O_CREAT | os.O_WRONLY
        self._file = os.open(Path(folder, f"trace-{name}-{os.getpid()}.jsonl"), flags)

    def note(self, what: str, **fields: object) -> None:
        """An event; now, unless it has a time ``t`` by the monotonic clock."""
        line = {"what": what, "t": time.monotonic(), **fields}
        os.write(self._file, json.dumps(line).encode() + b"\n")


@dataclass
class Life:
    """One process of a rank, from its start.

    Args:
        name: of the rank.
        process: its number.
        events: what it has written down, in this order.
    """

    name: str
    process: int
    events: list[Event] = field(default_factory=list)
    read: int = 0

    def of(self, what: str) -> list[Event]:
        return [event for event in self.events if event["what"] == what]

    @property
    def commits(self) -> list[Event]:
        return self.of("commit")

    @property
    def alive(self) -> bool:
        """Its process is there."""
        return alive(self.process, self.events[0]["t"] if self.events else math.inf)

    @property
    def ended(self) -> bool:
        """In order."""
        return bool(self.events) and self.events[-1]["what"] == "end"


def alive(process: int, by: float = math.inf) -> bool:
    """Whether it is there, and no zombie, and was by a time of the monotonic clock: numbers of processes come again."""
    try:
        told = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    began = int(told[19]) / os.sysconf("SC_CLK_TCK") - time.clock_gettime(time.CLOCK_BOOTTIME) + time.monotonic()
    return told[0] not in "ZX" and began <= by + 1.0  # in hundredths of a second, by clocks that are read in turn


class Traces:
    """The files of a run, read as they grow."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lives: dict[str, Life] = {}

    def read(self) -> list[Life]:
        """All lives that there were, with all that is known of them by now."""
        for path in sorted(self._folder.glob("trace-*.jsonl")):
            _, name, process = path.stem.split("-")
            life = self._lives.setdefault(path.name, Life(name, int(process)))
            with path.open("rb") as file:
                file.seek(life.read)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    life.read += len(line)
                    life.events.append(json.loads(line))
        return list(self._lives.values())


@dataclass(kw_only=True)
class Death:
    """What a death has cost those that are left. Times in seconds.

    Args:
        place: where the rank was.
        name: its name.
        ranks: how many there were with it.
        recovery_s: from the kill to the next committed round, on the last of the survivors.
        period_s: from one round to the next, before it.
        pause_s: the longest that a survivor's training thread stood between two steps, without sync points, until then.
        repeated: rounds that failed and were repeated.
        alike: survivors have committed the same, to the bit.
    """

    place: str
    name: str
    ranks: int
    recovery_s: float
    period_s: float
    pause_s: float
    repeated: int
    alike: bool

    @property
    def excess_s(self) -> float:
        """Beyond the period."""
        return self.recovery_s - self.period_s


@dataclass(kw_only=True)
class Return:
    """A rank that was killed, and came back. Times in seconds.

    Args:
        name: its name.
        ranks: how many there are with it.
        away_s: from the kill to its first committed round.
        joining_s: from where its program begins to train, which is after its imports, to that round.
        pause_s: the longest that another one's training thread stood between two steps meanwhile.
    """

    name: str
    ranks: int
    away_s: float
    joining_s: float
    pause_s: float


def measure_return(others: Iterable[Life], back: Life, killed_at: float) -> Return:
    """Of a life that has committed a round, beside those that trained all the time."""
    begun, first = back.of("start")[0]["t"], back.commits[0]
    until = first["t"] + 0.5
    pauses = [s["gap"] for life in others for s in life.of("step") if begun < s["t"] < until]
    return Return(
        name=back.name, ranks=len(first["members"]), away_s=first["t"] - killed_at, joining_s=first["t"] - begun,
        pause_s=max(pauses),
    )  # fmt: skip


def first_without(life: Life, names: Iterable[str], killed_at: float) -> Event | None:
    """The first round that a survivor has committed without those that died."""
    gone = set(names)
    return next((c for c in life.commits if c["t"] > killed_at and not gone & set(c["members"])), None)


def measure_death(living: Sequence[Life], place: str, names: Sequence[str], killed_at: float) -> Death | None:
    """Of ranks that died at that time; None where one of those that live has not committed a round since.

    Who has come back is asked for nothing before its first round.
    """
    live_ranks = [life for life in living if any(commit["t"] < killed_at for commit in life.commits)]
    firsts = [first_without(life, names, killed_at) for life in live_ranks]
    if not live_ranks or any(first is None for first in firsts):
        return None
    pauses, repeated, periods = [0.0], [0], []
    for life, first in zip(live_ranks, firsts, strict=True):
        assert first is not None
        before = [commit for commit in life.commits if commit["t"] < killed_at]
        times = [commit["t"] for commit in before][-RECENT:]
        periods += [b - a for a, b in itertools.pairwise(times)]
        repeated.append(first["failed"] - before[-1]["failed"] * (first["run"] == before[-1]["run"]))
        until = first["t"] + 0.5  # the merge of that round, too
        pauses += [s["gap"] for s in life.of("step") if killed_at < s["t"] < until and not s["gated"]]
    return Death(
        place=place,
        name=",".join(names),
        ranks=len(live_ranks) + len(names),
        recovery_s=max(first["t"] for first in firsts if first is not None) - killed_at,
        period_s=statistics.median(periods) if periods else math.nan,
        pause_s=max(pauses),
        repeated=max(repeated),
        alike=alike(live_ranks),
    )


def alike(lives: Iterable[Life]) -> bool:
    """Whether all have committed the same in each round, and ended with the same model."""
    made: defaultdict[object, set[str]] = defaultdict(set)
    for life in lives:
        for commit in life.commits:
            if commit["digest"] is not None:
                made[commit["run"], commit["id"]].add(commit["digest"])
        for end in life.of("end"):
            made["end"].add(end["digest"])
    return all(len(digests) == 1 for digests in made.values())


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of them does not exceed.

    >>> percentile([3.0, 1.0, 2.0, 4.0], 0.5), percentile([3.0, 1.0], 0.95)
    (2.0, 3.0)
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan

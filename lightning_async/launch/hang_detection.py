"""Hang detection from the steps that ranks report in the store; runs in the process that keeps the store."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_async.membership.status import ENDED, FAILED, StatusRecord

# Largest number of seconds by which one `Watched.tick` advances the clock.
_LONGEST_LOOK_S = 10.0


class Watched:
    """A clock that stops while its process is suspended, so that a suspended job does not count as hanging.

    Args:
        since: Present time, in seconds.
    """

    def __init__(self, since: float) -> None:
        self._last = since
        self.now = 0.0

    def tick(self, now: float) -> float:
        """Advance the clock by the time since the last call, 10 seconds at most; return its time."""
        self.now += min(now - self._last, _LONGEST_LOOK_S)
        self._last = now
        return self.now


class ReportedProgress:
    """The steps that ranks have reported since all of them were last started.

    Args:
        limits: Seconds without a step of any rank that count as a hang: before the first step of a training, while
            programs import, compile and read data; and after it.
        world_size: Number of ranks.
        now: Present time, in seconds.
    """

    def __init__(self, limits: Sequence[float], world_size: int, now: float) -> None:
        self._limits = limits
        self._world_size = world_size
        self._since = now
        self._first: dict[tuple[str, int, int], int] = {}
        """Step of each training of each process when it was first seen."""
        self._begun: dict[tuple[str, int], int] = {}  # newest step of each process that has taken a step
        self._reached: dict[tuple[str, int], tuple[int, bool]] = {}
        self._heard: dict[tuple[str, int], tuple[float, float]] = {}

    def look(self, standings: Sequence[StatusRecord], now: float) -> str | None:
        """Return a report of each rank's state if no rank has made progress within the time limit, else None.

        After a report, the time limit begins again.

        Args:
            standings: Newest records of all ranks.
            now: Present time, in seconds.
        """
        reached = {(s.name, s.process): (s.step, s.state in (ENDED, FAILED)) for s in standings}
        for each in standings:
            key = (each.name, each.process)
            if self._heard.get(key, (0.0, 0.0))[0] != each.at:
                self._heard[key] = each.at, now
        last = {each.name: each for each in standings}
        newest = max(((s.run, s.generation) for s in last.values()), default=(0, 0))
        begun = False
        for each in last.values():
            process = each.name, each.process
            key = *process, each.run
            if key not in self._first:  # a run continues at the step of the one before if ranks join
                goes_on = process in self._begun and each.step >= self._begun[process]
                self._first[key] = each.step - goes_on
            if each.step > self._first[key]:
                self._begun[process] = each.step
                begun |= each.run == newest[0]
        members = {name for s in last.values() if (s.run, s.generation) == newest for name in s.members}
        done = bool(members) and all(reached[s.name, s.process][1] for s in last.values() if s.name in members)
        if reached != self._reached or done:  # after training, a script may take as long as it likes
            self._reached = reached
            self._since = now
        silent_s = now - self._since
        limit_s = self._limits[begun]
        if silent_s < limit_s:
            return None
        self._since = now
        what, option = ("a step for", "--hang-after") if begun else ("its first step within", "--hang-after-start")
        lines = [f"No rank has taken {what} {silent_s:.0f} s ({option} {limit_s:g}):"]
        for name in map(str, range(self._world_size)):
            lines.append(f"rank {name} {self._where(last.get(name), now)}")
        return "\n".join(lines)

    def _where(self, standing: StatusRecord | None, now: float) -> str:
        if standing is None:
            return "has reported no step yet"
        silent = now - self._heard[standing.name, standing.process][1]
        quiet = f"; nothing was heard of it for {silent:.0f} s" if silent >= 5.0 else ""
        return f"(process {standing.process}) {standing.state}, at step {standing.step}{quiet}"

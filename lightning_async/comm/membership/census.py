"""What one rank makes of everybody's records: who lives, who is lost, and what generation may come next.

Without threads, store or clock: its owner reads the records, holds a lock, and says how much time has passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lightning_async.comm.membership.generation import Generation, in_order, listed
from lightning_async.comm.membership.roster import OUTSIDE, Peer, Record

__all__ = ["Census"]

_MIN_SUSPICION_S = 1.0


class Census:
    """The others by name, and the generation this rank is in.

    Args:
        generation: the first; of a newcomer, itself alone.
        fresh: see `Membership`.
        dead_s, start_s: the silence that is death, of a peer that was seen and of one that was not yet.
        elastic: whether ranks may join: then who has been in longest comes first; else all keep their order.
        readmit: whether a rank that a generation was formed without may come back.
    """

    def __init__(
        self,
        generation: Generation,
        fresh: bool,
        dead_s: float,
        start_s: float,
        elastic: bool = True,
        readmit: bool = True,
    ) -> None:
        self.generation = generation
        self.me = generation.name
        self.peers: dict[str, Peer] = {}
        self._fresh, self._dead_s, self._start_s, self._elastic = fresh, dead_s, start_s, elastic
        self._soon_s = max(dead_s / 10, _MIN_SUSPICION_S)
        self._silent_before: dict[str, float] = {}
        """Seconds that each peer was silent for when something broke; empty where nothing has."""
        self.readmit = readmit
        self.fewest = 0
        """Fewer do not go on, so they decide nothing for the others."""
        self._evicted: set[str] = set()
        self.hear_of(generation.members)

    def hear_of(self, names: Iterable[str]) -> None:
        """There are ranks of these names."""
        for name in names:
            if name != self.me and name not in self.peers:
                self.peers[name] = Peer(fresh=self._fresh)

    def judge(self, records: Mapping[str, Record | None], passed_s: float) -> None:
        """Take in a reading, so long after the last one; None for what was no record."""
        self.hear_of(records)
        for name, record in records.items():
            before_s = self._silent_before.get(name, self._dead_s)
            self.peers[name].judge(record, passed_s, min(self._dead_s, before_s + self._soon_s), self._start_s)

    def hear_death(self, name: str, process: int, text: str) -> None:
        """A process has ended that spoke for a peer; what that means for the peer is judged with the next reading."""
        if name in self.peers:
            self.peers[name].death = process, text

    def suspect(self) -> None:
        """Something broke: until the next generation a tenth of the silence is death from now on, a second at least.

        Who lives has heard of it, too, and says so within a few beats. Whose process is found to have ended is lost
        without it, see `neighbours`.
        """
        self._silent_before = self._silent_before or {name: peer.silent_s for name, peer in self.peers.items()}

    def lost(self) -> frozenset[str]:
        """All that are lost, whether they are in this generation or not."""
        return frozenset(name for name, peer in self.peers.items() if peer.lost)

    def gone(self, known: frozenset[str] = frozenset(), restarts: bool = False) -> dict[str, Peer]:
        """The members of this generation that are lost, but for those that were ``known`` to be.

        Args:
            restarts: also those that live again, as another process.
        """
        others = {name: self.peers[name] for name in self.generation.members if name != self.me and name not in known}
        return {name: peer for name, peer in others.items() if peer.lost or (restarts and peer.restarted)}

    @property
    def enough(self) -> bool:
        """Whether as many of this generation are left as go on."""
        return self.generation.world_size - len(self.gone()) >= self.fewest

    def guests(self) -> list[str]:
        """Those that wait to be invited elsewhere, and have been heard of just now: they are not to be waited for."""
        return in_order(name for name, peer in self.peers.items() if peer.visits and peer.silent_s < self._soon_s)

    def bell(self) -> int:
        """The highest that a peer has rung."""
        return max([peer.record.bell for peer in self._heard().values()], default=0)

    def view(self) -> object:
        """What a listener is told of when it changes."""
        return [
            (name, peer.record.bell, peer.record.wanted, peer.record.state, peer.record.life, peer.lost)
            for name, peer in self.peers.items()
        ]

    def newest(self) -> int:
        """The newest generation that a living peer is in, or waits for.

        Where nobody may come back, none is passed over: the next one may have been decided without this rank, which
        then would propose itself for a later one.
        """
        newest = max([peer.record.wanted for peer in self._heard().values() if peer.up], default=0)
        return newest if self.readmit else min(newest, self.generation.number + 1)

    def ahead(self) -> list[str]:
        """The living peers that have left this generation for a newer one."""
        number = self.generation.number
        return in_order(name for name, peer in self._heard().items() if peer.up and peer.record.wanted > number)

    def awaited(self, wanted: int) -> list[str]:
        """The ranks without which the generation that is wanted cannot be decided."""
        return in_order(
            name
            for name, peer in self._heard().items()
            if not peer.lost
            and ((peer.up and peer.record.wanted != wanted) or (not peer.confirmed and name in self.generation.members))
        )

    def proposal(self, mine: Record) -> list[str] | None:
        """Who would be in the generation that ``mine`` wants, in the order of their ranks; None while it is too early.

        Where ranks may join, who has been in longest comes first: rank 0 has lived through what newcomers have not.
        Else a rank that only heard too late of a generation with it keeps its number, too. A newcomer decides nothing,
        as it may not have heard of all.
        """
        if not self.enough or self.generation.number < 0 or self.awaited(mine.wanted):
            return None
        since = {name: peer.record.since for name, peer in self._heard().items() if peer.up} | {self.me: mine.since}
        if not self._elastic:
            return in_order(since)
        return sorted(in_order(since), key=lambda name: mine.wanted if since[name] == OUTSIDE else since[name])

    def enter(self, number: int, members: tuple[str, ...]) -> None:
        """Be in this generation from now on."""
        self.hear_of(members)
        if not self.readmit:
            self._evicted |= {*self.generation.members} - {*members}
        self._silent_before = {}
        self.generation = Generation(number, members, members.index(self.me))
        for peer in self.peers.values():
            peer.restarted = False

    def _heard(self) -> dict[str, Peer]:
        """The peers whose word counts: one that was left out may wake up, and speaks of the past."""
        return {name: peer for name, peer in self.peers.items() if name not in self._evicted}

    # ---- in words ----

    def left_behind(self, by: Iterable[str]) -> str:
        """That others wait in a newer generation."""
        return f"rank {self.me}: rank(s) {listed(by)} left generation {self.generation.number}."

    def overdue(self, wanted: int, waited_s: float) -> str:
        """That a generation has not come about, and whom it waits for."""
        return (
            f"rank {self.me}: generation {wanted} did not come about within {waited_s:g} s: rank(s) "
            f"{listed(self.awaited(wanted))} live but have not left their generation. Are they in a long computation "
            "that never calls check()?"
        )

    def evicted(self, number: int, members: Iterable[str]) -> str:
        """That the others have gone on without this rank, and what to do about it."""
        return (
            f"rank {self.me}: rank(s) {listed(members)} heard nothing of it for too long, or that it had failed, and "
            f"have gone on without it in generation {number}. What it did since is lost. Was its process or its host "
            "stopped, or too busy for a heartbeat? Then raise `Deadlines(dead_after=...)`."
        )

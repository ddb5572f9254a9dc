"""Who is alive, and which generation of the groups they are in: heartbeats through a store.

Liveness is independent of the collectives: a rank may wait in an operation for long, its heartbeat goes on. One
record per rank; every beat writes the own and reads all, in two requests.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta

from lightning_async.comm.membership.board import Board, Waiting
from lightning_async.comm.membership.roster import FAILED, LEFT, UP, Peer, Record, describe, new_life
from lightning_async.comm.membership.signing import Seal
from lightning_async.comm.membership.stores import Contact, Store
from lightning_async.comm.protocols import Quorum
from lightning_async.errors import CollectiveTimeout, GenerationChanged, PeerLost

__all__ = ["HEARTBEAT", "Membership"]

HEARTBEAT = timedelta(seconds=0.2)
_log = logging.getLogger(__name__)
_GOODBYE_S, _GIVEUP = 2.0, 3  # refusals in a row: no use in saying goodbye
_MIN_PATIENCE = timedelta(seconds=0.5)
_started: weakref.WeakSet[Membership] = weakref.WeakSet()


class Membership:
    """This rank's heartbeat, and its view of the others'.

    A peer is lost when its record has not changed for ``dead_after`` by this rank's clock, in at least four readings
    of the store: time in which this rank was stopped, or the store was slow, does not count. A peer that closed in
    order is never lost; one that failed is lost at once. A store serves one membership; give another a `PrefixStore`.

    Args:
        store: reachable by all ranks. Threads need a client each, so the heartbeat clones it.
        rank, world_size: of this rank; ranks keep their numbers for life, whatever the groups call them.
        interval: between two beats.
        dead_after: the silence after which a peer, or the store, is lost. At least four intervals.
        start_timeout: the silence allowed to a peer that has not been seen yet.
        fresh: the store holds no records of earlier lives of the ranks, as it is no older than the job: what is found
            there lives, or has lived, so its silence is judged by ``dead_after`` from the first reading on.
        seal: of the records; by default they are not signed.
        on_change: called on the heartbeat thread after a peer's bell, generation or liveness changed.
        clock: monotonic seconds; for tests.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        interval: timedelta = HEARTBEAT,
        dead_after: timedelta = timedelta(seconds=20),
        start_timeout: timedelta = timedelta(minutes=5),
        fresh: bool = False,
        seal: Seal | None = None,
        on_change: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"`Membership(rank={rank}, world_size={world_size})`: rank must be in [0, world_size).")
        if interval <= timedelta(0) or dead_after < 4 * interval:
            raise ValueError(f"`Membership(dead_after={dead_after})` must be at least four intervals of {interval}.")
        # A stall of the store that is shorter costs nothing: the answer is waited for.
        patience = max(_MIN_PATIENCE, dead_after / 4)
        self._board = Board(store, rank, world_size, Seal() if seal is None else seal, patience)
        self._rank = rank
        self.dead_after, self._dead_s = dead_after, dead_after.total_seconds()
        self._interval_s = interval.total_seconds()
        self._start_s = start_timeout.total_seconds()
        self.on_change, self._clock = on_change, clock
        self._lock = threading.Lock()
        self._beaten = threading.Condition(self._lock)
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._stop = False
        self._mine = Record(life=new_life(), state=UP)
        self._published = self._mine
        self._peers = {other: Peer(Record(), fresh) for other in range(world_size) if other != rank}
        self._members = frozenset(range(world_size))
        self._generation = 0
        self._decided: Quorum | None = None
        self._read_at, self._pid = clock(), os.getpid()
        self._contact = Contact(self._read_at, self._dead_s)

    @property
    def generation(self) -> int:
        """The generation this rank is in: 0, then what `next_generation` returned last."""
        return self._generation

    @property
    def bell(self) -> int:
        """The highest round that any rank has rung for."""
        with self._lock:
            return max([self._mine.bell, *(peer.record.bell for peer in self._peers.values())])

    def start(self) -> None:
        """Publish the first record and start the heartbeat thread; does nothing where it runs.

        Raises:
            AsyncTrainingError: another process lives under this rank; it is left alone.
            RuntimeError: the store is out of reach.
        """
        if self._thread is not None:
            return
        self._board.open(timedelta(seconds=self._interval_s))
        self._exchange()
        self._thread = threading.Thread(target=self._run, name="lightning_async heartbeat", daemon=True)
        self._thread.start()
        _started.add(self)

    def close(self) -> None:
        """Say goodbye and end the thread; idempotent. A store out of reach delays it by a few seconds at most."""
        self._publish_end(LEFT, "")
        self._end()

    def _end(self) -> None:
        self._stop = True
        if self._thread is None or os.getpid() != self._pid:  # a fork that leaves: the rank is its parent's
            return
        self._wake.set()
        self._thread.join(_GOODBYE_S)
        if self._thread.is_alive():  # the store's host stands still, say
            self._board.hang_up()
            self._thread.join(_GOODBYE_S)

    def fail(self, text: str) -> None:
        """Tell the peers that this rank ends in an error; blocks until that is written, a few seconds at most."""
        self._publish_end(FAILED, text[:2000])

    def report_death(self, rank: int, text: str) -> None:
        """Tell all ranks that a peer's process has ended in an error, so that none waits out its silence.

        Raises:
            RuntimeError: the store is out of reach.
        """
        self._board.report(rank, text)

    def ring(self, bell: int) -> None:
        """Say that this rank wants round ``bell`` now. Published at once, by the heartbeat thread."""
        with self._lock:
            self._mine = replace(self._mine, bell=max(bell, self._mine.bell))
        self._wake.set()

    def left(self) -> frozenset[int]:
        """The peers that have closed in order, by this rank's view. No I/O."""
        return frozenset(rank for rank, peer in self._peers.items() if peer.has_left)

    def why(self, ranks: Iterable[int]) -> str:
        """Why these peers are lost, in words. No I/O."""
        return "; ".join(self._peers[rank].describe(rank) for rank in ranks)

    def lost(self) -> tuple[int, ...]:
        """The members of this generation that are lost, by this rank's view. No I/O."""
        return tuple(rank for rank, peer in self._peers.items() if peer.lost and rank in self._members)

    def check(self) -> None:
        """Raise if the present generation cannot go on. No I/O.

        Raises:
            PeerLost: names members that are silent or failed, or the store's host.
            GenerationChanged: a peer waits in a newer generation; enter `next_generation`.
        """
        with self._lock:
            self._check_store()
            self._check_peers(frozenset(), restarts=True)
            newer = [rank for rank, peer in self._peers.items() if peer.up and peer.record.wanted > self._generation]
            if newer:
                raise GenerationChanged(f"rank {self._rank}: rank(s) {newer} left generation {self._generation}.")

    def next_generation(self, timeout: timedelta) -> Quorum:
        """Enter the next generation together with every rank that lives; all members get the same quorum.

        Ranks lost before the call are left out. One that is lost during the call raises; call again to go on
        without it. A rank that comes back, under its old number, is taken in.

        Raises:
            PeerLost: names the ranks lost since the call began, or the store's host.
            CollectiveTimeout: names the ranks that live but did not come.
        """
        deadline = self._clock() + timeout.total_seconds()
        with self._beaten:
            known = frozenset(rank for rank, peer in self._peers.items() if peer.lost)
            self._want(self._generation + 1)
            while True:
                quorum = self._decided
                if quorum is not None and quorum.generation == self._mine.wanted:
                    if self._rank in quorum.ranks:
                        self._enter(quorum)
                        return quorum
                    # Decided without this rank, when it was taken for dead: ask for another one.
                    self._want(quorum.generation + 1)
                self._want(self._mine.wanted)
                self._check_store()
                self._check_peers(known)
                if self._clock() >= deadline:
                    raise CollectiveTimeout(
                        f"rank {self._rank}: generation {self._mine.wanted} did not come about within "
                        f"{timeout.total_seconds():g} s: rank(s) {self._awaited()} live but have not left their "
                        "generation. Are they in a long computation that never calls check()?"
                    )
                self._beaten.wait(self._interval_s)

    def beat(self) -> None:
        """One heartbeat: publish, read, judge. The thread calls it; tests may do so in its place."""
        before = self._view()
        try:
            self._exchange()
        except Waiting:
            pass
        except (RuntimeError, OSError) as error:
            with self._lock:
                self._contact.refused(error)
        with self._beaten:
            self._beaten.notify_all()
        if self.on_change is not None and self._view() != before:
            try:
                self.on_change()
            except Exception:
                _log.exception("on_change of the membership failed; the heartbeat goes on.")

    # ------------------------------------------------------------------ the heartbeat thread

    def _run(self) -> None:
        while not self._stop:
            self._wake.wait(self._interval_s)
            self._wake.clear()
            try:
                self.beat()
            except Exception:
                _log.exception("rank %d: a heartbeat failed; the next one comes.", self._rank)

    def _exchange(self) -> None:
        """Write the own record, read all, and take part in the decision on a generation.

        Raises:
            Waiting, RuntimeError, OSError: see `Board.exchange`.
        """
        with self._lock:
            self._mine = mine = replace(self._mine, beat=self._mine.beat + 1)
        records = self._board.exchange(mine)
        with self._lock:
            self._published = mine
            now = self._clock()
            passed = min(now - self._read_at, self._dead_s / 4)
            self._read_at = now
            self._contact.answered(now)
            for rank, record in records.items():
                self._peers[rank].judge(record, passed, self._dead_s, self._start_s)
            wanted = self._mine.wanted
            deciding = wanted > self._generation and (self._decided is None or self._decided.generation < wanted)
            proposal = None if self._awaited() else [self._rank, *(r for r, peer in self._peers.items() if peer.up)]
        if deciding:
            quorum = self._board.decide(wanted, None if proposal is None else sorted(proposal))
            with self._lock:
                self._decided = self._decided if quorum is None else quorum

    # ------------------------------------------------------------------ under the lock

    def _awaited(self) -> list[int]:
        """The ranks without which the wanted generation cannot be decided."""
        return [
            rank
            for rank, peer in self._peers.items()
            if not peer.lost
            and (
                (peer.up and peer.record.wanted != self._mine.wanted) or (not peer.confirmed and rank in self._members)
            )
        ]

    def _enter(self, quorum: Quorum) -> None:
        self._generation, self._members = quorum.generation, frozenset(quorum.ranks)
        for peer in self._peers.values():
            peer.restarted = False

    def _want(self, generation: int) -> None:
        newest = max([peer.record.wanted for peer in self._peers.values() if peer.up], default=0)
        wanted = max(generation, newest, self._mine.wanted)
        if wanted > self._mine.wanted:
            self._mine = replace(self._mine, wanted=wanted)
            self._wake.set()

    def _view(self) -> object:
        with self._lock:
            return [
                (peer.record.bell, peer.record.wanted, peer.record.state, peer.record.life, peer.lost)
                for peer in self._peers.values()
            ], self._decided

    def _check_store(self) -> None:
        if self._thread is not None and (silence := self._contact.lost(self._clock())) is not None:
            raise PeerLost(f"rank {self._rank}: {silence}", () if self._rank == 0 else (0,))

    def _check_peers(self, known: frozenset[int], restarts: bool = False) -> None:
        gone = {rank: peer for rank, peer in self._peers.items() if peer.lost or (restarts and peer.restarted)}
        lost = {rank: peer for rank, peer in gone.items() if rank in self._members - known}
        if lost:
            raise PeerLost(f"rank {self._rank}, generation {self._generation}: {describe(lost)}", tuple(sorted(lost)))

    def _publish_end(self, state: str, text: str) -> None:
        if os.getpid() != self._pid:
            return
        with self._beaten:
            if self._mine.state == UP:
                self._mine = replace(self._mine, state=state, text=text)
            if self._thread is None or not self._thread.is_alive():
                return
            self._wake.set()
            until = time.monotonic() + _GOODBYE_S
            while self._published.state == UP and self._contact.refusals < _GIVEUP and time.monotonic() < until:
                self._beaten.wait(self._interval_s)


@atexit.register
def _end_all() -> None:
    # A thread that comes back from torch while the interpreter shuts down aborts the process.
    for membership in list(_started):
        membership._end()

"""The live ranks and their generation, by heartbeats through a store.

Liveness is independent of collectives: while a rank waits in one, its heartbeat continues. There is one record for each
rank, and every beat writes this rank's record and reads all, in two requests. The store also decides on generations. A
rank that wants a new generation says so in its record, and waits until all live ranks want it. The first rank that sees
this proposes the live ranks as members, and the first proposal in the store decides. No rank is special.

    in generation g --(next_generation, or a peer wants more)--> wants g+1 --(decided with this rank)--> in g+1
                                                   wants g+1 --(decided without it)--> wants g+2
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

from lightning_async.errors import CollectiveTimeout, Evicted, GenerationChanged, PeerLost, StoreLost, in_brief
from lightning_async.membership.failure_detector import (
    FAILED,
    LEFT,
    OUTSIDE,
    UP,
    VISITING,
    FailureDetector,
    Peer,
    Record,
    describe,
    new_life,
)
from lightning_async.membership.generation import Generation, at_start
from lightning_async.membership.heartbeat_store import HeartbeatStore, Waiting
from lightning_async.membership.signing import Seal
from lightning_async.membership.store import Contact, Store

log = logging.getLogger(__name__)


_THREAD_END_S = 2.0
_started: weakref.WeakSet[HeartbeatThread] = weakref.WeakSet()


class HeartbeatThread:
    """A thread that calls ``beat`` at an interval, and at once after `wake`; ``hang_up`` ends a ``beat`` that hangs."""

    def __init__(self, beat: Callable[[], None], interval_s: float, hang_up: Callable[[], None]) -> None:
        self._beat = beat
        self._interval_s = interval_s
        self._hang_up = hang_up
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._stop = False
        self._pid = os.getpid()

    @property
    def started(self) -> bool:
        return self._thread is not None

    @property
    def beats(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def inherited(self) -> bool:
        return os.getpid() != self._pid

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="lightning_async heartbeat", daemon=True)
        self._thread.start()
        _started.add(self)

    def wake(self) -> None:
        self._wake.set()

    def stop(self) -> bool:
        """End the thread within a few seconds; return whether it has ended. Idempotent."""
        self._stop = True
        # In a fork that ends, the thread is its parent's, and keeps beating for the rank.
        if self._thread is None or self.inherited:
            return not self.inherited
        self._wake.set()
        self._thread.join(_THREAD_END_S)
        # A request hangs, for example because the store's host is stopped.
        if self._thread.is_alive():
            self._hang_up()
            # Wait with a limit, because a request may hang for as long as the store's host is stopped.
            self._thread.join(_THREAD_END_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop:
            self._wake.wait(self._interval_s)
            self._wake.clear()
            try:
                self._beat()
            except Exception:
                # The thread must go on, because a rank without heartbeats counts as dead.
                log.exception("A heartbeat failed; the next one follows.")


@atexit.register
def _stop_all() -> None:
    # A thread that returns from torch while the interpreter shuts down aborts the process.
    for heartbeat_thread in list(_started):
        heartbeat_thread.stop()


HEARTBEAT = timedelta(seconds=0.2)
_MIN_PATIENCE = timedelta(seconds=0.5)
# Seconds to wait for the last record to be written, so that a short stall of the store does no harm.
_GOODBYE_S = 2.0
# Number of refused requests in a row after which the last record is not written.
_GIVEUP = 3


class Membership:
    """The heartbeat of this rank, and its view of the other ranks.

    A peer is lost when its record has not changed for ``dead_after`` by this rank's clock, in at least four readings of
    the store. Time in which this rank was stopped, or the store was slow, does not count. A peer that has published
    that it left is never lost, and one that has published a failure is lost at once. Two memberships must not use the
    same keys of a store: give the second one a `PrefixStore`.

    The lock guards this rank's record, the failure detector and the contact with the store, which the heartbeat thread
    and the callers share. No request to the store is made under it.

    Args:
        store: Store that all ranks reach. Each thread needs its own client, so the heartbeat clones this one.
        rank: Rank at the start. It is also the stable name of a rank that starts together with the others.
        world_size: Number of ranks at the start.
        member: Name of a joining rank, which is rank 0 in a world of 1 until the others admit it.
        visits: Whether this joining rank only makes itself known to the members of this run, and then waits for their
            invitation to a new run; see `JoinBoard`.
        elastic: Whether joining ranks are admitted; equal on all ranks.
        readmit: Whether a rank may come back after the others have continued without it.
        interval: Time between two beats.
        dead_after: Silence after which a peer, or the store, is lost. At least four intervals.
        start_timeout: Silence that is allowed to a peer that has not been seen yet.
        fresh: Whether the store is no older than the job, so that it has no records of earlier processes. The first
            record that is read of a peer then proves that the peer lives, and ``dead_after`` applies to the peer.
        seal: Signs the records. Default: no signatures.
        on_change: Function that the heartbeat thread calls after a peer's bell, generation or liveness has changed.
        clock: Function that returns monotonic seconds; for tests.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        member: str | None = None,
        visits: bool = False,
        elastic: bool = False,
        readmit: bool = True,
        interval: timedelta = HEARTBEAT,
        dead_after: timedelta = timedelta(seconds=20),
        start_timeout: timedelta = timedelta(minutes=5),
        fresh: bool = False,
        seal: Seal | None = None,
        on_change: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        generation = at_start("Membership", rank, world_size, member)
        if interval <= timedelta(0) or dead_after < 4 * interval:
            raise ValueError(f"`Membership(dead_after={dead_after})` must be at least four intervals of {interval}.")
        elastic = elastic or member is not None
        patience = max(_MIN_PATIENCE, dead_after / 4)
        self._board = HeartbeatStore(store, generation.name, generation.members, seal or Seal(), patience, elastic)
        self.dead_after = dead_after
        self._dead_s = dead_after.total_seconds()
        self._failure_detector = FailureDetector(
            generation, fresh, self._dead_s, start_timeout.total_seconds(), elastic, readmit
        )
        self._interval_s = interval.total_seconds()
        self.on_change = on_change
        self._clock = clock
        # One lock for everything that the heartbeat thread shares. Waiters are notified after each beat.
        self._lock = self._beaten = threading.Condition(threading.Lock())
        self._heartbeat_thread = HeartbeatThread(lambda: self.beat(), self._interval_s, self._board.hang_up)
        self._here = VISITING if visits else UP
        self._mine = self._published = Record(life=new_life(), state=self._here, since=0 if member is None else OUTSIDE)
        self._decided: tuple[int, tuple[str, ...]] = (0, ())
        self._deaths: list[tuple[str, int, str]] = []
        """Deaths of processes, to be judged with the next reading of the store."""
        self._read_at, self._contact = clock(), Contact(clock(), self._dead_s)

    @property
    def generation(self) -> Generation:
        """The generation that this rank is in: the first one, then the last result of `next_generation`."""
        return self._failure_detector.generation

    @property
    def bell(self) -> int:
        with self._lock:
            return max(self._mine.bell, self._failure_detector.bell())

    def start(self) -> None:
        """Publish the first record and start the heartbeat thread; do nothing if the thread runs.

        Raises:
            AsyncTrainingError: Another live process has this rank's name; it is not disturbed.
            RuntimeError: The store does not answer.
            ConnectionError: The connection to the store has ended.
        """
        if self._heartbeat_thread.started:
            return
        if self._board.open(timedelta(seconds=self._interval_s)):
            # The state of this rank's earlier process is gone, so it counts as a joining rank.
            self._mine = replace(self._mine, since=OUTSIDE)
        self._exchange()
        self._heartbeat_thread.start()

    def leave(self) -> None:
        """Publish that this rank leaves on purpose; the heartbeat thread continues to read the others' records."""
        self._publish_end(LEFT)

    def close(self) -> None:
        """Publish that this rank leaves on purpose, and end the heartbeat thread. Idempotent.

        A store that cannot be reached delays this by a few seconds at most.
        """
        self.leave()
        if self._heartbeat_thread.stop():
            self._board.close()

    def fail(self, text: str) -> None:
        """Publish that this rank ends with the error ``text``; block until that is written, a few seconds at most."""
        self._publish_end(FAILED, in_brief(text))

    def report_death(self, name: str, text: str) -> None:
        """Publish that a peer's process has ended in an error; raise RuntimeError if the store cannot be reached."""
        self._board.report(name, text)

    def hear_death(self, name: str, process: int, text: str) -> None:
        """Note that a peer's process has ended: the peer is lost at once, unless it has published that it left."""
        with self._lock:
            self._deaths.append((name, process, text))
        self._heartbeat_thread.wake()

    def ring(self, bell: int) -> None:
        """Publish at once, through the heartbeat thread, that this rank asks for the round with the number ``bell``."""
        with self._lock:
            self._mine = replace(self._mine, bell=max(bell, self._mine.bell))
        self._heartbeat_thread.wake()

    def behind(self, kind: str, number: int) -> tuple[str, ...]:
        """Return the members that have not come to an operation in which this rank waits, in this rank's view. No I/O.

        Operations of each ``kind`` are numbered in ascending order. The next heartbeat publishes that this rank has
        come to operation ``number``.
        """
        with self._lock:
            self._mine = replace(self._mine, operations={**self._mine.operations, kind: number})
            records = {name: peer.record for name, peer in self._failure_detector.peers.items()}
            members = [name for name in self.generation.members if name in records]
            return tuple(name for name in members if records[name].operations.get(kind, 0) < number)

    def left(self) -> frozenset[str]:
        """Return the names of the peers that have left on purpose, in this rank's view. No I/O."""
        with self._lock:
            return frozenset(name for name, peer in self._failure_detector.peers.items() if peer.has_left)

    def visitors(self) -> tuple[str, ...]:
        """Return the names of the joining ranks that wait for an invitation, in this rank's view. No I/O."""
        with self._lock:
            return tuple(self._failure_detector.visitors())

    def lost(self) -> tuple[str, ...]:
        """Return the names of this generation's lost members, in this rank's view. No I/O."""
        with self._lock:
            return tuple(self._failure_detector.gone())

    def ended(self) -> dict[str, Peer]:
        """Return the peers that were lost, have left, or were replaced by a new process, in this rank's view. No I/O.

        Raises:
            StoreLost: The store's host is gone.
        """
        with self._lock:
            self._check_store()
            peers = self._failure_detector.peers.items()
            return {name: peer for name, peer in peers if peer.lost or peer.has_left or peer.restarted}

    def all_ended(self) -> dict[str, Peer]:
        """Return all peers if each was lost or has left, else none; raise like `ended`. No I/O."""
        with self._lock:
            self._check_store()
            peers = dict(self._failure_detector.peers)
            return peers if all(peer.lost or peer.has_left for peer in peers.values()) else {}

    def accept_new_processes(self) -> None:
        """Forget which peers were replaced by a new process, because the present ones train together from now on."""
        with self._lock:
            for peer in self._failure_detector.peers.values():
                peer.restarted = False

    def why(self, names: Iterable[str]) -> str:
        with self._lock:
            return "; ".join(self._failure_detector.peers[name].describe(name) for name in names)

    def check(self) -> None:
        """Raise if the present generation cannot continue. No I/O.

        Raises:
            PeerLost: Members, which the error names, are silent or have failed, or the store's host is gone.
            GenerationChanged: A peer waits in a newer generation; call `next_generation`.
        """
        with self._lock:
            self._check_store()
            self._check_members(frozenset(), restarts=True)
            if newer := self._failure_detector.ahead():
                raise GenerationChanged(self._failure_detector.left_behind(newer))

    def keep(self, fewest: int) -> None:
        self._failure_detector.fewest = fewest

    def suspect(self) -> None:
        """Shorten the silence that counts as death, because a connection was closed. See `FailureDetector.suspect`."""
        with self._lock:
            self._failure_detector.suspect()

    def next_generation(self, timeout: timedelta) -> Generation:
        """Enter the next generation together with every live rank; all members return the same one.

        Ranks that were lost before the call are not members. If a rank is lost during the call, this raises PeerLost;
        call it again then. Ranks that came back or joined may be new members.

        Raises:
            PeerLost: Ranks were lost since the call began, or the store's host is gone; the error names them.
            Evicted: The others have formed a generation without this rank, and ``readmit`` is False.
            CollectiveTimeout: Live ranks, which the error names, did not call this in time.
        """
        deadline = self._clock() + timeout.total_seconds()
        with self._beaten:
            known = self._failure_detector.lost() if self._failure_detector.enough else frozenset()
            self._want(max(self.generation.number, 0) + 1)
            while True:
                number, members = self._decided
                if number == self._mine.wanted:
                    if self._failure_detector.me in members:
                        return self._enter(number, members)
                    # The others took this rank for dead. Where it may come back, it asks for another generation.
                    if not self._failure_detector.readmit:
                        raise Evicted(self._failure_detector.evicted(number, members))
                    self._want(number + 1)
                self._want(self._mine.wanted)
                self._check_store()
                self._check_members(known)
                if self._clock() >= deadline:
                    raise CollectiveTimeout(self._failure_detector.overdue(self._mine.wanted, timeout.total_seconds()))
                # Each beat may bring the decision. The limit is for a heartbeat that hangs, which `_check_store`
                # notices.
                self._beaten.wait(self._interval_s)

    def beat(self) -> None:
        """Publish this rank's record, and read and judge those of all peers, once; the heartbeat thread calls this."""
        before = self._view()
        try:
            self._exchange()
        except Waiting:
            # The silence of the store grows meanwhile, and `check` reports it.
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
                # A listener's error must not end the heartbeat.
                log.exception("on_change of the membership failed; the heartbeat goes on.")

    # ------------------------------------------------------------------ on the heartbeat thread

    def _exchange(self) -> None:
        """Write this rank's record, read all others, and take part in the decision on a generation."""
        with self._lock:
            self._mine = mine = replace(self._mine, beat=self._mine.beat + 1)
            # Note deaths before the records are read: a rank that left in order has published that before its process
            # ended.
            while self._deaths:
                self._failure_detector.hear_death(*self._deaths.pop(0))
        # Requests are made without the lock, because they may take seconds, and `check` must not wait.
        records = self._board.exchange(mine)
        with self._lock:
            self._published, now = mine, self._clock()
            self._contact.answered(now)
            self._failure_detector.judge(records, min(now - self._read_at, self._dead_s / 4))
            self._read_at = now
            wanted = self._mine.wanted
            deciding = wanted > max(self.generation.number, self._decided[0])
            proposal = self._failure_detector.proposal(self._mine) if deciding else None
        if deciding and (members := self._board.decide(wanted, proposal)) is not None:
            with self._lock:
                self._decided = wanted, members

    # ------------------------------------------------------------------ under the lock

    def _enter(self, number: int, members: tuple[str, ...]) -> Generation:
        # This rank has joined, or missed a generation, so it has not been in all since its start.
        if self._mine.since == OUTSIDE or number != self.generation.number + 1:
            self._mine = replace(self._mine, since=number)
        self._failure_detector.enter(number, members)
        return self.generation

    def _want(self, generation: int) -> None:
        wanted = max(generation, self._failure_detector.newest(), self._mine.wanted)
        if wanted > self._mine.wanted:
            self._mine = replace(self._mine, wanted=wanted)
            self._heartbeat_thread.wake()

    def _view(self) -> object:
        with self._lock:
            return self._failure_detector.view(), self._decided

    def _check_store(self) -> None:
        if self._heartbeat_thread.started and (silence := self._contact.lost(self._clock())) is not None:
            raise StoreLost(
                f"rank {self._failure_detector.me}: {silence}", () if self._failure_detector.me == "0" else (0,)
            )

    def _check_members(self, known: frozenset[str], restarts: bool = False) -> None:
        if lost := self._failure_detector.gone(known, restarts):
            text = f"rank {self._failure_detector.me}, generation {self.generation.number}: {describe(lost)}"
            raise PeerLost(text, tuple(sorted(map(self.generation.rank_of, lost))))

    def _publish_end(self, state: str, text: str = "") -> None:
        if self._heartbeat_thread.inherited:
            return
        with self._beaten:
            if self._mine.state == self._here:
                self._mine = replace(self._mine, state=state, text=text)
            if not self._heartbeat_thread.beats:
                return
            self._heartbeat_thread.wake()
            until = time.monotonic() + _GOODBYE_S
            while self._published.state == self._here and self._contact.refusals < _GIVEUP and time.monotonic() < until:
                # The last record must be written before the process ends, or the others take this rank for dead.
                self._beaten.wait(self._interval_s)

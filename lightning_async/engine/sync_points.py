"""Sync points and votes.

At a sync point, ranks wait until all of them hold one model. By a vote, one rank asks all others to do something
together, such as to save or to stop.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_async.engine.control_plane import ControlPlane
from lightning_async.engine.decision import batches_per_second
from lightning_async.engine.shared_state import Arrival, SyncPointKind, Vote


class SyncPointParticipant:
    """A base for objects that `SyncPoints` calls around sync points, on the training thread; its methods do nothing."""

    def before_sync_point(self) -> None:
        """Prepare for a sync point, before the other ranks learn that this rank waits there."""

    def at_sync_point(self) -> None:
        """Work while the training thread waits: called once at first, and after every change of the shared state."""

    def after_sync_point(self, waited_s: float) -> None:
        """Clean up after a wait of ``waited_s`` seconds at a sync point, however the wait ended.

        The wait ends if the sync point opens, if a vote ends it, or with an error. The caller holds the lock.
        """

    def leave_sync_point(self) -> None:
        """Apply what the last sync point has changed, before the next batch or sync point."""


class SyncPoints:
    """The operations by which the training thread waits at sync points and votes.

    While the training thread waits, the engine's thread exchanges headers with the other ranks.
    """

    def __init__(self, control: ControlPlane, *participants: SyncPointParticipant) -> None:
        self._control = control
        self._box = control.shared_state
        self._participants = participants
        self.moved_at_sync_point = False  # whether any rank's model changed between the last two sync points
        self.coming = SyncPointKind.NONE  # the kind of the next, the present or the last sync point
        self.waited_s = 0.0  # seconds that the training thread has waited for other ranks, at sync points and elsewhere
        self._at_sync_point = True  # no batch has begun since the last sync point, or since training began

    def add(self, participant: SyncPointParticipant) -> None:
        self._participants = (*self._participants, participant)

    def rendezvous(self, sync_point: SyncPointKind, index: int = 0) -> Arrival:
        """Wait until every rank stands at this sync point and holds the same model, or until a vote ends the wait.

        The model is the work-weighted mean of all replicas. A second sync point right after the first changes no bit
        of the model.

        Args:
            sync_point: Kind of the sync point.
            index: Number of the epoch, for EPOCH_END; all ranks must wait with the same number. Default: 0.

        Returns:
            OPEN if all ranks may continue. Any other `Arrival` says what a vote asks for: the caller does that, and
            then calls this method again, unless training ends.
        """
        box = self._box
        now = self._control.now
        started = now()
        waited_s = self.waited_s
        self._leave()
        self.coming = sync_point
        for participant in self._participants:
            participant.before_sync_point()
        with box.changed:
            box.sync_point = sync_point
            box.sync_point_index = index
            box.opened = False
        self._control.ring()  # all ranks, ready or not, answer a header now, and learn that this one waits here
        try:
            while True:
                for participant in self._participants:
                    participant.at_sync_point()
                with box.changed:
                    self._control.see()
                    if self._control.buckets.arrived is not None:
                        continue
                    if box.opened:
                        self.moved_at_sync_point = box.moved
                        self._at_sync_point = True
                        return Arrival.OPEN
                    if Vote.STOP in box.agreed and sync_point is not SyncPointKind.STOP:
                        return Arrival.STOP
                    if Vote.DECIDE in box.agreed and sync_point not in (SyncPointKind.DECIDE, SyncPointKind.STOP):
                        return Arrival.DECIDE
                    stays = (SyncPointKind.VALIDATE, SyncPointKind.DECIDE, SyncPointKind.STOP)
                    if Vote.VALIDATE in box.agreed and sync_point not in stays:
                        return Arrival.VALIDATE
                    box.changed.wait(1.0)
        finally:
            with box.changed:
                box.sync_point = SyncPointKind.NONE
                box.last_seen = now()
                self.waited_s = waited_s + now() - started
                for participant in self._participants:
                    participant.after_sync_point(now() - started)

    def resume(self) -> None:
        with self._box.changed:
            self._control.see()
        self._leave()

    def _leave(self) -> None:
        if self._at_sync_point:
            self._at_sync_point = False
            for participant in self._participants:
                participant.leave_sync_point()

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until the engine's thread has made ``condition`` true; raise the engine's error if it has failed."""
        started = self._control.now()
        with self._box.changed:
            self._box.wait(condition, self._control.see)
        self.waited_s += self._control.now() - started

    def vote(self, vote: Vote) -> None:
        with self._box.changed:
            news = vote not in self._box.asked
            self._box.asked |= vote
        if news:
            self._control.ring()

    def request_stop(self) -> None:
        """Ask for a vote to stop; a signal handler may call this, because it takes no lock."""
        self._box.stop_requested = True

    @property
    def stop_requested(self) -> bool:
        return self._box.stop_requested

    def is_any_stopping(self) -> bool:
        """Return whether any rank was told to stop; called within an evaluation, where no rank passes a batch boundary.

        There, ranks need not wait until a vote holds for all of them.
        """
        with self._box.changed:
            self._control.see()
            return self._box.stop_requested or Vote.STOP in self._box.asked_last | self._box.agreed

    def tell_loss(self, loss: float) -> None:
        with self._box.changed:
            self._box.loss = loss

    def tell_pace(self, pace: tuple[float, ...]) -> None:
        with self._box.changed:
            self._box.pace = pace

    def tell_place(self, place: float) -> None:
        """Record how far this rank will be in its data after the coming step. The next message carries this number."""
        with self._box.changed:
            self._box.place = place

    @property
    def name(self) -> str:
        return self._control.membership.generation.name

    @property
    def places(self) -> dict[str, float]:
        """Each rank's place in its data after the committed rounds, by stable id.

        At a sync point it is equal on all ranks.
        """
        with self._box.changed:
            return dict(self._box.places)

    def tell_collectives(self, count: int) -> None:
        """Record how many collectives of torch's default group have completed; ranks that wait for this one see it."""
        with self._box.changed:
            self._box.collectives = count

    def misses_collective(self, number: float) -> bool:
        """Return whether another rank waits at a sync point for this one, and has not called collective ``number``.

        Raises the engine's error if it has failed.
        """
        if (error := self._box.error) is not None:
            raise error
        return self._box.fewest_collectives < number

    @property
    def standing(self) -> bool:
        return self._box.sync_point is not SyncPointKind.NONE

    @property
    def losses(self) -> tuple[float, ...]:
        return self._box.losses

    @property
    def paces(self) -> dict[str, tuple[float, ...]]:
        members = self._control.membership.generation.members
        with self._box.changed:
            paces = self._box.paces
        return dict(zip(members, paces, strict=True)) if len(members) == len(paces) else {}

    @property
    def speeds(self) -> dict[str, float]:
        """The batches per second of every rank, by stable id; 0.0 where they are unknown."""
        return {name: batches_per_second(pace) for name, pace in self.paces.items()}

    @property
    def opened(self) -> int:
        with self._box.changed:
            return self._box.num_opened

    @property
    def agreed(self) -> Vote:
        """The votes on which all ranks act at their next batch boundary."""
        return self._box.agreed

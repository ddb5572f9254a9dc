"""Where all ranks meet, and what they vote for: all arrive, headers are served meanwhile, one model comes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from lightning_async.engine.control_plane import ControlPlane
from lightning_async.engine.decision import batches_per_second
from lightning_async.engine.shared_state import Arrival, SyncPointKind, Vote


class SyncPointParticipant(Protocol):
    """What a component does at sync points, on the training thread."""

    def come(self) -> None:
        """The training thread is about to stand at a sync point."""
        ...

    def stand(self) -> None:
        """It stands there: called once, and after every event."""
        ...

    def go(self, waited_s: float) -> None:
        """It stands there no more. Under the lock."""
        ...

    def leave(self) -> None:
        """A batch begins, or another sync point: what was done at the last one counts from now on."""
        ...

    def resume(self) -> None:
        """A batch begins."""
        ...


class SyncPoints:
    """The training thread's meetings and votes.

    Args:
        control: the control plane, which serves headers meanwhile.
        visitors: the components that have something to do at sync points.
    """

    def __init__(self, control: ControlPlane, *visitors: SyncPointParticipant) -> None:
        self._control = control
        self._box = control.shared_state
        self._visitors = visitors
        self.moved_at_sync_point = False
        """Whether the model had changed, on any rank, between the last two sync points."""
        self.coming = SyncPointKind.NONE
        """Where the training thread is about to stand, stands, or stood last."""
        self.waited_s = 0.0
        """How long the training thread has stood still for others, at sync points and elsewhere."""
        self._at_sync_point = True
        """No batch has begun since the last sync point, or since training began."""

    def add(self, participant: SyncPointParticipant) -> None:
        """Another one that has something to do there."""
        self._visitors = (*self._visitors, participant)

    def rendezvous(self, sync_point: SyncPointKind, index: int = 0) -> Arrival:
        """Wait, serving headers, until every rank stands at this sync point and holds the same model.

        The model is the work-weighted mean of all replicas (or what the rule says of it). Two in a row change
        no bit: where no rank has moved since the last one, nothing is exchanged.
        """
        box = self._box
        now = self._control.now
        started = now()
        waited_s = self.waited_s
        self._leave()
        self.coming = sync_point
        for participant in self._visitors:
            participant.come()
        with box.changed:
            box.sync_point = sync_point
            box.sync_point_index = index
            box.opened = False
        self._control.ring()
        try:
            while True:
                for participant in self._visitors:
                    participant.stand()
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
                    if Vote.VALIDATE in box.agreed and sync_point not in (
                        SyncPointKind.VALIDATE,
                        SyncPointKind.DECIDE,
                        SyncPointKind.STOP,
                    ):
                        return Arrival.VALIDATE
                    box.changed.wait(1.0)
        finally:
            with box.changed:
                box.sync_point = SyncPointKind.NONE
                box.last_seen = now()
                self.waited_s = waited_s + now() - started
                for participant in self._visitors:
                    participant.go(now() - started)

    def resume(self) -> None:
        """The training thread starts a batch: it is alive."""
        with self._box.changed:
            self._control.see()
        for participant in self._visitors:
            participant.resume()
        self._leave()

    def _leave(self) -> None:
        if self._at_sync_point:
            self._at_sync_point = False
            for participant in self._visitors:
                participant.leave()

    def wait(self, condition: Callable[[], bool]) -> None:
        """Stand still until the engine's thread has made ``condition`` true; its failures end the wait."""
        started = self._control.now()
        with self._box.changed:
            self._box.wait(condition, self._control.see)
        self.waited_s += self._control.now() - started

    def vote(self, vote: Vote) -> None:
        """Ask every rank for this."""
        with self._box.changed:
            news = vote not in self._box.asked
            self._box.asked |= vote
        if news:
            self._control.ring()

    def request_stop(self) -> None:
        """Vote for stopping, from a signal handler: that may touch no lock."""
        self._box.stop_requested = True

    @property
    def stop_requested(self) -> bool:
        """Whether this rank was told to stop."""
        return self._box.stop_requested

    def tell_loss(self, loss: float) -> None:
        """What the next header says of this replica's last batch."""
        with self._box.changed:
            self._box.loss = loss

    def tell_pace(self, pace: tuple[float, ...]) -> None:
        """What headers say of this replica's speed, see `Header`."""
        with self._box.changed:
            self._box.pace = pace

    def tell_place(self, place: float) -> None:
        """How far this replica is in its data with the step that follows; goes with the next message."""
        with self._box.changed:
            self._box.place = place

    @property
    def name(self) -> str:
        """This rank's, for life."""
        return self._control.membership.generation.name

    @property
    def places(self) -> dict[str, float]:
        """By name, how far each rank was in its data with what all have committed; equal on all ranks at a sync
        point."""
        with self._box.changed:
            return dict(self._box.places)

    @property
    def standing(self) -> bool:
        """Whether the training thread stands at a sync point."""
        return self._box.sync_point is not SyncPointKind.NONE

    @property
    def losses(self) -> tuple[float, ...]:
        """Every replica's, as the last header told it."""
        return self._box.losses

    @property
    def paces(self) -> dict[str, tuple[float, ...]]:
        """By name, what every rank has said of its speed in the last header."""
        members = self._control.membership.generation.members
        with self._box.changed:
            paces = self._box.paces
        return dict(zip(members, paces, strict=True)) if len(members) == len(paces) else {}

    @property
    def speeds(self) -> dict[str, float]:
        """By name, every rank's batches per second, as said in the last header; 0.0 where they are not known."""
        return {name: batches_per_second(pace) for name, pace in self.paces.items()}

    @property
    def opened(self) -> int:
        """How many have opened for this rank."""
        with self._box.changed:
            return self._box.num_opened

    @property
    def agreed(self) -> Vote:
        """What all ranks do from the next batch boundary on."""
        return self._box.agreed

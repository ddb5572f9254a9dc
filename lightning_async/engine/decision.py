"""The decision that follows from all ranks' headers: pure functions of the gathered headers, equal on every rank.

Read `decide` first. Headers travel as rows of float64 numbers (exact for integers below 2**53): a header's common part,
then the part of each component.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from lightning_async.engine.buckets import RoundType
from lightning_async.engine.shared_state import Header, Mark, SyncPointKind, Vote
from lightning_async.errors import CollectiveError, GateMismatch, LayoutMismatch

_ASKED_BY_STANDING = {
    SyncPointKind.VALIDATE: Vote.VALIDATE,
    SyncPointKind.STOP: Vote.STOP,
    SyncPointKind.SYNCHRONISE: Vote.SYNCHRONISE,
    SyncPointKind.DECIDE: Vote.DECIDE,
    SyncPointKind.EPOCH_END: Vote.EPOCH,
}


@dataclass(frozen=True)
class ComponentPlan:
    """A component's plan for the next exchange, which follows from all headers and is equal on every rank."""

    kind: RoundType | None  # None: no message holds anything, and those that are ready are dropped
    weights: tuple[float, ...] = ()  # each rank's share in the mean, 0 for an absent rank; they add up to 1


class EngineComponent:
    """A capability that is registered with the control plane, such as averaging; this base sends nothing.

    All methods are called on the engine's thread. ``headers`` holds the common part of each rank's header, ``parts``
    the component's own part. `is_due`, `plan` and `settle` must be pure functions of these, so that all ranks decide
    alike.
    """

    blank: Any = ()
    """The component's part of a header when it has nothing to say: a NamedTuple of numbers."""
    priority = 0
    """The priority of the component's messages; 0 if it has none. A component is asked about its own messages only."""

    def is_indispensable(self) -> bool:
        """Return whether other ranks must wait for this rank's message, however late it is.

        The caller holds the lock.
        """
        return False

    def compose(self) -> Any:
        """Return this component's part of the rank's header, as far as it does not depend on a message.

        The caller holds the lock.
        """
        return self.blank

    def announce(self, part: Any, message: Any) -> Any:
        """Return ``part``, the result of `compose`, with what ``message`` says, which the header announces."""
        return part

    def compare(self, part: Any) -> Any:
        """Return ``part`` with digests of the model, as all ranks wait at one sync point."""
        return part

    def is_due(self, parts: Sequence[Any]) -> bool:
        """Return whether some rank has a message that must be exchanged before a sync point can open.

        ``parts`` holds this component's part of each rank's header.
        """
        return False

    def plan(self, headers: Sequence[Header], parts: Sequence[Any]) -> ComponentPlan:
        """Plan the round of this component's priority, for which all ranks are ready."""
        raise NotImplementedError(f"{type(self).__name__} has no rounds between sync points.")

    def settle(self, headers: Sequence[Header], parts: Sequence[Any]) -> tuple[bool, ComponentPlan | None]:
        """Return whether the sync point at which all ranks wait may open, so that they continue.

        The second result is the plan of an exchange that must come first, or None if none is needed.
        """
        return True, None

    def opened(self, here: bool) -> None:
        """Record that a sync point has opened. The caller holds the lock.

        Args:
            here: Whether this rank's training thread may continue, because it does not wait elsewhere.
        """

    def drop(self) -> None:
        """Drop this rank's message, because the plan found nothing to exchange in any message.

        The caller holds the lock.
        """


class RoundDecision(NamedTuple):
    """The decision on what all ranks do after they have exchanged headers: an exchange, an opening, or nothing.

    It follows from all ranks' headers, so it is equal on all ranks.
    """

    common: CommonDecision  # the part that does not depend on a component
    plan: ComponentPlan | None = None  # the exchange to come
    component: int = 0  # number of the component that made the plan
    opens: bool = False  # the sync point at which all ranks stand opens

    @property
    def compare(self) -> bool:
        """Whether the next headers contain fingerprints of the models, because all ranks wait at a sync point."""
        return self.common.place is not SyncPointKind.NONE and not self.opens and not self.common.late


def decide(
    headers: Sequence[Header], parts: Sequence[Sequence[Any]], components: Sequence[EngineComponent]
) -> RoundDecision:
    """Return the decision for these headers; ``parts`` is indexed by component, then by rank.

    First, a rank that has missed an exchange, or the opening of a sync point, catches up. Then, if all ranks wait at a
    sync point, the sync point opens, or an exchange makes the ranks' models equal first. Otherwise the round of the
    highest priority for which all ranks are ready begins.

    Raises:
        GateMismatch: Ranks wait at different sync points.
        LayoutMismatch: Ranks at a sync point, or in a round, hold different parameters.
        CollectiveError: A rank has missed more than one exchange.
    """
    all_stand = all(header.sync_point is not SyncPointKind.NONE for header in headers)
    due = all_stand and any(component.is_due(own) for component, own in zip(components, parts, strict=True))
    common = survey(headers, busy=due)
    if common.catch_up is not None or common.late:
        return RoundDecision(common)
    if all_stand and not due:
        if common.place is SyncPointKind.NONE:
            return RoundDecision(common)
        settled = [component.settle(headers, own) for component, own in zip(components, parts, strict=True)]
        for number, (_, plan) in enumerate(settled):
            if plan is not None:
                return RoundDecision(common, plan, number)
        return RoundDecision(common, opens=all(ok for ok, _ in settled))
    priority = ready_for(headers)
    for number, (component, own) in enumerate(zip(components, parts, strict=True)):
        if priority and component.priority == priority:
            plan = component.plan(headers, own)
            if plan.kind is not None:
                _check_layouts(headers)
            return RoundDecision(common, plan, number)
    return RoundDecision(common)


class CommonDecision(NamedTuple):
    """The common part of the decision on what all ranks do next, which is taken before any component is asked.

    It says which votes hold, whether a rank has to catch up, and which sync point may open.
    """

    votes: Vote = Vote.NONE  # the union of all ranks' votes
    catch_up: int | None = None  # id of the exchange that some ranks committed, and the others commit now
    late: bool = False  # the last sync point opened for some ranks only; it opens for the others now
    place: SyncPointKind = SyncPointKind.NONE  # the sync point that may open; with ``late``, the one that has opened
    moved: bool = False  # whether any rank's model has changed since the sync point before
    clock: float = 0.0  # sum of all ranks' steps when that sync point opens


def survey(headers: Sequence[Header], busy: bool = False) -> CommonDecision:
    """Return the common part of the decision, which follows from ``headers`` without asking a component.

    Args:
        headers: Common part of each rank's header.
        busy: Whether a message must be exchanged first; then no sync point opens now. Default: False.

    Raises:
        GateMismatch: Ranks wait at different sync points.
        LayoutMismatch: All ranks wait, but hold different parameters.
        CollectiveError: A rank has missed more than one exchange.
    """
    votes = Vote.NONE
    for header in headers:
        votes |= header.votes | _ASKED_BY_STANDING.get(header.sync_point, Vote.NONE)
    newest = max(h.exchange for h in headers)
    behind = [rank for rank, h in enumerate(headers) if h.exchange < newest]
    if behind:
        if any(headers[rank].exchange != newest - 1 for rank in behind):
            raise CollectiveError(f"Ranks {behind} have missed more than one round (newest is {newest - 1}).")
        return CommonDecision(votes=votes.lasting, catch_up=newest - 1)
    if len({h.opened for h in headers}) > 1:
        last = max(headers, key=lambda h: h.opened)
        at = {"place": last.last_sync_point, "moved": last.last_moved, "clock": last.last_clock}
        return CommonDecision(votes=votes.lasting, late=True, **at)
    if any(h.sync_point is SyncPointKind.NONE for h in headers):
        return CommonDecision(votes=votes)
    _check_layouts(headers)
    if busy or (place := _place(headers, votes)) is SyncPointKind.NONE:
        return CommonDecision(votes=votes)
    clock = sum(h.clock for h in headers)
    first = headers[0]
    moved = clock != first.last_clock or first.exchange != first.last_exchange
    return CommonDecision(votes=votes, place=place, moved=moved, clock=clock)


def _place(headers: Sequence[Header], votes: Vote) -> SyncPointKind:
    """Return the sync point that can open, so that the ranks that wait there continue.

    It is SYNCHRONISE if a rank waits there, else the sync point at which all ranks wait. It is NONE if ranks wait at
    different sync points, and a vote asks some of them to visit another one first; they come back later. Raises
    GateMismatch if ranks wait at different sync points without such a vote.
    """
    places = {(h.sync_point, h.sync_point_index if h.sync_point is SyncPointKind.EPOCH_END else 0) for h in headers}
    synchronise = any(h.sync_point is SyncPointKind.SYNCHRONISE for h in headers)
    sync_point = SyncPointKind.SYNCHRONISE if synchronise else headers[0].sync_point
    if len(places) > 1 and votes & (Vote.VALIDATE | Vote.STOP | Vote.DECIDE):
        return SyncPointKind.NONE  # the others join that one and come back
    if len(places) > 1 and sync_point is not SyncPointKind.SYNCHRONISE:  # SYNCHRONISE opens while others wait elsewhere
        where = ", ".join(f"rank {rank} at {h.sync_point.name} {h.sync_point_index}" for rank, h in enumerate(headers))
        raise GateMismatch(
            f"Ranks came to different sync points: {where}. Epoch-end work (checkpoints, metrics, early "
            "stopping) needs the same number of epochs on every rank: limit training by `max_epochs` rather than by "
            "`max_steps`, or validate with `val_check_interval` instead of at the end of epochs."
        )
    if Vote.STOP in votes and sync_point is not SyncPointKind.STOP:
        return SyncPointKind.NONE  # all ranks leave through STOP, together
    return sync_point


def between_steps(headers: Sequence[Header]) -> Vote:
    """Return the votes that ranks must ignore after headers without an exchange. The next headers repeat these votes.

    A header without an exchange may come when one rank has passed its batch boundary and another has not. If both acted
    on the vote at their next boundaries, one would take its next synchronous step alone. With an exchange, all ranks
    that take synchronous steps are in the same step. If a rank already waits at STOP, the others must not ignore the
    vote to stop.

    >>> between_steps([Header(in_step=True), Header()]), between_steps([Header(in_step=True, excused=True), Header()])
    (<Vote.STOP|END: 3>, <Vote.NONE: 0>)
    >>> between_steps([Header(in_step=True), Header(sync_point=SyncPointKind.STOP, excused=True)])
    <Vote.END: 2>
    """
    if not any(h.in_step and not h.excused for h in headers):
        return Vote.NONE
    # A rank at STOP acted on a vote of the last exchange, whose answer the others have lost: they stop now, too.
    leaves = any(h.sync_point is SyncPointKind.STOP for h in headers)
    return Vote.END if leaves else Vote.STOP | Vote.END


def places_of(headers: Sequence[Header], names: Sequence[str]) -> dict[str, float]:
    """Return how far each rank is in its data, by stable id, for the ranks that take part in the round.

    In a consensus all ranks take part.
    """
    ready = max(h.ready for h in headers)
    return {name: h.place for name, h in zip(names, headers, strict=True) if h.ready == ready}


def ready_for(headers: Sequence[Header]) -> int:
    """Return the priority of the round that can go ahead, or 0 if none can.

    That is the highest priority for which any rank has a message. The round can go ahead once every other rank has a
    message, too, or is excused. A message for a lower priority is enough: its rank takes part without a message of this
    priority, and its own message waits for a later round.

    >>> ready_for([Header(ready=1), Header(excused=True)]), ready_for([Header(ready=1), Header()])
    (1, 0)
    >>> ready_for([Header(ready=2), Header(ready=1)])
    2
    """
    wanted = max(h.ready for h in headers)
    there = all(h.ready == wanted or h.excused or 0 < h.ready < wanted for h in headers)
    # Versions differ for a while where some ranks have yet to follow a change of the layout (unfrozen parameters).
    return wanted if there and len({h.version for h in headers}) == 1 else 0


def able_to_share(headers: Sequence[Header], parts: Sequence[Any]) -> list[bool]:
    """Return for each rank whether other ranks may take over its tensors.

    A rank qualifies if all its tensors are finite: ``healthy`` and ``sound`` in its part of the header. If no rank
    does, buffers and frozen parameters are ignored. If still no rank qualifies, and all ranks wait at sync points, then
    all ranks qualify.
    """
    some_sound = any(part.sound and part.healthy for part in parts)
    able = [part.healthy and (part.sound or not some_sound) for part in parts]
    at_sync_points = all(header.sync_point is not SyncPointKind.NONE for header in headers)
    return able if any(able) or not at_sync_points else [True] * len(parts)


def mark_of(headers: Sequence[Header], members: Sequence[str]) -> Mark | None:
    """Return the mark of the checkpoint that ranks save with the round of these headers.

    Returns None if no rank votes for a save. The mark's number is one more than the largest number of saves in the
    headers, and its step is the mean of the ranks' steps. Its members are the ranks that have a message ready or wait
    at a sync point.

    >>> standing = Header(sync_point=SyncPointKind.TRAIN_END)
    >>> mark_of([Header(votes=Vote.SAVE, ready=1, clock=9, saved=3), Header(saved=2), standing], ["0", "2", "3"])
    Mark(number=4, step=3, members=('0', '3'))
    """
    if not any(Vote.SAVE in h.votes for h in headers):
        return None
    present = tuple(
        name for name, h in zip(members, headers, strict=True) if h.ready or h.sync_point is not SyncPointKind.NONE
    )
    step = int(sum(h.clock for h in headers) / len(headers))
    return Mark(max(h.saved for h in headers) + 1, step, present)


def _check_layouts(headers: Sequence[Header]) -> None:
    """Raise LayoutMismatch where layouts differ, because unequal sizes would abort the process inside the transport."""
    if len({h.layout for h in headers}) > 1:
        raise LayoutMismatch(
            f"The replicas' parameters differ: layout fingerprints by rank are {[h.layout for h in headers]}. Were "
            "parameters added, removed, resized, frozen or unfrozen after training began, on some ranks only?"
        )


def to_row(parts: Sequence[tuple[Any, ...]]) -> list[float]:
    """Return the numbers of a header's parts, one part after the other, as they are sent.

    The numbers of the example are the fields ``exchange``, ``ready`` and ``votes``.

    >>> to_row([Header(ready=2, votes=Vote.END)])[:3]
    [1.0, 2.0, 2.0]
    """
    return [float(x.value) if isinstance(x, Vote) else float(x) for part in parts for x in _flat(part)]


def from_rows(blanks: Sequence[tuple[Any, ...]], rows: Sequence[Sequence[float]]) -> list[list[Any]]:
    """Undo `to_row` for the rows of all ranks.

    Args:
        blanks: One tuple for each part of a header; it gives the part's type.
        rows: One row of numbers for each rank.

    Returns:
        For each part, a list with the part of each rank's header.

    >>> from_rows([Header()], [to_row([Header(sync_point=SyncPointKind.STOP)])])[0][0].sync_point
    <SyncPointKind.STOP: 4>
    """
    parts = []
    start = 0
    for blank in blanks:
        end = start + len(_flat(blank))
        parts.append([_like(blank, row[start:end]) for row in rows])
        start = end
    return parts


def _flat(part: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x for field in part for x in (field if isinstance(field, tuple) else (field,)))


def _like(blank: tuple[Any, ...], row: Sequence[float]) -> Any:
    values = iter([x if cast is None else cast(int(x)) for cast, x in zip(_casts(blank), row, strict=True)])
    kind: Any = type(blank)
    return kind(*(tuple(islice(values, len(x))) if isinstance(x, tuple) else next(values) for x in blank))


@functools.lru_cache(maxsize=32)
def _casts(blank: tuple[Any, ...]) -> list[Any]:
    return [None if isinstance(x, float) else type(x) for x in _flat(blank)]


def batches_per_second(pace: tuple[float, ...]) -> float:
    """Return a rank's batches per second; 0.0 if its pace is unknown.

    ``pace`` is a tuple of seconds for a batch's data, compute and communication, and of the batch's samples.

    >>> batches_per_second((0.1, 0.3, 0.1, 8.0))
    2.0
    """
    taken_s = sum(pace[:3])
    return 1.0 / taken_s if taken_s > 0.0 else 0.0


def relative_speed(pace: tuple[float, ...], paces: Iterable[tuple[float, ...]], unknown: float) -> float:
    """Return a rank's batches per second, divided by those of the fastest rank.

    A pace is a tuple of seconds for a batch's data, compute and communication, and of the batch's samples. If the three
    times are zero, the pace is unknown. If any pace is unknown, the result is ``unknown``.

    >>> relative_speed((0.0, 0.5, 0.0, 8.0), [(0.0, 0.5, 0.0, 8.0), (0.0, 0.25, 0.0, 8.0)], unknown=1.0)
    0.5
    >>> relative_speed((0.0, 0.5, 0.0, 8.0), [(0.0, 0.5, 0.0, 8.0), (0.0, 0.0, 0.0, 0.0)], unknown=1.0)
    1.0
    """
    speeds = list(map(batches_per_second, paces))
    return batches_per_second(pace) / max(speeds) if all(speeds) else unknown

"""The control plane of one rank: what its components share, the engine's thread, and recovery from failures.

    IDLE --> HEADER --> PAYLOAD --> COMMIT --> IDLE
    any of these --(an operation fails)--> FAILED --(new groups are formed)--> IDLE

Before each exchange, every rank sends a header to all others; it says what the rank has ready. `EngineLoop` is the
engine's thread: it sends this rank's header, and does what follows from the headers of all ranks. `GroupRecovery` forms
the groups of the next generation. Components and strategies use `ControlPlane` only.

A failed exchange never leaves ranks with different models. Either all ranks commit it after all have the payload, or
each rank commits it as soon as it has the payload, and keeps the payload for ranks that lack it.
"""

from __future__ import annotations

import enum
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lightning_async.comm.collectives import Collectives, ElasticCollectives
from lightning_async.engine.buckets import BucketOwner, Buckets, InFlightRound, Message, RoundType, side_stream
from lightning_async.engine.collectives import CallRecovery, ReplayableCalls
from lightning_async.engine.decision import (
    CommonDecision,
    ComponentPlan,
    EngineComponent,
    RoundDecision,
    between_steps,
    decide,
    from_rows,
    mark_of,
    places_of,
    relative_speed,
    to_row,
)
from lightning_async.engine.replica import Replica
from lightning_async.engine.shared_state import Header, SharedState, SyncPointKind, Vote
from lightning_async.engine.timeouts import Timeouts
from lightning_async.engine.transfer import Closed, Transfer, UncommittedRound, source_of
from lightning_async.errors import (
    START_AGAIN,
    AsyncTrainingError,
    CollectiveError,
    CollectiveTimeout,
    Evicted,
    GenerationChanged,
    LinkLost,
    PeerLost,
    StoreLost,
)
from lightning_async.events import tell
from lightning_async.membership.generation import Generation, listed
from lightning_async.membership.membership import Membership

log = logging.getLogger(__name__)
_SLICE = timedelta(seconds=1)  # of the wait for a generation, between two looks at `closing`
_HEARSAY_S = 2.0  # time for heartbeats to tell which rank has failed
_BEAT_S = 0.1
_PROMPT = timedelta(seconds=0.2)  # before a ready rank rings, where others were silent at the last header


class ControlPlane:
    """The parts that all components of one rank share: shared state, buckets, transfer, and the engine's thread.

    Args:
        collectives: Communicator for CPU tensors; headers are sent over a fork of it.
        membership: Which ranks are live, the generations, and requests for headers. The caller starts and closes it.
        replica: The tensors to move. All ranks must start with equal parameters.
        timeouts: Timeouts of headers, payloads and recovery.
        payload: Communicator of which payloads use a fork. Default: ``collectives``.
        part_bytes: Largest size of one part of a payload. Default 16 MiB.
        now: Clock in seconds. Default: `time.monotonic`.
        calls: Collective calls of the training thread, which are repeated when new groups are formed.
        min_replicas: Smallest number of ranks that go on. Default: all that there are, so that none may be lost.
        forks: Communicators of headers and payloads, see `forks_of`. Default: they are forked here.
    """

    def __init__(
        self,
        collectives: Collectives,
        membership: Membership,
        replica: Replica,
        timeouts: Timeouts,
        *,
        payload: Collectives | None = None,
        part_bytes: int = 16 << 20,
        now: Callable[[], float] = time.monotonic,
        calls: ReplayableCalls | None = None,
        min_replicas: int | None = None,
        forks: tuple[Collectives, Collectives] | None = None,
    ) -> None:
        self.shared_state = SharedState()
        self.buckets = Buckets(replica, self.shared_state)
        self.membership = membership
        self.now = now
        self.timeouts = timeouts
        self.calls = calls
        roots = (collectives, payload or collectives)
        small, large = forks or forks_of(*roots, timeouts)
        self.transfer = Transfer(small, large, self.shared_state, membership, timeouts.payload, part_bytes, now)
        self.components: list[EngineComponent] = []
        self.regroup = GroupRecovery(self, roots, min_replicas)
        self._loop = EngineLoop(self)
        self._thread = threading.Thread(target=self._loop.run, name=f"lightning_async-rounds-{self.rank}", daemon=True)

    @property
    def rank(self) -> int:
        return self.transfer.rank

    @property
    def reforming(self) -> bool:
        """Whether new groups are being formed after a failure."""
        return self._loop.stage is Stage.FAILED

    def register(self, component: EngineComponent) -> None:
        """Add a component to the engine; called before `start`, and in the same order on all ranks."""
        self.components.append(component)

    def on_mark(self, copy: Callable[[InFlightRound], Any]) -> None:
        """Register ``copy``, which is called with each exchange that ranks have marked for a checkpoint.

        It is called when the exchange is committed, and its result goes to `SharedState.marked`.
        """
        self._loop.on_mark = copy

    def start(self) -> None:
        """Start the engine's thread; all replicas must hold equal parameters."""
        self.shared_state.last_seen = self.now()
        self.shared_state.last_exchange = self.shared_state.next_exchange
        self.buckets.begin(self.transfer.registered)
        if self.calls is not None:
            self.calls.recovery = CallRecovery(self._report_trouble, self._look, self.regroup.survives)
        self._thread.start()

    def close(self, timeout: timedelta) -> bool:
        """End the engine's thread, without waiting for other ranks; return whether it has ended. Idempotent."""
        with self.shared_state.changed:
            self.shared_state.closing = True
            self.shared_state.changed.notify_all()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout.total_seconds())
        return not self._thread.is_alive()

    def see(self) -> None:
        """Record that the training thread lives; raise the engine's error if it has failed.

        If a signal handler has asked to stop, vote for that. The caller holds the lock.
        """
        box = self.shared_state
        box.last_seen = self.now()
        if box.error is not None:
            raise self._failure(box.error)
        if box.stop_requested and Vote.STOP not in box.asked:
            box.asked |= Vote.STOP
            self.ring()

    def _failure(self, error: BaseException) -> BaseException:
        if isinstance(error, AsyncTrainingError):
            return error
        box = self.shared_state
        failure = AsyncTrainingError(
            f"Rank {self.rank}: the averaging thread failed in round {box.next_exchange} at step {box.steps:.0f}: "
            f"{type(error).__name__}: {error}"
        )
        failure.__cause__ = error
        return failure

    def _look(self) -> None:
        with self.shared_state.changed:
            self.see()

    def _report_trouble(self, error: PeerLost | CollectiveError) -> None:
        with self.shared_state.changed:
            self.shared_state.trouble = error
            self.shared_state.changed.notify_all()

    def ring(self) -> None:
        """Ask all ranks to exchange headers now, even ranks that have no message.

        The header carries this rank's present state.
        """
        with self.shared_state.changed:
            # A header that is composed already does not carry the newest state: then the next one is rung for.
            seq = max(self._loop.seq, self.shared_state.composed + 1)
            self.shared_state.changed.notify_all()
        self.membership.ring(seq)

    def wake(self) -> None:
        with self.shared_state.changed:
            self.shared_state.changed.notify_all()

    def vacated(self) -> Tensor:
        """Return the bucket `received`, so that it can be overwritten.

        If other ranks may lack its payload, save a copy first.
        """
        self._loop.held.keep()
        return self.buckets.received

    def forget(self) -> None:
        self._loop.held.forget()


def forks_of(collectives: Collectives, payload: Collectives, timeouts: Timeouts) -> tuple[Collectives, Collectives]:
    """Fork the two communicators of the engine: return the one for headers, then the one for payloads.

    All ranks must do this in the same order as their other forks.

    Args:
        collectives: Root communicator for CPU tensors.
        payload: Root communicator for payloads; it may be the same.
        timeouts: Timeouts, of which ``payload`` is the deadline for one part of a payload.
    """
    return collectives.fork("header", timedelta(days=7)), payload.fork("payload", timeouts.payload)


class Stage(enum.Enum):
    """The phase of the exchange under way on this rank."""

    IDLE = "idle"
    HEADER = "header"
    PAYLOAD = "payload"
    COMMIT = "commit"
    FAILED = "failed"


_NEXT = {Stage.IDLE: Stage.HEADER, Stage.HEADER: Stage.PAYLOAD, Stage.PAYLOAD: Stage.COMMIT}


class EngineLoop:
    """The engine's thread of one rank: it exchanges headers with all ranks, and then does what the headers decide.

    It sends one header for all components, and exchanges payloads and commits them. After a failure it has new groups
    formed.

    Read `run`, `_serve`, `_exchange` and `_apply`, in this order.
    """

    def __init__(self, control: ControlPlane) -> None:
        self.stage = Stage.IDLE
        self.seq = _first_seq(control.membership.generation.number)  # number of the next header
        self.held = UncommittedRound(control.buckets, control.transfer)
        self.on_mark: Callable[[InFlightRound], Any] = lambda exchange: None  # copies what a marked exchange has made
        self._components = control.components
        self._buckets = control.buckets
        self._box = control.shared_state
        self._transfer = control.transfer
        self._membership = control.membership
        self._regroup = control.regroup
        self._timeouts = control.timeouts
        self._now = control.now
        self._some_silent = self._compare = False
        self._served_at = control.now()

    def run(self) -> None:
        """Exchange headers and payloads until the training thread closes the engine, or an error ends it."""
        box = self._box
        try:
            with side_stream(self._buckets.replica.device):
                self._serve_all()
        except Closed:
            pass
        except BaseException as error:  # handed to the training thread, which raises it
            with box.changed:
                box.error = box.error or error
                self._buckets.release()
            if not box.closing and not isinstance(error, PeerLost):  # a rank that lost a peer is not to blame
                self._membership.fail(f"{type(error).__name__}: {error}")
        finally:
            self._regroup.close()

    def _serve_all(self) -> None:
        while self._wait_for_cause():
            try:
                self._serve()
            except (PeerLost, CollectiveError) as error:
                if not self._regroup.possible:
                    self._regroup.look_for_the_cause()
                    raise
                self._recover(error)

    def _wait_for_cause(self) -> bool:
        """Wait until there is a reason to exchange headers with the other ranks; return False if the engine closes."""
        box = self._box
        with box.changed:
            while not box.closing:
                if self._has_cause() or box.trouble is not None:  # `_serve` raises the trouble where it is handled
                    return True
                box.changed.wait(1.0)  # `membership` notifies, but time that passes (`_is_stalled`) does not
                try:
                    self._membership.check()
                except (PeerLost, GenerationChanged):
                    return True
        return False

    def _has_cause(self) -> bool:
        box = self._box
        buckets = self._buckets
        if buckets.owner is BucketOwner.TRAINING or (buckets.arrived is not None and not self._is_stalled()):
            return False  # the training thread uses the buckets, or is about to
        # Where nothing is to be done for long, as at sync points, headers show that all ranks still reach each other.
        if self._now() - self._served_at > self._timeouts.payload.total_seconds():
            return True
        return buckets.has_message or box.sync_point is not SyncPointKind.NONE or self._membership.bell >= self.seq

    def _is_stalled(self) -> bool:
        """Return whether the training thread has been silent for so long that other ranks need not wait for this rank.

        It is False if an engine component cannot do without this rank. The caller holds the lock.
        """
        silent_s = self._now() - self._box.last_seen
        return silent_s > self._timeouts.grace.total_seconds() and not any(
            component.is_indispensable() for component in self._components
        )

    def _serve(self) -> None:
        box = self._box
        buckets = self._buckets
        started = self._now()
        self._transfer.check()
        with box.changed:
            box.changed.wait_for(lambda: buckets.owner is not BucketOwner.TRAINING)
            message = buckets.announce()
            header = self._header(message)
            drafts = [component.compose() for component in self._components]
            box.composed = self.seq
        buckets.to_engine.take()
        compare = self._compare and header.sync_point is not SyncPointKind.NONE
        parts = [
            self._completed(component, draft, message, compare)
            for component, draft in zip(self._components, drafts, strict=True)
        ]
        self._to(Stage.HEADER)
        # A rank that waits in a header with a message rings after a while: then the engines of ranks whose training
        # threads are silent answer for them.
        patience = _PROMPT if self._some_silent else self._timeouts.grace
        row = torch.tensor(to_row([header, *parts]), dtype=torch.float64)
        ring = None if message is None else (patience, self._ring_for_this)
        blanks = [Header(), *(component.blank for component in self._components)]
        headers, *everyones = from_rows(blanks, self._transfer.meet(row, self.seq, ring).tolist())
        self.seq += 1
        self._served_at = self._now()
        decision = decide(headers, everyones, self._components)
        plan = decision.plan
        waited_s = self._now() - started
        self._note(decision, header, headers)
        if decision.common.catch_up is not None:
            self._catch_up(decision.common.catch_up, headers)
        elif plan is not None and plan.kind is not None:
            self._exchange(plan.kind, plan, everyones[decision.component], headers, waited_s)
        else:
            self.held.forget()
        self._to(Stage.IDLE)
        with box.changed:
            if plan is not None and plan.kind is None:
                self._components[decision.component].drop()
            buckets.release()

    def _completed(self, component: EngineComponent, part: Any, message: Message | None, compare: bool) -> Any:
        if message is not None and message.priority == component.priority:
            part = component.announce(part, message)
        return component.compare(part) if compare else part

    def _header(self, message: Message | None) -> Header:
        box = self._box
        replica = self._buckets.replica
        return Header(
            exchange=box.next_exchange,
            ready=message.priority if message is not None else 0,
            votes=box.asked,
            excused=box.sync_point is not SyncPointKind.NONE or self._is_stalled(),
            sync_point=box.sync_point if self._buckets.arrived is None else SyncPointKind.NONE,
            sync_point_index=box.sync_point_index,
            layout=replica.fingerprint,
            version=replica.version,
            clock=box.steps,
            samples=box.samples,
            opened=box.num_opened,
            last_sync_point=box.last_sync_point,
            last_moved=box.moved,
            last_clock=box.last_clock,
            last_exchange=box.last_exchange,
            saved=box.saved,
            loss=box.loss,
            place=box.place if message is None else message.place,
            held=self.held.id,
            in_step=box.in_step,
            collectives=box.collectives,
            pace=box.pace,
        )

    def _note(self, decision: RoundDecision, mine: Header, headers: Sequence[Header]) -> None:
        box = self._box
        common = decision.common
        self._compare = decision.compare
        self._some_silent = any(h.excused and h.sync_point is SyncPointKind.NONE for h in headers)
        with box.changed:
            box.mean_steps = sum(h.clock for h in headers) / len(headers)
            box.steps_then = mine.clock
            samples = {name: h.samples for name, h in zip(self._membership.generation.members, headers, strict=True)}
            # A rank that was started again counts its samples anew.
            box.lost_samples += sum(n for name, n in box.samples_by_name.items() if samples.get(name, 0.0) < n)
            box.samples_by_name = samples
            box.losses = tuple(h.loss for h in headers)
            box.paces = tuple(h.pace for h in headers)
            waiting = [h.collectives for h in headers if h.sync_point is not SyncPointKind.NONE]
            is_waited_for = mine.sync_point is SyncPointKind.NONE and not decision.opens
            box.fewest_collectives = min(waiting, default=math.inf) if is_waited_for else math.inf
            box.speed = relative_speed(mine.pace, box.paces, unknown=box.speed)
            box.asked_last = common.votes
            votes = common.votes.lasting if decision.opens or common.late else common.votes
            unheard = Vote.NONE if decision.plan is not None else between_steps(headers)
            box.agreed |= votes & ~(Vote.SAVE | unheard)  # the engines' threads carry saves out
            if decision.opens or (common.late and box.num_opened < max(h.opened for h in headers)):
                self._open(common)
            box.changed.notify_all()

    def _open(self, common: CommonDecision) -> None:
        box = self._box
        box.num_opened += 1
        box.last_sync_point = common.place
        box.moved = common.moved
        box.last_clock = common.clock
        box.last_exchange = box.next_exchange
        self._regroup.attempts = 0
        for component in self._components:
            component.opened(box.stands_at(common.place))
        self._buckets.release()  # no exchange follows, and the next step may already have a message
        box.open_sync_point(common.place, self._now())

    def _exchange(
        self, kind: RoundType, plan: ComponentPlan, parts: Sequence[Any], headers: Sequence[Header], waited: float
    ) -> None:
        """Exchange a payload with the other ranks, and commit it.

        It is committed once all ranks are known to have it, or, if the round allows that, once this rank has it.
        """
        self._to(Stage.PAYLOAD)
        # All ranks were in this header, and none has to catch up: no rank lacks the exchange before this one.
        self.held.forget()
        self._buckets.claim()
        started = self._now()
        exchange = kind.begin(plan, self._box.next_exchange, parts)
        exchange.header_s = waited
        if kind.takes_marks:
            members = self._membership.generation.members
            exchange.mark = mark_of(headers, members)
            exchange.places = places_of(headers, members)
        if exchange.at_once:
            # Another rank may have the payload first and commit it, even if this rank's `move` fails.
            self.held.behind = exchange
        kind.move(exchange)
        exchange.exchange_s = self._now() - started  # the time so far, in case the answer to the commit is lost
        self._to(Stage.COMMIT)
        if exchange.at_once or self.held.all_have(exchange):
            exchange.exchange_s = self._now() - started
            self._apply(exchange)

    def _catch_up(self, id: int, headers: Sequence[Header]) -> None:
        """Commit the exchange ``id``, unless this rank has committed it already. All ranks call this together."""
        if (exchange := self.held.catch_up(id, source_of(headers, id), self._box.next_exchange <= id)) is not None:
            log.warning("Rank %d: round %d was committed elsewhere; committing it here too.", self._transfer.rank, id)
            self._apply(exchange)

    def _apply(self, exchange: InFlightRound) -> None:
        # `committing` keeps checkpoints from reading the rule's state while it changes, without holding up the training
        # thread, which takes `changed` at every step.
        with self._box.committing:
            exchange.kind.commit(exchange)
            self._box.next_exchange += 1
            self._box.places |= exchange.places
            copied = None if exchange.mark is None else self.on_mark(exchange)
        with self._buckets.handing_over():
            self._box.lost += [] if self._box.marked is None else [self._box.marked]
            self._box.marked = copied
            if exchange.mark is not None:
                self._box.saved = max(self._box.saved, exchange.mark.number)
                self._box.asked &= ~Vote.SAVE
            exchange.kind.hand_over(exchange)  # from here on the training thread may go on
        self.held.committed(exchange)
        self._regroup.attempts = 0

    def _recover(self, error: PeerLost | CollectiveError) -> None:
        """Form a new generation of all live ranks, and ask all of them to exchange headers at once.

        Requests for headers (`ControlPlane.ring`) that were made in older generations do not count in the new one.
        """
        self._to(Stage.FAILED)
        self.seq = _first_seq(self._regroup.after(error))
        self._to(Stage.IDLE)
        self._ring_for_this()

    def _ring_for_this(self) -> None:
        self._membership.ring(self.seq)

    def _to(self, stage: Stage) -> None:
        done = stage in (Stage.IDLE, Stage.FAILED)  # from any stage: there may be nothing to exchange or commit
        assert done or stage is _NEXT.get(self.stage), f"{self.stage} -> {stage}"
        self.stage = stage


def _first_seq(generation: int) -> int:
    """Return the first header number of a generation, which is higher than any number of older generations.

    A request for a header (`ControlPlane.ring`) carries the header's number. So a request of an older generation does
    not match any header of this one.
    """
    return (generation << 32) + 1


class GroupRecovery:
    """The recovery from a failure: it forms new groups with the live ranks, as long as there are enough of them.

    ``roots`` are the root communicators for CPU tensors and for payloads, which may be the same. All methods run on the
    engine's thread, but for `survives`, which the training thread calls, too.
    """

    def __init__(
        self, control: ControlPlane, roots: tuple[Collectives, Collectives], min_replicas: int | None = None
    ) -> None:
        first, second = roots
        distinct = [first] if second is first else [first, second]
        self._roots = [root for root in distinct if isinstance(root, ElasticCollectives)]
        self.possible = len(self._roots) == len(distinct)
        """Whether the transport can form new groups; if not, the first failure ends training."""
        membership = control.membership
        self._membership = membership
        self._shared_state = control.shared_state
        self._transfer = control.transfer
        self._calls = control.calls
        self._timeouts = control.timeouts
        self._now = control.now
        self._min_replicas = membership.generation.world_size if min_replicas is None else min_replicas
        self.on_loss: Callable[[Generation, str], None] = lambda generation, why: None
        """Called with a new generation, and why some ranks are not in it, once its groups are formed."""
        self._may_lose = self._min_replicas < membership.generation.world_size
        if self._may_lose:
            membership.keep(self._min_replicas)
        self._lost: list[str] = []  # why ranks are missing in the generation that is being formed
        self.attempts = 0  # failures in a row

    def survives(self, error: PeerLost) -> bool:
        left = self._membership.generation.world_size - len(self._membership.lost())
        return self.possible and not isinstance(error, (StoreLost, Evicted)) and left >= self._min_replicas

    def after(self, error: PeerLost | CollectiveError) -> int:
        """Form new groups of all live ranks, repeatedly if that fails; return the number of their generation.

        Raises the last failure if too few ranks are left, this rank was evicted, or too many attempts have failed.
        """
        box = self._shared_state
        box.failed += 1
        while True:
            if isinstance(error, PeerLost):
                if not self.survives(error):
                    if isinstance(error, Evicted):  # the error says it to the user; this is for the log of events
                        tell("evicted", logging.INFO, str(error), rank=self._transfer.rank)
                    raise error
            elif isinstance(error, LinkLost) and self._transfer.rank in error.leaving:
                self._membership.fail(str(error))
                raise Evicted(str(error)) from error
            else:
                self._count(error)
                if self._may_lose and not isinstance(error, (CollectiveTimeout, GenerationChanged)):
                    self._membership.suspect()
            rank = self._transfer.rank
            round_id = box.next_exchange
            words = f"Rank {rank}: round {round_id} failed: {error}"
            tell("round_failed", logging.INFO, words, rank=rank, round=round_id)
            try:
                generation = self._meet()
            except (PeerLost, CollectiveError) as again:
                error = again
                box.failed += not isinstance(error, PeerLost)
                continue
            tell(
                "regrouped", logging.WARNING,
                f"Rank {rank}: round {round_id} failed and is repeated by re-formed groups (number {generation}); no "
                f"weight has changed. {str(error).replace(START_AGAIN, '')}",
                rank=self._transfer.rank, round=round_id, generation=generation,
                world_size=self._transfer.small.world_size,
            )  # fmt: skip
            return generation

    def _count(self, error: CollectiveError) -> None:
        self.attempts += 1
        if self.attempts >= self._timeouts.attempts:
            raise CollectiveError(
                f"Rank {self._transfer.rank}: round {self._shared_state.next_exchange} failed {self.attempts} times in "
                f"a row; the last time: {error} If the network is slow, raise `Timeouts(payload=...)`."
            ) from error

    def _meet(self) -> int:
        started = self._now()
        members = self._membership.generation.members
        if self._calls is not None:
            self._calls.suspend()  # before the groups go: an answer that comes meanwhile is not known to all ranks
        while True:
            if self._shared_state.closing:
                raise Closed
            try:
                generation = self._membership.next_generation(_SLICE)
                break
            except CollectiveTimeout:
                if self._now() - started > self._timeouts.reform.total_seconds():
                    raise
        missing = [name for name in members if name not in generation.members]
        if missing:
            self._go_on_without(missing)
        for root in self._roots:
            root.reconfigure(generation)
        self._shared_state.trouble = None
        if self._lost:  # before the training thread goes on, because ranks have other numbers now
            self.on_loss(generation, "; ".join(self._lost))
            self._lost = []
        if self._calls is not None:
            self._calls.settle(self._transfer.gather, self._from, generation.number)
        return generation.number

    def _from(self, data: Tensor, source: int) -> Tensor:
        return self._transfer.result(self._transfer.small.broadcast(data, source))

    def look_for_the_cause(self) -> None:
        """Wait for heartbeats to tell which rank has failed, and raise PeerLost, which names that rank.

        Returns after 2 s if the heartbeats tell of no failure.
        """
        until = self._now() + _HEARSAY_S
        while self._now() < until and not self._shared_state.closing:
            self._membership.check()
            with self._shared_state.changed:
                self._shared_state.changed.wait(_BEAT_S)

    def close(self) -> None:
        if self._calls is not None:
            self._calls.abandon()

    def _go_on_without(self, missing: list[str]) -> None:
        """Continue without the ``missing`` ranks, which are not in the next generation.

        Raises `Closed` if they ended normally at the last sync point, and PeerLost if too few ranks are left.
        """
        box = self._shared_state
        left = self._membership.left()
        generation = self._membership.generation
        with box.changed:
            if box.sync_point in (SyncPointKind.TRAIN_END, SyncPointKind.STOP) and left.issuperset(missing):
                # Ranks leave in order only after the last sync point has opened: this rank has lost that answer.
                box.open_sync_point(box.sync_point, self._now())
                raise Closed
            box.last_clock = math.nan  # a sum over other ranks, with which no later sum can be compared
            box.saved += 1  # a rank that failed may have used the next save number alone
        if generation.world_size >= self._min_replicas:
            self._lost.append(self._membership.why(missing))
            return
        # Ranks that left in order may have done so because they had lost a peer, too: rather name those that failed.
        missing = [rank for rank in missing if rank not in left] or missing
        raise PeerLost(
            f"Rank {self._transfer.rank} ends: {self._membership.why(missing)}. See the log of rank(s) "
            f"{listed(missing)}{START_AGAIN}.",
            tuple(map(int, missing)),  # stable ids are the rank numbers of the first generation
        )

"""The engine's thread: it answers every header for its rank, and has done what all headers together decide.

    IDLE --> HEADER --> PAYLOAD --> COMMIT --> IDLE
    any of these --(an operation fails)--> FAILED --(the groups are formed anew)--> IDLE

An exchange commits in two steps: after the payload every rank says whether it has it, and only when all do is it
applied. Or, where whoever has the payload can still give it to the others later, at once. So a failed exchange forks
nothing: in the next generation's first header a higher id tells a rank that others committed, see `Held`.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from lightning_async.comm.membership.membership import Membership
from lightning_async.engine.ballot import (
    Decision,
    Plan,
    Verdict,
    Wing,
    between_steps,
    decide,
    from_rows,
    mark_of,
    places_of,
    relative_speed,
    to_row,
)
from lightning_async.engine.buckets import Buckets, Exchange, Kind, Message, Owner, side_stream
from lightning_async.engine.deadlines import Deadlines
from lightning_async.engine.header import Gate, Header, Vote
from lightning_async.engine.mailbox import Mailbox
from lightning_async.engine.regroup import Regroup
from lightning_async.engine.transfer import Closed, Held, Transfer, source_of
from lightning_async.errors import CollectiveError, GenerationChanged, PeerLost

__all__ = ["Loop", "Stage"]

log = logging.getLogger(__name__)
_PROMPT = timedelta(seconds=0.2)


class Stage(enum.Enum):
    """Where the exchange in flight stands on this rank."""

    IDLE = "idle"
    HEADER = "header"
    PAYLOAD = "payload"
    COMMIT = "commit"
    FAILED = "failed"


class Loop:
    """Serves headers, for all wings of one rank.

    Args:
        wings: what takes part; may grow until `run`.
        buckets: what is moved.
        mailbox: what is shared with the training thread.
        transfer: moves it.
        membership: liveness, and the bell that calls for a header at once.
        regroup: forms the groups anew after a failure.
        deadlines: how long to wait for what.
        now: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        wings: Sequence[Wing],
        buckets: Buckets,
        mailbox: Mailbox,
        transfer: Transfer,
        membership: Membership,
        regroup: Regroup,
        deadlines: Deadlines,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stage = Stage.IDLE
        self.seq = _first_seq(membership.generation.number)
        """Number of the next header."""
        self.held = Held(buckets, transfer)
        self.on_mark: Callable[[Exchange], Any] = lambda exchange: None  # what a marked one has made is copied
        self._wings, self._buckets, self._box, self._transfer = wings, buckets, mailbox, transfer
        self._membership, self._regroup, self._deadlines, self._now = membership, regroup, deadlines, now
        self._some_silent = self._compare = False

    def run(self) -> None:
        """Until the training thread closes the engine, or an error ends it."""
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
            if not box.closing and not isinstance(error, PeerLost):  # who lost a peer is not to blame
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
        """Until this rank has a reason to answer the next header; False when closing."""
        box = self._box
        with box.changed:
            while not box.closing:
                if self._has_cause() or box.trouble is not None:  # `_serve` meets that again, where it is handled
                    return True
                box.changed.wait(1.0)
                try:
                    self._membership.check()
                except (PeerLost, GenerationChanged):
                    return True
        return False

    def _has_cause(self) -> bool:
        box, buckets = self._box, self._buckets
        if buckets.owner is Owner.TRAINING or (buckets.arrived is not None and not self._is_stalled()):
            return False  # the training thread uses them, or is about to
        return buckets.has_message or box.gate is not Gate.NONE or self._membership.bell >= self.seq

    def _is_stalled(self) -> bool:
        """Whether the training thread has been silent for so long that nobody need wait for it. Under the lock."""
        silent_s = self._now() - self._box.last_seen
        return silent_s > self._deadlines.grace.total_seconds() and not any(w.is_indispensable() for w in self._wings)

    def _serve(self) -> None:
        """One cycle: header, and what it decides."""
        box, buckets, started = self._box, self._buckets, self._now()
        self._transfer.check()
        with box.changed:
            box.changed.wait_for(lambda: buckets.owner is not Owner.TRAINING)
            message = buckets.announce()
            header, drafts = self._header(message), [wing.compose() for wing in self._wings]
            box.composed = self.seq
        buckets.to_engine.take()
        compare = self._compare and header.gate is not Gate.NONE
        parts = [wing.complete(d, message, compare) for wing, d in zip(self._wings, drafts, strict=True)]
        self._to(Stage.HEADER)
        # A rank that is ready rings for those whose training threads are silent for long.
        patience = _PROMPT if self._some_silent else self._deadlines.grace
        row = torch.tensor(to_row([header, *parts]), dtype=torch.float64)
        ring = None if message is None else (patience, self._ring_for_this)
        blanks = [Header(), *(wing.blank for wing in self._wings)]
        headers, *everyones = from_rows(blanks, self._transfer.meet(row, ring).tolist())
        self.seq += 1
        verdict = decide(headers, everyones, self._wings)
        waited_s = self._now() - started
        self._note(verdict, header, headers)
        if verdict.common.catch_up is not None:
            self._catch_up(verdict.common.catch_up, headers)
        elif verdict.plan is not None and verdict.plan.kind is not None:
            self._exchange(verdict.plan.kind, verdict.plan, everyones[verdict.wing], headers, waited_s)
        else:
            self.held.forget()
        self._to(Stage.IDLE)
        with box.changed:
            if verdict.plan is not None and verdict.plan.kind is None:
                self._wings[verdict.wing].drop()
            buckets.release()

    def _header(self, message: Message | None) -> Header:
        """The common part of this rank's header. Under the lock."""
        box, replica = self._box, self._buckets.replica
        return Header(
            exchange=box.next_exchange,
            ready=message.priority if message is not None else 0,
            votes=box.asked,
            excused=box.gate is not Gate.NONE or self._is_stalled(),
            gate=box.gate if self._buckets.arrived is None else Gate.NONE,
            gate_index=box.gate_index,
            layout=replica.fingerprint,
            version=replica.version,
            clock=box.steps,
            samples=box.samples,
            opened=box.num_opened,
            last_gate=box.last_gate,
            last_moved=box.moved,
            last_clock=box.last_clock,
            last_exchange=box.last_exchange,
            saved=box.saved,
            loss=box.loss,
            place=box.place if message is None else message.place,
            held=self.held.id,
            in_step=box.in_step,
            pace=box.pace,
        )

    def _note(self, verdict: Verdict, mine: Header, headers: Sequence[Header]) -> None:
        """Tell the training thread what was agreed."""
        box, common = self._box, verdict.common
        self._compare = verdict.compare
        self._some_silent = any(h.excused and h.gate is Gate.NONE for h in headers)
        with box.changed:
            box.mean_steps, box.steps_then = sum(h.clock for h in headers) / len(headers), mine.clock
            told = ((h.samples, h.loss, h.pace) for h in headers)
            box.samples_by_rank, box.losses, box.paces = zip(*told, strict=True)
            box.speed = relative_speed(mine.pace, box.paces, unknown=box.speed)
            votes = common.votes.lasting if verdict.opens or common.late else common.votes
            unheard = Vote.NONE if verdict.plan is not None else between_steps(headers)
            box.agreed |= votes & ~(Vote.SAVE | unheard)  # saves are carried out by the engine's threads
            if verdict.opens or (common.late and box.num_opened < max(h.opened for h in headers)):
                self._open(common)
            box.changed.notify_all()

    def _open(self, common: Decision) -> None:
        """A gate opens: all replicas hold one model. Under the lock."""
        box = self._box
        box.num_opened += 1
        box.last_gate, box.moved, box.last_clock = common.place, common.moved, common.clock
        box.last_exchange = box.next_exchange
        self._regroup.attempts = 0
        for wing in self._wings:
            wing.opened(box.stands_at(common.place))
        self._buckets.release()  # no exchange follows: the first step from here on may already have a message
        box.open_gate(common.place, self._now())

    # ---- exchanges ----

    def _exchange(self, kind: Kind, plan: Plan, parts: Sequence[Any], headers: Sequence[Header], waited: float) -> None:
        """Move a payload, and apply it if every rank has it: a rank that has not does not come to the last gather."""
        self._to(Stage.PAYLOAD)
        self.held.forget()
        self._buckets.claim()
        started = self._now()
        exchange = kind.begin(plan, self._box.next_exchange, parts)
        exchange.header_s = waited
        if kind.takes_marks:
            members = self._membership.generation.members
            exchange.mark, exchange.places = mark_of(headers, members), places_of(headers, members)
        if exchange.at_once:
            self.held.behind = exchange
        kind.move(exchange)
        exchange.exchange_s = self._now() - started  # what is known, should the answer to the commit be lost
        self._to(Stage.COMMIT)
        if exchange.at_once or self.held.all_have(exchange):
            exchange.exchange_s = self._now() - started
            self._apply(exchange)

    def _catch_up(self, id: int, headers: Sequence[Header]) -> None:
        """Some ranks committed an exchange whose last answer, or payload, others lost."""
        if (exchange := self.held.catch_up(id, source_of(headers, id), self._box.next_exchange <= id)) is not None:
            log.warning("Rank %d: round %d was committed elsewhere; committing it here too.", self._transfer.rank, id)
            self._apply(exchange)

    def _apply(self, exchange: Exchange) -> None:
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

    # ---- failing ----

    def _recover(self, error: PeerLost | CollectiveError) -> None:
        """Meet all ranks that live again in a new generation of the groups.

        All answer its first header at once. The bell of the one that failed is gone with it, some may have lost its
        answer, and a training thread with nothing to send is kept from packing (`announced`) until it is served.
        """
        self._to(Stage.FAILED)
        self.seq = _first_seq(self._regroup.after(error))
        self._to(Stage.IDLE)
        self._ring_for_this()

    def _ring_for_this(self) -> None:
        """Ask every rank to answer the header that is under way."""
        self._membership.ring(self.seq)

    def _to(self, stage: Stage) -> None:
        done = stage in (Stage.IDLE, Stage.FAILED)  # there may be nothing to exchange, or to commit
        assert done or stage is _NEXT.get(self.stage), f"{self.stage} -> {stage}"
        self.stage = stage


_NEXT = {Stage.IDLE: Stage.HEADER, Stage.HEADER: Stage.PAYLOAD, Stage.PAYLOAD: Stage.COMMIT}


def _first_seq(generation: int) -> int:
    """Headers are numbered, so that a bell is for one header; the numbers of a new generation are all newer."""
    return (generation << 32) + 1

"""The engine's thread: it answers every round for its rank, and repairs the groups when one fails."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lightning_async import ops
from lightning_async.comm.protocols import ElasticCollectives, Pending, ReduceOp
from lightning_async.comm.rendezvous import Membership
from lightning_async.engine.mailbox import Arrived, Mailbox, Message, Work
from lightning_async.engine.replica import Replica
from lightning_async.engine.round import Decision, Gate, Header, Kind, Stage, decide
from lightning_async.errors import CollectiveError, GenerationChanged, PeerLost
from lightning_async.flat import FlatLayout
from lightning_async.rules.protocols import AveragingRule, Round

__all__ = ["Deadlines", "RoundServer"]

log = logging.getLogger(__name__)

_BEAT = timedelta(seconds=0.1)


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """How long the engine waits for what.

    Args:
        payload: for each part of a payload. Default 60 s; the header before it has no deadline, because a late
            rank is no failure.
        grace: after this long without a step, a rank's engine answers rounds without it. Default 10 s.
        dead_after: a rank that sent no heartbeat for so long is lost. Default 30 s.
        reform: for all ranks to meet again after a failure. Default 300 s.
        attempts: failed rounds in a row before training ends with an error. Default 10.

    Raises:
        ValueError: a time that is not positive.
    """

    payload: timedelta = timedelta(seconds=60)
    grace: timedelta = timedelta(seconds=10)
    dead_after: timedelta = timedelta(seconds=30)
    reform: timedelta = timedelta(seconds=300)
    attempts: int = 10

    def __post_init__(self) -> None:
        for name in ("payload", "grace", "dead_after", "reform"):
            value = getattr(self, name)
            if not isinstance(value, timedelta):
                raise TypeError(f"`Deadlines({name}={value!r})` must be a datetime.timedelta.")
            if value <= timedelta(0):
                raise ValueError(f"`Deadlines({name}={value!r})` must be longer than zero.")
        if self.attempts < 1:
            raise ValueError(f"`Deadlines(attempts={self.attempts})` must be at least 1.")


@dataclass
class _Exchange:
    """A payload that has moved and awaits its commit."""

    id: int
    decision: Decision
    message: Message | None
    landing: Tensor
    round: Round
    has_source: bool = False
    spread: float = 0.0
    header_s: float = 0.0
    exchange_s: float = 0.0
    used: Tensor | None = None
    counters: list[Tensor] = field(default_factory=list)


class RoundServer:
    """Serves rounds on a thread of its own: header, payload, commit.

    A round commits in two steps: after the payload every rank says whether it has it, and only when all do is
    it applied. So a failed round forks nothing. A rank that loses the last answer holds the round as
    *prepared*; in the next generation's first header a higher round id tells it that others committed.

    Args:
        collectives: the root communicator, for CPU tensors; this forks ``header`` off it.
        payload: what ``payload`` is forked off: ``collectives``, or one for the device that the buckets are on.
        membership: liveness, generations, and the bell that calls for a header at once.
        replica: the tensors and buckets.
        rule: what a mean message means.
        mailbox: what is shared with the training thread.
        deadlines: how long to wait for what.
        part_bytes: payloads move in parts of at most this size.
        weigh: the weight of an amount of work.
        now: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        collectives: ElasticCollectives,
        payload: ElasticCollectives,
        membership: Membership,
        replica: Replica,
        rule: AveragingRule,
        mailbox: Mailbox,
        *,
        deadlines: Deadlines,
        part_bytes: int,
        weigh: Callable[..., float],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank, self.world_size = collectives.rank, collectives.world_size
        self.next_round = 1
        self.stage = Stage.IDLE
        self._roots = [collectives] if payload is collectives else [collectives, payload]
        self._header = collectives.fork("header", timedelta(days=7))
        self._payload = payload.fork("payload", deadlines.payload)
        self._membership = membership
        self._replica = replica
        self._rule = rule
        self._mailbox = mailbox
        self._deadlines = deadlines
        self._part_bytes = part_bytes
        self._weigh = weigh
        self._now = now
        self._seq = (membership.generation << 32) + 1
        self._prepared: _Exchange | None = None
        self._attempts = 0
        self.rule_state: Any = None
        self.init_rule()
        self._thread = threading.Thread(target=self._run, name=f"lightning_async-rounds-{self.rank}", daemon=True)

    # ---- called by the training thread ----

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def join(self, timeout: timedelta) -> bool:
        """Wait for the thread to end; whether it has."""
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout.total_seconds())
        return not self._thread.is_alive()

    def ring(self) -> None:
        """Ask every rank to answer the next header now, ready or not."""
        self._membership.ring(self._seq)

    def init_rule(self) -> None:
        """Start the rule anew from the parameters in the `received` bucket, equal on all ranks."""
        self.rule_state = self._rule.init(self._replica.of_rule(self._replica.received), self._replica.layout)

    def wake(self) -> None:
        """Something outside the mailbox has changed."""
        with self._mailbox.changed:
            self._mailbox.changed.notify_all()

    # ---- the thread ----

    def _run(self) -> None:
        box = self._mailbox
        try:
            while self._wait_for_cause():
                try:
                    self._serve()
                except PeerLost:
                    raise
                except CollectiveError as error:
                    self._recover(error)
        except _Closed:
            return
        except BaseException as error:  # noqa: BLE001 - handed to the training thread, which raises it
            with box.changed:
                box.error = box.error or error
                box.claimed = False
                box.changed.notify_all()
            if not box.closing:
                self._membership.fail(f"{type(error).__name__}: {error}")

    def _wait_for_cause(self) -> bool:
        """Until this rank has a reason to answer the next header; False when closing."""
        box = self._mailbox
        with box.changed:
            while not box.closing:
                if self._has_cause():
                    return True
                box.changed.wait(1.0)
                try:
                    self._membership.check()
                except GenerationChanged:
                    return True  # `_serve` meets it again, where it is handled
        return False

    def _has_cause(self) -> bool:
        box = self._mailbox
        if box.merging or (box.arrived is not None and not self._is_stalled()):
            return False  # the training thread is about to take it
        return box.message is not None or box.gate is not Gate.NONE or self._membership.bell >= self._seq

    def _is_stalled(self) -> bool:
        box = self._mailbox
        silent_s = self._now() - box.last_seen
        return not box.synchronous and silent_s > self._deadlines.grace.total_seconds()

    def _serve(self) -> None:
        """One cycle: header, and what it decides."""
        box, started = self._mailbox, self._now()
        self._membership.check()
        with box.changed:
            header, message = self._compose()
            box.claimed = True
        self._to(Stage.HEADER)
        table = self._gather_headers(header).tolist()
        self._seq += 1
        headers = [Header.unpack(row) for row in table]
        decision = decide(headers)
        waited_s = self._now() - started
        with box.changed:
            box.mean_steps = sum(h.clock for h in headers) / len(headers)
            self._note(decision)
        if decision.catch_up is not None:
            self._catch_up(decision.catch_up)
        elif decision.kind is not Kind.NONE:
            self._prepared = None
            exchange = self._exchange(decision, message, headers)
            exchange.header_s = waited_s
            self._commit(exchange)
        else:
            self._prepared = None
            self._to(Stage.IDLE)
        with box.changed:
            if decision.void:
                box.message = None
            box.claimed = False
            box.changed.notify_all()

    def _gather_headers(self, header: Header) -> Tensor:
        """All headers. A rank that is ready rings for those whose training threads are silent for long."""
        pending = self._header.all_gather(header.pack())
        started, grace_s = self._now(), self._deadlines.grace.total_seconds()
        while not pending.wait(_BEAT):
            self._check()
            if header.kind is not Kind.NONE and self._now() - started > grace_s:
                self.ring()
                started = self._now()
        return pending.result(timedelta(0))

    def _compose(self) -> tuple[Header, Message | None]:
        """This rank's header, and the message that goes with it."""
        box = self._mailbox
        message = box.message if box.arrived is None else None
        header = Header(
            round=self.next_round,
            length=self._replica.numel,
            layout=self._replica.fingerprint(),
            unreported=self._weigh(box.work),
            excused=box.gate is not Gate.NONE or self._is_stalled(),
            gate=box.gate if box.arrived is None else Gate.NONE,
            index=box.index,
            stop=box.asked.stop,
            end=box.asked.end,
            clock=box.steps,
            agreed=box.agreed,
            scalars=(0.0,) * self._rule.num_scalars,
        )
        if message is None:
            return header, None
        if message.kind is Kind.ROUND and not message.scalars and message.healthy:
            part = self._replica.of_rule(self._replica.sent)
            message.healthy = ops.all_finite(part)
            message.scalars = self._rule.message_(part, self.rule_state)
            if not message.healthy:
                log.warning(
                    "Rank %d: its parameters are not finite at step %d; it takes part in round %d with weight zero "
                    "and takes over the other replicas' model. Lower its learning rate or clip its gradients.",
                    self.rank, message.step, self.next_round,
                )  # fmt: skip
        work = self._weigh(message.work) if message.healthy else 0.0
        scalars = message.scalars or header.scalars
        mask = 0 if message.used is None else _hash(message.used)
        return header._replace(
            kind=message.kind, work=work, steps=message.work.steps, mask=mask, scalars=scalars
        ), message

    def _note(self, decision: Decision) -> None:
        """Tell the training thread what was agreed."""
        box = self._mailbox
        votes = box.agreed_votes
        votes.stop |= decision.stop
        votes.end |= decision.end
        votes.validate |= decision.validate and decision.opens is Gate.NONE
        if decision.opens is not Gate.NONE:
            box.opened = True
            box.gate = Gate.NONE
            box.last_seen = self._now()
            if decision.opens is Gate.VALIDATE:
                votes.validate = False
        box.changed.notify_all()

    # ---- payload ----

    def _exchange(self, decision: Decision, message: Message | None, headers: list[Header]) -> _Exchange:
        """Move the payload."""
        self._to(Stage.PAYLOAD)
        started, replica, kind = self._now(), self._replica, decision.kind
        if kind is Kind.CONSENSUS:
            message = None
            replica.pack_(replica.sent)
        elif message is not None and message.kind is not kind:
            message = None  # ready for an averaging round, while others are at a synchronous step
        share = decision.weights[self.rank]
        exchange = _Exchange(
            id=self.next_round,
            decision=decision,
            message=message,
            landing=self._landing(kind, message),
            round=Round(
                id=self.next_round,
                rank=self.rank,
                work=tuple(h.work if h.kind is kind else 0.0 for h in headers),
                steps=tuple(h.steps for h in headers),
                scalars=tuple(h.scalars for h in headers),
                lr=message.lr if message is not None else 0.0,
            ),
            has_source=kind is Kind.CONSENSUS or headers[0].kind is kind,
        )
        if kind is Kind.GRADIENTS:
            self._reduce_gradients(exchange, share, {h.mask for h in headers if h.kind is kind})
        else:
            self._reduce_messages(exchange, share)
        exchange.exchange_s = self._now() - started
        return exchange

    def _landing(self, kind: Kind, message: Message | None) -> Tensor:
        """The bucket in which the mean arrives; must not hold anything that is still needed."""
        replica, box = self._replica, self._mailbox
        if message is not None or kind is Kind.CONSENSUS:
            return replica.received
        with box.changed:
            sent_is_free = box.message is None and box.arrived is None
        # An absent replica keeps the last target in `received`: it moves from there. If `sent` is taken too
        # (by a round that it has yet to merge), a third bucket is borrowed until its training thread is back.
        return replica.sent if sent_is_free else torch.zeros_like(replica.sent)

    def _reduce_messages(self, exchange: _Exchange, share: float) -> None:
        replica, landing = self._replica, exchange.landing
        consensus = exchange.decision.kind is Kind.CONSENSUS
        if consensus or exchange.message is not None:
            replica.scale_(landing, replica.sent, share, is_source=self.rank == 0)
        else:
            landing.zero_()
        self._all_reduce(landing)
        if consensus:
            for counter in replica.counters:
                flat = counter.detach().to("cpu", torch.int64, copy=True).reshape(-1)
                self._await(self._header.all_reduce(flat, ReduceOp.MAX))
                exchange.counters.append(flat.view(counter.shape))
        elif share > 0.0:
            exchange.spread = share * ops.sq_distance(replica.of_rule(replica.sent), replica.of_rule(landing))

    def _reduce_gradients(self, exchange: _Exchange, share: float, masks: set[int]) -> None:
        replica, message = self._replica, exchange.message
        exchange.used = torch.zeros(len(replica.layout))
        if message is not None and message.used is not None:
            exchange.used.copy_(message.used)
        if len(masks) > 1:
            self._await(self._header.all_reduce(exchange.used, ReduceOp.MAX))
        landing = replica.of_rule(exchange.landing)
        replica.scaled_(landing, replica.of_rule(replica.sent), share)
        self._all_reduce(landing)

    def _all_reduce(self, bucket: Tensor) -> None:
        """Sum ``bucket`` over all ranks, part by part, each with the payload's deadline."""
        for part in FlatLayout.parts(bucket, self._part_bytes):
            self._await(self._payload.all_reduce(part), self._deadlines.payload)

    def _commit(self, exchange: _Exchange) -> None:
        """Apply the round if every rank has its payload: a rank that has not does not come to this gather."""
        self._to(Stage.COMMIT)
        self._prepared = exchange
        started = self._now()
        spreads = self._await(self._header.all_gather(torch.tensor([exchange.spread], dtype=torch.float64)))
        exchange.spread = float(spreads.sum().sqrt())
        exchange.exchange_s += self._now() - started
        self._apply(exchange)

    def _catch_up(self, round_id: int) -> None:
        """Some ranks committed a round whose last answer others lost; those hold it prepared."""
        prepared = self._prepared
        if self.next_round > round_id:
            self._to(Stage.IDLE)
            return
        if prepared is None or prepared.id != round_id:
            raise RuntimeError(f"Rank {self.rank} is told to commit round {round_id}, but holds none prepared.")
        log.warning("Rank %d: round %d was committed elsewhere; committing it here too.", self.rank, round_id)
        self._apply(prepared)

    def _apply(self, exchange: _Exchange) -> None:
        """Advance the rule's state and hand the result to the training thread."""
        replica, message, kind = self._replica, exchange.message, exchange.decision.kind
        target = replica.of_rule(exchange.landing)
        if kind is Kind.ROUND:
            sent = replica.of_rule(replica.sent) if message is not None else None
            self.rule_state = self._rule.merge_(sent, target, self.rule_state, exchange.round)
        elif kind is Kind.CONSENSUS:
            agreed = self._rule.agree(target, self.rule_state)
            if agreed is not target:
                target.copy_(agreed)
        self._prepared = None
        self.next_round += 1
        self._attempts = 0
        self._to(Stage.MERGE)
        with self._mailbox.changed:
            self._mailbox.changed.wait_for(lambda: not self._mailbox.merging)
            self._hand_over(exchange, self._base(exchange))
        self._to(Stage.IDLE)

    def _base(self, exchange: _Exchange) -> Tensor | None:
        """What the target is a displacement from, and the buckets' new roles."""
        replica, message, pending = self._replica, exchange.message, self._mailbox.arrived
        if exchange.decision.kind is not Kind.ROUND:
            return None
        if message is not None:
            return replica.sent if message.healthy else None
        # Absent: from the last target to the new one. With a round that is not merged yet, from where that began.
        last, replica.received = replica.received, exchange.landing
        if exchange.landing is replica.sent:
            replica.sent = last
        return pending.base if pending is not None else last

    def _hand_over(self, exchange: _Exchange, base: Tensor | None) -> None:
        """Count the work off and put the result where the training thread takes it."""
        box, message, kind = self._mailbox, exchange.message, exchange.decision.kind
        pending = box.arrived
        box.last_commit = self._now()
        if kind is Kind.GRADIENTS:
            # Shared already: what is kept is only who has the newest model, should a rendezvous come next.
            box.work = message.work.copy() if message is not None else Work()
            if message is None:
                return
        elif kind is Kind.CONSENSUS:
            box.work, box.message = Work(), None
        elif message is not None:
            box.work = box.work - message.work
        if message is not None:
            box.message = None
        box.arrived = Arrived(
            kind=kind,
            id=exchange.id,
            message=message or (pending.message if pending is not None else None),
            target=exchange.landing,
            base=base,
            share=exchange.decision.weights[self.rank],
            num_present=sum(w > 0.0 for w in exchange.decision.weights),
            has_source=exchange.has_source,
            header_s=exchange.header_s,
            exchange_s=exchange.exchange_s,
            spread=exchange.spread,
            used=exchange.used,
            counters=tuple(exchange.counters),
        )
        box.changed.notify_all()

    # ---- waiting and failing ----

    def _await(self, pending: Pending[Tensor], deadline: timedelta | None = None) -> Tensor:
        """The result, once it is there; gives up when a peer is lost, the groups move on, or the time is up."""
        started = self._now()
        while not pending.wait(_BEAT):
            self._check()
            if deadline is not None and self._now() - started > deadline.total_seconds():
                return pending.result(timedelta(0))
        return pending.result(timedelta(0))

    def _check(self) -> None:
        if self._mailbox.closing:
            raise _Closed
        self._membership.check()

    def _recover(self, error: CollectiveError) -> None:
        """Meet all ranks again in a new generation of the groups."""
        self._to(Stage.FAILED)
        while True:
            self._attempts += 1
            self._mailbox.failed_rounds += 1
            if self._attempts >= self._deadlines.attempts:
                raise CollectiveError(
                    f"Rank {self.rank}: round {self.next_round} failed {self._attempts} times in a row; the last time: "
                    f"{error} If the network is slow, raise `Deadlines(payload=...)`."
                ) from error
            log.warning(
                "Rank %d: round %d failed and is repeated by re-formed groups; no weight has changed. %s",
                self.rank, self.next_round, error,
            )  # fmt: skip
            try:
                quorum = self._membership.next_generation(self._deadlines.reform)
                for root in self._roots:
                    root.reconfigure(quorum)
            except PeerLost:
                raise
            except CollectiveError as again:
                error = again
                continue
            self._seq = (quorum.generation << 32) + 1
            self._to(Stage.IDLE)
            return

    def _to(self, stage: Stage) -> None:
        assert stage in self.stage.next or stage is Stage.FAILED, f"{self.stage} -> {stage}"
        self.stage = stage


def _hash(mask: Tensor) -> int:
    """A hash of a list of flags that a float64 holds exactly."""
    return int.from_bytes(hashlib.sha256(bytes(mask.to(torch.uint8).tolist())).digest()[:6], "big")


class _Closed(Exception):
    """The training thread has closed the engine."""

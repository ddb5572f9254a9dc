"""The engine's thread: it answers every round for its rank, and repairs the groups when one fails."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch

from lightning_async.comm.membership.membership import Membership
from lightning_async.comm.protocols import Collectives
from lightning_async.engine.averaging.agreed import Commits
from lightning_async.engine.averaging.ballot import Decision, Header, Kind, Stage, decide
from lightning_async.engine.averaging.config import AveragerConfig
from lightning_async.engine.averaging.mailbox import Mailbox
from lightning_async.engine.averaging.own_header import OwnHeader
from lightning_async.engine.averaging.payload import Exchange, Payload
from lightning_async.engine.averaging.regroup import Regroup
from lightning_async.engine.averaging.waiting import Closed, Waiter
from lightning_async.engine.calls import Calls
from lightning_async.engine.header import Gate
from lightning_async.engine.replica import Replica
from lightning_async.engine.streams import side_stream
from lightning_async.errors import CollectiveError, GenerationChanged, PeerLost
from lightning_async.flat import FlatLayout
from lightning_async.rules.averaging.protocol import AveragingRule

__all__ = ["RoundServer"]

log = logging.getLogger(__name__)
_PROMPT = timedelta(seconds=0.2)


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
        config: weights, sizes, deadlines.
        now: a monotonic clock, in seconds.
        calls: of the training thread, which go on in the new groups when these are formed anew.
    """

    def __init__(
        self,
        collectives: Collectives,
        payload: Collectives,
        membership: Membership,
        replica: Replica,
        rule: AveragingRule,
        mailbox: Mailbox,
        config: AveragerConfig,
        now: Callable[[], float] = time.monotonic,
        calls: Calls | None = None,
    ) -> None:
        self.rank = collectives.rank
        self.stage = Stage.IDLE
        self.commits = Commits(replica, rule, mailbox, self.rank, now)
        self._membership, self._replica, self._rule, self._mailbox = membership, replica, rule, mailbox
        self._config, self._deadlines, self._now = config, config.deadlines, now
        self._waiter = Waiter(mailbox, membership, now)
        self._own = OwnHeader(replica, rule, mailbox, self.commits, config, now)
        self._header = collectives.fork("header", timedelta(days=7))
        roots = (collectives, payload)
        self._regroup = Regroup(roots, self._header, membership, mailbox, self._waiter, calls, config, now)
        large = payload.fork("payload", config.deadlines.payload)
        self.payload = Payload(self._header, large, replica, mailbox, config, self._waiter, now)
        self._seq = _first_seq(membership.generation.number)
        self._prepared: Exchange | None = None
        self._attempts = 0
        self._some_silent = self._diverged = False
        self._compare = False  # the next header says what this rank holds, at a gate
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
        """Ask every rank, ready or not, to answer the header that will carry what is in the mailbox now."""
        with self._mailbox.changed:
            seq = max(self._seq, self._mailbox.composed + 1)
        self._membership.ring(seq)

    def _ring_for_this(self) -> None:
        """Ask every rank to answer the header that is under way."""
        self._membership.ring(self._seq)

    def follow_layout(self, before: FlatLayout) -> None:
        """The replica has another layout than ``before``: nothing of the old one is used any more."""
        self.commits.follow_layout(before)
        self.payload.follow_layout()
        self._prepared = None

    def wake(self) -> None:
        """Something outside the mailbox has changed."""
        with self._mailbox.changed:
            self._mailbox.changed.notify_all()

    # ---- the thread ----

    def _run(self) -> None:
        box = self._mailbox
        try:
            with side_stream(self._replica.device):
                self._serve_all()
        except Closed:
            pass
        except BaseException as error:  # handed to the training thread, which raises it
            with box.changed:
                box.error = box.error or error
                box.claimed = False
                box.changed.notify_all()
            if not box.closing and not isinstance(error, PeerLost):  # who lost a peer is not to blame
                self._membership.fail(f"{type(error).__name__}: {error}")
        finally:
            self._regroup.close()

    def _serve_all(self) -> None:
        while self._wait_for_cause():
            try:
                self._serve()
            except PeerLost:
                raise
            except CollectiveError as error:
                if not self._regroup.possible:
                    raise
                self._recover(error)

    def _wait_for_cause(self) -> bool:
        """Until this rank has a reason to answer the next header; False when closing."""
        box = self._mailbox
        with box.changed:
            while not box.closing:
                if self._has_cause():
                    return True
                if box.trouble is not None:
                    return True  # `_serve` meets it again, where it is handled
                box.changed.wait(1.0)
                try:
                    self._membership.check()
                except GenerationChanged:
                    return True
        return False

    def _has_cause(self) -> bool:
        box = self._mailbox
        if box.in_use or (box.arrived is not None and not self._own.is_stalled()):
            return False  # the training thread is about to take it
        return box.message is not None or box.gate is not Gate.NONE or self._membership.bell >= self._seq

    def _serve(self) -> None:
        """One cycle: header, and what it decides."""
        box, started = self._mailbox, self._now()
        self._waiter.check()
        with box.changed:
            box.changed.wait_for(lambda: not box.in_use)
            header, message = self._own.composed()
            box.claimed, box.composed = True, self._seq
        self._replica.to_engine.take()
        if message is not None:
            header = self._own.announced(header, message)
        if self._compare and header.gate is not Gate.NONE:
            header = self._own.compared(header)
        self._to(Stage.HEADER)
        # A rank that is ready rings for those whose training threads are silent for long.
        patience = _PROMPT if self._some_silent else self._deadlines.grace
        ring = None if message is None else (patience, self._ring_for_this)
        table = self._waiter.result(self._header.all_gather(header.pack()), every=ring).tolist()
        self._seq += 1
        headers = [Header.unpack(row) for row in table]
        decision = decide(headers)
        self._compare = decision.compare
        self._some_silent = any(h.excused and h.gate is Gate.NONE for h in headers)
        waited_s = self._now() - started
        with box.changed:
            box.mean_steps, box.steps_then = sum(h.clock for h in headers) / len(headers), header.clock
            box.samples_by_rank = tuple(h.samples for h in headers)
            self._note(decision, headers)
        if decision.catch_up is not None:
            self._catch_up(decision.catch_up)
        elif decision.kind is not Kind.NONE:
            self._to(Stage.PAYLOAD)
            self._prepared = None
            self._replica.to_engine.take()  # the training thread may have merged while the header waited
            exchange = self.payload.move(self.commits.next_round, decision, message, headers)
            exchange.header_s = waited_s
            self._commit(exchange)
        else:
            self._prepared = None
            self._to(Stage.IDLE)
        with box.changed:
            if decision.void:
                self._drop_void()
            box.claimed = False
            box.changed.notify_all()

    def _note(self, decision: Decision, headers: list[Header]) -> None:
        """Tell the training thread what was agreed. Under the lock."""
        box = self._mailbox
        votes = box.agreed_votes
        votes.stop |= decision.stop
        votes.end |= decision.end
        votes.validate |= decision.validate and decision.opens is Gate.NONE
        votes.synchronise |= decision.synchronise and decision.opens is Gate.NONE
        late = decision.late and box.opened_gates < max(h.opened for h in headers)
        if late or (decision.opens is not Gate.NONE and not decision.late):
            self._open(decision)
        box.changed.notify_all()

    def _open(self, decision: Decision) -> None:
        """A gate opens: all replicas hold one model, which is the last target from now on."""
        box, replica = self._mailbox, self._replica
        box.opened_gates += 1
        box.last_gate, box.moved, box.last_clock = decision.opens, decision.moved, decision.clock
        box.last_round = self.commits.next_round
        self._attempts = 0
        if not self._rule.restores_local:
            box.agree()
            self.payload.forget_debts()
            replica.note_agreed()
            if not box.at_target:  # equal without an exchange
                replica.pack_(replica.received)
                box.at_target = True
        box.open_gate(decision.opens, self._now())

    def _drop_void(self) -> None:
        """Nobody has anything to average. Under the lock."""
        message, self._mailbox.message = self._mailbox.message, None
        if message is not None and not message.healthy and not self._diverged:
            self._diverged = True
            log.error(
                "Rank %d: no replica is finite at step %d, so there is no model to take over: training has diverged. "
                "Lower the learning rate, clip gradients, or resume from the last checkpoint.",
                self.rank, message.step,
            )  # fmt: skip

    # ---- commit ----

    def _commit(self, exchange: Exchange) -> None:
        """Apply the round if every rank has its payload: a rank that has not does not come to this gather."""
        self._to(Stage.COMMIT)
        self._prepared = exchange
        started = self._now()
        spreads = self._waiter.result(self._header.all_gather(torch.tensor([exchange.spread], dtype=torch.float64)))
        exchange.spread = float(spreads.sum().sqrt())
        exchange.exchange_s += self._now() - started
        self._apply(exchange)

    def _catch_up(self, round_id: int) -> None:
        """Some ranks committed a round whose last answer others lost; those hold it prepared."""
        prepared = self._prepared
        if self.commits.next_round > round_id:
            self._to(Stage.IDLE)
            return
        if prepared is None or prepared.id != round_id:
            raise RuntimeError(f"Rank {self.rank} is told to commit round {round_id}, but holds none prepared.")
        log.warning("Rank %d: round %d was committed elsewhere; committing it here too.", self.rank, round_id)
        self._apply(prepared)

    def _apply(self, exchange: Exchange) -> None:
        self.payload.committed(exchange)
        self.commits.apply(exchange)  # from here on the training thread may go on
        self._prepared = None
        self._attempts = 0
        self._to(Stage.MERGE)
        self._to(Stage.IDLE)

    # ---- failing ----

    def _recover(self, error: CollectiveError) -> None:
        """Meet all ranks again in a new generation of the groups."""
        self._to(Stage.FAILED)
        while True:
            self._attempts += 1
            self._mailbox.failed_rounds += 1
            if self._attempts >= self._deadlines.attempts:
                raise CollectiveError(
                    f"Rank {self.rank}: round {self.commits.next_round} failed {self._attempts} times in a row; the "
                    f"last time: {error} If the network is slow, raise `Deadlines(payload=...)`."
                ) from error
            log.info("Rank %d: round %d failed: %s", self.rank, self.commits.next_round, error)
            try:
                generation = self._regroup(self.commits.next_round)
            except PeerLost:
                raise
            except CollectiveError as again:
                error = again
                continue
            log.warning(
                "Rank %d: round %d failed and is repeated by re-formed groups (number %d); no weight has changed. %s",
                self.rank, self.commits.next_round, generation, error,
            )  # fmt: skip
            self._seq = _first_seq(generation)
            self._to(Stage.IDLE)
            with self._mailbox.changed:
                box = self._mailbox
                waits = box.gate is not Gate.NONE or box.asked.stop or box.asked.end
            if waits:  # the bell of the header that failed is gone with it, and some may have lost its answer
                self._ring_for_this()
            return

    def _to(self, stage: Stage) -> None:
        assert stage in self.stage.next or stage is Stage.FAILED, f"{self.stage} -> {stage}"
        self.stage = stage


def _first_seq(generation: int) -> int:
    """Headers are numbered, so that a bell is for one header; the numbers of a new generation are all newer."""
    return (generation << 32) + 1

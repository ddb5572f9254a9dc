"""Where all ranks meet: every rank arrives, rounds are served meanwhile, one model comes out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_async.engine.averaging.ballot import Kind
from lightning_async.engine.averaging.loop import RoundServer
from lightning_async.engine.averaging.mailbox import Mailbox, Message
from lightning_async.engine.averaging.report import RoundReport, RunSummary
from lightning_async.engine.averaging.reports import Reports
from lightning_async.engine.header import Arrival, Gate
from lightning_async.engine.replica import Replica
from lightning_async.errors import AsyncTrainingError

__all__ = ["Gates"]


class Gates(ABC):
    """The training thread's waits, gates and votes. The averager adds what it does between them."""

    _box: Mailbox
    _server: RoundServer
    _now: Callable[[], float]
    _reports: Reports
    summary: RunSummary
    step: int
    replica: Replica

    stop_requested = False
    """Set by a signal handler, which may touch nothing else: a vote for stopping follows."""
    moved_at_gate = False
    """Whether the model had changed, on any rank, between the last two gates."""
    _at_gate = True
    """No batch has begun since the last gate, or since training began."""

    @abstractmethod
    def _take(self) -> RoundReport | None:
        """Move the parameters by what arrived."""

    @abstractmethod
    def _pack(self, lr: float = 0.0, due: bool = True) -> bool:
        """Make what is left of the work a message, if the buckets are free."""

    @abstractmethod
    def _follow_layout(self) -> None:
        """Take up parameters that were unfrozen at the last gate."""

    def _leave_gate(self) -> None:
        """A batch begins, or another gate: what was done at the last one counts from now on."""
        if self._at_gate:
            self._at_gate = False
            self._follow_layout()

    def _see(self) -> None:
        """Under the lock: the training thread shows itself, and learns of a failure."""
        box = self._box
        box.last_seen = self._now()
        if box.error is not None:
            raise self._failure()
        if self.stop_requested and not box.asked.stop:
            box.asked.stop = True
            self._server.ring()
            box.changed.notify_all()

    def _failure(self) -> BaseException:
        error = self._box.error
        assert error is not None
        if isinstance(error, AsyncTrainingError):
            return error
        failure = AsyncTrainingError(
            f"Rank {self.summary.rank}: the averaging thread failed in round {self._server.commits.next_round} at step "
            f"{self.step}: {type(error).__name__}: {error}"
        )
        failure.__cause__ = error
        return failure

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Stand still until the engine's thread has made ``condition`` true; its failures end the wait."""
        box = self._box
        with box.changed:
            while not condition():
                self._see()
                box.changed.wait(0.5)

    @contextmanager
    def _using_buckets(self, message: Message | None = None, alone: bool = False) -> Iterator[None]:
        """The engine's thread keeps off the buckets meanwhile; with the end, ``message`` is what they hold.

        Args:
            alone: first wait until no header is under way that may move them.
        """
        box = self._box
        with box.changed:
            while alone and box.claimed:
                self._see()
                box.changed.wait(0.5)
            box.in_use = True
        try:
            yield
        except BaseException:
            message = None
            raise
        finally:
            self.replica.to_engine.give()
            with box.changed:
                box.message = message or box.message
                box.in_use = False
                box.changed.notify_all()

    def rendezvous(self, gate: Gate, index: int = 0) -> Arrival:
        """Wait, serving rounds, until every rank stands at this gate and holds the same model.

        The model is the work-weighted mean of all replicas (or what the rule says of it). Two in a row change
        no bit: where no rank has moved since the last one, nothing is exchanged.
        """
        box, started = self._box, self._now()
        self._leave_gate()
        self.replica.tensors.check_unchanged()
        self.replica.to_engine.give()
        with box.changed:
            box.gate, box.gate_index, box.opened = gate, index, False
            in_flight = box.message is not None and box.message.kind is Kind.ROUND
            box.changed.notify_all()
        self._server.ring()
        try:
            while True:
                if in_flight:
                    self._reports.blocked_s = self._now() - started
                if self._take() is not None:
                    in_flight = False
                if not box.synchronous:
                    self._pack(due=False)  # what is left over counts, even if the gate does not open for long
                with box.changed:
                    self._see()
                    if box.arrived is not None:
                        continue
                    if box.opened:
                        self.moved_at_gate, self._at_gate = box.moved, True
                        return Arrival.OPEN
                    if box.agreed_votes.stop and gate is not Gate.STOP:
                        return Arrival.STOP
                    if box.agreed_votes.validate and gate is not Gate.VALIDATE:
                        return Arrival.VALIDATE
                    box.changed.wait(1.0)
        finally:
            with box.changed:
                box.gate = Gate.NONE
                box.last_seen = self._now()
                if not box.claimed:
                    box.drop_left_over()
            self.summary.idle_s += self._now() - started

    def resume(self) -> None:
        """The training thread starts a batch: it is alive."""
        with self._box.changed:
            self._see()

    def vote(self, *, stop: bool = False, end: bool = False) -> None:
        """Ask every rank to leave training (``stop``), or to end it as after its last epoch (``end``)."""
        box = self._box
        with box.changed:
            news = (stop and not box.asked.stop) or (end and not box.asked.end)
            box.asked.stop |= stop
            box.asked.end |= end
        if news:
            self._server.ring()
            self._server.wake()

    @property
    def stop_agreed(self) -> bool:
        """All ranks know that training stops at the next batch boundary."""
        return self._box.agreed_votes.stop

    @property
    def end_agreed(self) -> bool:
        """All ranks know that training ends as after its last epoch."""
        return self._box.agreed_votes.end

    @property
    def validation_asked(self) -> bool:
        """A rank waits for all others to validate."""
        return self._box.agreed_votes.validate

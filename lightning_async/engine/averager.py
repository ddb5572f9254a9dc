"""The training thread's side of averaging: count work, pack, merge, meet at gates."""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Generic, Literal, TypeVar, get_args

from lightning_async.comm.protocols import ElasticCollectives
from lightning_async.comm.rendezvous import Membership
from lightning_async.engine.mailbox import Arrived, Mailbox, Message, Work
from lightning_async.engine.replica import Replica
from lightning_async.engine.round import Gate, Kind
from lightning_async.engine.rounds import Deadlines, RoundServer
from lightning_async.engine.telemetry import RoundReport, RunSummary
from lightning_async.errors import AsyncTrainingError
from lightning_async.rules.protocols import Action, AveragingRule, Clock, Schedule

__all__ = ["Arrival", "AveragerConfig", "BackgroundAverager", "Weighting"]

log = logging.getLogger(__name__)
S = TypeVar("S")

Weighting = Literal["samples", "steps", "equal"]


class Arrival(enum.Enum):
    """How a rendezvous ended."""

    OPEN = "open"
    """Every rank is here and holds the same model."""
    VALIDATE = "validate"
    """A rank asks for a validation: go to `Gate.VALIDATE`, then come back."""
    STOP = "stop"
    """A rank was told to stop: go to `Gate.STOP`."""


@dataclass(frozen=True, kw_only=True)
class AveragerConfig:
    """How one replica averages, apart from its rule and its schedule.

    Args:
        overlap: rounds run while training goes on; False: training stands still for each.
        weighting: a message's weight: the samples or the steps behind it, or 1 for each.
        part_bytes: payloads move in parts of at most this size. Default 16 MiB.
        deadlines: how long to wait for what.

    Raises:
        ValueError: an unknown weighting, or a part smaller than one element.
    """

    overlap: bool = True
    weighting: Weighting = "samples"
    part_bytes: int = 16 << 20
    deadlines: Deadlines = field(default_factory=Deadlines)

    def __post_init__(self) -> None:
        if self.weighting not in get_args(Weighting):
            raise ValueError(f"`AveragerConfig(weighting={self.weighting!r})` must be one of {get_args(Weighting)}.")
        if self.part_bytes < 4:
            raise ValueError(f"`AveragerConfig(part_bytes={self.part_bytes})` must be at least 4.")

    def weigh(self, work: Work) -> float:
        """The weight of an amount of work."""
        if self.weighting == "equal":
            return float(work.steps > 0 or work.samples > 0)
        return work.steps if self.weighting == "steps" else work.samples


class BackgroundAverager(Generic[S]):
    """Averages one replica with its peers while it trains.

    The training thread calls `plan` before and `tick` after every optimizer step (or once per batch, where
    several optimizers step), `rendezvous` wherever all ranks must hold one model, and `resume` when it trains
    on. A thread of the engine's serves the rounds meanwhile. All ranks must start with equal parameters.

    Args:
        collectives: a communicator for CPU tensors, off which the engine forks its own.
        payload: a communicator for the device of the replica's buckets. Default: ``collectives``.
        membership: started and closed by its owner.
        replica: the tensors.
        rule: how replicas become one model.
        schedule: when they do.
        config: the rest.
        now: a monotonic clock, in seconds.

    Raises:
        ValueError: a rule that overwrites the parameters together with ``overlap=True``.
    """

    def __init__(
        self,
        collectives: ElasticCollectives,
        membership: Membership,
        replica: Replica,
        rule: AveragingRule[S],
        schedule: Schedule,
        config: AveragerConfig | None = None,
        *,
        payload: ElasticCollectives | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config or AveragerConfig()
        if self.config.overlap and not rule.overlappable:
            raise ValueError(
                f"`rule={rule!r}` overwrites the parameters, so `overlap=True` would lose the steps taken meanwhile: "
                "pass `overlap=False`, or `rule=DeltaMean()`."
            )
        self.replica, self.rule, self.schedule = replica, rule, schedule
        self.stop_requested = False
        """Set by a signal handler, which may touch nothing else: a vote for stopping follows."""
        self.moved_at_gate = False
        """Whether the last rendezvous changed the model."""
        self.summary = RunSummary(rank=collectives.rank, world_size=collectives.world_size)
        self.step = 0
        self.epoch = 0
        self._now = now
        self._box = Mailbox()
        self._at_target = True
        self._step_s = self._round_s = 0.0
        self._started_at = self._last_tick = self._merge_s = self._blocked_s = 0.0
        replica.pack_(replica.received)
        self._server = RoundServer(
            collectives,
            payload or collectives,
            membership,
            replica,
            rule,
            self._box,
            deadlines=self.config.deadlines,
            part_bytes=self.config.part_bytes,
            weigh=self.config.weigh,
            now=now,
        )

    # ---- life ----

    def start(self) -> None:
        """Begin: every replica's parameters are equal now."""
        self._started_at = self._last_tick = self._box.last_seen = self._box.last_commit = self._now()
        self._box.agreed = self._server.next_round - 1
        self._server.start()

    def close(self, timeout: timedelta = timedelta(seconds=10)) -> None:
        """End the engine's thread. Waits for no peer; idempotent."""
        with self._box.changed:
            self._box.closing = True
            self._box.changed.notify_all()
        if not self._server.join(timeout):
            log.warning("The engine's thread of rank %d did not end within %s.", self.summary.rank, timeout)

    def wake(self) -> None:
        """Called by the membership when something has changed."""
        self._server.wake()

    # ---- stepping ----

    def plan(self) -> Action:
        """What to do with the step that the training thread is about to take."""
        box = self._box
        with box.changed:
            self._see()
            work, committed = box.work, box.last_commit
            in_flight = box.message is not None
            since = work.steps - (box.message.work.steps if box.message is not None else 0.0)
        action = self.schedule.next(
            Clock(
                step=self.step,
                epoch=self.epoch,
                steps_since_round=int(since),
                seconds_since_round=self._now() - committed,
                step_s=self._step_s,
                round_s=self._round_s,
            )
        )
        synchronous = action is Action.GRADIENTS
        if synchronous and in_flight:
            self._wait(lambda: box.message is None)
        if box.synchronous and not synchronous:
            self._leave_synchronous()
        with box.changed:
            box.synchronous = synchronous
        return action

    def _leave_synchronous(self) -> None:
        """Replicas part from here: this is the model that the rule's state starts from."""
        self._wait(lambda: not self._box.claimed)
        self.replica.pack_(self.replica.received)
        self._server.init_rule()
        self._box.work = Work()
        self._at_target = True

    def reduce_gradients_(self, samples: float, scale: float = 1.0) -> None:
        r"""Replace the gradients by their sample-weighted mean over all replicas; stands still until it is there.

        .. math:: g \leftarrow s \sum_i \frac{n_i}{\sum_j n_j} \frac{g_i}{s_i}

        Args:
            samples: samples behind the gradients of this replica.
            scale: this replica's loss scale (mixed precision); replicas may have different ones.
        """
        box, replica = self._box, self.replica
        self._wait(lambda: box.arrived is None and box.message is None and not box.claimed)
        replica.pack_gradients_(replica.sent, 1.0 / scale)
        message = Message(Kind.GRADIENTS, Work(samples, 1.0), self.step, used=replica.used())
        self._post(message)
        self._wait(lambda: box.message is None)
        arrived = box.arrived
        if arrived is not None and arrived.used is not None:  # None: no replica had samples
            replica.unpack_gradients_(arrived.target, arrived.used, scale)
        with box.changed:
            box.arrived = None
        self.summary.synchronous_steps += 1

    def tick(self, action: Action, samples: float, *, stepped: bool = True, lr: float = 0.0) -> RoundReport | None:
        """Count a step, take what arrived, and start a round if that was planned.

        Args:
            action: what `plan` said.
            samples: samples behind the step.
            stepped: False if no parameter moved (a step skipped because of infinite gradients).
            lr: the inner learning rate, for rules that need it.

        Returns:
            The round that was merged, if one was.
        """
        box, now = self._box, self._now()
        self._step_s = 0.9 * self._step_s + 0.1 * (now - self._last_tick) if self._step_s else now - self._last_tick
        self._last_tick = now
        with box.changed:
            self._see()
            if stepped:
                self.step += 1
                box.steps = float(self.step)
                self._at_target = False
                box.agreed = -1
                self.summary.samples += samples
                self.summary.steps += 1
                if action is not Action.GRADIENTS:
                    box.work = Work(box.work.samples + samples, box.work.steps + 1)
        report = self._take()
        if action is Action.ROUND:
            if self.config.overlap:
                self._pack(lr)
            else:
                report = self._average_now(lr) or report
        return report

    def _average_now(self, lr: float) -> RoundReport | None:
        """One round, for which the training thread stands still."""
        box, started = self._box, self._now()
        self._wait(lambda: not box.claimed)
        report = self._take()
        if self._pack(lr):
            self._wait(lambda: box.message is None)
            self._blocked_s = self._now() - started
            report = self._take() or report
        return report

    def _pack(self, lr: float = 0.0) -> bool:
        """Snapshot the parameters as this rank's message, if the buckets are free; whether it did."""
        box, started = self._box, self._now()
        with box.changed:
            work = box.work.copy()
            if box.message is not None or box.arrived is not None or box.claimed or self.config.weigh(work) <= 0.0:
                return False
        self.replica.pack_(self.replica.sent)
        self._merge_s += self._now() - started
        self._post(Message(Kind.ROUND, work, self.step, lr))
        return True

    def _post(self, message: Message) -> None:
        with self._box.changed:
            self._box.message = message
            self._box.changed.notify_all()

    def _take(self) -> RoundReport | None:
        """Move the parameters by what arrived."""
        box = self._box
        with box.changed:
            arrived = box.arrived
            if arrived is None:
                return None
            box.merging = True
        started = self._now()
        self._merge(arrived)
        self._merge_s += self._now() - started
        with box.changed:
            box.arrived, box.merging = None, False
            box.changed.notify_all()
        return self._report(arrived)

    def _merge(self, arrived: Arrived) -> None:
        message, consensus = arrived.message, arrived.kind is Kind.CONSENSUS
        stood_still = message.step == self.step if message is not None else self._at_target
        copies = consensus or arrived.base is None or stood_still
        self.replica.merge_(
            arrived.target,
            None if copies else arrived.base,
            with_state=message is not None or consensus,
            buffers_too=arrived.has_source,
        )
        self._at_target = copies
        if consensus:
            self.replica.set_counters(arrived.counters)
            with self._box.changed:
                self._box.agreed = arrived.id

    def _report(self, arrived: Arrived) -> RoundReport:
        report = RoundReport(
            id=arrived.id,
            kind=arrived.kind,
            share=arrived.share,
            num_present=arrived.num_present,
            staleness_steps=self.step - arrived.message.step if arrived.message is not None else 0,
            payload_bytes=arrived.target.numel() * arrived.target.element_size(),
            header_s=arrived.header_s,
            exchange_s=arrived.exchange_s,
            blocked_s=min(self._blocked_s, arrived.exchange_s),
            merge_s=self._merge_s,
            spread=arrived.spread,
        )
        self._blocked_s = self._merge_s = 0.0
        self._round_s = arrived.exchange_s
        self.summary.add(report)
        self.summary.failed_rounds = self._box.failed_rounds
        return report

    # ---- gates ----

    def rendezvous(self, gate: Gate, index: int = 0) -> Arrival:
        """Wait, serving rounds, until every rank stands at this gate and holds the same model.

        The model is the work-weighted mean of all replicas (or what the rule says of it). Two in a row change
        no bit: where no rank has moved since the last one, nothing is exchanged.
        """
        box, started = self._box, self._now()
        consensuses = self.summary.consensuses
        with box.changed:
            box.gate, box.index, box.opened = gate, index, False
            in_flight = box.message is not None and box.message.kind is Kind.ROUND
            box.changed.notify_all()
        self._server.ring()
        try:
            while True:
                if in_flight:
                    self._blocked_s = self._now() - started
                if self._take() is not None:
                    in_flight = False
                if gate in (Gate.EPOCH_END, Gate.TRAIN_END) and not box.synchronous:
                    self._pack()  # what is left over counts, even if no rendezvous comes for long
                with box.changed:
                    self._see()
                    if box.arrived is not None:
                        continue
                    if box.opened:
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
            self.moved_at_gate = self.summary.consensuses > consensuses
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

    def global_step(self) -> int:
        """Optimizer steps per replica so far: the mean over all replicas at the last header."""
        return int(self._box.mean_steps)

    @property
    def elapsed_s(self) -> float:
        """Seconds since `start`."""
        return self._now() - self._started_at

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

    # ---- waiting ----

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
            f"Rank {self.summary.rank}: the averaging thread failed in round {self._server.next_round} at step "
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

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Rule state and clocks; to be taken at a rendezvous."""
        return {
            "round": self._server.next_round,
            "rule": type(self.rule).__qualname__,
            "rule_state": self.rule.state_dict(self._server.rule_state),
            "step": self.step,
            "epoch": self.epoch,
            "synchronous": self._box.synchronous,
            "summary": self.summary.state_dict(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from `state_dict`; before `start`.

        Raises:
            ValueError: the state is another rule's.
        """
        mine = type(self.rule).__qualname__
        if saved["rule"] != mine:
            raise ValueError(
                f"`rule={self.rule!r}` cannot go on from a checkpoint that `{saved['rule']}` wrote: pass that rule."
            )
        self._server.next_round = int(saved["round"])
        self._server.rule_state = self.rule.load_state_dict(self._server.rule_state, saved["rule_state"])
        self.step, self.epoch = int(saved["step"]), int(saved["epoch"])
        self._box.steps = self._box.mean_steps = float(self.step)
        self._box.synchronous = bool(saved["synchronous"])
        for name, value in saved["summary"].items():
            if name not in ("rank", "world_size"):
                setattr(self.summary, name, value)

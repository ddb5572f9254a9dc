"""Averaging as a component of the engine: its part of the ranks' headers, and the rounds that move parameters.

A header is the row of numbers that each rank sends to all others before an exchange. `AveragingComponent` writes the
numbers about averaging into this rank's header, and plans rounds from the headers of all ranks. There are two types of
rounds: `AveragingRound` averages all messages, and `AnchorRound` initialises the rule's state anew after synchronous
steps. These classes run on the engine's thread.
"""

from __future__ import annotations

import functools
import logging
import math
import operator
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from lightning_async import ops
from lightning_async.algorithms.averaging import Round
from lightning_async.engine.averaging.rule_state import AveragerConfig, RoundTrends, RuleState
from lightning_async.engine.buckets import InFlightRound, Message, ModelRound, RoundType
from lightning_async.engine.compressed_mean import CompressedMean, mean_of
from lightning_async.engine.control_plane import ControlPlane
from lightning_async.engine.decision import ComponentPlan, EngineComponent, able_to_share
from lightning_async.engine.replica import Updates
from lightning_async.engine.shared_state import Header
from lightning_async.engine.work_ledger import Work, WorkLedger
from lightning_async.errors import CollectiveError

log = logging.getLogger(__name__)

ROUND = 1  # the priority of averaging rounds: the lowest


class AveragingPart(NamedTuple):
    """The numbers about averaging that one rank sends in its header. In the comments, "it" is that rank."""

    due: bool = False  # its schedule asked for the message; else it packed the message because of a sync point
    work: float = 0.0  # weight of its message: its work since replicas last agreed
    steps: float = 0.0  # optimizer steps in its message since its last round
    lr: float = 0.0  # its inner learning rate
    healthy: bool = True  # its snapshot and its optimizers' state are finite
    sound: bool = True  # the buffers of its snapshot are finite; ignored if those of no rank are
    fresh: bool = False  # it took synchronous steps since the rule's state was initialised, which must be done anew
    fragment: int = 0  # number of the fragment of the parameters in its message
    steps_apart: float = 0.0  # steps in its message since replicas last agreed
    loss: float = math.inf  # mean loss of its steps; infinite where it is unknown or not finite
    scalars: tuple[float, ...] = ()  # the rule's scalars
    changed: tuple[int, ...] = ()  # flags of the buffers in its message that have changed


@dataclass
class LocalMessage(Message):
    """A message for an averaging round, with a snapshot of one replica's parameters."""

    work: Work  # work since replicas last agreed
    steps: float  # steps since the last round; more than in ``work`` where a sync point came between
    due: bool  # the schedule asked for it; else it is dropped with the sync point at which it was made
    lr: float = 0.0  # the inner learning rate
    fragment: int = 0  # number of the fragment of the parameters
    updates: Updates = ((), ())  # the result of `Replica.updates` at the snapshot
    state_is_finite: Tensor | None = None  # whether the optimizers' state is finite, as a bool on its device
    loss: Tensor | None = None  # mean training loss of its steps, if it was computed
    scalars: tuple[float, ...] = ()  # the rule's scalars
    announced: bool = False  # a header has carried it: the bucket holds the rule's message, not the snapshot
    healthy: bool = True  # the snapshot and the optimizers' state are finite; else its weight is zero
    sound: bool = True  # its buffers are finite; ignored if those of no replica are
    changed: tuple[int, ...] = ()  # flags of its buffers that have changed, see `Replica.changed_buffers`


@dataclass(frozen=True)
class AveragingPlan(ComponentPlan):
    """The plan of an averaging round."""

    able: tuple[bool, ...] = ()  # by rank, whether others may take over what it holds
    source: int | None = None  # the rank whose buffers are broadcast: the first one present, if any
    fresh: bool = False  # some rank took synchronous steps since the rule's state began
    fragment: int = 0  # number of the fragment of the parameters in the messages
    changed: tuple[int, ...] = ()  # flags of the buffers that have changed on any rank: the round sends only these


@dataclass(kw_only=True)
class Merge(ModelRound):
    """The record of an averaging round, with all values that the training thread needs to merge it."""

    plan: AveragingPlan
    round: Round  # the facts that the rule sees
    fragments: tuple[int, ...]  # the fragments of the parameters to merge
    base: Tensor | None = None  # origin of the displacement; None: copy the target
    carried_residual: Tensor | None = None  # see `CompressedMean.carried_residual`
    per_tally: float = math.inf  # factor that makes the tally the squared distance of replicas per step
    loss_variance: float = math.inf  # variance of the messages' losses; infinite where unknown, as the line above


class AveragingComponent(EngineComponent):
    """A component of the engine that averages parameters.

    Its methods run on the engine's thread. The training thread may call `drop_left_over`, too.
    """

    priority = ROUND

    def __init__(self, control: ControlPlane, agreed: RuleState, ledger: WorkLedger, config: AveragerConfig) -> None:
        self._control = control
        self._agreed = agreed
        self._ledger = ledger
        self._buckets = control.buckets
        self._replica = control.buckets.replica
        self.rule = agreed.rule
        self.blank = AveragingPart(scalars=(0.0,) * self.rule.num_scalars, changed=self._replica.no_buffers)
        self.average = AveragingRound(control, agreed, ledger, config)
        self.start = AnchorRound(control, agreed, ledger, self.average)
        self._diverged = False

    def compose(self) -> AveragingPart:
        return self.blank._replace(fresh=self._ledger.fresh)

    def announce(self, part: AveragingPart, message: LocalMessage) -> AveragingPart:
        if not message.announced and not part.fresh:
            self._announce(message)
        return part._replace(
            due=message.due,
            work=message.work.weight(self._ledger.weighting) if message.healthy else 0.0,
            steps=message.steps if message.healthy else 0.0,
            lr=message.lr,
            healthy=message.healthy,
            sound=message.sound,
            fragment=message.fragment,
            steps_apart=message.work.steps,
            loss=_finite(message.loss),
            scalars=message.scalars or part.scalars,
            changed=message.changed or part.changed,
        )

    def _announce(self, message: LocalMessage) -> None:
        sent = self._buckets.sent
        message.announced = True
        message.healthy, message.sound = self._replica.judge_packed(sent, message.fragment)
        message.changed = self._replica.changed_buffers(sent, message.fragment)
        message.healthy = message.healthy and bool(message.state_is_finite)
        if message.healthy:  # else the rule's state would take up values that are not finite
            message.scalars = self._agreed.message_(sent, message.fragment)

    def is_due(self, parts: Sequence[AveragingPart]) -> bool:
        return any(p.due for p in parts)

    def plan(self, headers: Sequence[Header], parts: Sequence[AveragingPart]) -> AveragingPlan:
        """Plan the round that averages the messages that are finite.

        If some rank took synchronous steps since the rule's state was initialised, an `AnchorRound` comes first. If no
        message holds work or steps, the plan has no round type.
        """
        able = able_to_share(headers, parts)
        present = [rank for rank, ok in enumerate(able) if ok and headers[rank].ready == ROUND]
        work = [parts[rank].work if rank in present else 0.0 for rank in range(len(parts))]
        # Steps count even where there is no work, because replicas agreed meanwhile: the anchor lacks these steps.
        steps = [parts[rank].steps if rank in present else 0.0 for rank in range(len(parts))]
        if sum(work) <= 0.0 and not any(steps):
            return AveragingPlan(None)
        source = min(present, default=None)
        fresh = any(p.fresh for p in parts)
        if fresh:
            first = max(present, key=lambda rank: work[rank])
            weights = tuple(float(rank == first) for rank in range(len(work)))
        else:
            scalars = tuple(p.scalars for p in parts)
            weights = self.rule.weights(Round(0, self._control.transfer.rank, tuple(work), tuple(steps), scalars))
        kind = self.start if fresh else self.average
        words = zip(*(p.changed for p in parts), strict=True)
        changed = tuple(functools.reduce(operator.or_, flags) for flags in words)
        fragment = _fragment(parts, present)
        return AveragingPlan(kind, weights, tuple(able), source, fresh, fragment=fragment, changed=changed)

    def opened(self, here: bool) -> None:
        self.average.forget_debts()
        if here:
            self.drop_left_over()

    def on_consensus(self, target: Tensor, fresh: bool) -> None:
        """Follow a consensus, whose model is in the bucket ``target``; with ``fresh``, begin the rule's state anew."""
        if fresh or not self.rule.absent_follow:
            self._agreed.begin(target)
        self.average.forget_debts()

    def drop_left_over(self) -> None:
        """Drop this rank's message if it was packed because of a sync point only; a later message includes its work.

        The caller holds `SharedState.changed`.
        """
        message = self._buckets.message
        if isinstance(message, LocalMessage) and not message.due:
            self._buckets.message = None

    def drop(self) -> None:
        message = self._buckets.message
        self._buckets.message = None
        if isinstance(message, LocalMessage) and not message.healthy and not self._diverged:
            self._diverged = True
            log.error(
                "Rank %d: no replica is finite at step %d, so there is no model to take over: training has diverged. "
                "Lower the learning rate, clip gradients, or resume from the last checkpoint.",
                self._control.transfer.rank, message.step,
            )  # fmt: skip


def _finite(loss: Tensor | None) -> float:
    """Return the loss as a number; infinity if the loss is unknown (None) or not finite."""
    value = math.inf if loss is None else float(loss)
    return value if math.isfinite(value) else math.inf


def disagreement(weights: Sequence[float], parts: Sequence[AveragingPart]) -> tuple[float, float]:
    r"""Return the factor that turns a round's tally into the replicas' disagreement per step, and the losses' variance.

    The tally is the weighted mean squared distance of the messages from their mean. The factor is

    .. math:: \Big(\big(1 - \sum_i w_i^2\big)\, \bar h\Big)^{-1}

    :math:`w_i` are the messages' ``weights``, and :math:`\bar h` is the mean number of steps since replicas agreed.
    Division by :math:`1 - \sum_i w_i^2` turns the mean squared distance of replicas from their mean into half of the
    mean squared distance between two replicas, whatever the number of replicas. Each result is infinite if fewer than
    two replicas can be compared.

    >>> disagreement((0.5, 0.5), [AveragingPart(steps_apart=4.0, loss=1.0), AveragingPart(steps_apart=4.0, loss=3.0)])
    (0.5, 2.0)
    >>> disagreement((1.0, 0.0), [AveragingPart(steps_apart=4.0, loss=1.0), AveragingPart()])
    (inf, inf)
    """
    present = [part for weight, part in zip(weights, parts, strict=True) if weight > 0.0]
    steps = sum(part.steps_apart for part in present)
    losses = [part.loss for part in parts if math.isfinite(part.loss)]  # also of a message without weight
    several = len(present) > 1 and steps > 0.0
    pairs = 1.0 - sum(weight * weight for weight in weights)
    per_tally = len(present) / (pairs * steps) if several and pairs > 0.0 else math.inf
    return per_tally, statistics.variance(losses) if len(losses) > 1 else math.inf


def _fragment(parts: Sequence[AveragingPart], present: Sequence[int]) -> int:
    """Return the number of the fragment that all messages hold; raise CollectiveError if messages differ in it."""
    fragments = {parts[rank].fragment for rank in present}
    if len(fragments) != 1:
        raise CollectiveError(f"The ranks' messages carry different fragments: {[p.fragment for p in parts]}.")
    return fragments.pop()


class _Round(RoundType):
    def __init__(self, control: ControlPlane, agreed: RuleState, ledger: WorkLedger) -> None:
        self._buckets = control.buckets
        self._transfer = control.transfer
        self._replica = control.buckets.replica
        self._agreed = agreed
        self._ledger = ledger


class AveragingRound(_Round):
    """A round type that averages all messages; the rule turns the mean into the parameters to which replicas move."""

    def __init__(self, control: ControlPlane, agreed: RuleState, ledger: WorkLedger, config: AveragerConfig) -> None:
        super().__init__(control, agreed, ledger)
        self._config = config
        self.trends = RoundTrends(self._replica.num_fragments)
        self._exact = config.compression == "none" or agreed.rule.keeps_residual
        """Whether messages leave no compression error in the parameters; only then may a round's target be copied over
        parameters that have taken no step."""
        self._compressed: list[CompressedMean] = []
        """The compressed mean of each fragment; empty without compression."""
        self.follow_layout()

    def follow_layout(self) -> None:
        compression = self._config.compression
        transfer = self._transfer
        replica = self._replica
        if compression != "none":
            self._compressed = [
                mean_of(transfer.large, transfer.result, compression, numel, transfer.part_bytes, replica.device)
                for numel in (replica.layout_of(fragment).numel for fragment in range(replica.num_fragments))
            ]

    def begin(self, plan: AveragingPlan, id: int, parts: Sequence[AveragingPart]) -> Merge:
        message = self._buckets.message
        mine = message if isinstance(message, LocalMessage) else None
        # An absent replica keeps the last target in `received`, from which it moves.
        target = self._buckets.landing() if mine is None else self._buckets.received
        rank = self._transfer.rank
        replica = self._replica
        facts = Round(
            id=id,
            rank=rank,
            work=tuple(p.work * able for p, able in zip(parts, plan.able, strict=True)),
            steps=tuple(p.steps * able for p, able in zip(parts, plan.able, strict=True)),
            scalars=tuple(p.scalars for p in parts),
            lr=tuple(p.lr for p in parts),
            fragment=plan.fragment,
            past=self._agreed.num_rounds // replica.num_fragments,
        )
        per_tally, loss_variance = disagreement(plan.weights, parts)
        return Merge(
            id=id, kind=self, message=mine, target=target, plan=plan, round=facts,
            share=plan.weights[rank], healed=not plan.able[rank],
            message_bytes=replica.of_round(target, plan.fragment).nbytes, fragments=(plan.fragment,),
            per_tally=per_tally, loss_variance=loss_variance,
        )  # fmt: skip

    def move(self, exchange: Merge) -> None:
        replica = self._replica
        target = exchange.target
        sent = self._buckets.sent
        share = exchange.share
        if any(each.world_size != self._transfer.large.world_size for each in self._compressed):
            self.follow_layout()  # the number of ranks has changed
        plan = exchange.plan
        fragment = plan.fragment
        compressed = self._compressed[fragment] if self._compressed else None
        mine, part = (replica.of_rule(bucket, fragment) for bucket in (sent, target))
        if exchange.message is not None:
            is_source = exchange.round.rank == plan.source
            replica.scale_(target, sent, {fragment: share}, is_source, of_rule=compressed is None)
        else:
            if replica.num_fragments > 1:
                target.copy_(self._buckets.received)  # keeps the last targets of the other fragments
            replica.of_round(target, fragment).zero_()
        exchange.message_bytes -= replica.sum_round_(
            target, sent, fragment, plan.changed, self._transfer.sum_, of_rule=compressed is None
        )
        if compressed is not None:
            exchange.carried_residual = compressed.move_(part, mine if share > 0.0 else None, plan.weights)
            exchange.message_bytes += compressed.message_bytes - part.nbytes
        if share > 0.0:
            exchange.tally = share * ops.sq_distance(mine, part)

    def commit(self, exchange: Merge) -> None:
        takes_part = exchange.message is not None and not exchange.healed
        self._agreed.merge_(self._buckets.sent if takes_part else None, exchange.target, exchange.round)
        if exchange.carried_residual is not None:
            self._compressed[exchange.plan.fragment].carried_residual = exchange.carried_residual

    def hand_over(self, exchange: Merge) -> None:
        message = exchange.message
        follows = self._agreed.rule.absent_follow
        # A rank that lost the last answer has its own part of the tally only. That is no measure: among the first
        # rounds it would give this rank another period for good.
        spread = exchange.tally * exchange.per_tally if exchange.tally_is_whole else math.inf
        self.trends.compare(spread, exchange.loss_variance)
        if isinstance(message, LocalMessage):
            self._ledger.round(message.work, message.steps, message.fragment)
            exchange.base = None if exchange.healed else self._buckets.sent
        else:
            self._ledger.round(None)
            if not follows:
                self._buckets.superseded.append(exchange)
                return  # the rule lets an absent replica stay where it is
            exchange.base = self._moved_from(exchange)
        self._buckets.hand_over(exchange)

    def _moved_from(self, exchange: Merge) -> Tensor | None:
        """Return the bucket from which this replica moves to the target of a round in which it had no message.

        Normally it holds the last target. If an earlier result is not merged yet, the replica moves for both results
        at once: then it is the bucket from which the replica was to move to the earlier result, and the fragments of
        that result are added to ``exchange.fragments``. Return None if this replica is to copy the target.
        ``exchange.target`` becomes the last target.
        """
        buckets = self._buckets
        last = buckets.turn(exchange.target)
        pending = buckets.arrived
        if self._ledger.synchronous:  # there is no last target, and the others have all of its work
            return None
        if pending is None:
            return last
        if not isinstance(pending, Merge):  # the model of a consensus
            exchange.fragments = tuple(range(self._replica.num_fragments))
            return None
        if pending.base is not None and (others := set(exchange.fragments).difference(pending.fragments)):
            for fragment in others:
                self._replica.of_rule(pending.base, fragment).copy_(self._replica.of_rule(last, fragment))
            buckets.to_training.give()
            exchange.fragments = (*pending.fragments, *others)
        else:
            exchange.fragments = pending.fragments
        return pending.base

    def merge(self, exchange: Merge, step: int) -> None:
        replica = self._replica
        buckets = self._buckets
        message = exchange.message
        base = exchange.base
        target = exchange.target
        takes_all = base is None
        buckets.to_training.take(*(bucket for bucket in (target, base) if bucket is not None))
        if message is not None:  # the snapshot holds one fragment: it tells nothing of others
            stood_still = message.step == step and self._exact and len(exchange.fragments) == 1
        else:
            stood_still = buckets.at_target
        rest = message if isinstance(message, LocalMessage) and message.fragment == replica.last_fragment else None
        # Buffers change without a step, too (accumulated batches), so their own counters tell how far they have moved.
        if rest is not None and base is not None:
            replica.merge_late_(target, base, rest.updates, exchange.plan.source is not None)
        if stood_still:
            base = None
        if base is not None and self._agreed.rule.mixes and (message is None or message.step != step):
            target = self._mix(exchange, base)
            base = None
        replica.merge_(
            target,
            base,
            with_state=message is not None and takes_all,
            buffers_too=exchange.plan.source is not None and rest is not None,
            still=stood_still and not takes_all,
            of_round=True,
            fragments=None if takes_all else exchange.fragments,
        )
        is_whole = replica.num_fragments == 1 or buckets.at_target
        buckets.at_target = takes_all or (stood_still and is_whole)

    def _mix(self, exchange: Merge, base: Tensor) -> Tensor:
        """Return a bucket with the target, plus the part of this replica's progress since ``base`` that the rule keeps.

        This may also change those fields of the rule's state that differ between replicas.
        """
        replica = self._replica
        mixed = exchange.target.clone()
        replica.pack_parameters_(mixed, exchange.fragments)
        for fragment in exchange.fragments:
            live, snapshot, target = (replica.of_rule(each, fragment) for each in (mixed, base, exchange.target))
            self._agreed.mix_(live, snapshot, target, exchange.round._replace(fragment=fragment))
        return mixed

    def residuals(self) -> dict[str, Any]:
        """Return the compression errors that this rank keeps for the part of each mean that it encodes.

        The result has one tensor per fragment (``parts``), and this rank's number and the world size (``place``), which
        determine this rank's part. The tensors are no copies.
        """
        place = [self._transfer.large.rank, self._transfer.large.world_size]
        return {"place": place, "parts": [compressed.carried_residual for compressed in self._compressed]}

    def load_residuals(self, saved: Mapping[str, Any]) -> None:
        """Load ``saved``, a result of `residuals`; ignore ``saved`` if its rank, world size or sizes differ."""
        mine, theirs = (
            (list(each["place"]), [part.shape for part in each["parts"]]) for each in (self.residuals(), saved)
        )
        if mine == theirs:
            for compressed, part in zip(self._compressed, saved["parts"], strict=True):
                compressed.carried_residual = part.to(self._replica.device, copy=True)

    def forget_debts(self) -> None:
        for compressed in self._compressed:
            compressed.carried_residual.zero_()


class AnchorRound(_Round):
    """A round type that initialises the rule's state anew, between synchronous steps and the next averaging round.

    The rank with the most work broadcasts the parameters that it had at the end of its synchronous steps. All ranks
    initialise the rule's state from these parameters.
    """

    takes_marks = False

    def __init__(self, control: ControlPlane, agreed: RuleState, ledger: WorkLedger, average: AveragingRound) -> None:
        super().__init__(control, agreed, ledger)
        self._average = average
        self._source = 0

    def begin(self, plan: AveragingPlan, id: int, parts: Sequence[AveragingPart]) -> InFlightRound:
        self._source = plan.weights.index(1.0)
        return InFlightRound(id, self, None, self._buckets.received)

    def move(self, exchange: InFlightRound) -> None:
        self._transfer.broadcast_(self._replica.of_rule(exchange.target), self._source)

    def commit(self, exchange: InFlightRound) -> None:
        self._agreed.begin(exchange.target)
        self._average.forget_debts()

    def hand_over(self, exchange: InFlightRound) -> None:
        """Record that the rule's state is initialised.

        The training thread gets no result. The ranks' messages remain, and an averaging round of them follows.
        """
        self._ledger.fresh = False

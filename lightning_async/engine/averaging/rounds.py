"""Averaging as a component of the engine: its part of the ranks' headers, and the rounds that move parameters.

A header is the row of numbers that each rank sends to all others before an exchange. `AveragingComponent` writes the
numbers about averaging into this rank's header, and plans rounds from the headers of all ranks. Three round types move
parameters. `AveragingRound` averages all messages. `ConsensusRound` makes one model of all replicas at a sync point.
`AnchorRound` initialises the rule's state anew after synchronous steps. These classes run on the engine's thread.

`CheckpointMarkers` is for checkpoints that ranks save together without waiting for each other: its methods, for the
training thread, ask for a round to be marked, and return this rank's copy of the state after that round.
"""

from __future__ import annotations

import functools
import logging
import math
import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_async import ops
from lightning_async.algorithms.averaging import Round
from lightning_async.engine.averaging.rule_state import AveragerConfig, RuleState, Work, WorkLedger
from lightning_async.engine.buckets import InFlightRound, Message, RoundType
from lightning_async.engine.compressed_mean import CompressedMean, mean_of
from lightning_async.engine.control_plane import ControlPlane
from lightning_async.engine.decision import ComponentPlan, EngineComponent
from lightning_async.engine.fingerprint import digests
from lightning_async.engine.replica import Updates, tensors_of
from lightning_async.engine.shared_state import Header, Mark, SyncPointKind, Vote
from lightning_async.errors import AsyncTrainingError, CollectiveError

log = logging.getLogger(__name__)

ROUND = 1  # the priority of averaging rounds: the lowest
NOT_COMPARED = -1  # in place of a digest: this rank has not computed it yet
UNLIKE = -2  # in place of a digest: this replica holds a model of its own, equal to no other


class AveragingPart(NamedTuple):
    """The numbers about averaging that one rank sends in its header. In the comments, "it" is that rank."""

    due: bool = False  # its schedule asked for the message; else it packed the message because of a sync point
    work: float = 0.0  # weight of its message: its work since replicas last agreed
    steps: float = 0.0  # optimizer steps in its message since its last round
    unreported: tuple[float, ...] = (0.0,)  # by fragment, its weight in a consensus: work since replicas last agreed
    lr: float = 0.0  # its inner learning rate
    healthy: bool = True  # its parameters and its optimizers' state are finite
    sound: bool = True  # its buffers and frozen parameters are finite; ignored if those of no rank are
    fresh: bool = False  # it took synchronous steps since the rule's state was initialised, which must be done anew
    digest: int = NOT_COMPARED  # of the parameters to which the rule applies; compared at sync points
    digest_rest: int = NOT_COMPARED  # of all other tensors that replicas share
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
    """The plan of an averaging round, or of a consensus (one model of all replicas, at a sync point)."""

    able: tuple[bool, ...] = ()  # by rank, whether others may take over what it holds
    source: int | None = None  # the rank whose buffers are broadcast: the first one present, if any
    fresh: bool = False  # some rank took synchronous steps since the rule's state began
    alike: bool = False  # of a consensus: parameters are equal on all ranks, and only other tensors differ
    fragment: int = 0  # number of the fragment of the parameters in the messages
    shares: tuple[tuple[float, ...], ...] = ()  # of a consensus: the `weights` for each fragment
    changed: tuple[int, ...] = ()  # flags of the buffers that have changed on any rank: the round sends only these


@dataclass(kw_only=True)
class Merge(InFlightRound):
    """The record of an averaging round or a consensus, with all values that the training thread needs to merge it."""

    plan: AveragingPlan  # the plan that follows from all headers
    round: Round  # the facts that the rule sees
    share: float  # this rank's weight in the mean
    able: bool  # others may take over what this rank holds
    message_bytes: int  # size of this rank's message on the wire
    is_consensus: bool = False  # whether it is a consensus, after which all replicas are one model
    fragments: tuple[int, ...] = (0,)  # the fragments of the parameters to merge
    base: Tensor | None = None  # origin of the displacement; None: copy the target
    apart: dict[str, Tensor] = field(default_factory=dict)  # of a consensus: tensors beside the bucket, by name
    carried_residual: Tensor | None = None  # see `CompressedMean.carried_residual`
    healed: bool = False  # this replica was not healthy, and takes over the others' model
    per_tally: float = math.inf  # factor that makes the tally the squared distance of replicas per step
    loss_variance: float = math.inf  # variance of the messages' losses; infinite where unknown, as the line above


class UnmergedRound(NamedTuple):
    """A committed round that this replica did not merge on its own.

    Either this replica was absent and the rule lets it keep its parameters, or it merged the round's result together
    with that of a later round.
    """

    share: float  # this rank's weight in the mean
    message_bytes: int
    exchange_s: float


class AveragingComponent(EngineComponent):
    """A component of the engine that averages parameters.

    Its methods run on the engine's thread. The training thread may call `drop_left_over` and `keeps_own_model`, too.
    """

    def __init__(self, control: ControlPlane, agreed: RuleState, ledger: WorkLedger, config: AveragerConfig) -> None:
        self._control = control
        self._agreed = agreed
        self._ledger = ledger
        self._config = config
        self._buckets = control.buckets
        self._replica = control.buckets.replica
        self.rule = agreed.rule
        self.blank = AveragingPart(
            unreported=(0.0,) * self._replica.num_fragments, scalars=(0.0,) * self.rule.num_scalars,
            changed=self._replica.no_buffers,
        )  # fmt: skip
        self.average = AveragingRound(control, agreed, ledger, config)
        self.consensus = ConsensusRound(control, agreed, ledger, self.average)
        self.start = AnchorRound(control, agreed, ledger, self.average)
        self.showing = False  # the module shows the model of a sync point, not this replica's own
        self._diverged = False

    def is_indispensable(self) -> bool:
        return self._ledger.synchronous or self._ledger.fresh

    def compose(self) -> AveragingPart:
        ledger = self._ledger
        weighting = self._config.weighting
        left = self._config.weight_of_reported(self.rule)
        pairs = zip(ledger.work, ledger.reported, strict=True)
        weights = [work.weight(weighting) + left * reported.weight(weighting) for work, reported in pairs]
        return self.blank._replace(unreported=tuple(weights), fresh=ledger.fresh)

    def complete(self, part: AveragingPart, message: Message | None, compare: bool) -> AveragingPart:
        if isinstance(message, LocalMessage):
            if not message.announced and not part.fresh:
                self._announce(message)
            part = part._replace(
                due=message.due,
                work=message.work.weight(self._config.weighting) if message.healthy else 0.0,
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
        return self._compared(part) if compare else part

    def _announce(self, message: LocalMessage) -> None:
        sent = self._buckets.sent
        message.announced = True
        message.healthy, message.sound = self._replica.judge_packed(sent, message.fragment)
        message.changed = self._replica.changed_buffers(sent, message.fragment)
        message.healthy = message.healthy and bool(message.state_is_finite)
        if message.healthy:  # else the rule's state would take up values that are not finite
            message.scalars = self._agreed.message_(sent, message.fragment)

    def _compared(self, part: AveragingPart) -> AveragingPart:
        """Return ``part`` with fingerprints of this replica's tensors, by which ranks compare their models."""
        whole, rest = self._replica.digests()
        if self.keeps_own_model() and not self.showing:
            whole = UNLIKE  # this is the replica's own model, in place of the one that the sync point shows
        healthy, sound = self._replica.judge()
        return part._replace(digest=whole, digest_rest=rest, healthy=healthy, sound=sound)

    def keeps_own_model(self) -> bool:
        """Return whether each replica keeps a model of its own through sync points; False during synchronous steps."""
        return self.rule.restores_local and not self._ledger.synchronous

    def weigh_step(self, samples: float) -> float:
        """Return the weight of this replica's gradients in the mean of a synchronous step.

        It is the weight that the work of a local step on ``samples`` samples has in a round; 0 without samples.
        """
        return Work(samples, 1.0).weight(self._config.weighting) if samples > 0.0 else 0.0

    def is_due(self, parts: Sequence[AveragingPart]) -> bool:
        return any(p.due for p in parts)

    def plan(self, priority: int, headers: Sequence[Header], parts: Sequence[AveragingPart]) -> AveragingPlan | None:
        """Plan the round of this ``priority``; return None if it is not the priority of averaging rounds.

        The round averages the messages that are finite. If some rank took synchronous steps since the rule's state was
        initialised, an `AnchorRound` comes first. If no message holds work or steps, the plan has no round type.
        """
        if priority != ROUND:
            return None
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

    def settle(self, headers: Sequence[Header], parts: Sequence[AveragingPart]) -> tuple[bool, AveragingPlan | None]:
        """Return whether the sync point may open, and the plan of a consensus that must come first.

        The sync point may open if all ranks hold the same bits; otherwise the consensus makes one model of all
        replicas. The plan is None if none is needed, or if a rank's header has no fingerprints of its tensors yet.
        """
        held = {(p.digest, p.digest_rest) for p in parts}
        if any(p.digest == NOT_COMPARED for p in parts):
            return False, None
        unlike = any(p.digest == UNLIKE for p in parts)
        if len(held) == 1 and not unlike:
            return True, None
        able = able_to_share(headers, parts)
        shares = tuple(_shares(work, able) for work in zip(*(p.unreported for p in parts), strict=True))
        alike = len({p.digest for p in parts}) == 1 and not unlike
        fresh = any(p.fresh for p in parts)
        source = able.index(True)
        return False, AveragingPlan(self.consensus, shares[-1], tuple(able), source, fresh, alike, shares=shares)

    def opened(self, here: bool) -> None:
        if not self.rule.restores_local:
            self._ledger.agree()
            self.average.forget_debts()
            self._replica.note_agreed()
            if not self._buckets.at_target:  # replicas are equal without an exchange
                self._replica.pack_(self._buckets.received)
                self._buckets.at_target = True
        if here:
            self.drop_left_over()

    def drop_left_over(self) -> None:
        """Drop this rank's message if it was packed because of a sync point only; a later message includes its work.

        The caller holds `SharedState.changed`.
        """
        message = self._buckets.message
        if isinstance(message, LocalMessage) and not message.due:
            self.average.abandon()

    def drop(self) -> None:
        message = self._buckets.message
        self.average.abandon()
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


def _shares(work: Sequence[float], able: Sequence[bool]) -> tuple[float, ...]:
    """Return each rank's share in a consensus, in proportion to its ``work``; 0 for a rank that is not ``able``.

    If no able rank has done any work, all able ranks get equal shares.
    """
    counted = [w if ok else 0.0 for w, ok in zip(work, able, strict=True)]
    if (total := sum(counted)) <= 0.0:
        counted = [float(ok) for ok in able]
        total = sum(counted)
    return tuple(w / total for w in counted)


def _fragment(parts: Sequence[AveragingPart], present: Sequence[int]) -> int:
    """Return the number of the fragment that all messages hold; raise CollectiveError if messages differ in it."""
    fragments = {parts[rank].fragment for rank in present}
    if len(fragments) != 1:
        raise CollectiveError(f"The ranks' messages carry different fragments: {[p.fragment for p in parts]}.")
    return fragments.pop()


def able_to_share(headers: Sequence[Header], parts: Sequence[AveragingPart]) -> list[bool]:
    """Return for each rank whether other ranks may take over its tensors.

    A rank qualifies if all its tensors are finite. If no rank does, buffers and frozen parameters are ignored. If still
    no rank qualifies, and all ranks wait at sync points, then all ranks qualify.
    """
    some_sound = any(p.sound and p.healthy for p in parts)
    able = [p.healthy and (p.sound or not some_sound) for p in parts]
    at_sync_points = all(h.sync_point is not SyncPointKind.NONE for h in headers)
    return able if any(able) or not at_sync_points else [True] * len(parts)


class _Round(RoundType):
    def __init__(self, control: ControlPlane, agreed: RuleState, ledger: WorkLedger) -> None:
        self._buckets = control.buckets
        self._transfer = control.transfer
        self._replica = control.buckets.replica
        self._shared_state = control.shared_state
        self._agreed = agreed
        self._ledger = ledger


class AveragingRound(_Round):
    """A round type that averages all messages; the rule turns the mean into the parameters to which replicas move."""

    def __init__(self, control: ControlPlane, agreed: RuleState, ledger: WorkLedger, config: AveragerConfig) -> None:
        super().__init__(control, agreed, ledger)
        self._config = config
        self._compressed: list[CompressedMean] = []
        """The compressed mean of each fragment; empty without compression."""
        self.unmerged: list[UnmergedRound] = []
        """The rounds still to be counted by the training thread; the lock `SharedState.changed` protects the list."""
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
        exchange = self.record(plan, id, parts)
        exchange.message = mine
        # An absent replica keeps the last target in `received`, from which it moves.
        exchange.target = self._buckets.landing() if mine is None else self._buckets.received
        return exchange

    def record(self, plan: AveragingPlan, id: int, parts: Sequence[AveragingPart]) -> Merge:
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
            id=id, kind=self, message=None, target=self._buckets.received, plan=plan, round=facts,
            share=plan.weights[rank], able=plan.able[rank], healed=not plan.able[rank],
            message_bytes=replica.of_round(self._buckets.received, plan.fragment).nbytes, fragments=(plan.fragment,),
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
        takes_part = exchange.message is not None and exchange.able
        self._agreed.merge_(self._buckets.sent if takes_part else None, exchange.target, exchange.round)
        if exchange.carried_residual is not None:
            self._compressed[exchange.plan.fragment].carried_residual = exchange.carried_residual

    def hand_over(self, exchange: Merge) -> None:
        message = exchange.message
        follows = self._agreed.rule.absent_follow
        # A rank that lost the last answer has its own part of the tally only. That is no measure: among the first
        # rounds it would give this rank another period for good.
        spread = exchange.tally * exchange.per_tally if exchange.tally_is_whole else math.inf
        self._ledger.compare(spread, exchange.loss_variance)
        if isinstance(message, LocalMessage):
            self._ledger.round(message.work, message.steps, message.fragment)
            exchange.base = self._buckets.sent if exchange.able else None
        else:
            self._ledger.round(None)
            if not follows:
                self._count_unmerged(exchange)
                return  # the rule lets an absent replica stay where it is
            exchange.base = self._moved_from(exchange)
        self.deliver(exchange)

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
        if pending.base is not None and (others := set(exchange.fragments).difference(pending.fragments)):
            for fragment in others:
                self._replica.of_rule(pending.base, fragment).copy_(self._replica.of_rule(last, fragment))
            buckets.to_training.give()
            exchange.fragments = (*pending.fragments, *others)
        else:
            exchange.fragments = pending.fragments
        return pending.base

    def deliver(self, exchange: Merge) -> None:
        """Pass the result to the training thread, combined with an earlier result that is not merged yet.

        The caller holds `SharedState.changed`.
        """
        pending = self._buckets.arrived
        self._buckets.hand_over(exchange)
        if pending is not None:
            exchange.message = exchange.message or pending.message
            exchange.healed = exchange.healed or pending.healed
            if not pending.is_consensus:
                self._count_unmerged(pending)

    def _count_unmerged(self, exchange: Merge) -> None:
        self.unmerged.append(UnmergedRound(exchange.share, exchange.message_bytes, exchange.exchange_s))

    def abandon(self) -> None:
        """Drop this rank's message; a later message includes its work. The caller holds `SharedState.changed`."""
        self._buckets.message = None

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


class ConsensusRound(_Round):
    """A round type that makes one model of all replicas at a sync point.

    It is no step of the averaging rule: the rule's state does not change, except that it is initialised anew after
    synchronous steps.
    """

    def __init__(self, control: ControlPlane, agreed: RuleState, ledger: WorkLedger, average: AveragingRound) -> None:
        super().__init__(control, agreed, ledger)
        self._average = average

    def begin(self, plan: AveragingPlan, id: int, parts: Sequence[AveragingPart]) -> Merge:
        """Drop this rank's message, pack all tensors into the bucket `sent`, and return the record of the consensus."""
        with self._shared_state.changed:
            self._average.abandon()
        self._replica.pack_(self._buckets.sent)
        exchange = self._average.record(plan, id, parts)
        exchange.kind = self
        exchange.is_consensus = True
        exchange.message_bytes = 4 * self._replica.numel
        exchange.fragments = tuple(range(self._replica.num_fragments))
        return exchange

    def move(self, exchange: Merge) -> None:
        replica = self._replica
        target = exchange.target
        sent = self._buckets.sent
        plan = exchange.plan
        rank = exchange.round.rank
        shares = {fragment: weights[rank] for fragment, weights in enumerate(plan.shares)}
        shows_state = self._agreed.rule.restores_local and not plan.fresh
        replica.scale_(target, sent, shares, rank == plan.source, of_rule=not (plan.alike or shows_state))
        if plan.alike:
            self._transfer.sum_(replica.beyond_rule(target))
            replica.of_rule(target).copy_(replica.of_rule(sent))
            exchange.message_bytes -= 4 * replica.layout.numel
        elif shows_state and plan.source is not None:
            # Each rank could compute this model, but different processors may round differently: all take one rank's.
            self._transfer.sum_(replica.beyond_rule(target))
            with self._shared_state.committing:
                self._agreed.agree_(target)
            self._transfer.broadcast_(replica.of_rule(target), plan.source)
        else:
            self._transfer.sum_(target)
        self._move_apart(exchange)

    def _move_apart(self, exchange: Merge) -> None:
        apart = self._replica.tensors.apart
        if not apart:
            return
        table = self._transfer.gather(torch.tensor(digests(apart.values())))
        unlike = (table != table[0]).any(dim=0).tolist()
        for (name, tensor), differs in zip(apart.items(), unlike, strict=True):
            if differs:
                exchange.apart[name] = self._one_of(name, tensor, exchange.share)
                exchange.message_bytes += tensor.nbytes
            elif tensor.dtype is torch.float64:  # the fp32 bucket has cut its digits
                exchange.apart[name] = tensor.detach().clone()

    def _one_of(self, name: str, tensor: Tensor, share: float) -> Tensor:
        """Return the tensor ``name`` with the same values on all ranks. All ranks call this together.

        Integers and bools become the maximum over all ranks. Other numbers become the mean, in which ``share`` is this
        rank's weight. Raises AsyncTrainingError for 8-bit floating numbers.
        """
        if not tensor.is_floating_point():
            flat = tensor.to("cpu", torch.int64, copy=True).reshape(-1)
            self._transfer.largest_(flat)
            return flat.view(tensor.shape)
        if tensor.element_size() < 2:
            raise AsyncTrainingError(
                f"Rank {self._transfer.rank}: the frozen parameter '{name}' ({tensor.dtype}) has changed on some ranks "
                "only, and 8-bit floating numbers cannot be averaged. Keep it as it is, or as another type."
            )
        wide = torch.float64 if tensor.dtype is torch.float64 else torch.float32
        flat = tensor.detach().to(self._replica.device, wide, copy=True).reshape(-1)
        flat = flat.zero_() if share == 0.0 else flat.mul_(share)
        self._transfer.sum_(flat)
        return flat.view(tensor.shape)

    def commit(self, exchange: Merge) -> None:
        if not self._agreed.rule.restores_local:  # else `move` has made the model already
            self._agreed.agree_(exchange.target)
        if exchange.plan.fresh:
            self._agreed.begin(exchange.target)
        self._average.forget_debts()

    def hand_over(self, exchange: Merge) -> None:
        """Pass the model to the training thread, and update the counts of this replica's work.

        The work becomes zero, because the model includes the work of all replicas. Only if the rule lets replicas keep
        their own models, the work stays as it is.
        """
        self._ledger.begin()
        if not self._agreed.rule.restores_local:
            self._ledger.agree()
        self._average.deliver(exchange)


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


class MarkedRound(NamedTuple):
    """A marked round, with this rank's copy of the state after it; the ranks save a checkpoint of that state."""

    mark: Mark  # the checkpoint and its members
    share: dict[str, Any] | None  # the result of `RuleState.share` after the round; None after a synchronous step


class CheckpointMarkers:
    """The marks by which asynchronous replicas save one checkpoint together, without waiting for each other.

    A rank whose checkpoint is due calls `ask`; then all ranks mark the next round. When that round commits, the
    engine's thread copies this rank's share of the model and of the rule's state. The training thread gets this copy
    from `take`, and saves it. If another exchange commits first, the copy is lost, and `lost` returns the mark. All
    public methods are for the training thread.
    """

    def __init__(self, control: ControlPlane, agreed: RuleState, ledger: WorkLedger, average: AveragingRound) -> None:
        self._box = control.shared_state
        self._control = control
        self._agreed = agreed
        self._average = average
        self._ledger = ledger
        self._name = control.membership.generation.name
        self.settle: Callable[[], None] = lambda: None
        """A function that saves this rank's part of a marked round; called before this replica changes again."""
        control.on_mark(self._copy)

    def ask(self) -> None:
        """Ask all ranks to mark the next round; the request travels with the next header, and does not cause one."""
        with self._box.changed:
            self._box.asked |= Vote.SAVE

    def begin(self, saved: int) -> None:
        """Set the number of the newest checkpoint that this rank knows of, unless it knows of a newer one.

        Call this before the control plane starts, or at a sync point.
        """
        with self._box.changed:
            self._box.saved = max(self._box.saved, saved)

    def replica(self) -> dict[str, Any]:
        """Return this replica's own state of averaging for a checkpoint: its work, its residuals, and similar values.

        The result does not include the rule's state and the module's tensors.
        """
        with self._box.changed:
            buckets = self._control.buckets
            return {
                "work": self._ledger.work_dict(),
                "reported": self._ledger.reported_dict(),
                "at_target": buckets.at_target,
                "reference": buckets.replica.reference,
                "remainders": buckets.replica.remainders,
                "residuals": self._average.residuals(),
            }

    def part(self, replica: Mapping[str, Any], tensors: Mapping[str, Tensor], module: nn.Module) -> None:
        """Load this replica's own part of a checkpoint, after all replicas have loaded the rule's state.

        Args:
            replica: Result of the method `replica`.
            tensors: This replica's own tensors, by name.
            module: Module into which the tensors are copied.
        """
        buckets = self._control.buckets
        with buckets.alone(self._control.see), torch.no_grad():
            for name, value in tensors_of(module).items():
                if name in tensors:
                    value.copy_(tensors[name])
            if buckets.replica.reference.shape == replica["reference"].shape:  # buffers may be kept now, or not
                buckets.replica.reference.copy_(replica["reference"])
            remainders = replica.get("remainders", {})
            for name in buckets.replica.remainders.keys() & remainders.keys():
                buckets.replica.remainders[name].copy_(remainders[name])
            if replica["at_target"]:
                buckets.replica.pack_(buckets.received)
        with self._box.changed:
            if "residuals" in replica:  # older checkpoints lack them
                self._average.load_residuals(replica["residuals"])
            self._ledger.load_work(replica["work"], replica.get("reported"))
            buckets.at_target = replica["at_target"]

    @property
    def saved(self) -> int:
        return self._box.saved

    @property
    def due(self) -> bool:
        with self._box.changed:
            marked = self._box.marked
        return marked is not None and self._name in marked.mark.members

    def take(self) -> MarkedRound | None:
        """Return the marked round whose checkpoint this rank must save now; each marked round is returned once.

        Return None if there is none, if this rank has yet to merge a result, or if this rank is not among the
        checkpoint's members.
        """
        with self._box.changed:
            if self._control.buckets.arrived is not None:
                return None
            marked = self._box.marked
            self._box.marked = None
        return marked if marked is not None and self._name in marked.mark.members else None

    def lost(self, all: bool = False) -> list[Mark]:
        """Return the marks of checkpoints for which this rank's part is lost; each mark is returned once.

        A part is lost if the next exchange has committed before `take` returned the marked round. With ``all``, the
        marked round that `take` could still return is dropped, and its mark is returned, too.
        """
        with self._box.changed:
            lost = self._box.lost
            self._box.lost = []
            if all and self._box.marked is not None:
                lost = [*lost, self._box.marked]
                self._box.marked = None
        return [marked.mark for marked in lost if self._name in marked.mark.members]

    def _copy(self, exchange: InFlightRound) -> MarkedRound:
        mark = exchange.mark
        share = None
        assert mark is not None
        if isinstance(exchange, Merge) and self._name in mark.members:
            share = self._agreed.share(exchange.target, mark.members.index(self._name), len(mark.members))
        if not isinstance(exchange, Merge):  # gradients: the checkpoint holds the step that follows them
            mark = mark._replace(step=mark.step + 1)
        return MarkedRound(mark, share)

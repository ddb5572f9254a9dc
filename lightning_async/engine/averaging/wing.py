"""Averaging as the control plane sees it: what a rank says of it in headers, and what all headers together ask for."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lightning_async.engine.averaging.agreed import Agreed, Ledger, Work
from lightning_async.engine.averaging.average import Average
from lightning_async.engine.averaging.config import REST, AveragerConfig
from lightning_async.engine.averaging.consensus import Consensus
from lightning_async.engine.averaging.records import NOT_COMPARED, ROUND, UNLIKE, AveragingPlan, LocalMessage, Part
from lightning_async.engine.averaging.start import Start
from lightning_async.engine.buckets import Message
from lightning_async.engine.control import ControlPlane
from lightning_async.engine.header import Gate, Header
from lightning_async.errors import CollectiveError
from lightning_async.rules.averaging.protocol import Round

__all__ = ["AveragingWing", "able_to_share"]

log = logging.getLogger(__name__)


class AveragingWing:
    """See `Wing`.

    Args:
        control: the control plane.
        agreed: the rule and its state.
        ledger: this replica's work.
        config: weights.
    """

    def __init__(self, control: ControlPlane, agreed: Agreed, ledger: Ledger, config: AveragerConfig) -> None:
        self._control, self._agreed, self._ledger, self._config = control, agreed, ledger, config
        self._buckets, self._replica = control.buckets, control.buckets.replica
        self.rule = agreed.rule
        self.blank = Part(scalars=(0.0,) * self.rule.num_scalars)
        self.average = Average(control, agreed, ledger, config)
        self.consensus = Consensus(control, agreed, ledger, self.average)
        self.start = Start(control, agreed, ledger, self.average)
        self.showing = False
        """The parameters only show the model of a rendezvous, and are not this replica's own."""
        self._diverged = False

    # ---- what this rank says ----

    def is_indispensable(self) -> bool:
        return self._ledger.synchronous or self._ledger.fresh

    def compose(self) -> Part:
        ledger, weighting = self._ledger, self._config.weighting
        weight = ledger.work.weight(weighting)
        if self._config.compression != "none":
            weight += REST * ledger.reported.weight(weighting)
        return self.blank._replace(unreported=weight, fresh=ledger.fresh)

    def complete(self, part: Part, message: Message | None, compare: bool) -> Part:
        """The message becomes the rule's on its first header."""
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
                scalars=message.scalars or part.scalars,
            )
        return self._compared(part) if compare else part

    def _announce(self, message: LocalMessage) -> None:
        sent, message.announced = self._buckets.sent, True
        message.healthy, message.sound = self._replica.judge_packed(sent)
        message.healthy = message.healthy and bool(message.state_is_finite)
        if message.healthy:  # else the rule's state would learn of it
            message.scalars = self._agreed.message_(sent, message.fragment)

    def _compared(self, part: Part) -> Part:
        """With what this replica holds, for the gate at which all ranks stand."""
        whole, rest = self._replica.digests()
        if self.rule.restores_local and not self.showing:
            whole = UNLIKE  # a replica's own model, in place of the one that the gate shows
        healthy, sound = self._replica.judge()
        return part._replace(digest=whole, digest_rest=rest, healthy=healthy, sound=sound)

    def weigh_step(self, samples: float) -> float:
        """What gradients of so many samples weigh in a synchronous step: what a local step of as many would; of none,
        nothing."""
        return Work(samples, 1.0).weight(self._config.weighting) if samples > 0.0 else 0.0

    # ---- what all headers ask for ----

    def is_due(self, parts: Sequence[Part]) -> bool:
        return any(p.due for p in parts)

    def plan(self, priority: int, headers: Sequence[Header], parts: Sequence[Part]) -> AveragingPlan | None:
        """A round of those who have something to average; after synchronous steps first where the rule begins."""
        if priority != ROUND:
            return None
        able = able_to_share(headers, parts)
        present = [rank for rank, ok in enumerate(able) if ok and headers[rank].ready == ROUND]
        work = [parts[rank].work if rank in present else 0.0 for rank in range(len(parts))]
        # Where an agreement left no work to weigh by, one brings for all what the anchor has yet to learn.
        steps = [parts[rank].steps if rank in present else 0.0 for rank in range(len(parts))]
        if sum(work) <= 0.0 and not any(steps):
            return AveragingPlan(None)
        source, fresh = min(present, default=None), any(p.fresh for p in parts)
        if fresh:
            first = max(present, key=lambda rank: work[rank])
            weights = tuple(float(rank == first) for rank in range(len(work)))
        else:
            weights = self.rule.topology.row(Round(0, self._control.transfer.rank, tuple(work), tuple(steps)))
        kind = self.start if fresh else self.average
        return AveragingPlan(kind, weights, tuple(able), source, fresh, fragment=_fragment(parts, present))

    def settle(self, headers: Sequence[Header], parts: Sequence[Part]) -> tuple[bool, AveragingPlan | None]:
        """A gate opens where all hold the same, to the bit; else there is one model to be made."""
        held = {(p.digest, p.digest_rest) for p in parts}
        if any(p.digest == NOT_COMPARED for p in parts):
            return False, None
        unlike = any(p.digest == UNLIKE for p in parts)
        if len(held) == 1 and not unlike:
            return True, None
        able = able_to_share(headers, parts)
        work = [p.unreported if ok else 0.0 for p, ok in zip(parts, able, strict=True)]
        if (total := sum(work)) <= 0.0:  # something has moved without a step
            work = [float(ok) for ok in able]
            total = sum(work)
        weights = tuple(w / total for w in work)
        alike = len({p.digest for p in parts}) == 1 and not unlike
        fresh = any(p.fresh for p in parts)
        return False, AveragingPlan(self.consensus, weights, tuple(able), able.index(True), fresh, alike)

    def opened(self, here: bool) -> None:
        """All replicas hold one model, which is the last target from now on."""
        if not self.rule.restores_local:
            self._ledger.agree()
            self.average.forget_debts()
            self._replica.note_agreed()
            if not self._buckets.at_target:  # equal without an exchange
                self._replica.pack_(self._buckets.received)
                self._buckets.at_target = True
        if here:
            self.drop_left_over()

    def drop_left_over(self) -> None:
        """Take back a message that its schedule did not ask for; its work stays. Under the lock."""
        message = self._buckets.message
        if isinstance(message, LocalMessage) and not message.due:
            self.average.abandon()

    def drop(self) -> None:
        """Nobody has anything to average."""
        message = self._buckets.message
        self.average.abandon()
        if isinstance(message, LocalMessage) and not message.healthy and not self._diverged:
            self._diverged = True
            log.error(
                "Rank %d: no replica is finite at step %d, so there is no model to take over: training has diverged. "
                "Lower the learning rate, clip gradients, or resume from the last checkpoint.",
                self._control.transfer.rank, message.step,
            )  # fmt: skip


def _fragment(parts: Sequence[Part], present: Sequence[int]) -> int:
    """The part of the parameters that all messages carry.

    Raises:
        CollectiveError: they differ.
    """
    fragments = {parts[rank].fragment for rank in present}
    if len(fragments) != 1:
        raise CollectiveError(f"The ranks' messages carry different fragments: {[p.fragment for p in parts]}.")
    return fragments.pop()


def able_to_share(headers: Sequence[Header], parts: Sequence[Part]) -> list[bool]:
    """Which ranks hold what others may take over. Where none does at a gate, nobody is to be healed: all do."""
    some_sound = any(p.sound and p.healthy for p in parts)
    able = [p.healthy and (p.sound or not some_sound) for p in parts]
    at_gates = all(h.gate is not Gate.NONE for h in headers)
    return able if any(able) or not at_gates else [True] * len(parts)

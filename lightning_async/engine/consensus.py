"""One model at a sync point: the component of the engine by which all replicas become equal to the bit.

At a sync point, the ranks' headers carry digests of their tensors. If all digests are equal, the sync point opens.
Otherwise a `ConsensusRound` makes one model of all replicas: the mean, weighted by the work that each replica did since
replicas last agreed. Every strategy has this component.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_async.engine.buckets import ModelRound, RoundType
from lightning_async.engine.control_plane import ControlPlane
from lightning_async.engine.decision import ComponentPlan, EngineComponent, able_to_share
from lightning_async.engine.fingerprint import digests
from lightning_async.engine.shared_state import Header
from lightning_async.engine.work_ledger import WorkLedger
from lightning_async.errors import AsyncTrainingError

NOT_COMPARED = -1  # in place of a digest: this rank has not computed it yet


class ConsensusPart(NamedTuple):
    """The numbers that one rank sends in its header for a consensus. In the comments, "it" is that rank."""

    unreported: tuple[float, ...] = (0.0,)  # by fragment, its weight: its work since replicas last agreed
    healthy: bool = True  # its parameters and its optimizers' state are finite
    sound: bool = True  # its buffers and frozen parameters are finite; ignored if those of no rank are
    fresh: bool = False  # it took synchronous steps since the averaging rule's state was initialised
    digest: int = NOT_COMPARED  # of the parameters that rounds move; compared at sync points
    digest_rest: int = NOT_COMPARED  # of all other tensors that replicas share


@dataclass(frozen=True)
class ConsensusPlan(ComponentPlan):
    """The plan of a consensus."""

    able: tuple[bool, ...] = ()  # by rank, whether others may take over what it holds
    source: int = 0  # the rank whose buffers are broadcast
    fresh: bool = False  # some rank took synchronous steps since the averaging rule's state was initialised
    alike: bool = False  # parameters are equal on all ranks, and only other tensors differ
    shares: tuple[tuple[float, ...], ...] = ()  # by fragment, the shares of all ranks


@dataclass(kw_only=True)
class AgreedModel(ModelRound):
    """The record of a consensus; its target is the model that all replicas take."""

    plan: ConsensusPlan
    apart: dict[str, Tensor] = field(default_factory=dict)  # tensors beside the bucket, by name


class Consensus(EngineComponent):
    """A component of the engine that makes one model of all replicas at sync points.

    It registers itself with the control plane. With each consensus, the engine's thread calls ``follow`` with the
    bucket of the new model, and with whether a rank took synchronous steps since the rule's state was initialised.
    """

    def __init__(self, control: ControlPlane, ledger: WorkLedger, follow: Callable[[Tensor, bool], None]) -> None:
        self._buckets = control.buckets
        self._replica = control.buckets.replica
        self._ledger = ledger
        self.blank = ConsensusPart(unreported=(0.0,) * self._replica.num_fragments)
        self._shared_state = control.shared_state
        self._follow = follow
        self.round = ConsensusRound(control, ledger, follow)
        control.register(self)

    def is_indispensable(self) -> bool:
        return self._ledger.synchronous or self._ledger.fresh

    def compose(self) -> ConsensusPart:
        return self.blank._replace(unreported=self._ledger.weights(), fresh=self._ledger.fresh)

    def compare(self, part: ConsensusPart) -> ConsensusPart:
        digest, digest_rest = self._replica.digests()
        healthy, sound = self._replica.judge()
        return part._replace(digest=digest, digest_rest=digest_rest, healthy=healthy, sound=sound)

    def settle(self, headers: Sequence[Header], parts: Sequence[ConsensusPart]) -> tuple[bool, ConsensusPlan | None]:
        """Return whether the sync point may open, and the plan of a consensus that must come first.

        The sync point may open if all ranks hold the same bits; otherwise the consensus makes one model of all
        replicas. The plan is None if none is needed, or if a rank's header has no digests of its tensors yet.
        """
        if any(part.digest == NOT_COMPARED for part in parts):
            return False, None
        if len({(part.digest, part.digest_rest) for part in parts}) == 1:
            return True, None
        able = able_to_share(headers, parts)
        shares = tuple(shares_of(weights, able) for weights in zip(*(part.unreported for part in parts), strict=True))
        return False, ConsensusPlan(
            self.round,
            shares[-1],
            able=tuple(able),
            source=able.index(True),
            fresh=any(part.fresh for part in parts),
            alike=len({part.digest for part in parts}) == 1,
            shares=shares,
        )

    def opened(self, here: bool) -> None:
        self._ledger.agree()
        self._replica.note_agreed()
        if not self._buckets.at_target:  # replicas are equal without an exchange, such as one alone
            self._replica.pack_(self._buckets.received)
            self._buckets.at_target = True
            with self._shared_state.committing:
                self._follow(self._buckets.received, False)


class ConsensusRound(RoundType):
    """A round type that makes one model of all replicas at a sync point."""

    def __init__(self, control: ControlPlane, ledger: WorkLedger, follow: Callable[[Tensor, bool], None]) -> None:
        self._buckets = control.buckets
        self._transfer = control.transfer
        self._replica = control.buckets.replica
        self._shared_state = control.shared_state
        self._ledger = ledger
        self._follow = follow

    def begin(self, plan: ConsensusPlan, id: int, parts: Sequence[ConsensusPart]) -> AgreedModel:
        """Drop this rank's message, pack all tensors into the bucket `sent`, and return the record of the consensus."""
        buckets = self._buckets
        rank = self._transfer.rank
        with self._shared_state.changed:
            buckets.message = None
        self._replica.pack_(buckets.sent)
        return AgreedModel(
            id=id,
            kind=self,
            message=None,
            target=buckets.received,
            plan=plan,
            share=plan.weights[rank],
            message_bytes=4 * self._replica.numel,
            healed=not plan.able[rank],
        )

    def move(self, exchange: AgreedModel) -> None:
        replica = self._replica
        target = exchange.target
        sent = self._buckets.sent
        plan = exchange.plan
        rank = self._transfer.rank
        shares = {fragment: weights[rank] for fragment, weights in enumerate(plan.shares)}
        replica.scale_(target, sent, shares, rank == plan.source, of_rule=not plan.alike)
        if plan.alike:
            self._transfer.sum_(replica.beyond_rule(target))
            replica.of_rule(target).copy_(replica.of_rule(sent))
            exchange.message_bytes -= 4 * replica.layout.numel
        else:
            self._transfer.sum_(target)
        self._move_apart(exchange)

    def _move_apart(self, exchange: AgreedModel) -> None:
        apart = self._replica.tensors.apart
        if not apart:
            return
        table = self._transfer.gather(torch.tensor(digests(apart.values())))
        unlike = (table != table[0]).any(dim=0).tolist()
        for (name, tensor), differs in zip(apart.items(), unlike, strict=True):
            if differs:
                exchange.apart[name] = self._make_equal(name, tensor, exchange.share)
                exchange.message_bytes += tensor.nbytes
            elif tensor.dtype is torch.float64:  # the fp32 bucket has cut its digits
                exchange.apart[name] = tensor.detach().clone()

    def _make_equal(self, name: str, tensor: Tensor, share: float) -> Tensor:
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

    def commit(self, exchange: AgreedModel) -> None:
        self._follow(exchange.target, exchange.plan.fresh)

    def hand_over(self, exchange: AgreedModel) -> None:
        """Pass the model to the training thread, and set this replica's work to zero: the model includes all work."""
        self._ledger.begin()
        self._ledger.agree()
        self._buckets.hand_over(exchange)

    def merge(self, exchange: AgreedModel, step: int) -> None:
        """Copy the model of a consensus into the parameters."""
        buckets = self._buckets
        buckets.to_training.take(exchange.target)
        self._replica.merge_(exchange.target, None, with_state=True, buffers_too=True, of_round=False)
        self._replica.tensors.set_apart(exchange.apart)
        buckets.at_target = True


def shares_of(work: Sequence[float], able: Sequence[bool]) -> tuple[float, ...]:
    """Return each rank's share in a consensus, in proportion to its ``work``; 0 for a rank that is not ``able``.

    If no able rank has done any work, all able ranks get equal shares.

    >>> shares_of((1.0, 3.0, 4.0), (True, True, False))
    (0.25, 0.75, 0.0)
    """
    counted = [amount if ok else 0.0 for amount, ok in zip(work, able, strict=True)]
    if (total := sum(counted)) <= 0.0:
        counted = [float(ok) for ok in able]
        total = sum(counted)
    return tuple(amount / total for amount in counted)

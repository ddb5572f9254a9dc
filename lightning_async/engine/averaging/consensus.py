"""A consensus: at a gate that every rank has reached, all replicas become one model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_async.engine.averaging.agreed import Agreed, Ledger
from lightning_async.engine.averaging.average import Average
from lightning_async.engine.averaging.records import AveragingPlan, Merge, Part
from lightning_async.engine.control import ControlPlane
from lightning_async.engine.digest import digests
from lightning_async.errors import AsyncTrainingError

__all__ = ["Consensus"]


class Consensus:
    """See `Kind`. It moves what replicas are, not the rule's messages: it is no outer step.

    Args:
        control: the control plane.
        agreed: the rule and its state.
        ledger: this replica's work.
        average: rounds, whose messages and debts end with it.
    """

    takes_marks = True

    def __init__(self, control: ControlPlane, agreed: Agreed, ledger: Ledger, average: Average) -> None:
        self._buckets, self._transfer = control.buckets, control.transfer
        self._replica, self._mailbox = control.buckets.replica, control.mailbox
        self._agreed, self._ledger, self._average = agreed, ledger, average

    def begin(self, plan: AveragingPlan, id: int, parts: Sequence[Part]) -> Merge:
        """Should it fail, the bucket no longer holds what a message said: the message goes first."""
        with self._mailbox.changed:
            self._average.abandon()
        self._replica.pack_(self._buckets.sent)
        exchange = self._average.record(plan, id, parts)
        exchange.kind, exchange.is_consensus = self, True
        return exchange

    def move(self, exchange: Merge) -> None:
        replica, target, sent, plan = self._replica, exchange.target, self._buckets.sent, exchange.plan
        is_source = exchange.round.rank == plan.source
        replica.scale_(target, sent, exchange.share, is_source, of_rule=not plan.alike)
        if plan.alike:
            self._transfer.sum_(replica.beyond_rule(target))
            replica.of_rule(target).copy_(replica.of_rule(sent))
            exchange.message_bytes -= 4 * replica.layout.numel
        else:
            self._transfer.sum_(target)
        self._move_apart(exchange)

    def _move_apart(self, exchange: Merge) -> None:
        """What does not travel in the bucket, where replicas differ in it."""
        apart = self._replica.tensors.apart
        if not apart:
            return
        table = self._transfer.gather(torch.tensor(digests(apart.values())))
        unlike = (table != table[0]).any(dim=0).tolist()
        for (name, tensor), differs in zip(apart.items(), unlike, strict=True):
            if differs:
                exchange.apart[name] = self._one_of(name, tensor, exchange.share)
                exchange.message_bytes += tensor.nbytes
            elif tensor.dtype is torch.float64:  # the bucket has cut it
                exchange.apart[name] = tensor.detach().clone()

    def _one_of(self, name: str, tensor: Tensor, share: float) -> Tensor:
        """The largest of integers and bools, the mean of others."""
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
        self._agreed.agree_(exchange.target)
        if exchange.plan.fresh:
            self._agreed.begin(exchange.target)
        self._average.forget_debts()

    def hand_over(self, exchange: Merge) -> None:
        """Replicas agree: nothing is left to weigh. What the rule has yet to learn stays owed; its clock goes on."""
        self._ledger.begin()
        if not self._agreed.rule.restores_local:
            self._ledger.agree()
        self._average.deliver(exchange)

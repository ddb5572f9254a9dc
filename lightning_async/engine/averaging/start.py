"""A start: after synchronous steps the rule's state begins anew, with the same parameters on all replicas."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_async.engine.averaging.agreed import Agreed, Ledger
from lightning_async.engine.averaging.average import Average
from lightning_async.engine.averaging.records import AveragingPlan, Part
from lightning_async.engine.buckets import Exchange
from lightning_async.engine.control import ControlPlane

__all__ = ["Start"]


class Start:
    """See `Kind`. Where one rank came from when it left synchronous training goes to all; its bucket still holds it.

    Args:
        control: the control plane.
        agreed: the rule, whose state begins.
        ledger: this replica's work.
        average: rounds, whose debts end with it.
    """

    takes_marks = False

    def __init__(self, control: ControlPlane, agreed: Agreed, ledger: Ledger, average: Average) -> None:
        self._buckets, self._transfer = control.buckets, control.transfer
        self._agreed, self._ledger, self._average = agreed, ledger, average
        self._source = 0

    def begin(self, plan: AveragingPlan, id: int, parts: Sequence[Part]) -> Exchange:
        self._source = plan.weights.index(1.0)
        return Exchange(id, self, None, self._buckets.received)

    def move(self, exchange: Exchange) -> None:
        self._transfer.broadcast_(self._buckets.replica.of_rule(exchange.target), self._source)

    def commit(self, exchange: Exchange) -> None:
        self._agreed.begin(exchange.target)
        self._average.forget_debts()

    def hand_over(self, exchange: Exchange) -> None:
        """Nothing to merge: the round with the messages follows."""
        self._ledger.fresh = False

"""Moving the parameters by what arrived: the training thread's last step of a round."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_async.engine.averaging.agreed import Agreed
from lightning_async.engine.averaging.records import LocalMessage, Merge
from lightning_async.engine.averaging.wing import AveragingWing
from lightning_async.engine.buckets import Buckets

__all__ = ["Merger"]


class Merger:
    """Merges committed rounds into one replica's parameters.

    Args:
        buckets: what has arrived.
        agreed: the rule, which says what becomes of progress made meanwhile, and of local models at a rendezvous.
        wing: hears whether the parameters only show a model.
        exact: False where a message counts as what its codes decode to: what they lack stays in the parameters.
    """

    def __init__(self, buckets: Buckets, agreed: Agreed, wing: AveragingWing, exact: bool = True) -> None:
        self._buckets, self._agreed, self._wing = buckets, agreed, wing
        self._replica = buckets.replica
        self._exact = exact
        self._local: Tensor | None = None
        """What training goes on from, while the parameters show the model of a rendezvous."""

    def merge(self, arrived: Merge, step: int) -> None:
        """Move the parameters; ``step`` is the replica's step count."""
        replica, rule, message, consensus = self._replica, self._agreed.rule, arrived.message, arrived.is_consensus
        self._buckets.to_training.take(*(bucket for bucket in (arrived.target, arrived.base) if bucket is not None))
        stood_still = message.step == step and self._exact if message is not None else self._buckets.at_target
        copies = consensus or arrived.base is None or stood_still
        # Buffers change without a step, too (accumulated batches): whether they stood still is seen where they are.
        if isinstance(message, LocalMessage) and arrived.base is not None and not consensus:
            replica.merge_late_(arrived.target, arrived.base, message.updates, arrived.plan.source is not None)
        target, base = arrived.target, None if copies else arrived.base
        if consensus and rule.restores_local and self._local is None:
            self._local = torch.empty_like(target)
            replica.pack_(self._local)
        if base is not None and rule.mixes:
            target, base = self._mix(arrived, base), None
        replica.merge_(
            target,
            base,
            with_state=consensus or (message is not None and arrived.base is None),
            buffers_too=arrived.plan.source is not None,
            still=stood_still and not consensus and arrived.base is not None,
            of_round=not consensus,
        )
        self._buckets.at_target = copies
        if consensus:
            replica.tensors.set_apart(arrived.apart)
            self._wing.showing = self._local is not None

    def _mix(self, arrived: Merge, base: Tensor) -> Tensor:
        """The target, with as much of the progress since ``base`` as the rule takes up."""
        replica, mixed = self._replica, arrived.target.clone()
        live, snapshot, target = (replica.of_rule(bucket) for bucket in (mixed, base, arrived.target))
        replica.pack_parameters_(live)
        self._agreed.mix_(live, snapshot, target, arrived.round)
        return mixed

    def restore_local(self) -> bool:
        """Where the parameters only show a model, put this replica's own back; whether it did."""
        if self._local is None:
            return False
        self._replica.merge_(self._local, None, with_state=True)
        self._local, self._buckets.at_target, self._wing.showing = None, False, False
        return True

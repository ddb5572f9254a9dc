"""Moving the parameters by what arrived: the training thread's last step of a round."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_async.engine.averaging.agreed import Commits
from lightning_async.engine.averaging.ballot import Kind
from lightning_async.engine.averaging.mailbox import Arrived, Mailbox
from lightning_async.engine.replica import Replica
from lightning_async.rules.averaging.protocol import AveragingRule

__all__ = ["Merger"]


class Merger:
    """Merges committed rounds into one replica's parameters.

    Args:
        replica: the tensors.
        rule: what becomes of progress made meanwhile, and of local models at a rendezvous.
        commits: holds the rule's state.
        mailbox: what both threads know of this replica.
        exact: False where a message counts as what its codes decode to: what they lack stays in the parameters.
    """

    def __init__(
        self, replica: Replica, rule: AveragingRule, commits: Commits, mailbox: Mailbox, exact: bool = True
    ) -> None:
        self._replica, self._rule, self._commits, self._mailbox = replica, rule, commits, mailbox
        self._exact = exact
        self._local: Tensor | None = None
        """What training goes on from, while the parameters show the model of a rendezvous."""

    def merge(self, arrived: Arrived, step: int) -> None:
        """Move the parameters; ``step`` is the replica's step count."""
        replica, message, consensus = self._replica, arrived.message, arrived.kind is Kind.CONSENSUS
        replica.to_training.take(*(bucket for bucket in (arrived.target, arrived.base) if bucket is not None))
        stood_still = message.step == step and self._exact if message is not None else self._mailbox.at_target
        copies = consensus or arrived.base is None or stood_still
        target, base = arrived.target, None if copies else arrived.base
        if consensus and self._rule.restores_local and self._local is None:
            self._local = torch.empty_like(target)
            replica.pack_(self._local)
        if base is not None and self._rule.mixes:
            target, base = self._mix(arrived, base), None
        replica.merge_(
            target,
            base,
            with_state=message is not None or consensus,
            buffers_too=arrived.has_source,
            still=stood_still and not consensus and arrived.base is not None,
            of_round=arrived.kind is Kind.ROUND,
        )
        self._mailbox.at_target = copies
        if consensus:
            replica.tensors.set_apart(arrived.apart)
            self._mailbox.showing = self._local is not None

    def _mix(self, arrived: Arrived, base: Tensor) -> Tensor:
        """The target, with as much of the progress since ``base`` as the rule takes up."""
        replica, commits, mixed = self._replica, self._commits, arrived.target.clone()
        live, snapshot, target = (replica.of_rule(bucket) for bucket in (mixed, base, arrived.target))
        replica.pack_parameters_(live)
        with commits.rule_lock:
            commits.rule_state = self._rule.mix_(live, snapshot, target, commits.rule_state, arrived.round)
        return mixed

    def restore_local(self) -> bool:
        """Where the parameters only show a model, put this replica's own back; whether it did."""
        if self._local is None:
            return False
        self._replica.merge_(self._local, None, with_state=True)
        self._local, self._mailbox.at_target, self._mailbox.showing = None, False, False
        return True

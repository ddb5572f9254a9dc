"""A tiny model of the engine's part of a round, in one thread and with a float64 exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_async import ops
from lightning_async.algorithms import AveragingRule, Round
from lightning_async.flat import FlatLayout

LR = 0.125


def fill(count: int, seed: int, scale: float = 1.0) -> Tensor:
    """``count`` normal fp32 numbers."""
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * scale


class Replica:
    """Parameters, the last target and the rule's state of one replica."""

    def __init__(self, rule: AveragingRule[Any], start: Sequence[Tensor]) -> None:
        self.params = [p.clone() for p in start]
        self.layout = FlatLayout(self.params)
        self.last_target = self.flat()
        self.state = rule.init(self.flat(), self.layout)
        self.work, self.moved = 0.0, False
        self.scalars: tuple[float, ...] = ()
        self.sent: Tensor | None = None

    def flat(self) -> Tensor:
        bucket = self.layout.empty()
        ops.pack_(bucket, self.layout, self.params)
        return bucket

    def learn(self, progress: Tensor, work: float = 0.0) -> None:
        """Local steps: the parameters move by ``progress``."""
        for p, d in zip(self.params, self.layout.views(progress), strict=True):
            p.add_(d)
        self.work, self.moved = self.work + work, True


class Replicas:
    """A number of replicas that start equal.

    Args:
        rule: what they average with.
        start: the common parameters.
        count: how many replicas.
    """

    def __init__(self, rule: AveragingRule[Any], start: Sequence[Tensor], count: int) -> None:
        self.rule = rule
        self.all = [Replica(rule, start) for _ in range(count)]
        self.rounds = 0

    def send(self) -> None:
        """Every replica that has work takes its snapshot and turns it into its message."""
        for replica in self.all:
            replica.sent = replica.flat() if replica.work else None
            if replica.sent is not None:
                replica.scalars = self.rule.message_(replica.sent, replica.state)
                assert len(replica.scalars) == self.rule.num_scalars
            replica.moved = False

    def receive(self, lr: Sequence[float] | None = None) -> None:
        """The messages arrive, weighted as the rule has it, and are merged everywhere; ``lr`` is each replica's."""
        work = tuple(replica.work for replica in self.all)
        rates = tuple(lr or (LR * (w > 0) for w in work))
        scalars = tuple(replica.scalars for replica in self.all)
        rounds = [Round(self.rounds, rank, work, scalars=scalars, lr=rates) for rank in range(len(work))]
        arriving = [self.received(round) for round in rounds]
        for replica, target, round in zip(self.all, arriving, rounds, strict=True):
            replica.state = self.rule.merge_(replica.sent, target, replica.state, round)
            replica.work = 0.0
            if replica.sent is not None or self.rule.absent_follow:
                self.merge(replica, target, round)
        self.rounds += 1

    def received(self, round: Round) -> Tensor:
        """What one replica receives; summed in float64."""
        total = torch.zeros(self.all[0].layout.numel, dtype=torch.float64)
        for replica, weight in zip(self.all, self.rule.weights(round), strict=True):
            if replica.sent is not None:
                total += weight * replica.sent.double()
        return total.float()

    def merge(self, replica: Replica, target: Tensor, round: Round) -> None:
        """The parameters move."""
        base = replica.last_target if replica.sent is None else replica.sent
        copies, values = replica.sent is not None and not replica.moved, target
        if self.rule.mixes and not copies:
            values = replica.flat()
            replica.state = self.rule.mix_(values, base, target, replica.state, round)
        ops.apply_(replica.params, replica.layout, values, None if copies or self.rule.mixes else base)
        replica.last_target = target

    def sync_point(self, weights: Sequence[float]) -> None:
        """A rendezvous: everyone takes the mean. The state stays, but begins anew where replicas keep own models."""
        total = torch.zeros(self.all[0].layout.numel, dtype=torch.float64)
        for replica, weight in zip(self.all, weights, strict=True):
            total += weight / sum(weights) * replica.flat().double()
        for replica in self.all:
            agreed = total.float()
            if not self.rule.absent_follow:
                replica.state = self.rule.init(agreed, replica.layout)
            ops.apply_(replica.params, replica.layout, agreed, None)
            replica.last_target, replica.work = agreed, 0.0

    def weighted(self, work: Sequence[float]) -> Tensor:
        """The work-weighted mean of the parameters, in float64."""
        rows = torch.stack([r.flat().double() for r in self.all])
        weights = torch.tensor(work, dtype=torch.float64)
        return (weights / weights.sum()) @ rows

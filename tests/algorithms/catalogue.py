"""Every public rule and schedule with example constructions: one row buys every law and the documentation check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_async.algorithms import (
    EASGD,
    AdaptiveDelayCompensation,
    AdaptiveDiLoCo,
    AdaptiveLr,
    AdaptivePeriod,
    AveragingRule,
    Bounded,
    Buffered,
    Clipping,
    Dana,
    DelayCompensation,
    DelayCorrection,
    DeltaMean,
    DiLoCo,
    DyLU,
    EveryNSteps,
    EverySeconds,
    GapAware,
    MatchCommunication,
    Mean,
    NoCorrection,
    PseudoGradientPenalty,
    Schedule,
    SlowMo,
    SparseLoCo,
    StalenessPolicy,
    Synchronous,
    Warmup,
    WeightPrediction,
)
from tests.algorithms.coming import Eager


class RuleRow(NamedTuple):
    """A rule and which laws hold for it.

    Args:
        name: unique, for test ids.
        make: builds the rule.
        is_mean: one round from a common start, nothing in flight, leaves every replica at the weighted mean.
    """

    name: str
    make: Callable[[], AveragingRule[Any]]
    is_mean: bool = False


class ScheduleRow(NamedTuple):
    """A schedule; ``name`` is unique, for test ids."""

    name: str
    make: Callable[[], Schedule]


class CorrectionRow(NamedTuple):
    """A correction for the delay of gradients; ``name`` is unique, for test ids."""

    name: str
    make: Callable[[], DelayCorrection]


class StalenessRow(NamedTuple):
    """A policy of staleness; ``name`` is unique, for test ids."""

    name: str
    make: Callable[[], StalenessPolicy]


def momentum_sgd(tensors: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=0.7, momentum=0.9, nesterov=True)


def adam(tensors: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(tensors, lr=0.01)


RULES = (
    RuleRow("Mean", Mean, is_mean=True),
    RuleRow("DeltaMean", DeltaMean, is_mean=True),
    RuleRow("DiLoCo", DiLoCo),
    RuleRow("AdaptiveDiLoCo", AdaptiveDiLoCo),
    RuleRow("DiLoCo-plain", lambda: DiLoCo(outer_lr=1.0, outer_momentum=0.0), is_mean=True),
    RuleRow("DiLoCo-heavy-ball", lambda: DiLoCo(outer_lr=0.5, outer_momentum=0.5, nesterov=False)),
    RuleRow("DiLoCo-torch-sgd", lambda: DiLoCo(outer_optimizer=momentum_sgd)),
    RuleRow("DiLoCo-torch-adam", lambda: DiLoCo(outer_optimizer=adam)),
    RuleRow("DiLoCo-mixing", lambda: DiLoCo(mixing=0.25)),
    RuleRow("EASGD", EASGD),
    RuleRow("PseudoGradientPenalty", lambda: PseudoGradientPenalty(DiLoCo())),
    RuleRow("SlowMo", SlowMo),
    RuleRow("SlowMo-plain", lambda: SlowMo(beta=0.0), is_mean=True),
    RuleRow("SparseLoCo", SparseLoCo, is_mean=True),
    RuleRow("SparseLoCo-half", lambda: SparseLoCo(outer_lr=0.5, decay=1.0)),
)

COMING = (RuleRow("Eager", Eager),)
"""What the interface must carry, too."""

SCHEDULES = (
    ScheduleRow("EveryNSteps", lambda: EveryNSteps(4)),
    ScheduleRow("MatchCommunication", lambda: MatchCommunication(minimum=4)),
    ScheduleRow("AdaptivePeriod", lambda: AdaptivePeriod(4, 40)),
    ScheduleRow("AdaptivePeriod-loss", lambda: AdaptivePeriod(4, 40, metric="loss_variance")),
    ScheduleRow("DyLU", lambda: DyLU(8, minimum=2)),
    ScheduleRow("EverySeconds", lambda: EverySeconds(0.5)),
    ScheduleRow("Synchronous", Synchronous),
    ScheduleRow("Warmup-steps", lambda: Warmup(EveryNSteps(4), steps=10)),
    ScheduleRow("Warmup-epochs", lambda: Warmup(EverySeconds(1), epochs=2, warmup_sync_every=2)),
)

CORRECTIONS = (
    CorrectionRow("DelayCompensation", DelayCompensation),
    CorrectionRow("WeightPrediction", lambda: WeightPrediction(1.5)),
)

STALENESS = (
    StalenessRow("NoCorrection", NoCorrection),
    StalenessRow("AdaptiveLr", AdaptiveLr),
    StalenessRow("AdaptiveLr-inverse", lambda: AdaptiveLr(form="inverse")),
    StalenessRow("AdaptiveLr-sqrt", lambda: AdaptiveLr(form="sqrt")),
    StalenessRow("AdaptiveLr-linear", lambda: AdaptiveLr(0.5, form="linear")),
    StalenessRow("Bounded", lambda: Bounded(3)),
    StalenessRow("GapAware", GapAware),
    StalenessRow("GapAware-gradient", lambda: GapAware("gradient", decay=0.5)),
    StalenessRow("Dana", Dana),
    StalenessRow("Dana-gap-aware", lambda: Dana(GapAware("gradient"))),
    StalenessRow("Buffered", lambda: Buffered(1)),
    StalenessRow("FedBuff", lambda: Buffered(1, AdaptiveLr(form="sqrt"))),
    StalenessRow("Clipping", lambda: Clipping(1e6)),
    StalenessRow("Clipping-Dana", lambda: Clipping(1e6, Dana(GapAware("gradient")))),
    StalenessRow("AdaptiveDelayCompensation", lambda: AdaptiveDelayCompensation(0.5)),
    StalenessRow("DelayCompensation-server", lambda: DelayCompensation(0.5)),
    StalenessRow("WeightPrediction-server", lambda: WeightPrediction(0.5)),
)

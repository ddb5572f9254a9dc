"""The algorithms as small values: how replicas become one model again, and when. No I/O, no threads, no clocks."""

from lightning_async.rules.averaging.base import AveragingState
from lightning_async.rules.averaging.diloco import DiLoCo, DiLoCoState
from lightning_async.rules.averaging.mean import DeltaMean, Mean
from lightning_async.rules.averaging.protocol import AllMean, AveragingRule, Round, Topology
from lightning_async.rules.balance import BalancedWindows
from lightning_async.rules.compression import Bf16, Fp8, Int8, PowerSGD, TopK, TwoBit
from lightning_async.rules.delays import DelayCorrection
from lightning_async.rules.schedules.balanced import DyLU
from lightning_async.rules.schedules.fixed import EveryNSteps, EverySeconds, Synchronous, Warmup
from lightning_async.rules.schedules.protocol import Action, Clock, Schedule, Step
from lightning_async.rules.staleness import (
    AdaptiveDelayCompensation,
    AdaptiveLr,
    Bounded,
    Buffered,
    Clipping,
    Dana,
    DelayCompensation,
    GapAware,
    StalenessPolicy,
    Uncorrected,
    WeightPrediction,
)

__all__ = [
    "Action",
    "AdaptiveDelayCompensation",
    "AdaptiveLr",
    "AllMean",
    "AveragingRule",
    "AveragingState",
    "BalancedWindows",
    "Bf16",
    "Bounded",
    "Buffered",
    "Clipping",
    "Clock",
    "Dana",
    "DelayCompensation",
    "DelayCorrection",
    "DeltaMean",
    "DiLoCo",
    "DiLoCoState",
    "DyLU",
    "EveryNSteps",
    "EverySeconds",
    "Fp8",
    "GapAware",
    "Int8",
    "Mean",
    "PowerSGD",
    "Round",
    "Schedule",
    "StalenessPolicy",
    "Step",
    "Synchronous",
    "TopK",
    "Topology",
    "TwoBit",
    "Uncorrected",
    "Warmup",
    "WeightPrediction",
]

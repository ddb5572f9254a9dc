"""The algorithms as small values: how replicas become one model again, and when. No I/O, no threads, no clocks."""

from lightning_async.rules.averaging.base import AveragingState
from lightning_async.rules.averaging.diloco import DiLoCo, DiLoCoState
from lightning_async.rules.averaging.mean import DeltaMean, Mean
from lightning_async.rules.averaging.protocol import AllMean, AveragingRule, Round, Topology
from lightning_async.rules.delays import DelayCompensation, DelayCorrection
from lightning_async.rules.schedules.fixed import EveryNSteps, EverySeconds, Synchronous, Warmup
from lightning_async.rules.schedules.protocol import Action, Clock, Schedule, Step

__all__ = [
    "Action",
    "AllMean",
    "AveragingRule",
    "AveragingState",
    "Clock",
    "DelayCompensation",
    "DelayCorrection",
    "DeltaMean",
    "DiLoCo",
    "DiLoCoState",
    "EveryNSteps",
    "EverySeconds",
    "Mean",
    "Round",
    "Schedule",
    "Step",
    "Synchronous",
    "Topology",
    "Warmup",
]

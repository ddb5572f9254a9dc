"""The algorithms as small values: how replicas become one model again, and when. No I/O, no threads, no clocks."""

from lightning_async.rules.averaging import AveragingState, DeltaMean, Mean
from lightning_async.rules.outer import DiLoCo, DiLoCoState
from lightning_async.rules.protocols import Action, AllMean, AveragingRule, Clock, Exchange, Round, Schedule
from lightning_async.rules.schedules import EveryNSteps, EverySeconds, Synchronous, Warmup

__all__ = [
    "Action",
    "AllMean",
    "AveragingRule",
    "AveragingState",
    "Clock",
    "DeltaMean",
    "DiLoCo",
    "DiLoCoState",
    "EveryNSteps",
    "EverySeconds",
    "Exchange",
    "Mean",
    "Round",
    "Schedule",
    "Synchronous",
    "Warmup",
]

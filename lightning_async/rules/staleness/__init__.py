"""What a parameter server does about pushes that are late."""

from lightning_async.rules.staleness.adaptive_lr import AdaptiveLr
from lightning_async.rules.staleness.bounded import Bounded
from lightning_async.rules.staleness.buffered import Buffered
from lightning_async.rules.staleness.choose import NAMES, auto, described, make_policy, momentum_warning
from lightning_async.rules.staleness.clipping import Clipping
from lightning_async.rules.staleness.dana import Dana
from lightning_async.rules.staleness.delay_compensation import AdaptiveDelayCompensation, DelayCompensation
from lightning_async.rules.staleness.gap_aware import GapAware
from lightning_async.rules.staleness.protocol import Late, StalenessPolicy, Uncorrected, Weight
from lightning_async.rules.staleness.weight_prediction import WeightPrediction

__all__ = [
    "NAMES",
    "AdaptiveDelayCompensation",
    "AdaptiveLr",
    "Bounded",
    "Buffered",
    "Clipping",
    "Dana",
    "DelayCompensation",
    "GapAware",
    "Late",
    "StalenessPolicy",
    "Uncorrected",
    "Weight",
    "WeightPrediction",
    "auto",
    "described",
    "make_policy",
    "momentum_warning",
]

"""How many samples an optimizer step has, and what that does to the learning rate."""

from lightning_async.rules.accumulation.learning_rates import LrScaling, lr_factor
from lightning_async.rules.accumulation.noise import Noise, estimate
from lightning_async.rules.accumulation.policies import ByEpoch, ByStep, CommunicationShare, Fixed, NoiseScale
from lightning_async.rules.accumulation.protocol import AccumulationPolicy, Progress, Times

__all__ = [
    "AccumulationPolicy",
    "ByEpoch",
    "ByStep",
    "CommunicationShare",
    "Fixed",
    "LrScaling",
    "Noise",
    "NoiseScale",
    "Progress",
    "Times",
    "estimate",
    "lr_factor",
]

"""Asynchronous, fault-tolerant distributed training for PyTorch Lightning."""

from lightning_async.callbacks.accumulation import AdaptiveGradientAccumulation
from lightning_async.callbacks.checkpoint import FaultTolerantCheckpoint
from lightning_async.callbacks.divergence import DivergenceMonitor
from lightning_async.callbacks.monitor import AveragingMonitor
from lightning_async.callbacks.peer_memory import PeerMemory
from lightning_async.callbacks.watchdog import HangWatchdog
from lightning_async.data.partitioned import PartitionedSampler, PartitionedStream
from lightning_async.engine.deadlines import Deadlines
from lightning_async.errors import AsyncTrainingError, CollectiveError, CollectiveTimeout, PeerLost
from lightning_async.rules import (
    DelayCompensation,
    DeltaMean,
    DiLoCo,
    EveryNSteps,
    EverySeconds,
    Mean,
    Synchronous,
    Warmup,
)
from lightning_async.strategies.averaging import AsyncAveragingStrategy
from lightning_async.strategies.gradients import AsyncGradientStrategy
from lightning_async.strategies.horovod import HorovodStrategy
from lightning_async.strategies.horovod_elastic import fit_elastic
from lightning_async.transports.horovod import HorovodTransport
from lightning_async.transports.torch import TorchTransport

__version__ = "0.1.0"

__all__ = [
    "AdaptiveGradientAccumulation",
    "AsyncAveragingStrategy",
    "AsyncGradientStrategy",
    "AsyncTrainingError",
    "AveragingMonitor",
    "CollectiveError",
    "CollectiveTimeout",
    "Deadlines",
    "DelayCompensation",
    "DeltaMean",
    "DiLoCo",
    "DivergenceMonitor",
    "EveryNSteps",
    "EverySeconds",
    "FaultTolerantCheckpoint",
    "HangWatchdog",
    "HorovodStrategy",
    "HorovodTransport",
    "Mean",
    "PartitionedSampler",
    "PartitionedStream",
    "PeerLost",
    "PeerMemory",
    "Synchronous",
    "TorchTransport",
    "Warmup",
    "fit_elastic",
]

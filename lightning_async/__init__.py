"""Asynchronous, fault-tolerant distributed training for PyTorch Lightning.

A user passes one of the strategies to the Trainer; everything else follows from the strategy's arguments.

- `AsyncAveragingStrategy`: replicas take local steps, and their parameters are averaged in the background.
- `AsyncGradientStrategy`: replicas accumulate gradients while earlier gradients are averaged in the background.
- `ParameterServerStrategy`: workers push gradients to servers, which hold the weights, and pull weights from them.
- `HorovodStrategy`: synchronous training over Horovod.

Importing this package starts no thread or process; a strategy starts them as training begins, see `strategies`.

Read strategies first, then engine (averaging rounds and sync points) and membership (which ranks are alive). The
algorithms are values without any communication, and can be read alone. docs/contributing has the list of all modules.
"""

from lightning_async.algorithms import (
    EASGD,
    AdaptiveDelayCompensation,
    AdaptiveDiLoCo,
    AdaptiveLr,
    AdaptivePeriod,
    BalancedWindows,
    Bounded,
    Buffered,
    Clipping,
    Dana,
    DelayCompensation,
    DeltaMean,
    DiLoCo,
    DyLU,
    EveryNSteps,
    EverySeconds,
    GapAware,
    MatchCommunication,
    Mean,
    NoCorrection,
    PowerSGD,
    PseudoGradientPenalty,
    SlowMo,
    SparseLoCo,
    StalenessPolicy,
    Synchronous,
    TopK,
    TwoBit,
    Warmup,
    WeightPrediction,
)
from lightning_async.callbacks.accumulation import AdaptiveGradientAccumulation
from lightning_async.callbacks.checkpoint import FaultTolerantCheckpoint
from lightning_async.callbacks.divergence import DivergenceMonitor
from lightning_async.callbacks.monitor import AveragingMonitor
from lightning_async.callbacks.peer_memory import PeerMemory
from lightning_async.callbacks.watchdog import HangWatchdog
from lightning_async.data.partition import PartitionedSampler, PartitionedStream
from lightning_async.engine.timeouts import Timeouts
from lightning_async.errors import AsyncTrainingError, CollectiveError, CollectiveTimeout, PeerLost
from lightning_async.horovod.elastic import fit_elastic
from lightning_async.horovod.strategy import HorovodStrategy
from lightning_async.horovod.transport import HorovodTransport
from lightning_async.strategies.averaging import AsyncAveragingStrategy
from lightning_async.strategies.gradients import AsyncGradientStrategy
from lightning_async.strategies.parameter_server import ParameterServerStrategy
from lightning_async.strategies.server_options import ServerOptions
from lightning_async.transports.torch import TorchTransport

__version__ = "0.1.0"

__all__ = [
    "EASGD", "AdaptiveDelayCompensation", "AdaptiveDiLoCo", "AdaptiveGradientAccumulation", "AdaptiveLr",
    "AdaptivePeriod", "AsyncAveragingStrategy", "AsyncGradientStrategy", "AsyncTrainingError", "AveragingMonitor",
    "BalancedWindows", "Bounded", "Buffered", "Clipping", "CollectiveError", "CollectiveTimeout",
    "Dana", "DelayCompensation", "DeltaMean", "DiLoCo", "DivergenceMonitor", "DyLU", "EveryNSteps", "EverySeconds",
    "FaultTolerantCheckpoint", "GapAware", "HangWatchdog", "HorovodStrategy", "HorovodTransport", "MatchCommunication",
    "Mean", "NoCorrection", "ParameterServerStrategy", "PartitionedSampler", "PartitionedStream", "PeerLost",
    "PeerMemory", "PowerSGD", "PseudoGradientPenalty", "ServerOptions", "SlowMo", "SparseLoCo", "StalenessPolicy",
    "Synchronous", "Timeouts", "TopK", "TorchTransport", "TwoBit", "Warmup", "WeightPrediction", "fit_elastic",
]  # fmt: skip

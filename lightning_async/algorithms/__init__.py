"""The algorithms as small immutable values: the equations of training, without I/O, threads or clocks.

Each algorithm is a frozen dataclass, whose docstring has its equation, its source and an example. The engine, servers
and callbacks call its methods with facts that they have measured, and keep its state.

- An `AveragingRule` says what replicas send, and what they make of the mean: `DeltaMean`, `DiLoCo`, `EASGD`,
  `SparseLoCo`.
- A `Schedule` says when an averaging round begins: `EveryNSteps`, `DyLU`, `MatchCommunication`, `Warmup`.
- A `StalenessPolicy` corrects late pushes on a server; a `DelayCorrection` corrects late windows of gradients.
- `TopK`, `PowerSGD` and the codes compress messages; an `AccumulationPolicy` sets the size of windows.
- A `KeepPolicy` and a `SavePolicy` are for checkpoints; `divergence` holds thresholds and remedies.

Read averaging and schedules first, then outer_optimizers and staleness; read the other modules in any order.
"""

from lightning_async.algorithms.accumulation import (
    AccumulationPolicy,
    BalancedWindows,
    ByEpoch,
    ByStep,
    CommunicationShare,
    Fixed,
    LrScaling,
    Noise,
    NoiseScale,
    Times,
    WindowProgress,
    estimate,
    lr_factor,
)
from lightning_async.algorithms.automatic import AdaptiveDiLoCo, AdaptivePeriod, MatchCommunication
from lightning_async.algorithms.averaging import (
    EASGD,
    AveragingRule,
    AveragingState,
    DeltaMean,
    EASGDState,
    Mean,
    Round,
)
from lightning_async.algorithms.checkpoint_policies import (
    Adaptive,
    AnySave,
    AtEpochEnd,
    Best,
    EveryInterval,
    EveryNth,
    EveryNTrainSteps,
    KeepAny,
    KeepPolicy,
    LastGood,
    Latest,
    Saved,
    SavePolicy,
    SaveProgress,
)
from lightning_async.algorithms.compression import Bf16, Fp8, Int8, PowerSGD, TopK, TwoBit
from lightning_async.algorithms.outer_optimizers import (
    DiLoCo,
    DiLoCoState,
    PenaltyState,
    PseudoGradientPenalty,
    SlowMo,
    SlowMoState,
)
from lightning_async.algorithms.schedules import (
    Action,
    DyLU,
    EveryNSteps,
    EverySeconds,
    ReplicaClock,
    Schedule,
    Synchronous,
    Warmup,
)
from lightning_async.algorithms.sparse_loco import SparseLoCo, SparseLoCoState
from lightning_async.algorithms.staleness import (
    NAMES,
    AdaptiveDelayCompensation,
    AdaptiveLr,
    Bounded,
    Buffered,
    Clipping,
    Dana,
    DelayCompensation,
    DelayCorrection,
    GapAware,
    NoCorrection,
    PushFacts,
    StalenessPolicy,
    Weight,
    WeightPrediction,
    auto,
    described,
    make_policy,
    momentum_warning,
    register_policy,
)

__all__ = [
    "EASGD", "NAMES", "AccumulationPolicy", "Action", "Adaptive", "AdaptiveDelayCompensation", "AdaptiveDiLoCo",
    "AdaptiveLr", "AdaptivePeriod", "AnySave", "AtEpochEnd", "AveragingRule", "AveragingState", "BalancedWindows",
    "Best", "Bf16", "Bounded", "Buffered", "ByEpoch", "ByStep", "Clipping", "CommunicationShare",
    "Dana", "DelayCompensation", "DelayCorrection", "DeltaMean", "DiLoCo", "DiLoCoState",
    "DyLU", "EASGDState", "EveryInterval", "EveryNSteps", "EveryNTrainSteps", "EveryNth", "EverySeconds", "Fixed",
    "Fp8", "GapAware", "Int8", "KeepAny", "KeepPolicy", "LastGood", "Latest", "LrScaling", "MatchCommunication", "Mean",
    "NoCorrection", "Noise", "NoiseScale", "PenaltyState", "PowerSGD", "PseudoGradientPenalty", "PushFacts",
    "ReplicaClock", "Round", "SavePolicy", "SaveProgress", "Saved", "Schedule", "SlowMo", "SlowMoState", "SparseLoCo",
    "SparseLoCoState", "StalenessPolicy", "Synchronous", "Times", "TopK", "TwoBit", "Warmup", "Weight",
    "WeightPrediction", "WindowProgress", "auto", "described", "estimate", "lr_factor", "make_policy",
    "momentum_warning", "register_policy",
]  # fmt: skip

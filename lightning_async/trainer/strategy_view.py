"""`StrategyView`: the properties of a strategy that loops, checkpoints and callbacks read; `view_of` any strategy."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from lightning_async.engine.collectives import LightningCollectives
from lightning_async.engine.sync_points import SyncPoints
from lightning_async.trainer.namespace import pytorch
from lightning_async.trainer.step_runner import StepRunner

_PLAIN_STEPS = StepRunner()


class StrategyView:
    """A strategy as the rest of the package sees it; the base of the strategies of this package, which override what
    differs from Lightning's own strategies."""

    replicated = False
    """A strategy of this package: one whole replica per rank."""
    asynchronous = False
    """Replicas run at their own pace between sync points."""
    in_windows = False
    """The strategy itself gathers the gradients of several batches before a step; see `AsyncGradientStrategy`."""
    served = False
    """Weights are on servers: replicas are copies of them, and there is one model."""
    averages_gradients = False
    """Each optimizer step has the mean of all ranks' gradients; asynchronous replicas step with their own."""
    in_step = False
    """Replicas take every step together, each after the same number of its own batches, as long as it has some."""
    failed = False
    """This rank has ended with an exception: it waits for no other."""
    weight = 1.0
    """Factor of each loss, see `HorovodStrategy`."""
    live_ranks: Any = None
    """The `RankMap` of live ranks; None where no rank may be lost."""
    host: Any = None
    """The `JoinCoordinator`, which admits joining ranks; None where none can join."""
    summary: Any = None
    """The `RunSummary` so far."""
    updates: Any = None
    """`OptimizerUpdates` of the fit; None where a step belongs to the batch that Lightning has at hand."""
    transport: Any = None
    """The `Transport` of the ranks; None where Lightning starts and connects them."""
    connection: Any = None
    """The `Connection` of all ranks; None in a world of one."""
    averager: Any = None
    """The `BackgroundAverager` of this session, if any."""
    gradients: Any = None
    """The `SynchronousGradients` of this session, if any, which move gradients by the engine."""

    @property
    def world(self) -> LightningCollectives | None:
        """Collectives over all ranks; None in a world of one."""
        return None

    @property
    def sync_points(self) -> SyncPoints | None:
        """The sync points of this session; None before training has begun, and where there is one rank."""
        return None

    @property
    def step_runner(self) -> StepRunner:
        """The `StepRunner` of this replica; the base class where nothing is exchanged."""
        return _PLAIN_STEPS

    @property
    def joining(self) -> bool:
        """Whether this rank was started while others train, and is not admitted yet."""
        return False

    @property
    def num_averaged(self) -> int:
        """Number of ranks whose gradients become one before an optimizer step."""
        return 1

    @property
    def in_lockstep(self) -> bool:
        """Whether all ranks must have as many batches before a step; replicas of our engine need not."""
        return not self.asynchronous and self.num_averaged > 1

    @property
    def equal_gradients(self) -> bool:
        """Whether ranks that step together have the same gradients, each of them whole."""
        return self.replicated

    @property
    def averages_parameters(self) -> bool:
        """Whether ranks become equal from time to time only, without this package's doing."""
        return False

    @property
    def shrinks(self) -> bool:
        """Whether training may go on without ranks that are lost."""
        return False

    @property
    def patience(self) -> timedelta:
        """How long too few replicas wait for others."""
        return timedelta(0)

    @property
    def shared_steps(self) -> tuple[int, int] | None:
        """Optimizer steps, as the mean over replicas, when training began and now; learning rates that change per batch
        follow them. None: each replica's follow its own steps."""
        return None

    def start_over(self) -> None:
        """Begin another training with the next batch: all ranks are here, with one model."""

    def begin_again(self) -> None:
        """Become asynchronous again, before a batch or a sync point, if a checkpoint was restored during training."""

    def on_model_changed(self) -> None:
        """Follow another model, which a sync point has given all replicas."""

    def end_epoch(self) -> None:
        """Count an epoch of this rank."""

    def summarise(self) -> None:
        """Complete the summary, at the last sync point."""


class _LightningsView(StrategyView):
    """The answers of a strategy that is none of this package."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    @property
    def num_averaged(self) -> int:
        kwargs = getattr(self._strategy, "distributed_sampler_kwargs", None) or {}
        return int(kwargs.get("num_replicas", 1))

    @property
    def equal_gradients(self) -> bool:
        return isinstance(self._strategy, pytorch("strategies").DDPStrategy)

    @property
    def averages_parameters(self) -> bool:
        return getattr(self._strategy, "_model_averaging_period", None) is not None


def view_of(strategy: Any) -> Any:
    """Return the strategy itself where it is one of this package, else a view of it."""
    return strategy if isinstance(strategy, StrategyView) else _LightningsView(strategy)

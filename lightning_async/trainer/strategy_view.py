"""The properties of a strategy that loops, checkpoints and callbacks read."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from lightning_async.engine.collectives import LightningCollectives
from lightning_async.engine.sync_points import SyncPoints
from lightning_async.trainer.namespace import pytorch
from lightning_async.trainer.step_runner import StepRunner

_PLAIN_STEPS = StepRunner()


class StrategyView:
    """A strategy as the rest of the package sees it.

    It is the base of this package's strategies, which override what differs from Lightning's own strategies.
    """

    replicated = False
    """Whether this is a strategy of this package that keeps a complete replica of the model on each rank."""
    asynchronous = False
    """Whether replicas run at their own pace between sync points."""
    in_windows = False
    """Whether the strategy gathers the gradients of several batches before a step; see `AsyncGradientStrategy`."""
    served = False
    """Whether the weights are on servers. Replicas are copies of these weights, so there is one model."""
    averages_gradients = False
    """Whether each optimizer step has the mean of all ranks' gradients. Asynchronous replicas step with their own."""
    in_step = False
    """Whether replicas take every step together, after equally many batches, as long as they have data."""
    failed = False
    """Whether this rank has ended with an exception, and waits for no other rank."""
    weight = 1.0
    """The factor by which each loss is multiplied; see `HorovodStrategy`."""
    live_ranks: Any = None
    """The `RankMap` of live ranks; None if no rank may be lost."""
    host: Any = None
    """The `JoinCoordinator`, which admits joining ranks; None if none can join."""
    summary: Any = None
    """The `RunSummary` so far."""
    updates: Any = None
    """The `OptimizerUpdates` of the fit; None if each step belongs to the batch that Lightning trains on."""
    transport: Any = None
    """The `Transport` of the ranks; None if Lightning starts and connects them."""
    lost_rank_data: Any = None
    """The `LostRankData` of the fit; None if no rank may be lost."""
    connection: Any = None
    """The `Connection` of all ranks; None in a world of one."""
    averager: Any = None
    """The `BackgroundAverager` of this session, if any."""
    gradients: Any = None
    """The `SynchronousGradients` of this session, if any, which move gradients by the engine."""

    @property
    def world(self) -> LightningCollectives | None:
        """The collectives over all ranks; None in a world of one."""
        return None

    @property
    def sync_points(self) -> SyncPoints | None:
        """The sync points of this session; None before training has begun, and with a single rank."""
        return None

    @property
    def step_runner(self) -> StepRunner:
        """The `StepRunner` of this replica; an object of the base class if the replica exchanges nothing."""
        return _PLAIN_STEPS

    @property
    def joining(self) -> bool:
        """Whether this rank was started while others train, and is not admitted yet."""
        return False

    @property
    def num_averaged(self) -> int:
        """The number of ranks whose gradients are averaged before an optimizer step."""
        return 1

    @property
    def in_lockstep(self) -> bool:
        """Whether all ranks must train on equally many batches before a step. Asynchronous replicas need not."""
        return not self.asynchronous and self.num_averaged > 1

    @property
    def equal_gradients(self) -> bool:
        """Whether all ranks that step together have the same gradients, of all parameters, when they step."""
        return self.replicated

    @property
    def averages_parameters(self) -> bool:
        """Whether something other than this package averages parameters now and then, such as DDP's model averaging."""
        return False

    @property
    def shrinks(self) -> bool:
        """Whether training may continue without ranks that are lost."""
        return False

    @property
    def patience(self) -> timedelta:
        """The time for which training waits for ranks to join when there are fewer replicas than required."""
        return timedelta(0)

    @property
    def num_sharing(self) -> int:
        """The number of ranks that have trained on the samples of the present step; 0: schedules count steps alone."""
        return 0

    @property
    def shared_steps(self) -> tuple[int, int] | None:
        """The mean number of optimizer steps over replicas when training began, and the present one.

        Learning rates that change per batch follow this mean. None: each replica's rates follow its own steps.
        """
        return None

    def start_over(self) -> None:
        """End the present training within this fit, so that `begin_again` begins another one.

        All ranks call this at a sync point, where they have one model.
        """

    def begin_again(self) -> None:
        """Begin another training, with asynchronous replicas, if `start_over` has ended the last one.

        The loops call this before each batch and each sync point. It usually does nothing.
        """

    def on_model_changed(self) -> None:
        """Adapt to a model that a sync point has replaced on all replicas."""

    def end_epoch(self) -> None:
        """Count an epoch that this rank has finished."""

    def summarise(self) -> None:
        """Complete the run's summary, at the last sync point."""


class _LightningsView(StrategyView):
    """The view of a strategy that is not of this package."""

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
    """Return ``strategy`` if it is of this package, and otherwise a `StrategyView` of it."""
    return strategy if isinstance(strategy, StrategyView) else _LightningsView(strategy)

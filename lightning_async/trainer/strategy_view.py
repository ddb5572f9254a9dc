"""`StrategyView`: what the loops, checkpoints and callbacks ask of a strategy; `view_of` asks any strategy."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from lightning_async.engine.collectives import LightningCollectives
from lightning_async.engine.sync_points import SyncPoints
from lightning_async.trainer.step_runner import StepRunner

_PLAIN_STEPS = StepRunner()


class StrategyView:
    """A strategy as the rest of the package sees it. This base answers as a strategy of Lightning's own.

    The strategies of this package inherit from it, and replace what is otherwise with them.
    """

    replicated = False
    """A strategy of this package: one whole replica per rank."""
    asynchronous = False
    """Replicas run at their own pace between sync points."""
    in_windows = False
    """The strategy itself gathers the gradients of several batches before a step; see `AsyncGradientStrategy`."""
    served = False
    """Weights are on servers: replicas are copies of them, and there is one model."""
    in_step = False
    """Replicas take every step together, each after the same number of its own batches, as long as it has some."""
    failed = False
    """This rank has ended with an exception: it waits for nobody."""
    weight = 1.0
    """What each loss is multiplied by, see `HorovodStrategy`."""
    live_ranks: Any = None
    """The live ranks of those that began, see `RankMap`; None where all are, or must be."""
    host: Any = None
    """Admits joining ranks, see `JoinCoordinator`; None where nobody can come."""
    summary: Any = None
    """What the run has done so far, see `RunSummary`."""
    updates: Any = None
    """`OptimizerUpdates` of the fit; None where a step belongs to the batch that Lightning has at hand."""

    @property
    def connection(self) -> Any:
        """`Connection` of all ranks; None in a world of one."""
        return None

    @property
    def world(self) -> LightningCollectives | None:
        """Collectives over all ranks; None in a world of one."""
        return None

    @property
    def averager(self) -> Any:
        """The `BackgroundAverager` of this session; None where there is none."""
        return None

    @property
    def gradients(self) -> Any:
        """`SynchronousGradients` of this session, which move gradients by the engine; None where there is none."""
        return None

    @property
    def sync_points(self) -> SyncPoints | None:
        """The sync points of this session; None before training has begun, and where there is one rank."""
        return None

    @property
    def step_runner(self) -> StepRunner:
        """Takes the steps of this replica; where nothing is exchanged, as they come."""
        return _PLAIN_STEPS

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
        """Optimizer steps per replica, the mean over all: when training began, and now.

        Learning rates that change per batch follow them; None: each replica's follow its own steps.
        """
        return None

    def start_over(self) -> None:
        """Begin another training with the next batch: all ranks are here, with one model."""

    def begin_again(self) -> None:
        """Before a batch or a sync point: if a checkpoint was restored during training, be asynchronous from there."""

    def on_model_changed(self) -> None:
        """Follow another model, which a sync point has given all replicas."""

    def end_epoch(self) -> None:
        """Count an epoch of this rank's."""

    def summarise(self) -> None:
        """Complete the summary: all replicas are at the last sync point."""


_OTHERS = StrategyView()


def view_of(strategy: Any) -> Any:
    """Return the strategy itself where it is one of this package, else the answers of one that is not."""
    return strategy if isinstance(strategy, StrategyView) else _OTHERS

"""What a strategy of asynchronous replicas offers to the changes in Lightning's loops, whatever replicas exchange."""

from __future__ import annotations

from typing import Any, Protocol

from lightning_async.engine.collectives import LightningCollectives
from lightning_async.engine.sync_points import SyncPoints
from lightning_async.trainer.step_runner import StepRunner


class AsyncStrategyView(Protocol):
    """A strategy whose replicas run at their own pace between sync points."""

    failed: bool
    """This rank has ended with an exception: it waits for nobody."""

    @property
    def shrinks(self) -> bool:
        """Training may go on without ranks that are lost."""
        ...

    live_ranks: Any
    """Who is there of the ranks that began, see `RankMap`; None where all are, or must be."""

    @property
    def patience(self) -> Any:
        """How long too few replicas wait for others, a timedelta."""
        ...

    @property
    def connection(self) -> Any:
        """Of all ranks, see `Connection`; None in a world of one."""
        ...

    host: Any
    """Takes joining ranks in, see `CollectiveCallback`; None where nobody can come."""

    @property
    def sync_points(self) -> SyncPoints | None:
        """None before training has begun, and where there is one rank."""
        ...

    @property
    def step_runner(self) -> StepRunner:
        """Takes the steps of this replica."""
        ...

    @property
    def world(self) -> LightningCollectives | None:
        """Collectives over all ranks; None in a world of one."""
        ...

    @property
    def shared_steps(self) -> tuple[int, int] | None:
        """Optimizer steps per replica, the mean over all: when training began, and now.

        Learning rates that change per batch follow them; None: each replica's follow its own steps.
        """
        ...

    in_step: bool
    """Replicas take every step together, each after the same number of its own batches, as long as it has some."""

    served: bool
    """Weights are on servers: replicas are copies of them, and there is one model."""

    def start_over(self) -> None:
        """All ranks are here, with one model: the training that begins with the next batch is another one."""
        ...

    def begin_again(self) -> None:
        """Before a sync point: if a checkpoint was restored during training, be asynchronous from there."""
        ...

    def on_model_changed(self) -> None:
        """A sync point has given all replicas another model."""
        ...

    def end_epoch(self) -> None:
        """An epoch of this rank's is over."""
        ...

    def summarise(self) -> None:
        """All replicas are at the last sync point."""
        ...

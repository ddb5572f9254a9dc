"""`trainer.fit` under Horovod Elastic: entered again from memory when ranks are lost or come."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lightning_async.comm.horovod.collectives import HorovodCollectives
from lightning_async.comm.horovod.elastic import Committed, run_elastic
from lightning_async.comm.horovod.world import HorovodWorld
from lightning_async.engine.world import World
from lightning_async.strategies.commits import Commit, Commits, agree
from lightning_async.strategies.drifting import DriftingStrategy
from lightning_async.strategies.horovod import HorovodStrategy
from lightning_async.trainer.loggers import take_places
from lightning_async.transports.horovod import HorovodTransport

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["check_carried", "fit_elastic"]

_fits = itertools.count(1)  # of this process


def fit_elastic(
    make_trainer: Callable[[], Trainer],
    module: LightningModule,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    *,
    datamodule: Any = None,
    commit_every: int = 10,
    gloo_timeout: timedelta = timedelta(seconds=30),
) -> Trainer:
    """`trainer.fit`, for ranks that come and go: ``horovodrun --min-np 1 --max-np 4 --host-discovery-script ...``.

    All ranks commit together, in memory: every so many steps, and at the end of every epoch. When a rank is lost, the
    others go back to the last commit and train on without it; a rank that joins is given it. What was not committed of
    the epoch is dealt out anew among those that are there, each sample once.

    Args:
        make_trainer: makes a new Trainer with ``strategy=HorovodStrategy()``, or with ``AsyncAveragingStrategy()`` or
            ``AsyncGradientStrategy()`` over Horovod; called for every world.
        module: what is trained.
        train_dataloaders, val_dataloaders, datamodule: as for `Trainer.fit`.
        commit_every: steps between two commits: so many are lost at most. A commit copies the model and the
            optimizers' state. Replicas that average meet for it and become one model: give them a few rounds. Default
            10.
        gloo_timeout: how long a rank that is lost without a trace (a host without power) goes unnoticed, and how long
            the others wait for one that comes, while it imports. Default 30 seconds.

    Returns:
        The last Trainer.

    Raises:
        ValueError: ``commit_every`` is not positive, or the Trainer's strategy is none that Horovod carries.
        SettingsMismatch: on a rank with another strategy than rank 0, or that commits at other steps.
    """
    if commit_every < 1:
        raise ValueError(f"`fit_elastic(commit_every={commit_every})` must be at least 1.")
    committed, number = Committed(Commit()), next(_fits)
    trainers = []

    def train() -> None:
        trainer = make_trainer()
        strategy: Any = trainer.strategy
        check_carried(strategy)
        trainers[:] = [trainer]
        with _one_world() as world:
            settings = re.sub(" at 0x[0-9a-f]+", "", f"fit {number}, {strategy!r}, commit_every={commit_every}")
            committed.value, exact = agree(world, committed.value, settings)
        take_places(trainer, committed.value.logs)
        commits = Commits(committed, commit_every, exact)
        trainer.callbacks = [commits, *trainer.callbacks]  # pyright: ignore[reportAttributeAccessIssue]
        try:
            path = commits.read_by(strategy)
            trainer.fit(module, train_dataloaders, val_dataloaders, datamodule=datamodule, ckpt_path=path)
        finally:
            commits.close()
            trainer.callbacks = [each for each in trainer.callbacks if each is not commits]  # pyright: ignore

    run_elastic(train, committed, _broadcast, gloo_timeout)
    return trainers[0]


def check_carried(strategy: Any) -> None:
    """Whether ranks that come and go can train with it.

    Raises:
        ValueError: they cannot; says why.
    """
    if not isinstance(strategy, HorovodStrategy | DriftingStrategy) or not isinstance(
        strategy.transport, HorovodTransport
    ):
        raise ValueError(
            "`fit_elastic` trains with `Trainer(strategy=HorovodStrategy())`, or with `AsyncAveragingStrategy("
            f"transport='horovod')` or `AsyncGradientStrategy(transport='horovod')`; `make_trainer` chose {strategy!r}."
        )
    config = strategy.config if isinstance(strategy, DriftingStrategy) else None
    for name in ("min_replicas", "max_replicas"):
        if (number := getattr(config, name, None)) is not None:
            raise ValueError(
                f"`{type(strategy).__name__}({name}={number})` under `fit_elastic`: how many ranks there are is "
                "for horovodrun's `--min-np` and `--max-np`. Leave it out."
            )


def _broadcast(obj: Any) -> Any:
    """Rank 0's object, between two fits or within one."""
    with _one_world() as world:
        return world.broadcast(obj)


@contextmanager
def _one_world() -> Iterator[World]:
    """Collectives of all ranks that there are, between two fits or within one."""
    horovod = HorovodWorld.join()
    horovod.num_runs += 1
    collectives = HorovodCollectives(horovod, name=f"run{horovod.num_runs}")
    try:
        yield World(collectives)
    finally:
        collectives.close()

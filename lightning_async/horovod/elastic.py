"""Horovod Elastic: `fit_elastic` starts a fit again, from memory, when ranks are lost or join.

`Commits` keeps the commits in memory. A commit is a state of the fit on which all ranks have agreed.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from lightning_async._checks import check_number
from lightning_async.callbacks.checkpoint import FaultTolerantCheckpoint
from lightning_async.data.random_states import of_another
from lightning_async.data.redistribution import deal, deal_steps
from lightning_async.engine.collectives import LightningCollectives
from lightning_async.errors import SettingsMismatch
from lightning_async.horovod.collectives import Committed, HorovodCollectives, HorovodWorld, run_elastic
from lightning_async.horovod.transport import HorovodTransport
from lightning_async.trainer.checkpoint.checkpoint_recovery import MemoryIO
from lightning_async.trainer.checkpoint.checkpoint_state import TrainerState
from lightning_async.trainer.checkpoint.resume import Resume
from lightning_async.trainer.checkpoint.safe_points import LastSafeState
from lightning_async.trainer.data.samplers import resized, weight_of_the_last
from lightning_async.trainer.loops.loggers import places, take_places
from lightning_async.trainer.loops.sync_points import CollectiveCallback
from lightning_async.trainer.namespace import Callback, Undo, override, searches_lr, set_for_now, take_back
from lightning_async.trainer.strategy_view import view_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

IN_MEMORY = "(the last commit, in memory)"
_OF_PLACES = ("taken", "made", "drawn", "share", "ended")


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A state of training that one rank has committed."""

    number: int = 0  # counts commits; equal on all ranks for one moment
    dealt: tuple[int, int] = (0, 0)  # ``(rank, world_size)`` at that moment
    checkpoint: dict[str, Any] | None = None  # this rank's Lightning checkpoint; None before training
    resume: dict[str, Any] | None = None  # the state for `Resume`; None before the first batch
    places: list[Any] = field(default_factory=list)  # the positions of all ranks' loaders
    weight: float = 1.0  # weight of this rank's last batch in the epoch; see `HorovodStrategy.weight`
    # The places where rank 0's loggers write, see `loggers.places`, because each world's Trainer has new loggers.
    logs: list[dict[str, Any]] = field(default_factory=list)


def agree(world: LightningCollectives, mine: Commit, settings: str) -> tuple[Commit, bool]:
    """Return the commit from which this rank continues, and whether ranks and world size are as at that commit.

    A rank whose commit is not of the same moment as rank 0's takes over rank 0's commit, as a new rank does. Raises
    SettingsMismatch if this rank trains with other settings than rank 0.
    """
    # Settings are compared first, because ranks with other settings would wait in different collectives.
    told = world.gather_objects([mine.number, *mine.dealt, settings])
    if settings != told[0][3]:
        raise SettingsMismatch(
            f"Rank {world.rank} cannot train with the others under `fit_elastic`: it has {settings}, and rank 0 has "
            f"{told[0][3]}. Start all with the same program; one with several fits can be joined in its first."
        )
    number = told[0][0]
    if any(each[0] != number for each in told):
        first = world.broadcast(mine if world.rank == 0 else None)
        assert first is not None
        if mine.number != number:
            mine = _of_a_joining_rank(first, world.rank)
    exact = all(each[:3] == [number, rank, len(told)] for rank, each in enumerate(told))
    return mine, exact


def _of_a_joining_rank(first: Commit, rank: int) -> Commit:
    if first.resume is None:
        return first
    random = of_another(first.resume["random"], rank)
    return Commit(**{**vars(first), "resume": {**first.resume, "random": random}})


class Commits(CollectiveCallback, Callback):
    """A callback that restores the last commit, and commits at intervals of steps and at the end of each epoch.

    Ranks that step together commit after the same step. Asynchronous replicas come to a sync point for it.

    Raises:
        ValueError: The Trainer's strategy does not allow ranks to come and go; the message has the reason.
    """

    def __init__(self, committed: Committed[Commit], every: int, trainer: Any) -> None:
        strategy = view_of(trainer.strategy)
        if not isinstance(strategy.transport, HorovodTransport):
            raise ValueError(
                "`fit_elastic` trains with `Trainer(strategy=HorovodStrategy())`, or with `AsyncAveragingStrategy("
                "transport='horovod')` or `AsyncGradientStrategy(transport='horovod')`; `make_trainer` chose "
                f"{trainer.strategy!r}."
            )
        config = strategy.config if strategy.asynchronous else None
        for name in ("min_replicas", "max_replicas"):
            if (number := getattr(config, name, None)) is not None:
                raise ValueError(
                    f"`{type(strategy).__name__}({name}={number})` under `fit_elastic`: how many ranks there are is "
                    "for horovodrun's `--min-np` and `--max-np`. Leave it out."
                )
        self._committed = committed
        self._every = every
        self._trainer = trainer
        self._strategy = strategy
        self._state = TrainerState(trainer)
        self.exact = False
        """Whether every rank has the rank that it had at the commit."""
        self._resume: Resume | None = None
        self._undo: list[Undo] = []
        # The step of the last commit.
        self._step = 0
        self._epoch = -1
        self._weight = 1.0
        """The weight of the last batch in the epoch ``_epoch``, which was resumed."""

    def path(self) -> str | None:
        """Register the commit under a made-up path, from which the strategy can load it; return this path.

        Returns None if there is no commit.
        """
        checkpoint = self._committed.value.checkpoint
        if checkpoint is None:
            return None
        from_memory = MemoryIO(self._strategy.checkpoint_io, IN_MEMORY, checkpoint)
        self._undo.append(set_for_now(self._strategy, "_checkpoint_io", from_memory))
        return IN_MEMORY

    def close(self) -> None:
        take_back(self._undo)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and self._beside() is None:
            self._resume = Resume(trainer)
            self._undo += self._resume.install()
            self._undo.append(override(self._strategy, "load_model_state_dict", self._state.load_model))

    def _beside(self) -> FaultTolerantCheckpoint | None:
        """Return the Trainer's `FaultTolerantCheckpoint`, if any. Its `Resume` then also restores commits."""
        return next((each for each in self._trainer.callbacks if isinstance(each, FaultTolerantCheckpoint)), None)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        beside = self._beside()
        commit = self._committed.value
        rank = trainer.global_rank
        ranks = trainer.world_size
        if beside is not None:
            self._resume = beside.resume
        if self._resume is None or searches_lr(trainer):
            return
        self._undo.append(override(self._resume, "on_boundary", self._after))
        self._step = 0
        self._weight = commit.weight
        self._epoch = -1
        if commit.resume is None or commit.checkpoint is None:
            return
        state: Any = copy.deepcopy(commit.resume)
        if not self.exact:
            together = not self._strategy.asynchronous
            dealt = [{"loaders": place} for place in commit.places]
            state = resized(dealt, rank, ranks, state, deal_steps if together else deal)
            self._weight = weight_of_the_last(state, rank, ranks) if together else 1.0
        self._resume.restore(state)
        self._step = commit.checkpoint["global_step"]
        self._epoch = commit.checkpoint["epoch"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._resume is None:
            return
        if self._beside() is None:
            self._resume.points.keeps = self.call_together is not None
            self._undo.append(self._resume.points.follow())
        if self._committed.value.checkpoint is None:
            self._commit(LastSafeState(None, None), "start")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self._strategy.asynchronous:
            is_last = trainer.current_epoch == self._epoch and batch_idx + 1 == trainer.num_training_batches
            self._strategy.weight = self._weight if is_last else 1.0

    def _after(self, original: Callable[[], None]) -> None:
        original()
        resume = self._resume
        assert resume is not None
        asynchronous = self.call_together is not None and self._strategy.sync_points is not None
        if resume.where == "epoch":
            if not asynchronous or not self._strategy.world.asynchronous:
                self._commit(LastSafeState(resume.capture(), None), "epoch")
        elif resume.where == "batch" and self._is_due(asynchronous):
            if asynchronous:
                assert self.call_together is not None
                self.call_together()
            else:
                self._commit(LastSafeState(resume.capture(), None), "batch")

    def _is_due(self, asynchronous: bool) -> bool:
        step = self._trainer.global_step
        loop = self._trainer.fit_loop.epoch_loop
        if asynchronous:
            return step >= self._step + self._every
        # The end of an epoch has a commit of its own.
        return step > self._step and step % self._every == 0 and not loop.batch_progress.is_last_batch

    def decide(self, world: LightningCollectives) -> bool:
        """Commit at a sync point, where all replicas hold one model; return False, because the model is unchanged."""
        assert self._resume is not None
        with self._resume.as_it_was() as state:
            if all(world.gather_objects(state.resume is not None)):
                self._commit(state, "sync_point")
        return False

    def _commit(self, state: LastSafeState, where: str) -> None:
        trainer = self._trainer
        strategy = self._strategy
        number = self._committed.value.number + 1
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        self._state.add_left_out(checkpoint)
        if state.callbacks is not None:
            checkpoint["callbacks"] = state.callbacks
        # The loops have not begun yet.
        if state.resume is None:
            del checkpoint["loops"]
        strategy.write_state(checkpoint, f"commit {number}")
        told = [[[_place(each, where) for each in (state.resume or {}).get("loaders", [])], places(trainer.loggers)]]
        if strategy.world is not None:
            told = strategy.world.gather_objects(told[0])
        self._step = trainer.global_step
        in_epoch = where != "epoch" and trainer.current_epoch == self._epoch
        commit = Commit(
            number=number, dealt=(trainer.global_rank, trainer.world_size), checkpoint=_to_memory(checkpoint),
            resume=_to_memory(state.resume), places=[place for place, _ in told],
            weight=self._weight if in_epoch else 1.0, logs=told[0][1],
        )  # fmt: skip
        with self._leaving_together():
            self._committed.commit(commit)

    @contextmanager
    def _leaving_together(self) -> Iterator[None]:
        """Keep the strategy from reporting a failure if a change of hosts interrupts the commit on all ranks."""
        try:
            yield
        except RuntimeError as error:
            # Only this interruption is common to all ranks. A real failure must still be reported.
            if type(error).__name__ == "HostsUpdatedInterrupt":
                self._undo.append(set_for_now(self._strategy, "on_exception", lambda exception: None))
            raise


def _place(position: dict[str, Any], where: str) -> dict[str, Any]:
    return {"ended": True} if where == "epoch" else {key: position[key] for key in _OF_PLACES if key in position}


def _to_memory(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return type(value)((key, _to_memory(each)) for key, each in value.items())
    if type(value) in (list, tuple):
        return type(value)(_to_memory(each) for each in value)
    return copy.deepcopy(value)


# Numbers the calls of `fit_elastic` in this process.
_fits = itertools.count(1)


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
    """Run `trainer.fit` with ranks that come and go, under ``horovodrun --min-np 1 --max-np 4``.

    Start it with ``horovodrun --min-np 1 --max-np 4 --host-discovery-script ...``. All ranks commit together, in
    memory, at intervals of steps and at the end of every epoch. When a rank is lost, the others return to the last
    commit and train on without it. A rank that joins begins from that commit. The part of the epoch after the commit
    is distributed again among the live ranks, so that each sample counts once.

    Args:
        make_trainer: Function that makes a new Trainer with ``strategy=HorovodStrategy()``, or with
            ``AsyncAveragingStrategy()`` or ``AsyncGradientStrategy()`` over Horovod. It is called at the start, and
            again after each change of ranks.
        module: Module to train.
        train_dataloaders: As for `Trainer.fit`.
        val_dataloaders: As for `Trainer.fit`.
        datamodule: As for `Trainer.fit`.
        commit_every: Number of steps between two commits, which is the largest number of steps that are lost. A commit
            copies the model and the optimizers' state. Asynchronous replicas need a sync point for a commit, so choose
            a number of steps in which there are several rounds. Default: 10.
        gloo_timeout: Time after which the other ranks notice that a rank is silent (its host has lost power), and time
            for which they wait for a joining rank while it imports. Default: 30 seconds.

    Returns:
        The last Trainer.

    Raises:
        TypeError: ``commit_every`` is no int.
        ValueError: ``commit_every`` is not positive, or Horovod does not support the Trainer's strategy.
        SettingsMismatch: This rank has another strategy or another ``commit_every`` than rank 0.
    """
    check_number("fit_elastic", "commit_every", commit_every, at_least=1)
    committed = Committed(Commit())
    number = next(_fits)
    trainers = []

    def train() -> None:
        trainer = make_trainer()
        commits = Commits(committed, commit_every, trainer)
        trainers[:] = [trainer]
        with _one_world() as world:
            settings = re.sub(" at 0x[0-9a-f]+", "", f"fit {number}, {trainer.strategy!r}, commit_every={commit_every}")
            committed.value, commits.exact = agree(world, committed.value, settings)
        take_places(trainer.loggers, committed.value.logs)
        trainer.callbacks = [commits, *trainer.callbacks]  # pyright: ignore[reportAttributeAccessIssue]
        try:
            trainer.fit(module, train_dataloaders, val_dataloaders, datamodule=datamodule, ckpt_path=commits.path())
        finally:
            # A failed fit is followed by another one, with a new Trainer and the same module.
            commits.close()
            trainer.callbacks = [each for each in trainer.callbacks if each is not commits]  # pyright: ignore

    run_elastic(train, committed, _broadcast, gloo_timeout)
    return trainers[0]


def _broadcast(obj: Any) -> Any:
    with _one_world() as world:
        return world.broadcast(obj)


@contextmanager
def _one_world() -> Iterator[LightningCollectives]:
    horovod = HorovodWorld.join()
    horovod.num_runs += 1
    collectives = HorovodCollectives(horovod, name=f"run{horovod.num_runs}")
    try:
        yield LightningCollectives(collectives)
    finally:
        collectives.close()

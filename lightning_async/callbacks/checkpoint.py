"""Verified checkpoints that do not stall training, and from which `fit` resumes by itself."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, get_args

from lightning_async._checks import check_bool, check_choice, check_int, check_number, check_protocol, check_time
from lightning_async.algorithms import (
    Adaptive,
    AnySave,
    Best,
    EveryInterval,
    EveryNTrainSteps,
    KeepAny,
    KeepPolicy,
    Latest,
    SavePolicy,
)
from lightning_async.checkpoint.recovery import STRATEGIES, candidates
from lightning_async.checkpoint.store import CheckpointStore
from lightning_async.engine.collectives import LightningCollectives
from lightning_async.trainer.checkpoint.checkpoint_recovery import FILES, load_folders
from lightning_async.trainer.checkpoint.checkpointing import Checkpointing
from lightning_async.trainer.checkpoint.save_timing import Settings
from lightning_async.trainer.loops.loggers import keep_files_until_saved
from lightning_async.trainer.loops.preemption import TRY_AGAIN, StopSignal
from lightning_async.trainer.loops.sync_points import CollectiveCallback
from lightning_async.trainer.namespace import check_object, pytorch
from lightning_async.trainer.strategy_view import view_of

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Checkpoint
else:
    Checkpoint = pytorch("callbacks").Checkpoint

Busy = Literal["latest", "wait", "skip"]
Objects = Literal["refuse", "pickle"]
_SHARDED = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")


def save_policy(
    owner: str, save: SavePolicy | None, steps: int | None, interval: timedelta | None = None
) -> SavePolicy:
    """Return the save policy that a callback's arguments describe.

    If several of them are given, a save is due when any of them is due. Without any, return ``Adaptive()``.

    Args:
        owner: Name of the callback's class, for error messages.
        save: Policy, or None.
        steps: Number of optimizer steps from one save to the next, or None.
        interval: Time from one save to the next. Default: None.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A number or time is out of range.
    """
    policies: list[SavePolicy] = [] if save is None else [save]
    if steps is not None:
        check_number(owner, "every_n_train_steps", steps, at_least=1)
        policies.append(EveryNTrainSteps(steps))
    if interval is not None:
        check_time(owner, "train_time_interval", interval)
        policies.append(EveryInterval(interval))
    for policy in policies:
        check_protocol(owner, "save", policy, SavePolicy, "a policy such as `EveryNTrainSteps(100)`")
    return policies[0] if len(policies) == 1 else AnySave(*policies) if policies else Adaptive()


class FaultTolerantCheckpoint(CollectiveCallback, Checkpoint):
    """A callback that saves everything for an exact resume, while training continues; `fit` resumes by itself.

    State is copied into the memory of another process, which writes it. Training pauses only for the copy, and a copy
    is written even if training is killed. A checkpoint is a directory ``dirpath/000017-step-1200``, which exists
    completely or not at all. Before a resume, every byte of the checkpoint is verified. Damaged checkpoints are
    renamed, and the newest undamaged one is used. Reading files executes no code in them, unless ``objects="pickle"``.

    A checkpoint holds each rank's parameters, optimizers, schedulers, scaler, loops, callbacks, random states, data
    loader positions and accumulated gradients. Training after a resume is bit-equal with uninterrupted training, for a
    single device, DDP and synchronous steps of this package's strategies. After a SIGTERM to any rank, all ranks save
    once more and end with exit code 75 (try again).

    Args:
        dirpath: Directory that all ranks see, or a URL that fsspec knows; no other training may use it. If ranks take
            every step together, each host may have a directory of its own.
        every_n_train_steps: Save after each time this number of optimizer steps.
        train_time_interval: Save after each time this interval.
        save: Alternatively, a policy of `lightning_async.algorithms`. Default, without any of the three:
            ``Adaptive(share=0.05)``, which saves as often as is possible within 5% of the training time. With any
            policy, the end of training is saved, too.
        keep: Policy that says which checkpoints to keep. Default: ``Latest(2)``. The newest, the last good one and the
            one resumed from are always kept.
        recover: Checkpoint from which a plain ``trainer.fit(model)`` resumes: ``"auto"`` (default) or ``"latest"``, the
            newest complete one; ``"best"``, by the `Best` policy in ``keep``; ``"last_good"``; ``"step=N"``; or None:
            training begins from scratch.
        busy: Handling of a save that is due while the last one is still being written: ``"latest"`` (default) saves as
            soon as the last one is written, ``"skip"`` drops the new save, and with ``"wait"`` training waits.
        buffers: Number of copies of the state in memory, 1 or 2. Default: 2.
        max_failures: Number of failed saves in a row after which training ends with an error. Default: 3.
        good_after: With a `DivergenceMonitor`, number of steps without an alarm after which a checkpoint is good.
            Default: 20.
        save_on_exception: Save the training so far when an exception ends it; each rank saves alone, without waiting
            for the others. Default: True.
        objects: Handling of objects that are no plain values or tensors, such as one that a module puts into the
            checkpoint in ``on_save_checkpoint``. ``"refuse"`` (default): an error names the first one when training
            begins; hyper-parameters that are such objects are not saved, and a warning names them. ``"pickle"``: such
            objects are pickled, and checkpoints with them are loaded, which executes code in them.
        trainable_only: Leave out frozen parameters, for fine-tuning. A resume takes them from the module as it was
            built, and compares a sample of each with the training that saved. A frozen parameter is saved if its
            sample has changed since training began. Default: False.

    Raises:
        TypeError: A policy lacks a method, or an argument is of another type.
        ValueError: An argument is out of range.

    Source: CheckFreq (Mohan et al., FAST 2021) for when to save; Orbax for policies of what to keep.

    >>> FaultTolerantCheckpoint("runs/checkpoints", every_n_train_steps=100)
    FaultTolerantCheckpoint('runs/checkpoints', save=EveryNTrainSteps(n=100), keep=Latest(n=2), recover='auto')
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str],
        *,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        save: SavePolicy | None = None,
        keep: KeepPolicy | None = None,
        recover: str | None = "auto",
        busy: Busy = "latest",
        buffers: int = 2,
        max_failures: int = 3,
        good_after: int = 20,
        save_on_exception: bool = True,
        objects: Objects = "refuse",
        trainable_only: bool = False,
    ) -> None:
        owner = type(self).__name__
        policy = save_policy(owner, save, every_n_train_steps, train_time_interval)
        keep = Latest(2) if keep is None else keep
        check_protocol(owner, "keep", keep, KeepPolicy, "a policy such as `Latest(3)`")
        check_choice(owner, "busy", busy, get_args(Busy))
        check_choice(owner, "buffers", buffers, (1, 2))
        check_choice(owner, "objects", objects, get_args(Objects))
        check_bool(owner, "save_on_exception", save_on_exception)
        check_bool(owner, "trainable_only", trainable_only)
        best = _best(keep)
        if recover is not None and not (recover.startswith("step=") and recover[5:].isdecimal()):
            check_choice(owner, "recover", recover, (*STRATEGIES, "step=N", None))
        if recover == "best" and best is None:
            raise ValueError(f"`{owner}(recover='best')` needs `keep=Best(monitor=...)`, alone or within `KeepAny`.")
        self.max_failures = max_failures
        self.good_after = good_after
        check_int(self, "max_failures", at_least=1)
        check_int(self, "good_after", at_least=1)
        self.settings = Settings(
            os.fspath(dirpath), policy, keep, recover, busy, buffers, max_failures, good_after, best,
            save_on_exception, objects, trainable_only,
        )  # fmt: skip
        self._now: Checkpointing | None = None
        # Not in a fit: scripts load checkpoints after it, and loggers open their files before callbacks run.
        load_folders()
        keep_files_until_saved()
        StopSignal.install()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        check_object(self, trainer)
        StopSignal.install()
        strategy = type(trainer.strategy).__name__
        if any(kind.__name__ in _SHARDED for kind in type(trainer.strategy).__mro__):
            raise ValueError(
                f"`{type(self).__name__}` does not know the sharded state of `{strategy}` yet: use that strategy's own "
                "checkpoints, or a strategy whose ranks hold whole replicas."
            )
        # Move this callback to the end, so that `trainer.checkpoint_callback` and "best" are of the user's
        # `ModelCheckpoint`.
        trainer.callbacks = [*(each for each in trainer.callbacks if each is not self), self]
        self._now = Checkpointing(trainer, self.settings, self._call)
        self._now.install()

    def _call(self) -> None:
        if self.call_together is not None:
            self.call_together()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to save; raise ValueError if ranks that step together may differ in weights or optimizer state."""
        kinds = [type(optimizer).__name__ for optimizer in trainer.strategy.optimizers]
        if "ZeroRedundancyOptimizer" in kinds or view_of(trainer.strategy).averages_parameters:
            raise ValueError(
                f"`{type(self).__name__}` takes ranks that step together for equal, which they are not with "
                "`ZeroRedundancyOptimizer` or `DDPStrategy(model_averaging_period=)`: use a strategy of this package "
                "for asynchronous replicas, or an optimizer whose state is whole on each rank."
            )
        if self._now is not None:
            self._now.start()

    def state_dict(self) -> dict[str, Any]:
        paths = [] if self._now is None else self._now.written.paths
        return {FILES: paths} if paths else {}

    def for_joining_ranks(self) -> dict[str, Any]:
        return {} if self._now is None else self._now.for_joining_ranks()

    def come(self, told: dict[str, Any]) -> None:
        if self._now is not None and told:
            self._now.come(told)

    def save_together(self, world: LightningCollectives) -> None:
        if self._now is not None:
            self._now.save_together()

    def roll_back(self, trainer: Any) -> int | None:
        """Restore the newest good checkpoint; see `RollsBack`."""
        return None if self._now is None else self._now.roll_back()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._now is not None:
            self._now.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Save the training so far; after a SIGTERM, set exit code 75, which asks the launcher to start again."""
        if self._now is not None:
            self._now.fail(exception)
            if isinstance(exception, pytorch("utilities.exceptions").SIGTERMException):
                exception.code = TRY_AGAIN  # pyright: ignore[reportAttributeAccessIssue]  (a SystemExit)

    @property
    def resume(self) -> Any:
        """The `Resume` of the fit under way; None outside of a fit."""
        return None if self._now is None else self._now.resume

    @property
    def best_model_path(self) -> str:
        """The path that Lightning uses for ``ckpt_path="best"``, and for evaluation without a model.

        It is the path of the best checkpoint by the `Best` policy in ``keep``. Without such a policy, it is the path of
        the newest checkpoint. It is ``""`` if there is no checkpoint.
        """
        best = self.settings.best
        found = candidates(CheckpointStore(self.settings.dirpath).entries(), "best" if best else "latest", best)
        return found[0].path if found else ""

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        """Ignore the path that Lightning copies from ranks it has forked or spawned: the getter reads the directory."""

    def __repr__(self) -> str:
        s = self.settings
        return f"{type(self).__name__}({s.dirpath!r}, save={s.save!r}, keep={s.keep!r}, recover={s.recover!r})"


def _best(keep: KeepPolicy) -> Best | None:
    if isinstance(keep, Best):
        return keep
    inner = keep.policies if isinstance(keep, KeepAny) else ()
    return next((best for policy in inner if (best := _best(policy)) is not None), None)

"""Checkpoints that do not stall training, that are verified, and that `fit` resumes from by itself."""

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
from lightning_async.trainer.checkpoint.checkpointing import Checkpointing
from lightning_async.trainer.checkpoint.save_timing import Settings
from lightning_async.trainer.loops.preemption import TRY_AGAIN
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
    """Return the policy that a callback's arguments ask for; raise TypeError or ValueError for bad ones."""
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
    """Saves all that training needs to go on exactly, while training goes on; `fit` resumes by itself.

    State is copied into memory of another process, which writes it: training stands still for the copy only, and what
    was copied is written even if training is killed. A checkpoint is a directory ``dirpath/000017-step-1200``, which is
    there whole or not at all. Before one is resumed from, every byte of it is verified; damaged ones are set aside by
    name, and the next one is taken. Files are read without executing anything in them, unless ``objects="pickle"``.

    It holds parameters, optimizers, schedulers, scaler, loops, callbacks, random states, positions of data loaders and
    gradients in accumulation, of every rank its own. What follows a resume is equal, to the bit, to what would have
    followed without an interruption, for a single device, DDP and synchronous steps of this package's strategies.

    SIGTERM to any rank saves once more, on all of them, and ends with exit code 75 (try again).

    Args:
        dirpath: a directory that all ranks see, or a URL that fsspec knows; of this training alone. Where ranks take
            every step together, each host may have its own.
        every_n_train_steps: save whenever so many optimizer steps were taken.
        train_time_interval: save whenever so much time has passed.
        save: or a policy of `lightning_async.algorithms`. Default, without any of the three:
            ``Adaptive(share=0.05)``, as often as costs at most 5% of the training time. Besides, training always saves
            at its end.
        keep: which to keep, by a policy. Default: ``Latest(2)``. The newest, the last good one and the one resumed from
            are always kept.
        recover: which one a plain ``trainer.fit(model)`` goes on from: ``"auto"`` (default) or ``"latest"``, the newest
            that is whole; ``"best"`` by the `Best` policy in ``keep``; ``"last_good"``; ``"step=N"``; None: begin anew.
        busy: what becomes of a save that is due while the one before is still being written: ``"latest"`` (default) is
            made as soon as that is done, ``"skip"`` is left out, and for ``"wait"`` training waits.
        buffers: copies of the state in memory, 1 or 2. Default: 2.
        max_failures: after so many failed saves in a row training ends with an error. Default: 3.
        good_after: beside a `DivergenceMonitor`, a checkpoint is good when so many steps have followed in which nothing
            was out of bounds. Default: 20.
        save_on_exception: when training ends by an exception, save what was trained until then; a rank alone, without
            waiting for others. Default: True.
        objects: what becomes of objects that are no plain values or tensors, such as one that a module puts into the
            checkpoint in ``on_save_checkpoint``. ``"refuse"`` (default): an error names the first one as training
            begins; hyper-parameters are left out, and a warning names them. ``"pickle"``: they are pickled, and
            checkpoints that hold such are loaded, which executes code in them.

    Raises:
        TypeError: a policy lacks what one must answer, or an argument is of another type.
        ValueError: an argument is out of range.

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
    ) -> None:
        owner = type(self).__name__
        policy = save_policy(owner, save, every_n_train_steps, train_time_interval)
        keep = Latest(2) if keep is None else keep
        check_protocol(owner, "keep", keep, KeepPolicy, "a policy such as `Latest(3)`")
        check_choice(owner, "busy", busy, get_args(Busy))
        check_choice(owner, "buffers", buffers, (1, 2))
        check_choice(owner, "objects", objects, get_args(Objects))
        check_bool(owner, "save_on_exception", save_on_exception)
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
            save_on_exception, objects,
        )  # fmt: skip
        self._now: Checkpointing | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        check_object(self, trainer)
        strategy = type(trainer.strategy).__name__
        if any(kind.__name__ in _SHARDED for kind in type(trainer.strategy).__mro__):
            raise ValueError(
                f"`{type(self).__name__}` does not know the sharded state of `{strategy}` yet: use that strategy's own "
                "checkpoints, or a strategy whose ranks hold whole replicas."
            )
        # So that `trainer.checkpoint_callback`, and what is "best", are those of the user's `ModelCheckpoint`, if any.
        trainer.callbacks = [*(each for each in trainer.callbacks if each is not self), self]
        self._now = Checkpointing(trainer, self.settings, self._call)
        self._now.install()

    def _call(self) -> None:
        if self.call_together is not None:
            self.call_together()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to save; raise ValueError where ranks that step together are not equal."""
        kinds = [type(optimizer).__name__ for optimizer in trainer.strategy.optimizers]
        if "ZeroRedundancyOptimizer" in kinds or view_of(trainer.strategy).averages_parameters:
            raise ValueError(
                f"`{type(self).__name__}` takes ranks that step together for equal, which they are not with "
                "`ZeroRedundancyOptimizer` or `DDPStrategy(model_averaging_period=)`: use a strategy of this package "
                "for asynchronous replicas, or an optimizer whose state is whole on each rank."
            )
        if self._now is not None:
            self._now.start()

    def for_joining_ranks(self) -> dict[str, Any]:
        return {} if self._now is None else self._now.for_joining_ranks()

    def come(self, told: dict[str, Any]) -> None:
        if self._now is not None and told:
            self._now.come(told)

    def save_together(self, world: LightningCollectives) -> None:
        if self._now is not None:
            self._now.save_together()

    def roll_back(self, trainer: Any) -> int | None:
        """Go back to the newest good checkpoint, see `RollsBack`."""
        return None if self._now is None else self._now.roll_back()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._now is not None:
            self._now.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Save what was trained; a signal is one that a checkpoint was made for."""
        if self._now is not None:
            self._now.fail(exception)
            if isinstance(exception, pytorch("utilities.exceptions").SIGTERMException):
                exception.code = TRY_AGAIN  # pyright: ignore[reportAttributeAccessIssue]  (a SystemExit)

    @property
    def resume(self) -> Any:
        """The position of the fit under way; None outside of one."""
        return None if self._now is None else self._now.resume

    @property
    def best_model_path(self) -> str:
        """The path that Lightning takes for ``ckpt_path="best"``, and where it evaluates without
        a model: the best one by the `Best` policy in ``keep``, without one the newest; ``""`` where there is none.
        """
        best = self.settings.best
        found = candidates(CheckpointStore(self.settings.dirpath).entries(), "best" if best else "latest", best)
        return found[0].path if found else ""

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        """Ignore the path that Lightning brings back from ranks it has forked or spawned: the folder tells it here."""

    def __repr__(self) -> str:
        s = self.settings
        return f"{type(self).__name__}({s.dirpath!r}, save={s.save!r}, keep={s.keep!r}, recover={s.recover!r})"


def _best(keep: KeepPolicy) -> Best | None:
    if isinstance(keep, Best):
        return keep
    inner = keep.policies if isinstance(keep, KeepAny) else ()
    return next((best for policy in inner if (best := _best(policy)) is not None), None)

"""What strategies share whose replicas run at their own pace between sync points, whatever they exchange."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_async.algorithms.averaging import AveragingRule, DeltaMean
from lightning_async.algorithms.schedules import Schedule, Synchronous
from lightning_async.callbacks.monitor import AveragingMonitor
from lightning_async.engine.averaging.averager import BackgroundAverager
from lightning_async.engine.averaging.report import RunSummary
from lightning_async.engine.averaging.rule_state import AveragerConfig
from lightning_async.engine.gradients.reduction import SynchronousGradients
from lightning_async.engine.replica import BufferPolicy, OptimizerPolicy
from lightning_async.engine.shared_state import Vote
from lightning_async.engine.sync_points import SyncPoints
from lightning_async.errors import Evicted, PeerLost, StoreLost
from lightning_async.strategies.averaging_state import SavedState
from lightning_async.strategies.base import ReplicatedStrategy
from lightning_async.strategies.join import JoinCoordinator
from lightning_async.strategies.joining_rank import JoiningRank
from lightning_async.strategies.local_steps import LocalSteps
from lightning_async.strategies.session import FitSessions, Session
from lightning_async.trainer import configuration_checks
from lightning_async.trainer.environment.settings import TrainerSettings, check_equal
from lightning_async.trainer.environment.subprocess_launcher import note_end
from lightning_async.trainer.loops.timing import Pacing
from lightning_async.trainer.namespace import batch_size, in_words
from lightning_async.trainer.step_runner import StepRunner
from lightning_async.transports.base import Transport
from lightning_async.transports.resolve import TransportName
from lightning_async.transports.torch import TorchTransport

_fits = itertools.count(1)  # of this process, in the order of its script, which is the same on all ranks


class AsyncStrategy(ReplicatedStrategy):
    """Replicas that meet at sync points, and in the background in between.

    Args:
        config: what the engine must know.
        buffers: what happens to floating-point buffers.
        optimizer_state: what happens to the optimizers' state.
        lr_clock: whose steps the learning rates follow that change per batch.
        transport: see `ReplicatedStrategy`.

    Raises:
        TypeError, ValueError: see `ReplicatedStrategy`.
    """

    asynchronous = True
    checkpoint_key = "lightning_async"  # under which a checkpoint holds the rule's state and the clocks
    rule: AveragingRule = DeltaMean()
    """Makes one model of replicas that differ at a sync point: by default their mean."""
    schedule: Schedule = Synchronous()
    """Says which steps replicas take alone: by default none, so that there are no rounds between sync points."""
    num_fragments: int = 1
    """Parts of the parameters that rounds move in turn."""
    automatic: tuple[str, ...] = ()
    """Names the arguments that follow from what is measured."""
    make_step_runner: Callable[..., StepRunner] = LocalSteps
    """Makes what takes the steps of a session."""
    make_totals: Callable[[], Any] | None = None
    """Makes `Totals` of what replicas exchange; None: averaging rounds."""

    def __init__(
        self,
        config: AveragerConfig,
        *,
        buffers: BufferPolicy,
        optimizer_state: OptimizerPolicy = "keep",
        lr_clock: configuration_checks.LrClock = "local",
        transport: Transport | TransportName,
    ) -> None:
        dead_after = config.timeouts.dead_after
        super().__init__(transport=transport, dead_after=dead_after, gloo_timeout=dead_after)
        self.config = config
        self.num_fits = 0
        self.host = JoinCoordinator(self) if isinstance(self.transport, TorchTransport) else None
        if config.timeouts.replicas and not isinstance(self.transport, TorchTransport):
            raise ValueError(
                f"`Timeouts(replicas={config.timeouts.replicas!r})`: over {self.transport!r} nobody comes back to be "
                "waited for. Use `TorchTransport()`, or leave it out."
            )
        self.buffers: BufferPolicy = buffers
        self.optimizer_state_policy: OptimizerPolicy = optimizer_state
        self.lr_clock: configuration_checks.LrClock = lr_clock
        self.summary = RunSummary()
        self._trainer: Any = None
        self.fit_sessions: FitSessions | None = None
        self.pacing: Any = None
        """Measures this replica's speed, in a fit."""
        self.saved = SavedState(self.checkpoint_key)

    def setup_environment(self) -> None:
        super().setup_environment()
        self.failed = False
        self.saved.begin_run()
        trainer: Any = self.module.trainer
        configuration_checks.check_callbacks(trainer.callbacks)
        if self.world is not None:
            TrainerSettings(trainer).check(self.world)
            owner = type(self).__name__
            config = self.config
            configuration_checks.check_survival(owner, config.min_replicas, config.max_replicas, self.world_size)

    def setup(self, trainer: Any) -> None:
        self._trainer = trainer
        fitting = trainer.state.fn == "fit"
        self.saved.begin_stage(trainer.lightning_module, fitting)
        if self.world is not None and fitting:
            check_equal(self.world, {"ckpt_path": self.saved.origin})
            configuration_checks.check_setup(self.module, self._layer_sync, self.buffers)
        self.setup_replica(trainer)
        if fitting:
            self.num_fits = next(_fits)
            self.fit_sessions = FitSessions(self, trainer)
            if not self.joining:
                self.fit_sessions.install(self.world)
            self.fit_sessions.undo.append(AveragingMonitor().attach(trainer))
            self.pacing = Pacing(self, trainer, lambda: self.summary.merge_s)
            self.fit_sessions.undo += self.pacing.install()

    def on_train_start(self) -> None:
        """Let the replicas part: all ranks hold the same model."""
        if self.averager is not None:  # a loop within this fit, such as the LearningRateFinder's
            self.start_over()
        if self.joining:
            JoiningRank(self, self._trainer).join()
        elif self.fit_sessions is not None:
            self.fit_sessions.begin()

    def start_over(self) -> None:
        if self.fit_sessions is not None:
            self.fit_sessions.start_over()

    def begin_again(self) -> None:
        if self.fit_sessions is not None:
            self.fit_sessions.begin_again()

    def on_exception(self, exception: BaseException) -> None:
        """Tell the peers, so that they end with this rank's error instead of waiting for it."""
        agreed = self.sync_points is not None and Vote.STOP in self.sync_points.agreed
        self.failed = not (agreed and isinstance(exception, SystemExit))  # Lightning's SIGTERMException is one
        if self._connection is not None:
            self._connection.world.asynchronous = True
            self._connection.outlives &= not isinstance(exception, Evicted | StoreLost)  # nobody waits for it
            if self.failed and not isinstance(exception, PeerLost):
                self._connection.membership.fail(in_words(exception))
        note_end(exception)  # after the others were told: a disk may hang

    def teardown(self) -> None:
        if self.fit_sessions is not None:
            self.fit_sessions.end()
        self.fit_sessions = self._trainer = None
        self.disconnect(in_order=not self.failed)
        super().teardown()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.fit_sessions is not None:
            self.fit_sessions.patches.begin_batch(batch_idx)
        self.begin_again()
        if self._session is not None and self.world is not None:
            self.world.asynchronous = True
            self.step_runner.start_batch(batch)
        if self.fit_sessions is not None:
            self.fit_sessions.patches.after_batch_start()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        run = partial(super().optimizer_step, optimizer, model=model, **kwargs)
        return self.step_runner.step(optimizer, closure, run)

    def skip_batch(self) -> None:
        self.step_runner.skip_batch()

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with self.step_runner.backward():
            return super().backward(closure_loss, *args, **kwargs)

    def post_backward(self, closure_loss: Tensor) -> None:
        self.step_runner.after_backward()

    @property
    def averages_gradients(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return isinstance(self.schedule, Synchronous)

    @property
    def fewest(self) -> int:
        """With so many replicas training does not end."""
        return self.config.survives(self.num_started, can_lose=isinstance(self.transport, TorchTransport))

    @property
    def patience(self) -> timedelta:
        return self.config.timeouts.replicas

    @property
    def shrinks(self) -> bool:
        return self.fewest < max(self.num_started, (self.host and self.config.max_replicas) or 0)

    @property
    def _session(self) -> Session | None:
        return None if self.fit_sessions is None else self.fit_sessions.session

    @property
    def averager(self) -> BackgroundAverager | None:
        session = self._session
        return None if session is None else session.averager

    @property
    def gradients(self) -> SynchronousGradients | None:
        session = self._session
        return None if session is None else session.gradients

    @property
    def sync_points(self) -> SyncPoints | None:
        fit_sessions = self.fit_sessions  # not by `_session`: it is asked for a dozen times a step
        return (
            None if fit_sessions is None or fit_sessions.session is None else fit_sessions.session.averager.sync_points
        )

    @property
    def step_runner(self) -> StepRunner:
        session = self._session
        return super().step_runner if session is None else session.step_runner

    alone = "so there is nothing to average"
    count = staticmethod(batch_size)

    def count_samples(self, batch: Any) -> float:
        """Return what the batch counts, once for each batch, and tell the replica's pace its samples."""
        counted = self.count(batch)
        self.pacing.samples = counted if self.count is batch_size else batch_size(batch)
        return counted

    @property
    def shared_steps(self) -> tuple[int, int] | None:
        averager = None if self.lr_clock == "local" else self.averager
        return None if averager is None else (averager.first_step, averager.global_step())

    def end_epoch(self) -> None:
        if self.averager is not None:
            self.averager.epoch += 1

    def on_model_changed(self) -> None:
        if self._session is not None:
            self._session.on_model_changed()

    def summarise(self) -> None:
        if self.fit_sessions is not None:
            self.fit_sessions.summarise()

    def settings(self) -> dict[str, object]:
        """Return what must be equal on all ranks in a fit."""
        return {
            "strategy": type(self).__qualname__, "buffers": self.buffers,
            "backend": self.transport.backend_on(self.root_device), **self.config.settings(),
        }  # fmt: skip

    def usual_settings(self) -> dict[str, object]:
        """Return what need not be equal, but commonly is."""
        return {"timeouts": self.config.timeouts}

    def go_on_without(self, names: Sequence[str], rank: int) -> None:
        """Forget ranks that are lost; this one is ``rank`` from here on. Called on the engine's thread."""

    def handed_over(self) -> dict[str, Any]:
        """Return what a joining rank needs of this strategy besides."""
        return {}

    def take_handed_over(self, told: dict[str, Any]) -> None:
        """Take what the live ranks have `handed_over`."""

    def write_state(self, checkpoint: dict[str, Any], origin: str = "") -> None:
        self.saved.write(checkpoint, None if self._session is None else self._session.state(), origin)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        self.write_state(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if self.averager is not None:
            self.start_over()
        self.saved.load(checkpoint)
        return checkpoint

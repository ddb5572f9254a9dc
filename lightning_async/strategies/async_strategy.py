"""`AsyncStrategy`: the base of strategies whose replicas run at their own pace between sync points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

from torch import Tensor
from torch.optim import Optimizer

from lightning_async.callbacks.monitor import AveragingMonitor
from lightning_async.engine.averaging.rule_state import AveragerConfig
from lightning_async.engine.control_plane import ControlPlane
from lightning_async.engine.gradients.reduction import SynchronousGradients
from lightning_async.engine.replica import BufferPolicies, OptimizerPolicy
from lightning_async.engine.replica_engine import ReplicaEngine
from lightning_async.engine.report import RunSummary
from lightning_async.engine.shared_state import Arrival, SyncPointKind, Vote
from lightning_async.engine.sync_points import SyncPoints
from lightning_async.errors import Evicted, PeerLost, StoreLost
from lightning_async.strategies.averaging_state import SavedState
from lightning_async.strategies.base import ReplicatedStrategy
from lightning_async.strategies.finished_calls import CallIsOver, FinishedCalls
from lightning_async.strategies.join import JoinCoordinator
from lightning_async.strategies.joining_rank import JoiningRank
from lightning_async.strategies.rank_mapping import note_failure
from lightning_async.strategies.session import FitSessions, Session
from lightning_async.trainer import configuration_checks
from lightning_async.trainer.environment.settings import TrainerSettings, check_equal
from lightning_async.trainer.environment.subprocess_launcher import note_end
from lightning_async.trainer.loops.lr_schedules import SCHEDULES
from lightning_async.trainer.loops.timing import Pacing
from lightning_async.trainer.namespace import batch_size, in_words, searches_lr
from lightning_async.trainer.step_runner import StepRunner
from lightning_async.transports.base import Connection, Transport
from lightning_async.transports.resolve import TransportName
from lightning_async.transports.torch import TorchTransport

T = TypeVar("T")


class AsyncStrategy(ReplicatedStrategy):
    """A strategy whose replicas wait for each other only at sync points, and otherwise exchange data in the background.

    This base averages the replicas at sync points only. Derived classes set the class attributes to exchange between
    sync points as well.

    Args:
        config: Settings of the averager and the engine.
        buffers: Treatment of floating-point buffers (BatchNorm statistics), see `AsyncAveragingStrategy`.
        optimizer_state: Treatment of the optimizers' state: ``"keep"`` (default), ``"average"`` or ``"reset"``, see
            `AsyncAveragingStrategy`.
        lr_clock: What a learning-rate scheduler with interval ``"step"`` counts, see `AsyncAveragingStrategy`. Default:
            ``"samples"``.
        transport: Starts the ranks and moves their bytes, see `ReplicatedStrategy`.

    Raises:
        TypeError: ``transport`` is no transport.
        ValueError: the transport is unknown, or cannot do what ``config`` asks for.
    """

    asynchronous = True
    checkpoint_key = "lightning_async"
    """The key of a checkpoint under which the averaging rule's state and the ranks' counts of steps and rounds are."""
    num_fragments: int = 1
    """The number of parts into which the parameters are divided; each averaging round moves one part, in turn."""
    automatic: tuple[str, ...] = ()
    """The names of the arguments whose values follow from measurements, for the summary of the run."""
    make_step_runner: Callable[..., StepRunner]
    """A function that makes the step runner of a session."""

    def __init__(
        self,
        config: AveragerConfig,
        *,
        buffers: BufferPolicies,
        optimizer_state: OptimizerPolicy = "keep",
        lr_clock: configuration_checks.LrClock = "samples",
        transport: Transport | TransportName,
    ) -> None:
        super().__init__(transport=transport, timeouts=config.timeouts, gloo_timeout=config.timeouts.dead_after)
        self.config = config
        self.finished_calls = FinishedCalls(self)
        # Ranks can join over torch only, because Horovod's groups cannot be formed again during a run.
        self.host = JoinCoordinator(self) if isinstance(self.transport, TorchTransport) else None
        if config.timeouts.replicas and not isinstance(self.transport, TorchTransport):
            raise ValueError(
                f"`Timeouts(replicas={config.timeouts.replicas!r})`: over {self.transport!r} nobody comes back to be "
                "waited for. Use `TorchTransport()`, or leave it out."
            )
        self.buffers: BufferPolicies = buffers
        self.optimizer_state_policy: OptimizerPolicy = optimizer_state
        self.lr_clock: configuration_checks.LrClock = lr_clock
        self.summary = RunSummary()
        self._trainer: Any = None
        self.fit_sessions: FitSessions | None = None
        self.pacing: Any = None
        """The `Pacing` of a fit, which measures this replica's speed."""
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

    def run_call(self, trainer: Any, call: partial[Any]) -> Any:
        """Run a call of the Trainer, and publish its result for ranks that come back; on such a rank, take it."""
        if self.host is None or self.num_started == 1:
            return call()
        self.finished_calls.begin(trainer, call.args[1:])  # the first one is the model
        try:
            result = call()
        except CallIsOver as over:
            return self.finished_calls.take_over(trainer, over.parts)
        self.finished_calls.publish(trainer, result)
        return result

    def connect_ranks(self) -> None:
        super().connect_ranks()
        if self.joining and self.host is not None:
            self.finished_calls.wait(self.module.trainer)

    def use(self, connection: Connection, run: int) -> None:
        super().use(connection, run)
        connection.world.calls.deadline = self.config.timeouts.sync_point

    def setup(self, trainer: Any) -> None:
        self._trainer = trainer
        fitting = trainer.state.fn == "fit"
        self.saved.begin_stage(trainer.lightning_module, fitting)
        if self.world is not None and fitting:
            # Ranks that go on from different checkpoints would average different models.
            check_equal(self.world, {"ckpt_path": self.saved.origin})
            configuration_checks.check_setup(self.module, self._layer_sync, self.buffers)
        self.setup_replica(trainer)
        if fitting:
            self.fit_sessions = FitSessions(self, trainer)
            # A joining rank patches the loops when it has received the state of the others.
            if not self.joining:
                self.fit_sessions.install(self.world)
            self.fit_sessions.undo.append(AveragingMonitor().attach(trainer))
            self.pacing = Pacing(self, trainer, lambda: self.summary.merge_s)
            self.fit_sessions.undo += self.pacing.install()

    def on_train_start(self) -> None:
        """Begin a session; on a joining rank, first wait to be admitted.

        All ranks have the same model now. Their models may differ until the next sync point.
        """
        if self.averager is not None:  # a loop within this fit has begun, such as the LearningRateFinder's
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
        """Report the exception to the peers, so that they end with its text instead of waiting for this rank."""
        agreed = self.sync_points is not None and Vote.STOP in self.sync_points.agreed
        self.failed = not (agreed and isinstance(exception, SystemExit))  # Lightning's SIGTERMException is one
        if self._connection is not None:
            self._connection.world.asynchronous = True
            # This rank's store is kept until other failing ranks have read why. Without a store, or when they have gone
            # on without this rank, no rank reads it.
            self._connection.outlives &= not isinstance(exception, Evicted | StoreLost)
            if self.failed and not isinstance(exception, PeerLost):
                self._connection.membership.fail(in_words(exception))
        if self.failed:
            note_failure(in_words(exception))
        # After the report to the peers, because writing to the disk may hang.
        note_end(exception)

    def teardown(self) -> None:
        # Before `disconnect`, because a session uses the connection until it ends.
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
            self._session.user_collectives.begin_step(latches=True)
            # From here to the next sync point, collectives of users must not wait for ranks that are at other batches.
            self.world.asynchronous = True
            self.step_runner.start_batch(batch)
        if self.fit_sessions is not None:
            self.fit_sessions.patches.after_batch_start()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        run = partial(super().optimizer_step, optimizer, model=model, **kwargs)
        return self.step_runner.step(optimizer, closure, run)

    def skip_batch(self) -> None:
        self.step_runner.skip_batch()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's step; None, as of a batch without a loss, if a collective of it fails with a lost rank."""
        try:
            return super().training_step(*args, **kwargs)
        except Exception:
            if self._session is None or not self._session.user_collectives.lose_step():
                raise
        self.own_steps.skipped = True
        if self.module.automatic_optimization:
            self.skip_batch()
        return None

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        try:
            with self.step_runner.backward():  # withdraws gradients that it has sent, if the pass fails
                return super().backward(closure_loss, *args, **kwargs)
        except Exception:
            if self._session is None or not self._session.user_collectives.lose_step():
                raise
        # Gradients of a part of the model are in no step.
        self.module.zero_grad(set_to_none=True)
        self.skip_batch()
        self.step_runner.after_backward()  # in manual optimization, the others' mean is this rank's step
        return closure_loss

    def post_backward(self, closure_loss: Tensor) -> None:
        self.step_runner.after_backward()

    averages_gradients = True

    def make_engine(self, control: ControlPlane, meet: Callable[[SyncPointKind], Arrival]) -> ReplicaEngine:
        """Return the engine of a session, which is not started yet.

        Args:
            control: Control plane of the session.
            meet: Function that waits at a sync point in the middle of a batch; it returns how the wait has ended.
        """
        return ReplicaEngine(control)

    @property
    def fewest(self) -> int:
        """Smallest number of live replicas with which the job does not end. They train, or wait for ranks to join."""
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
    def averager(self) -> ReplicaEngine | None:
        session = self._session
        return None if session is None else session.averager

    def broadcast(self, obj: T, src: int = 0) -> T:
        world = self.world
        votes = self.sync_points
        searches = isinstance(obj, bool) and searches_lr(self._trainer)
        if searches and votes is not None and world is not None and world.asynchronous:
            # The learning-rate finder broadcasts after every batch whether the search is over. Between sync points that
            # would wait for other ranks. They learn of it by the vote of rank ``src``, whose losses alone decide.
            return obj if world.rank == src else cast("T", Vote.END in votes.agreed)
        return super().broadcast(obj, src)

    @property
    def gradients(self) -> SynchronousGradients | None:
        session = self._session
        return None if session is None else session.gradients

    @property
    def sync_points(self) -> SyncPoints | None:
        # Without the property `_session`, because this is read a dozen times a step.
        fit_sessions = self.fit_sessions
        return (
            None if fit_sessions is None or fit_sessions.session is None else fit_sessions.session.averager.sync_points
        )

    @property
    def step_runner(self) -> StepRunner:
        session = self._session
        return super().step_runner if session is None else session.step_runner

    alone = "so there is nothing to average"
    """The consequence of training with one rank only, as a part of a log line."""
    count = staticmethod(batch_size)

    def count_samples(self, batch: Any) -> float:
        """Return a batch's weight, by default its number of samples, and report its number of samples to `pacing`.

        The step runner calls this once for each batch.
        """
        counted = self.count(batch)
        self.pacing.samples = counted if self.count is batch_size else batch_size(batch)
        return counted

    @property
    def shared_steps(self) -> tuple[int, int] | None:
        averager = self.averager if self.lr_clock == "global" else None
        return None if averager is None else (averager.first_step, averager.global_step())

    @property
    def num_sharing(self) -> int:
        if self.lr_clock == "local":
            return 0
        together = self.averager is not None and (self.in_windows or self.averager.ledger.synchronous)
        told = self.gradients.told if together and self.gradients is not None else None
        # All ranks that step together must take the same number, and a loss may be known to some of them only.
        return told.ranks if told is not None and told.ranks else self.world_size

    def end_epoch(self) -> None:
        if self.averager is not None:
            self.averager.epoch += 1

    def on_model_changed(self) -> None:
        if self._session is not None:
            self._session.on_model_changed()

    def advice(self) -> str:
        """Return advice that follows from the summary of the run; "" for none."""
        return ""

    def summarise(self) -> None:
        if self.fit_sessions is not None:
            self.fit_sessions.summarise()

    def settings(self) -> dict[str, object]:
        """Return the settings that must be equal on all ranks of a fit; a difference is refused."""
        return {
            "strategy": type(self).__qualname__, "buffers": self.buffers,
            "backend": self.transport.backend_on(self.root_device), **self.config.settings(),
        }  # fmt: skip

    def usual_settings(self) -> dict[str, object]:
        """Return the settings that usually are equal on all ranks; rank 0 warns of a difference."""
        return {"timeouts": self.config.timeouts}

    def go_on_without(self, names: Sequence[str], rank: int) -> None:
        """Adapt the strategy to the loss of ranks; called on the engine's thread. This base does nothing.

        Args:
            names: Names of the lost ranks in this run.
            rank: This rank's new number.
        """

    def handed_over(self) -> dict[str, Any]:
        """Return the strategy's own state for a joining rank; model and state of averaging are sent separately."""
        return {}

    def take_handed_over(self, told: dict[str, Any]) -> None:
        """Load, on a joining rank, the state that `handed_over` has returned on rank 0."""

    def write_state(self, checkpoint: dict[str, Any], origin: str = "") -> None:
        self.saved.write(checkpoint, None if self._session is None else self._session.state(), origin)
        checkpoint.setdefault(SCHEDULES, self.saved.schedules)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        self.write_state(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        # A checkpoint was restored during training: averaging begins again with it.
        if self.averager is not None:
            self.start_over()
        self.saved.load(checkpoint)
        self.saved.schedules = checkpoint.get(SCHEDULES, [])
        return checkpoint

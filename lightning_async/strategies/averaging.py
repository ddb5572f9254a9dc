"""The strategy: `Trainer(strategy=AsyncAveragingStrategy(...))`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_async.callbacks.monitor import AveragingMonitor
from lightning_async.engine.averager import BackgroundAverager
from lightning_async.engine.compressed import Compression
from lightning_async.engine.config import AveragerConfig, Deadlines, Weighting
from lightning_async.engine.replica import BufferPolicy, OptimizerPolicy, Replica
from lightning_async.engine.telemetry import RunSummary
from lightning_async.errors import PeerLost
from lightning_async.namespace import name as namespace
from lightning_async.namespace import pytorch
from lightning_async.rules import DeltaMean, EveryNSteps
from lightning_async.rules.protocols import Action, AveragingRule, Schedule
from lightning_async.strategies import checks
from lightning_async.strategies.batch import batch_size
from lightning_async.strategies.drift import DriftPatches
from lightning_async.strategies.glue import allow_compiled_modules, rank_zero_info
from lightning_async.strategies.optimizer_state import materialise, reset, state_tensors
from lightning_async.strategies.recompute import RECENT_BATCHES, recompute_batch_norm
from lightning_async.strategies.replicated import EngineName, ReplicatedStrategy, StartMethod
from lightning_async.strategies.saved_state import SavedState, state_of
from lightning_async.strategies.settings import check_settings

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["AsyncAveragingStrategy"]

LrClock = Literal["local", "global"]


class AsyncAveragingStrategy(ReplicatedStrategy):
    r"""Replicas take local steps and become one model by averaging in the background.

    Each replica :math:`i` trains alone. When the schedule says so it sends a snapshot :math:`s_i`; while it goes on
    training, the work-weighted mean :math:`m = \sum_i w_i s_i` arrives, and the parameters move by
    :math:`x_i \leftarrow x_i + (m - s_i)` (or by what another rule makes of it). Validation, checkpoints, the end of
    an epoch and the end of training happen at a *gate*: all ranks wait there, serving rounds for those that still
    train, until every one holds the same model to the bit. Between gates nothing waits for all ranks.

    Args:
        rule: how replicas become one model: `DeltaMean` (default), `DiLoCo`, or, without overlap, `Mean`.
        schedule: when: `EveryNSteps` (default: 32), `EverySeconds`, `Synchronous`, `Warmup`.
        overlap: rounds run while training goes on; False: training stands still for each.
        weighting: what a replica's contribution is weighted by: its ``"samples"`` since its last round (default),
            its ``"steps"``, or ``"equal"``.
        buffers: floating-point buffers (BatchNorm statistics): ``"average"`` (default), ``"keep"`` each replica's,
            ``"broadcast"`` rank 0's, or ``"recompute"`` BatchNorm's from recent batches at every gate. Integer
            buffers take the largest value of all replicas at every gate.
        optimizer_state: ``"keep"`` each replica's (default), ``"average"`` it, or ``"reset"`` it after each round.
        lr_clock: learning-rate schedulers that step per batch follow the replica's own steps (``"local"``,
            default), or the mean over all replicas (``"global"``).
        compression: of the messages: ``"int8"`` or ``"fp8"`` (a quarter of the bytes; for rules that send differences,
            such as `DiLoCo`), ``"bf16"`` (half), or ``"none"`` (default). Nothing is lost: what a message cannot hold
            stays in the replica's parameters and goes with the next one. Gates exchange fp32.
        deadlines: how long to wait for what.
        part_mb: payloads move in parts of at most this many MiB. Default 16.
        engine: what moves bytes: "torch", "horovod", or "auto" (default): Horovod where horovodrun started the ranks.
        process_group_backend: of torch: "gloo", "nccl" or "mpi". Default: "nccl" on CUDA, else "gloo".
        start_method: how Lightning starts the other ranks where no launcher did: "popen" runs the script again;
            "spawn" and "fork" suit notebooks.

    Raises:
        TypeError: ``rule`` or ``schedule`` lacks what a rule or a schedule must answer.
        ValueError: an unknown policy, a rule that overwrites together with ``overlap=True``, or one that sends its
            parameters together with 8 bits of compression.

    Source: local SGD (Stich, 2019), DiLoCo (Douillard et al., 2023), and asynchronous model averaging as in Bagua.
    """

    strategy_name = "async_averaging"
    checkpoint_key = "lightning_async"  # under which a checkpoint holds the rule's state and the clocks

    def __init__(
        self,
        rule: AveragingRule | None = None,
        schedule: Schedule | None = None,
        overlap: bool = True,
        *,
        weighting: Weighting = "samples",
        buffers: BufferPolicy = "average",
        optimizer_state: OptimizerPolicy = "keep",
        lr_clock: LrClock = "local",
        compression: Compression = "none",
        deadlines: Deadlines | None = None,
        part_mb: float = 16.0,
        engine: EngineName = "auto",
        process_group_backend: str | None = None,
        start_method: StartMethod = "popen",
    ) -> None:
        deadlines = deadlines or Deadlines()
        super().__init__(
            engine=engine,
            dead_after=deadlines.dead_after,
            process_group_backend=process_group_backend,
            start_method=start_method,
            gloo_timeout=deadlines.dead_after,
        )
        self.rule = DeltaMean() if rule is None else rule
        self.schedule = EveryNSteps(32) if schedule is None else schedule
        checks.check_arguments(self.rule, self.schedule, overlap)
        owner = type(self).__name__
        checks.check_choice(owner, "buffers", buffers, get_args(BufferPolicy))
        checks.check_choice(owner, "optimizer_state", optimizer_state, get_args(OptimizerPolicy))
        checks.check_choice(owner, "lr_clock", lr_clock, get_args(LrClock))
        if not part_mb > 0:
            raise ValueError(f"`AsyncAveragingStrategy(part_mb={part_mb!r})` must be > 0.")
        self.config = AveragerConfig(
            overlap=overlap, weighting=weighting, compression=compression, deadlines=deadlines,
            part_bytes=max(4, int(part_mb * 2**20)),
        )  # fmt: skip
        self.config.check_rule(owner, self.rule)
        self.buffers: BufferPolicy = buffers
        self.optimizer_state_policy: OptimizerPolicy = optimizer_state
        self.lr_clock: LrClock = lr_clock
        self.averager: BackgroundAverager | None = None
        self.summary = RunSummary()
        self._trainer: Any = None
        self._patches: DriftPatches | None = None
        self._saved = SavedState(self.checkpoint_key)
        self._samples = 0.0
        self._batch_action: Action | None = None
        self._steps_seen = self._steps_counted = 0
        self._hooks: list[Any] = []
        self._recent: deque[Any] = deque(maxlen=RECENT_BATCHES)

    def setup_environment(self) -> None:
        super().setup_environment()
        self.failed = False
        self._saved.begin_run()

    def setup(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        fitting = trainer.state.fn == "fit"
        self._saved.begin_stage(trainer.lightning_module, fitting)
        if self.world is not None and fitting:
            check_settings(self, trainer, self.world, self._saved.origin)
            checks.check_setup(trainer, self._layer_sync)
        self.setup_replica(trainer)
        if fitting:
            self._patches = DriftPatches(self, trainer)
            if self.world_size > 1:
                self._patches.install()
            callbacks: list[Any] = self._trainer.callbacks
            if not any(isinstance(callback, AveragingMonitor) for callback in callbacks):
                callbacks.insert(0, AveragingMonitor())

    def on_train_start(self) -> None:
        """All ranks hold the same model: replicas part from here."""
        self.summary = RunSummary(rank=self.global_rank, world_size=self.world_size)
        if self.world_size == 1:
            rank_zero_info(
                "AsyncAveragingStrategy: there is one replica only, so there is nothing to average; it trains as with "
                "a single device. Pass `Trainer(devices=2)` or more."
            )
            return
        assert self._connection is not None
        assert self._patches is not None
        self._patches.gates_epochs = checks.check_fit(self._trainer, self._connection.world)
        replica = Replica(self.module, self.buffers, self.bucket_device)
        if self.optimizer_state_policy == "average":
            materialise(self.optimizers)
            replica.build(state_tensors(self.optimizers))
        connection = self._connection
        self.averager = BackgroundAverager(
            connection.root, connection.membership, replica, self.rule, self.schedule, self.config,
            payload=connection.payload,
        )  # fmt: skip
        self.summary = self.averager.summary
        self._saved.resume(self.averager, self.global_rank, self.world_size)
        connection.membership.on_change = self.averager.wake
        for optimizer in self.optimizers:
            self._hooks.append(optimizer.register_step_post_hook(self._count_step))
        connection.open()
        self.averager.start()

    def on_exception(self, exception: BaseException) -> None:
        """Tell the peers, so that they end with this rank's error instead of waiting for it."""
        agreed = self.averager is not None and self.averager.stop_agreed
        self.failed = not (agreed and isinstance(exception, SystemExit))  # Lightning's SIGTERMException is one
        if self._connection is not None:
            self._connection.world.drifting = True
            if self.failed and not isinstance(exception, PeerLost):  # who lost a peer is not to blame
                self._connection.membership.fail(f"{type(exception).__name__}: {exception}")

    def teardown(self) -> None:
        if self.averager is not None:
            self.averager.close()
            self.averager = None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._recent.clear()
        self._samples = 0.0
        if self._patches is not None:
            self._patches.remove()
            self._patches = None
        self.disconnect(in_order=not self.failed)
        self._trainer = None
        super().teardown()

    # ---- steps ----

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.averager is None:
            return
        self.finish_batch()
        assert self._connection is not None
        self._connection.world.drifting = True
        self.averager.resume()
        self._samples += batch_size(batch)
        if self.buffers == "recompute":
            self._recent.append(batch)
        if not self.module.automatic_optimization:
            self._batch_action = self.averager.plan()
            self._steps_counted = self._steps_seen

    def finish_batch(self) -> None:
        """Manual optimization: a batch is one step, and merges happen between batches.

        Between the steps of two losses a merge would break their graphs.
        """
        action, self._batch_action = self._batch_action, None
        if action is not None and self.averager is not None:
            self._tick(action, stepped=self._steps_seen > self._steps_counted)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        averager = self.averager
        if averager is None or not self.module.automatic_optimization:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        action = averager.plan()
        before = self._steps_seen
        step = self._synchronised(closure) if action is Action.GRADIENTS else closure
        output = super().optimizer_step(optimizer, step, model, **kwargs)
        self._tick(action, stepped=self._steps_seen > before)
        return output

    def _synchronised(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """``closure``, then the mean of all replicas' gradients: before they are unscaled and clipped."""

        def wrapped() -> Any:
            result = closure()
            self._reduce_gradients()
            return result

        return wrapped

    def post_backward(self, closure_loss: Tensor) -> None:
        if self._batch_action is Action.GRADIENTS:  # manual optimization
            self._reduce_gradients()

    def _reduce_gradients(self) -> None:
        assert self.averager is not None
        scaler = getattr(self.precision_plugin, "scaler", None)
        scale = float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0
        self.averager.reduce_gradients_(self._samples, scale)

    def _tick(self, action: Action, stepped: bool) -> None:
        assert self.averager is not None
        samples = self._samples
        if stepped or self.module.automatic_optimization:  # else: manual accumulation, the step is yet to come
            self._samples = 0.0
        lr = float(self.optimizers[0].param_groups[0]["lr"]) if self.optimizers else 0.0
        report = self.averager.tick(action, samples, stepped=stepped, lr=lr)
        if report is not None and self.optimizer_state_policy == "reset":
            reset(self.optimizers)

    def _count_step(self, *_: Any) -> None:
        """After every real optimizer step: mixed precision skips some, and users step optimizers themselves."""
        self._steps_seen += 1

    # ---- gates ----

    def on_model_changed(self) -> None:
        """A gate has given all replicas another model."""
        if self.optimizer_state_policy == "reset":
            reset(self.optimizers)
        if self.buffers == "recompute" and self.world is not None:
            recompute_batch_norm(self.module, list(self._recent), self.world)

    def summarise(self) -> None:
        """All replicas are at the last gate: one summary of the run, on rank 0."""
        if self.averager is None or self.world is None:
            return
        self.summary.elapsed_s = time.monotonic() - self.averager.started_at
        self.summary.samples_by_rank = self.world.gather_objects(self.summary.samples)
        self._saved.keep(state_of(self.averager, self.world))
        rank_zero_info(f"Asynchronous averaging, as rank 0 saw it:\n{self.summary}")

    # ---- checkpoints ----

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        self._saved.write(checkpoint, None if self.averager is None else state_of(self.averager, self.world))
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._saved.load(checkpoint)
        return checkpoint

    def __repr__(self) -> str:
        return f"<{type(self).__name__} for `{namespace}`: rule={self.rule!r}, schedule={self.schedule!r}>"


AsyncAveragingStrategy.register_strategies(pytorch("strategies").StrategyRegistry)
allow_compiled_modules(AsyncAveragingStrategy)

"""The strategy: `Trainer(strategy=AsyncAveragingStrategy(...))`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_async.callbacks.monitor import monitor_for_now
from lightning_async.engine.averaging.averager import BackgroundAverager
from lightning_async.engine.averaging.config import AveragerConfig, Weighting
from lightning_async.engine.averaging.report import RunSummary
from lightning_async.engine.codes import Compression
from lightning_async.engine.deadlines import Deadlines
from lightning_async.engine.gates import Gates
from lightning_async.engine.header import Vote
from lightning_async.engine.replica import BufferPolicy, OptimizerPolicy
from lightning_async.errors import PeerLost
from lightning_async.rules import DeltaMean, EveryNSteps
from lightning_async.rules.averaging.protocol import AveragingRule
from lightning_async.rules.schedules.protocol import Schedule
from lightning_async.strategies.base import ReplicatedStrategy
from lightning_async.strategies.course import Course
from lightning_async.strategies.guest import Guest
from lightning_async.strategies.host import Host
from lightning_async.strategies.saved_state import SavedState
from lightning_async.strategies.session import Session
from lightning_async.strategies.survivors import started
from lightning_async.trainer import refusals
from lightning_async.trainer.names import is_newcomer
from lightning_async.trainer.namespace import name as namespace
from lightning_async.trainer.namespace import pytorch
from lightning_async.trainer.patches import in_words, shorten
from lightning_async.trainer.settings import check_checkpoint, check_settings
from lightning_async.transports.choose import TransportName
from lightning_async.transports.transport import ElasticTransport, Transport

__all__ = ["AsyncAveragingStrategy"]

_fits = itertools.count(1)  # of this process, in the order of its script, which is the same on all ranks


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
        min_replicas: ranks may be lost as long as so many are left, and these go on: no local step of theirs is lost,
            the round under way is repeated by them, and they train on what the lost had not shared of the epoch. None
            (default): half of those that were started, rounded up; over Horovod all. The number of ranks: one that is
            lost ends training on all.
        max_replicas: ranks that are started while others train are taken in until there are so many: those that were
            lost, under their numbers, and new ones, under numbers of their own. None (default): as many as began.
        deadlines: how long to wait for what.
        part_mb: payloads move in parts of at most this many MiB. Default 16.
        transport: who starts the ranks and what moves their bytes: `TorchTransport`, `HorovodTransport`, or a short
            name, "torch", "horovod" or "auto" (default): Horovod where horovodrun started the ranks, else torch.

    Raises:
        TypeError: ``rule``, ``schedule`` or ``transport`` lacks what one must answer; a number of replicas is none.
        ValueError: an unknown policy, numbers of replicas that cannot be, a rule that overwrites together with
            ``overlap=True``, or one that sends its parameters together with 8 bits of compression.

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
        lr_clock: refusals.LrClock = "local",
        compression: Compression = "none",
        min_replicas: int | None = None,
        max_replicas: int | None = None,
        deadlines: Deadlines | None = None,
        part_mb: float = 16.0,
        transport: Transport | TransportName = "auto",
    ) -> None:
        deadlines = deadlines or Deadlines()
        super().__init__(transport=transport, dead_after=deadlines.dead_after, gloo_timeout=deadlines.dead_after)
        self.rule = DeltaMean() if rule is None else rule
        self.schedule = EveryNSteps(32) if schedule is None else schedule
        refusals.check_arguments(self.rule, self.schedule, overlap)
        owner = type(self).__name__
        refusals.check_policies(owner, buffers, optimizer_state, lr_clock, part_mb)
        self.config = AveragerConfig(
            overlap=overlap, weighting=weighting, compression=compression, deadlines=deadlines,
            part_bytes=max(4, int(part_mb * 2**20)), min_replicas=min_replicas, max_replicas=max_replicas,
        )  # fmt: skip
        self.config.check_rule(owner, self.rule)
        self.host = Host(self) if isinstance(self.transport, ElasticTransport) else None
        self.num_fits = 0
        self.buffers: BufferPolicy = buffers
        self.optimizer_state_policy: OptimizerPolicy = optimizer_state
        self.lr_clock: refusals.LrClock = lr_clock
        self.summary = RunSummary()
        self._trainer: Any = None
        self.course: Course | None = None
        self.saved = SavedState(self.checkpoint_key)

    def setup_environment(self) -> None:
        super().setup_environment()
        self.failed = False
        self.saved.begin_run()
        trainer: Any = self.module.trainer
        refusals.check_callbacks(trainer.callbacks)
        if self.world is not None:
            check_settings(self, trainer, self.world)
            refusals.check_survival(self.config.min_replicas, self.config.max_replicas, self.world_size)

    def setup(self, trainer: Any) -> None:
        self._trainer = trainer
        fitting = trainer.state.fn == "fit"
        self.saved.begin_stage(trainer.lightning_module, fitting)
        if self.world is not None and fitting:
            check_checkpoint(self.world, self.saved.origin)
            refusals.check_setup(trainer, self._layer_sync)
        self.setup_replica(trainer)
        if fitting:
            self.num_fits = next(_fits)
            self.course = Course(self, trainer)
            if not is_newcomer(self):
                self.course.install(self.world)
            self.course.undo.append(monitor_for_now(trainer))

    def on_train_start(self) -> None:
        """All ranks hold the same model: replicas part from here."""
        if self.averager is not None:  # a loop within this fit, such as the LearningRateFinder's
            self.start_over()
        if is_newcomer(self):
            Guest(self, self._trainer).join()
        elif self.course is not None:
            self.course.begin()

    def start_over(self) -> None:
        """See `Drifting`."""
        if self.course is not None:
            self.course.start_over()

    def begin_again(self) -> None:
        """See `Drifting`."""
        if self.course is not None:
            self.course.begin_again()

    def on_exception(self, exception: BaseException) -> None:
        """Tell the peers, so that they end with this rank's error instead of waiting for it."""
        agreed = self.gates is not None and Vote.STOP in self.gates.agreed
        self.failed = not (agreed and isinstance(exception, SystemExit))  # Lightning's SIGTERMException is one
        if isinstance(exception, PeerLost):  # who lost a peer is not to blame, and where it stood says nothing
            shorten(exception)
        if self._connection is not None:
            self._connection.world.drifting = True
            if self.failed and not isinstance(exception, PeerLost):
                self._connection.membership.fail(in_words(exception))

    def teardown(self) -> None:
        if self.course is not None:
            self.course.end()
        self.course = self._trainer = None
        self.disconnect(in_order=not self.failed)
        super().teardown()

    # ---- steps ----

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.begin_again()
        if self._session is not None and self.world is not None:
            self.world.drifting = True
            self._session.stepping.start_batch(batch)

    def finish_batch(self) -> None:
        """See `Stepping.finish_batch`."""
        if self._session is not None:
            self._session.stepping.finish_batch()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        run = partial(super().optimizer_step, optimizer, model=model, **kwargs)
        if self._session is None or not self.module.automatic_optimization:
            return run(closure)
        return self._session.stepping.step(closure, run)

    def post_backward(self, closure_loss: Tensor) -> None:
        if self._session is not None:
            self._session.stepping.after_backward()

    # ---- ranks that are lost ----

    @property
    def fewest(self) -> int:
        """So many replicas go on without those that are lost."""
        return self.config.fewest(started(self), can_lose=self.host is not None)

    @property
    def shrinks(self) -> bool:
        """See `Drifting`."""
        return self.fewest < max(started(self), (self.host and self.config.max_replicas) or 0)

    # ---- gates ----

    @property
    def _session(self) -> Session | None:
        return None if self.course is None else self.course.session

    @property
    def averager(self) -> BackgroundAverager | None:
        """What averages this replica with the others, while it trains."""
        return None if self._session is None else self._session.averager

    @property
    def gates(self) -> Gates | None:
        """See `Drifting`."""
        return None if self.averager is None else self.averager.gates

    @property
    def shared_steps(self) -> tuple[int, int] | None:
        """See `Drifting`."""
        averager = None if self.lr_clock == "local" else self.averager
        return None if averager is None else (averager.first_step, averager.global_step())

    def end_epoch(self) -> None:
        """See `Drifting`."""
        if self.averager is not None:
            self.averager.epoch += 1

    def on_model_changed(self) -> None:
        """See `Drifting`."""
        if self._session is not None:
            self._session.on_model_changed()

    def summarise(self) -> None:
        """See `Drifting`."""
        if self.course is not None:
            self.course.summarise()

    # ---- settings ----

    def settings(self) -> dict[str, object]:
        """What must be equal on all ranks in a fit."""
        return {
            "strategy": type(self).__qualname__, "rule": self.rule, "schedule": self.schedule,
            "buffers": self.buffers, "optimizer_state": self.optimizer_state_policy, "lr_clock": self.lr_clock,
            "backend": self.transport.backend_on(self.root_device), **self.config.settings(),
        }  # fmt: skip

    def usual_settings(self) -> dict[str, object]:
        """What need not be equal, but commonly is."""
        return {"deadlines": self.config.deadlines}

    # ---- checkpoints ----

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

    def __repr__(self) -> str:
        return f"<{type(self).__name__} for `{namespace}`: rule={self.rule!r}, schedule={self.schedule!r}>"


AsyncAveragingStrategy.register_strategies(pytorch("strategies").StrategyRegistry)

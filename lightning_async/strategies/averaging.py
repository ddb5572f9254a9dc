"""The strategy: `Trainer(strategy=AsyncAveragingStrategy(...))`."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_async.callbacks.monitor import AveragingMonitor
from lightning_async.engine.averager import Arrival, AveragerConfig, BackgroundAverager, Weighting
from lightning_async.engine.replica import BufferPolicy, OptimizerPolicy, Replica, describe
from lightning_async.engine.round import Gate
from lightning_async.engine.rounds import Deadlines
from lightning_async.engine.telemetry import RoundReport, RunSummary
from lightning_async.errors import LayoutMismatch
from lightning_async.flat import FlatLayout
from lightning_async.namespace import fabric, pytorch
from lightning_async.namespace import name as namespace
from lightning_async.rules import DeltaMean, EveryNSteps
from lightning_async.rules.protocols import Action, AveragingRule, Schedule
from lightning_async.strategies import checks
from lightning_async.strategies.connection import Connection, join_default_group
from lightning_async.strategies.drift import DriftPatches
from lightning_async.strategies.environments import MPIRunEnvironment
from lightning_async.strategies.optimizer_state import materialise, reset, state_tensors
from lightning_async.strategies.recompute import RECENT_BATCHES, recompute_batch_norm
from lightning_async.strategies.world import World

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ParallelStrategy
else:
    ParallelStrategy = pytorch("strategies.parallel").ParallelStrategy

__all__ = ["AsyncAveragingStrategy"]

log = logging.getLogger(__name__)

T = TypeVar("T")
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
LrClock = Literal["local", "global"]


class AsyncAveragingStrategy(ParallelStrategy):
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
        deadlines: how long to wait for what.
        part_mb: payloads move in parts of at most this many MiB. Default 16.
        process_group_backend: "gloo", "nccl" or "mpi". Default: "nccl" on CUDA, else "gloo".
        start_method: how Lightning starts the other ranks where no launcher did: "popen" runs the script again;
            "spawn" and "fork" suit notebooks.

    Raises:
        TypeError: ``rule`` or ``schedule`` lacks what a rule or a schedule must answer.
        ValueError: an unknown policy, or a rule that overwrites together with ``overlap=True``.

    Source: local SGD (Stich, 2019), DiLoCo (Douillard et al., 2023), and asynchronous model averaging as in Bagua.
    """

    strategy_name = "async_averaging"
    is_distributed = True

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
        deadlines: Deadlines | None = None,
        part_mb: float = 16.0,
        process_group_backend: str | None = None,
        start_method: StartMethod = "popen",
    ) -> None:
        super().__init__()
        self.rule = DeltaMean() if rule is None else rule
        self.schedule = EveryNSteps(32) if schedule is None else schedule
        self.deadlines = deadlines or Deadlines()
        checks.check_arguments(self.rule, self.schedule, overlap)
        for argument, value, allowed in (
            ("buffers", buffers, get_args(BufferPolicy)),
            ("optimizer_state", optimizer_state, get_args(OptimizerPolicy)),
            ("lr_clock", lr_clock, get_args(LrClock)),
            ("process_group_backend", process_group_backend, (None, "gloo", "nccl", "mpi")),
            ("start_method", start_method, get_args(StartMethod)),
        ):
            if value not in allowed:
                raise ValueError(f"`AsyncAveragingStrategy({argument}={value!r})` must be one of {allowed}.")
        if not part_mb > 0:
            raise ValueError(f"`AsyncAveragingStrategy(part_mb={part_mb!r})` must be > 0.")
        self.config = AveragerConfig(
            overlap=overlap, weighting=weighting, part_bytes=max(4, int(part_mb * 2**20)), deadlines=self.deadlines
        )
        self.buffers: BufferPolicy = buffers
        self.optimizer_state_policy: OptimizerPolicy = optimizer_state
        self.lr_clock: LrClock = lr_clock
        self.averager: BackgroundAverager | None = None
        self.summary = RunSummary()
        self._backend = process_group_backend
        self._start_method: StartMethod = start_method
        self._num_nodes = 1
        self._connection: Connection | None = None
        self._runs = 0
        self._trainer: Any = None
        self._patches: DriftPatches | None = None
        self._saved_state: dict[str, Any] | None = None
        self._failed = False
        self._samples = 0.0
        self._batch_action: Action | None = None
        self._steps_seen = self._steps_counted = 0
        self._hooks: list[Any] = []
        self._recent: deque[Any] = deque(maxlen=RECENT_BATCHES)

    # ---- ranks and processes ----

    @property
    def cluster_environment(self) -> Any:
        """Who this rank is. Lightning's own choice, except under a launcher that it does not know."""
        return self._environment

    @cluster_environment.setter
    def cluster_environment(self, environment: Any) -> None:
        own = fabric("plugins.environments").LightningEnvironment
        if type(environment) is own and MPIRunEnvironment.detect():
            environment = MPIRunEnvironment()
        self._environment = environment

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """Hosts that take part; set by the Trainer."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Ranks on this host."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        """Tell the environment its ranks, and Lightning's printing whether it is rank 0."""
        environment = self.cluster_environment
        if environment is not None:
            environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            environment.set_world_size(self.num_nodes * self.num_processes)
        for module in (fabric("utilities.rank_zero"), pytorch("utilities.rank_zero")):
            module.rank_zero_only.rank = self.global_rank

    def _configure_launcher(self) -> None:
        if self._start_method == "popen":
            launcher = pytorch("strategies.launchers.subprocess_script")._SubprocessScriptLauncher
            self._launcher = launcher(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            launcher = pytorch("strategies.launchers.multiprocessing")._MultiProcessingLauncher
            self._launcher = launcher(self, start_method=self._start_method)

    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        backend = self._backend or ("nccl" if self.root_device.type == "cuda" else "gloo")
        if self.world_size == 1:
            return
        join_default_group(self.cluster_environment, backend, timedelta(minutes=30))
        self._runs += 1
        device = self.root_device if backend == "nccl" else torch.device("cpu")
        self._bucket_device = device
        self._failed = False
        self._connection = Connection(
            self.cluster_environment, backend, device, f"lightning_async/{self._runs}", self.deadlines.dead_after
        )

    # ---- set-up and tear-down ----

    def setup(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        fitting = trainer.state.fn == "fit"
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        if self.world_size > 1 and fitting:
            checks.check_setup(trainer, self._layer_sync)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if self.world_size > 1:
            self._make_equal()
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            fabric("utilities.optimizer")._optimizers_to_device(self.optimizers, self.root_device)
            self._patches = DriftPatches(self, trainer)
            if self.world_size > 1:
                self._patches.install()
            if not any(isinstance(c, AveragingMonitor) for c in trainer.callbacks):
                trainer.callbacks.insert(0, AveragingMonitor())

    def _make_equal(self) -> None:
        """Compare the replicas' models and start them all from rank 0's."""
        assert self._connection is not None
        world = self._connection.world
        mine = describe(self.lightning_module)
        for rank, theirs in enumerate(world.gather_objects(mine)):
            difference = FlatLayout.first_difference(mine, theirs)
            if difference is not None:
                raise LayoutMismatch(
                    f"Rank {self.global_rank} and rank {rank} hold different models; the first difference is {difference} "
                    f"(rank {self.global_rank} | rank {rank}). Build the same model on every rank."
                )
        world.make_equal_([*self.lightning_module.parameters(), *self.lightning_module.buffers()])

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def on_train_start(self) -> None:
        """All ranks hold the same model: replicas part from here."""
        self.summary = RunSummary(rank=self.global_rank, world_size=self.world_size)
        if self.world_size == 1:
            _rank_zero_info(
                "AsyncAveragingStrategy: there is one replica only, so there is nothing to average; it trains as with "
                "a single device. Pass `Trainer(devices=2)` or more."
            )
            return
        assert self._connection is not None
        assert self._patches is not None
        self._patches.gates_epochs = checks.check_fit(self._trainer, self._connection.world)
        module = self.lightning_module
        assert module is not None
        replica = Replica(module, self.buffers, self._bucket_device)
        if self.optimizer_state_policy == "average":
            materialise(self.optimizers)
            replica.build(state_tensors(self.optimizers))
        connection = self._connection
        self.averager = BackgroundAverager(
            connection.root, connection.membership, replica, self.rule, self.schedule, self.config,
            payload=connection.payload,
        )  # fmt: skip
        self.summary = self.averager.summary
        if self._saved_state is not None:
            self.averager.load_state_dict(self._saved_state)
            self._saved_state = None
        connection.membership.on_change = self.averager.wake
        for optimizer in self.optimizers:
            self._hooks.append(optimizer.register_step_post_hook(self._count_step))
        connection.root.open()
        self.averager.start()

    def on_exception(self, exception: BaseException) -> None:
        """Tell the peers, so that they end with this rank's error instead of waiting for it."""
        leaves = isinstance(exception, (SystemExit, KeyboardInterrupt)) or exception.__class__.__name__ == "_TunerExit"
        self._failed = not (leaves and self.averager is not None and self.averager.stop_agreed)
        if self._connection is not None:
            self._connection.world.drifting = True
            if self._failed:
                self._connection.membership.fail(f"{type(exception).__name__}: {exception}")

    def teardown(self) -> None:
        if self.averager is not None:
            self.averager.close()
            self.averager = None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._patches is not None:
            self._patches.remove()
            self._patches = None
        if self._connection is not None:
            self._connection.close(in_order=not self._failed)
            self._connection = None
        self._trainer = None
        super().teardown()

    # ---- steps ----

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.averager is None:
            return
        self._finish_batch()
        assert self._connection is not None
        self._connection.world.drifting = True
        self.averager.resume()
        self._samples += _batch_size(batch)
        if self.buffers == "recompute":
            self._recent.append(batch)
        if not self.lightning_module.automatic_optimization:
            self._batch_action = self.averager.plan()
            self._steps_counted = self._steps_seen

    def _finish_batch(self) -> None:
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
        if averager is None or not self.lightning_module.automatic_optimization:
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
        samples, self._samples = self._samples, 0.0
        lr = float(self.optimizers[0].param_groups[0]["lr"]) if self.optimizers else 0.0
        self._merged(self.averager.tick(action, samples, stepped=stepped, lr=lr))

    def _merged(self, report: RoundReport | None) -> None:
        if report is not None and self.optimizer_state_policy == "reset":
            reset(self.optimizers)

    def _count_step(self, *_: Any) -> None:
        """After every real optimizer step: mixed precision skips some, and users step optimizers themselves."""
        self._steps_seen += 1

    # ---- gates ----

    def rendezvous(self, gate: Gate, index: int = 0) -> None:
        """Wait until every rank is at this gate with the same model; join what others ask for meanwhile."""
        averager = self.averager
        if averager is None or self._failed:
            return
        self._finish_batch()
        while (arrival := averager.rendezvous(gate, index)) is not Arrival.OPEN:
            if arrival is Arrival.STOP:
                self.stop()
            cast(DriftPatches, self._patches).join_validation()
        assert self._connection is not None
        assert self._patches is not None
        self._connection.world.drifting = False
        if averager.end_agreed:
            self._trainer.should_stop = True
        if averager.moved_at_gate:
            self._patches.forget_saved()
            if self.buffers == "recompute":
                self._recompute_buffers()

    def stop(self) -> None:
        """A rank was told to stop: all leave from here, with one model."""
        assert self.averager is not None
        self.averager.rendezvous(Gate.STOP)
        self._trainer._signal_connector.received_sigterm = True
        raise pytorch("utilities.exceptions").SIGTERMException

    def check_votes(self) -> None:
        """After every batch: whether the ranks have agreed to stop, or to end early."""
        averager = self.averager
        if averager is None:
            return
        averager.resume()
        if averager.stop_agreed:
            self._finish_batch()
            self.stop()
        if self._trainer.should_stop and not averager.end_agreed:
            averager.vote(end=True)
        elif averager.end_agreed:
            self._trainer.should_stop = True

    def _recompute_buffers(self) -> None:
        assert self._connection is not None
        recompute_batch_norm(self.lightning_module, list(self._recent), self._connection.world)

    def summarise(self) -> None:
        """All replicas are at the last gate: one summary of the run, on rank 0."""
        if self.averager is None or self.world is None:
            return
        self.summary.elapsed_s = self.averager.elapsed_s
        self.summary.samples_by_rank = self.world.gather_objects(self.summary.samples)
        _rank_zero_info(f"Asynchronous averaging, as rank 0 saw it:\n{self.summary}")

    # ---- Lightning's collectives ----

    @property
    def world(self) -> World | None:
        """Collectives over all ranks; None in a world of one."""
        return self._connection.world if self._connection is not None else None

    def barrier(self, name: str | None = None) -> None:
        if self.world is not None:
            self.world.barrier(name or "")

    def broadcast(self, obj: T, src: int = 0) -> T:
        return self.world.broadcast(obj, src) if self.world is not None else obj

    def reduce(self, tensor: Tensor | Any, group: Any = None, reduce_op: Any = "mean") -> Tensor | Any:
        if self.world is None or not isinstance(tensor, Tensor):
            return tensor
        return self.world.reduce(tensor, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self.world is None:
            return decision
        flag = torch.tensor(float(decision))
        return bool(self.world.reduce(flag, "min" if all else "max"))

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return self.world.all_gather(tensor, sync_grads) if self.world is not None else tensor.unsqueeze(0)

    # ---- checkpoints ----

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self.averager is not None:
            checkpoint[_CHECKPOINT_KEY] = self.averager.state_dict()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._saved_state = checkpoint.get(_CHECKPOINT_KEY)
        return checkpoint

    # ---- registration ----

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """``"async_averaging"``, and the same with the start methods for notebooks."""
        for suffix, start_method in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork")):
            strategy_registry.register(
                cls.strategy_name + suffix,
                cls,
                description=f"Asynchronous model averaging; other ranks are started by '{start_method}'.",
                override=True,
                start_method=start_method,
            )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} for `{namespace}`: rule={self.rule!r}, schedule={self.schedule!r}>"


def _batch_size(batch: Any) -> float:
    """Samples in a batch, as Lightning counts them for its logs; 1 where it cannot tell."""
    with suppress(Exception):
        return float(pytorch("utilities.data").extract_batch_size(batch))
    if not _warned_batch_size:
        _warned_batch_size.append(True)
        log.warning(
            "The number of samples in a batch of type %s cannot be told; every batch counts as one sample.",
            type(batch).__name__,
        )
    return 1.0


_warned_batch_size: list[bool] = []
_CHECKPOINT_KEY = "lightning_async"


def _rank_zero_info(text: str) -> None:
    pytorch("utilities.rank_zero").rank_zero_info(text)


def _allow_compiled_modules() -> None:
    """Lightning lets only strategies on a list of its own train a module that `torch.compile` returned."""
    trainer_module = pytorch("trainer.trainer")
    verify = trainer_module._verify_strategy_supports_compile

    def verify_others(model: Any, strategy: Any) -> None:
        if not isinstance(strategy, AsyncAveragingStrategy):
            verify(model, strategy)

    trainer_module._verify_strategy_supports_compile = verify_others


AsyncAveragingStrategy.register_strategies(pytorch("strategies").StrategyRegistry)
_allow_compiled_modules()

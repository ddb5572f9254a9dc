"""`AsyncGradientStrategy`: gradients accumulate while earlier gradients are averaged in the background."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

from torch.optim import LBFGS, SparseAdam

from lightning_async._checks import check_choice, check_int
from lightning_async.algorithms.accumulation import BalancedWindows
from lightning_async.algorithms.compression import PowerSGD, TopK
from lightning_async.algorithms.staleness import DelayCorrection
from lightning_async.engine.averaging.rule_state import AveragerConfig
from lightning_async.engine.control_plane import ControlPlane
from lightning_async.engine.gradients.compression import GradientCompression
from lightning_async.engine.gradients.window import WindowTotals
from lightning_async.engine.replica import BufferPolicies
from lightning_async.engine.replica_engine import ReplicaEngine
from lightning_async.engine.shared_state import Arrival, SyncPointKind
from lightning_async.engine.timeouts import Timeouts
from lightning_async.strategies.async_strategy import AsyncStrategy
from lightning_async.strategies.window_steps import ManualWindowSteps, WindowSteps, check_apart
from lightning_async.trainer import configuration_checks
from lightning_async.trainer.environment.settings import check_optimizers
from lightning_async.trainer.loops.updates import ExternalWindowSize, OptimizerUpdates
from lightning_async.trainer.namespace import Undo, callbacks_of, pytorch, set_for_now, take_back
from lightning_async.trainer.namespace import name as namespace
from lightning_async.trainer.step_runner import StepRunner
from lightning_async.transports.base import Transport
from lightning_async.transports.resolve import TransportName

CompressionName = Literal["none", "bf16", "fp8", "int8", "topk", "powersgd"]


class AsyncGradientStrategy(AsyncStrategy):
    r"""A strategy in which gradients accumulate while those of earlier batches are averaged in the background.

    Each replica :math:`i` gathers the gradients of a *window* of batches. When the window is full, the mean over all
    replicas' windows is computed in the background, while the next window is gathered. The optimizer steps with the
    mean when it has arrived:

    .. math:: g = \frac{\sum_i \sum_{b \in W_i} n_{i,b}\, g_{i,b}}{\sum_i \sum_{b \in W_i} n_{i,b}}

    over all batches :math:`b` of all replicas' windows :math:`W_i`, of :math:`n_{i,b}` samples each. All replicas take
    the same steps, and have the same parameters after each step. ``global_step``, ``max_steps`` and learning-rate
    schedulers with interval ``"step"`` count these steps. Gradients are clipped after averaging. Before all ranks wait
    for one another (validation, the end of an epoch, checkpoints), they take the step with the gradients in flight. The
    last batch of an epoch ends a window. In manual optimization ``optimizer.step()`` asks for a step, see
    `ManualWindowSteps`.

    Args:
        accumulate: Number of batches in a window. Default 1: as many steps as DDP takes. ``"until_reduced"``: each
            window lasts until the gradients of the window before are averaged, and at least one batch, so that no rank
            waits for another. `BalancedWindows`: slow ranks have fewer batches in a window. If ``accumulate`` is a
            number, an `AdaptiveGradientAccumulation` among the callbacks replaces it.
        delay: 1 (default): a window's step is taken when the next window is full. 0: training waits for each step.
        warmup_steps: Number of steps without delay at the start of training. Default 0.
        correction: Correction of the delay. None (default): none. `DelayCompensation` changes late gradients;
            `WeightPrediction` computes gradients at predicted parameters. Each needs memory for one copy of the
            parameters.
        compression: Form in which gradients are sent: "none" (default), as fp32; "bf16" (half of the bytes); "int8" or
            "fp8" (a quarter, with a scale per 256 elements); "topk" or `TopK(fraction)`, only the largest elements;
            "powersgd" or `PowerSGD(rank)`, matrices as products of thin ones. The error of a message is kept as a
            residual and added to the next message; checkpoints hold it. Compression needs memory for two fp32 copies of
            the parameters. "topk" and "powersgd" delay a large part of each gradient, and need a smaller learning rate.
        buffers: Treatment of floating-point buffers (BatchNorm statistics) at sync points: ``"average"`` (default),
            ``"keep"``, ``"broadcast"`` or ``"recompute"``, see `AsyncAveragingStrategy`.
        min_replicas: Smallest number of replicas with which training goes on after ranks are lost; the live ranks
            repeat the averaging that was under way. None (default): half of the ranks that were started, rounded up;
            over Horovod all of them.
        max_replicas: Largest number of replicas up to which ranks that are started during training are admitted, see
            `AsyncAveragingStrategy`. None (default): as many as were started.
        timeouts: Time limits of waits, see `Timeouts`. Default: those of `Timeouts()`.
        part_mb: Largest size in MiB of the parts in which payloads move. Default 16.
        transport: Starts the ranks and moves their bytes, see `AsyncAveragingStrategy`. Default ``"auto"``.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument is out of range, or ``"until_reduced"`` is combined with ``delay=0``.

    Source: delayed gradient averaging (Zhu et al., NeurIPS 2021); windows that fill the time of communication as in
    ACCO (Nabli et al., 2024, https://arxiv.org/abs/2406.02613).

    >>> AsyncGradientStrategy(accumulate=2, delay=0)
    <AsyncGradientStrategy for `lightning.pytorch`: accumulate=2, delay=0>
    """

    strategy_name = "async_gradients"
    in_windows = True
    updates: OptimizerUpdates | None = None

    def __init__(
        self,
        accumulate: int | BalancedWindows | Literal["until_reduced"] = 1,
        delay: int = 1,
        *,
        warmup_steps: int = 0,
        correction: DelayCorrection | None = None,
        compression: GradientCompression | CompressionName = "none",
        buffers: BufferPolicies = "average",
        min_replicas: int | None = None,
        max_replicas: int | None = None,
        timeouts: Timeouts | None = None,
        part_mb: float = 16.0,
        transport: Transport | TransportName = "auto",
    ) -> None:
        self.accumulate: int | BalancedWindows | Literal["until_reduced"] = accumulate
        self.delay = delay
        self.warmup_steps = warmup_steps
        self.correction = correction
        owner = type(self).__name__
        if isinstance(accumulate, str) and accumulate != "until_reduced":
            raise ValueError(f"`{owner}(accumulate={accumulate!r})` must be 'until_reduced', or a number of batches.")
        if not isinstance(accumulate, str | BalancedWindows):
            check_int(self, "accumulate", at_least=1)
        check_choice(owner, "delay", delay, (0, 1))
        check_int(self, "warmup_steps", at_least=0)
        if correction is not None:
            if isinstance(correction, type) or not isinstance(correction, DelayCorrection):
                what = "a correction such as DelayCompensation()"
                raise TypeError(f"`{owner}(correction={correction!r})` must be {what}.")
            if delay == 0:
                raise ValueError(
                    f"`{owner}(correction={correction!r}, delay=0)`: without a delay nothing is corrected."
                )
        if not isinstance(compression, TopK | PowerSGD):
            check_choice(owner, "compression", compression, get_args(CompressionName))
        self.compression: GradientCompression = (
            TopK() if compression == "topk" else PowerSGD() if compression == "powersgd" else compression
        )
        if accumulate == "until_reduced" and delay == 0:
            raise ValueError(
                f"`{owner}(accumulate='until_reduced', delay=0)`: without a delay nothing is gathered while gradients "
                "are reduced. Pass `delay=1`, or a number of batches."
            )
        configuration_checks.check_policies(owner, buffers, "keep", "samples", part_mb)
        config = AveragerConfig(
            timeouts=Timeouts.or_default(timeouts), part_bytes=max(4, int(part_mb * 2**20)),
            min_replicas=min_replicas, max_replicas=max_replicas,
        )  # fmt: skip
        super().__init__(config, buffers=buffers, transport=transport)
        self.sizes: ExternalWindowSize | None = None
        """The size of windows that a callback sets, in place of `accumulate`; None where no callback does."""
        self.lent = False
        """Whether a callback sets the size of windows."""
        self._undo: list[Undo] = []

    def setup_environment(self) -> None:
        trainer: Any = self.module.trainer
        # A run that failed early may have ended without `teardown`.
        take_back(self._undo)
        self._check(trainer)
        super().setup_environment()

    def _check(self, trainer: Any) -> None:
        """Refuse settings of the Trainer that have no effect with this strategy.

        Raises:
            ValueError: ``accumulate_grad_batches`` is not 1, or there is a `GradientAccumulationScheduler`.
        """
        owner = type(self).__name__
        if trainer.accumulate_grad_batches != 1:
            raise ValueError(
                f"`Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches})`: with `{owner}` say how many "
                f"batches a step has by `{owner}(accumulate={trainer.accumulate_grad_batches})`."
            )
        if callbacks_of(trainer, "GradientAccumulationScheduler"):
            raise ValueError(
                f"`GradientAccumulationScheduler` has no effect on `{owner}`, which accumulates by itself."
            )

    def setup(self, trainer: Any) -> None:
        if trainer.state.fn == "fit":
            if (
                self.accumulate != "until_reduced" and not self.lent
            ):  # Lightning estimates the number of steps from this setting
                batches = self.accumulate.batches if isinstance(self.accumulate, BalancedWindows) else self.accumulate
                self._undo.append(set_for_now(trainer, "accumulate_grad_batches", batches))
            if self.world is not None or self.joining:
                # A rank alone needs no patch, because Lightning's own accumulation does the same.
                self.updates = OptimizerUpdates(
                    trainer, lambda: self.step_runner.after_batch(), lambda: self.step_runner.batch()
                )
                self._undo += self.updates.install()
        super().setup(trainer)
        if trainer.state.fn == "fit" and self.world is not None:
            check_optimizers(self.world, self.module, self.optimizers)
        for optimizer in self.optimizers if trainer.state.fn == "fit" else ():
            is_sam = self.module.automatic_optimization and hasattr(optimizer, "first_step")
            if is_sam or isinstance(optimizer, LBFGS):
                raise ValueError(
                    f"`{type(optimizer).__name__}` evaluates the loss again within a step, and `{type(self).__name__}` "
                    "steps with gradients of earlier batches. Use an optimizer that takes gradients as they are, or "
                    "`AsyncAveragingStrategy()`, whose replicas step with their own batch."
                )
            if isinstance(optimizer, SparseAdam):
                raise ValueError(
                    f"SparseAdam takes sparse gradients, and what `{type(self).__name__}` has averaged is dense: use "
                    "Adam, or SGD."
                )

        if trainer.state.fn == "fit" and not self.module.automatic_optimization:
            check_apart(type(self).__name__, self.module, self.optimizers)

    def make_engine(self, control: ControlPlane, meet: Callable[[SyncPointKind], Arrival]) -> ReplicaEngine:
        return ReplicaEngine(control, WindowTotals())

    def make_step_runner(self, *args: Any) -> StepRunner:  # pyright: ignore[reportIncompatibleVariableOverride]
        return WindowSteps(*args) if self.module.automatic_optimization else ManualWindowSteps(*args)

    @property
    def in_step(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return isinstance(self.accumulate, int) and (self.sizes is None or self.sizes.least == 0.0 or self.sizes.even)

    @property
    def is_update_step(self) -> bool:
        """Whether the optimizer has stepped during the current batch; meant for hooks at the end of a batch."""
        if self.updates is not None:
            return self.updates.taken
        return self._trainer is not None and not self._trainer.fit_loop._should_accumulate()

    def tell_place(self) -> None:
        """Record, when a window is sent, that its message covers this rank's batches up to the current one.

        If this rank is lost, the other ranks train on its remaining samples after this batch.
        """
        if self.fit_sessions is not None:
            self.fit_sessions.patches.tell_place()

    def teardown(self) -> None:
        # First the sessions end, which use the patches and `updates`.
        super().teardown()
        take_back(self._undo)
        self.updates = None

    def settings(self) -> dict[str, object]:
        return {
            **super().settings(), "accumulate": self.accumulate, "delay": self.delay, "warmup_steps": self.warmup_steps,
            "correction": self.correction, "compression": self.compression,
        }  # fmt: skip

    def __repr__(self) -> str:
        return f"<{type(self).__name__} for `{namespace}`: accumulate={self.accumulate!r}, delay={self.delay}>"


AsyncGradientStrategy.register_strategies(pytorch("strategies").StrategyRegistry)

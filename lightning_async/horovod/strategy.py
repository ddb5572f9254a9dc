"""Synchronous data parallel training over Horovod, as `Trainer(strategy="horovod")`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_async._checks import check_choice
from lightning_async.engine.replica import persistent_buffers
from lightning_async.horovod.collectives import HorovodCollectives
from lightning_async.horovod.reducer import GradientReducer
from lightning_async.strategies.base import ReplicatedStrategy
from lightning_async.trainer.environment.subprocess_launcher import note_end
from lightning_async.trainer.loop_patches import ShortEpochs
from lightning_async.trainer.namespace import (
    pytorch,
    refuse_elsewhere,
    scaled_zero,
    scaler_of,
    take_back,
)
from lightning_async.transports.resolve import how_to_have_more

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)


Compression = Literal["none", "fp16"]
Reduction = Literal["mean", "adasum"]


class HorovodStrategy(ReplicatedStrategy):
    r"""A strategy for synchronous data parallel training, which averages gradients over Horovod at every step.

    .. math:: g \leftarrow \frac{1}{n} \sum_i g_i

    Gradients travel in buckets while the backward pass still runs. Start the ranks with ``horovodrun -np 2 python
    train.py``, or with ``mpirun`` if Horovod was built with MPI. Each rank trains on the device of its local rank,
    whatever the Trainer's ``devices`` are. Training equals that of a single process with batches ``n`` times as large.
    All ranks must take equally many steps.

    Args:
        compression: "fp16" sends gradients as fp16, which halves the bytes. Default: "none".
        reduction: "mean" (default), or "adasum", which adapts to how well gradients agree in direction (Maleki et al.,
            2020). "adasum" needs Horovod with MPI, and a number of ranks that is a power of two.
        bucket_mb: Size of a bucket in MiB. Default: 25.
        timeout: Limit of every operation. A rank that is silent for longer ends training on all ranks. Default: 5
            minutes.

    Raises:
        ModuleNotFoundError: Horovod is not installed; the message has the remedy.
        ValueError: An argument is out of range.

    Source: Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow", 2018,
    https://arxiv.org/abs/1802.05799; Lightning had a strategy of this name before its version 2.0.
    """

    strategy_name = "horovod"

    def __init__(
        self,
        *,
        compression: Compression = "none",
        reduction: Reduction = "mean",
        bucket_mb: float = 25.0,
        timeout: timedelta = timedelta(minutes=5),
    ) -> None:
        check_choice("HorovodStrategy", "compression", compression, get_args(Compression))
        check_choice("HorovodStrategy", "reduction", reduction, get_args(Reduction))
        if not bucket_mb > 0:
            raise ValueError(f"`HorovodStrategy(bucket_mb={bucket_mb!r})` must be > 0.")
        if timeout <= timedelta(0):
            raise ValueError(f"`HorovodStrategy(timeout={timeout!r})` must be longer than zero.")
        if reduction == "adasum" and compression != "none":
            raise ValueError(
                f"`HorovodStrategy(reduction='adasum', compression={compression!r})`: Adasum takes gradients as they "
                "are; leave `compression` out."
            )
        super().__init__(transport="horovod", timeouts=None, gloo_timeout=timeout)
        self.compression: Compression = compression
        self.reduction: Reduction = reduction
        self.timeout = timeout
        self._bucket_bytes = int(bucket_mb * 2**20)
        self.weight = 1.0
        """The weight of this rank's next backward pass in the mean over ranks, for batches of unequal size."""
        self.dropped_gradients = 0
        """Number of means of gradients that were not finite, and with which no rank has stepped."""
        # Whether gradients were averaged within the present closure.
        self._reduced = False
        self._reducer: GradientReducer | None = None
        self._averaged: set[int] = set()
        self._undo: list[Callable[[], None]] = []

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        refuse_elsewhere(cls, [cls.strategy_name])
        strategy_registry.register(cls.strategy_name, cls, description=cls.__name__, override=True)

    def setup_environment(self) -> None:
        super().setup_environment()
        self.failed = False

    @contextmanager
    def _prepare_data(self) -> Iterator[None]:
        """Wait without a limit for the rank that prepares data, which may take hours."""
        yield
        if self.world is None:
            return
        calls = self.world.calls
        before, calls.deadline = calls.deadline, None
        try:
            self.barrier("prepare_data")
        finally:
            calls.deadline = before

    def setup(self, trainer: pl.Trainer) -> None:
        if self._layer_sync is not None:
            raise ValueError(
                "`Trainer(sync_batchnorm=True)` needs torch.distributed: with Horovod use plain BatchNorm, or DDP."
            )
        self.setup_replica(trainer)
        if self.world_size == 1:
            self.tell_alone(f"whatever `devices` says. {how_to_have_more(self.transport)}")
            return
        if trainer.state.fn == "fit":
            self._reducer = self._make_reducer()
            # If a user calls `loss.backward()`, no hook of the strategy marks the end of the pass.
            self._undo += [
                optimizer.register_step_pre_hook(lambda *_: self._finish_begun()).remove
                for optimizer in self.optimizers
            ]

    def setup_replica(self, trainer: Any) -> None:
        super().setup_replica(trainer)
        if trainer.state.fn == "fit":
            self._undo += ShortEpochs(trainer).install()

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Begin to average the gradients of newly unfrozen parameters; every rank must have unfrozen the same ones."""
        if self._reducer is None or self._reducer.begun:
            return
        if any(param.requires_grad and id(param) not in self._averaged for param in self.module.parameters()):
            enabled = self._reducer.enabled
            self._reducer.close()
            self._reducer = self._make_reducer()
            self._reducer.enabled = enabled

    def _make_reducer(self) -> GradientReducer:
        assert self._connection is not None
        collectives = self._connection.root
        assert isinstance(collectives, HorovodCollectives)
        adasum = self.reduction == "adasum"
        if adasum:
            collectives.check_adasum()
        trained = [p for p in self.module.parameters() if p.requires_grad or id(p) in self._averaged]
        if self._averaged:
            collectives = collectives.fork(f"unfrozen{len(trained)}")
            assert isinstance(collectives, HorovodCollectives)
        self._averaged = {id(param) for param in trained}
        return GradientReducer(
            trained,
            collectives.for_gradients(self.timeout, self._bucket_bytes),
            # Adasum treats each parameter's gradient separately.
            bucket_bytes=0 if adasum else self._bucket_bytes,
            wire=torch.float16 if self.compression == "fp16" else None,
            mean=not adasum,
            all_reduce=HorovodCollectives.adasum if adasum else HorovodCollectives.all_reduce,  # type: ignore[arg-type]
            on_drop=self._count_drop if scaler_of(self.precision_plugin) is None else None,
        )

    def _count_drop(self) -> None:
        self.dropped_gradients += 1
        if self.dropped_gradients == 1:
            log.warning(
                "The mean of all ranks' gradients is not finite (NaN or infinite): it is dropped, on all ranks, and no "
                "step is taken with it. This warning comes once; `trainer.strategy.dropped_gradients` counts. Look at "
                "the data, lower the learning rate, or clip gradients."
            )

    def on_train_start(self) -> None:
        """Copy the state of rank 0's optimizers to all ranks, because only rank 0 may have resumed."""
        if self.world is None:
            return
        has_state = any(optimizer.state for optimizer in self.optimizers)
        # Without any state, as in a new training, all ranks' optimizers are equal already.
        states = self.world.broadcast([each.state_dict() for each in self.optimizers] if has_state else None)
        if states is not None and self.global_rank != 0:
            for optimizer, state in zip(self.optimizers, states, strict=True):
                optimizer.load_state_dict(state)

    def on_validation_start(self) -> None:
        """Copy rank 0's buffers, which checkpoints hold, to all ranks: in training, BatchNorm's buffers differ."""
        if self.world is None:
            return
        buffers = persistent_buffers(self.module)
        told = self.world.broadcast({name: buffer.cpu() for name, buffer in buffers.items()})
        if self.global_rank != 0:
            for name, buffer in buffers.items():
                buffer.copy_(told[name])

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        if self._reducer is None:
            yield
            return
        self._reducer.enabled = False
        try:
            yield
        finally:
            self._reducer.enabled = True

    def write_state(self, checkpoint: dict[str, Any], origin: str = "") -> None:
        """Add nothing to a checkpoint, because Lightning's own checkpoint is complete; ``origin`` is not used."""

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().backward(closure_loss if self.weight == 1.0 else closure_loss * self.weight, *args, **kwargs)

    def post_backward(self, closure_loss: Tensor) -> None:
        if self._reducer is not None:
            self._reducer.finish()
            self._reduced = True

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Take the step. If `training_step` returned None, still take part in the averaging, as other ranks wait."""
        reducer = self._reducer

        def with_all() -> Any:
            self._reduced = False
            output = closure()
            if reducer is None or self._reduced or not self.own_steps.skipped:
                return output
            reducer.finish(absent=self.weight)
            has_any = any(p.grad is not None for p in self.module.parameters())
            return scaled_zero(self.precision_plugin, self.module.device) if has_any else output

        taken = with_all if self.module.automatic_optimization else closure
        return super().optimizer_step(optimizer, taken, model, **kwargs)

    def _finish_begun(self) -> None:
        if self._reducer is not None and self._reducer.begun:
            self._reducer.finish()

    def on_exception(self, exception: BaseException) -> None:
        self.failed = True
        note_end(exception)

    def teardown(self) -> None:
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None
        self._averaged = set()
        take_back(self._undo)
        self.disconnect(in_order=not self.failed)
        super().teardown()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: compression={self.compression!r}, reduction={self.reduction!r}>"


HorovodStrategy.register_strategies(pytorch("strategies").StrategyRegistry)

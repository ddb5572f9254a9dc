"""Checks of `AdaptiveGradientAccumulation`'s arguments, and learning rates that are scaled for one step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, get_args

import torch

from lightning_async._checks import check_bool, check_choice, check_int, check_protocol
from lightning_async.algorithms import AccumulationPolicy, Fixed, LrScaling
from lightning_async.algorithms.staleness import GradientCorrection, Prediction
from lightning_async.trainer.namespace import Undo, callbacks_of, override, pulls
from lightning_async.trainer.strategy_view import view_of

log = logging.getLogger(__name__)


def check_arguments(callback: Any) -> AccumulationPolicy:
    """Return the policy of an `AdaptiveGradientAccumulation`; raise TypeError or ValueError for bad arguments."""
    owner = type(callback).__name__
    base = callback.base_batch_size
    target = callback.target_batch_size
    if (callback.accumulation_steps is None) == (target is None):
        raise ValueError(f"`{owner}` needs exactly one of `accumulation_steps` and `target_batch_size`.")
    if (base is None) != (target is None):
        raise ValueError(
            f"`{owner}(base_batch_size={base}, target_batch_size={target})`: the two go together; `base_batch_size` is "
            "that of the loader."
        )
    if base is not None:
        check_int(callback, "base_batch_size", at_least=1)
    check_choice(owner, "lr_scaling", callback.lr_scaling, (*get_args(LrScaling), None))
    if callback.count is not None and not callable(callback.count):
        raise TypeError(f"`{owner}(count={callback.count!r})` must be a function of a batch.")
    check_bool(owner, "split_on_oom", callback.split_on_oom)
    name, unit = ("accumulation_steps", "batches") if target is None else ("target_batch_size", "samples")
    given = getattr(callback, name)
    if isinstance(given, int):
        check_int(callback, name, at_least=1)
        return Fixed(given)
    check_protocol(owner, name, given, AccumulationPolicy, "an int or a policy such as ByEpoch({0: 1, 4: 8})")
    if given.unit not in ("any", unit):
        raise ValueError(f"`{owner}({name}={given!r})`: this policy counts {given.unit}, not {unit}.")
    return given


def check_trainer(callback: Any, trainer: Any, module: Any) -> None:
    """Raise ValueError if the module, the Trainer, the strategy or another callback already decides on windows."""
    name = type(callback).__name__
    if not module.automatic_optimization:
        raise ValueError(
            f"`{name}` works with automatic optimization: with manual optimization the module decides when its "
            "optimizers step."
        )
    if pulls(module):
        raise ValueError(
            f"`{name}` must know a batch before it is trained on: `training_step(dataloader_iter)` takes it by itself. "
            "Take `training_step(batch, batch_idx)`."
        )
    if any(other is not callback and type(other) is type(callback) for other in trainer.callbacks):
        raise ValueError(f"The Trainer has two `{name}`: one decides how long a window is.")
    if callbacks_of(trainer, "GradientAccumulationScheduler"):
        raise ValueError(
            f"The Trainer has a `GradientAccumulationScheduler` beside `{name}`: leave it out, and pass "
            f"`{name}(ByEpoch({{...}}))` with what it was given."
        )
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"`Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches})` beside `{name}`: leave it out, the "
            "callback says how many batches a window has."
        )
    if callback.split_on_oom and view_of(trainer.strategy).in_lockstep:
        raise ValueError(
            f"`{name}(split_on_oom=True)` is for ranks that step by themselves: under "
            f"`{type(trainer.strategy).__name__}` the others wait for this one's gradients, bucket by bucket."
        )
    _check_servers(callback, trainer.strategy)
    if trainer.strategy.handles_gradient_accumulation:
        raise ValueError(
            f"`{type(trainer.strategy).__name__}` accumulates gradients by itself: leave `{name}` out, or take another "
            "strategy. `AsyncGradientStrategy(accumulate=)` says how many batches a step has."
        )
    if view_of(trainer.strategy).in_windows:
        _check_windows(callback, trainer.strategy)


def _check_windows(callback: Any, strategy: Any) -> None:
    """Raise ValueError if the callback has arguments that the windows of `AsyncGradientStrategy` do not support."""
    name = type(callback).__name__
    owner = type(strategy).__name__
    policy = callback.policy
    correction = strategy.correction
    measures = getattr(policy, "measures", "nothing")
    if strategy.accumulate != 1:
        raise ValueError(
            f"`{owner}(accumulate={strategy.accumulate!r})` beside `{name}`: one says how large a window is. Leave "
            f"`accumulate` out, or `{name}`."
        )
    if callback.split_on_oom:
        raise ValueError(f"`{name}(split_on_oom=True)` is for other strategies than `{owner}`: leave it out.")
    if callback.lr_scaling is not None and isinstance(correction, Prediction):
        raise ValueError(
            f"`{name}(lr_scaling={callback.lr_scaling!r})` with `{owner}(correction={correction!r})`: that foresees "
            "steps at the rates that optimizers have. Leave one of the two out."
        )
    changed = strategy.compression != "none" or isinstance(correction, GradientCorrection)
    if measures == "noise" and changed:
        what = f"compression={strategy.compression!r}, correction={correction!r}"
        raise ValueError(
            f"`{name}` with `{policy!r}` and `{owner}({what})`: noise is measured of the mean of a window as all have "
            "made it, which is not what arrives there. Leave both out, or take a number or a schedule."
        )
    if measures == "times" and strategy.delay:
        raise ValueError(
            f"`{name}` with `{policy!r}` and `{owner}(delay=1)`: behind the next window nothing is to be seen of "
            "communication. `accumulate='until_reduced'`, without this callback, fills its time; or take `delay=0`."
        )


def _check_servers(callback: Any, strategy: Any) -> None:
    """Raise ValueError if the callback needs all workers' numbers of samples in a step, but pushes to servers.

    A worker does not know the other workers' numbers when it pushes its gradients.
    """
    # Workers that run the optimizer themselves, or alone, know their whole step.
    if not view_of(strategy).served or not strategy.update_on_server or strategy.world_size == 1:
        return
    name = type(callback).__name__
    owner = type(strategy).__name__
    policy = callback.policy
    if callback.lr_scaling is not None and (strategy.mode == "sync" or strategy.warmup_steps):
        how = "mode='sync'" if strategy.mode == "sync" else f"warmup_steps={strategy.warmup_steps}"
        raise ValueError(
            f"`{name}(lr_scaling={callback.lr_scaling!r})` with `{owner}({how})`: the learning rate goes with each "
            "push, and how many samples all workers push only the servers hear. Leave `lr_scaling` out, or take "
            "`AsyncAveragingStrategy(schedule=Synchronous())`."
        )
    if getattr(policy, "measures", "nothing") != "nothing" and strategy.mode == "sync":
        raise ValueError(
            f"`{name}` with `{policy!r}` and `{owner}(mode='sync')`: each worker measures by itself, and they could "
            "not agree on the size of a step. Take a number or a schedule, or "
            "`AsyncAveragingStrategy(schedule=Synchronous())`."
        )


def check_target(callback: Any, rank: int, size: int, ranks: int, began: bool) -> None:
    """Raise ValueError if ``size`` samples cannot be divided into equal batches.

    ``size`` must be a multiple of the callback's ``base_batch_size`` times ``ranks``. ``began`` is True when training
    begins. If it is False, the number of ranks has changed during training. Then there is only a warning, because a
    lost rank must not end training.
    """
    base = callback.base_batch_size
    unit = base * ranks
    # Each rank has a whole number of batches.
    if size % unit == 0:
        return
    # Training must not end because a rank was lost, so the target is met as closely as possible.
    if not began:
        log.warning(
            "Rank %d: %d ranks average their gradients now, so a step has a multiple of %d samples: as near to "
            "`target_batch_size=%d` as can be.", rank, ranks, unit, size,
        )  # fmt: skip
        return
    lower = size - size % unit
    near = " or ".join(str(each) for each in (lower, lower + unit) if each)
    raise ValueError(
        f"`{type(callback).__name__}(base_batch_size={base}, target_batch_size={size})`: steps have multiples of "
        f"{unit} samples, {base} on each of {ranks} ranks that average their gradients. Take {near}, or another batch "
        "size in the loader."
    )


def show(module: Any, metrics: dict[str, float]) -> None:
    """Log metrics to all loggers, and show the first metric in the progress bar."""
    trainer = module.trainer
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
    name = next(iter(metrics))
    module.log(name, metrics[name], on_step=True, on_epoch=False, prog_bar=True, logger=False, batch_size=1)


class TemporaryRates:
    """Learning rates that are changed during one optimizer step only.

    They are multiplied when the gradients are ready, and restored after the step, even if the step fails. So schedulers
    and checkpoints never see the changed rates.
    """

    def __init__(self) -> None:
        self._before: list[tuple[dict[str, Any], Any]] = []

    def install(self, trainer: Any) -> list[Undo]:
        automatic = trainer.fit_loop.epoch_loop.automatic_optimization
        return [self._put_back, override(automatic, "_optimizer_step", self._step)]

    def _step(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        try:
            original(*args, **kwargs)
        finally:
            # A failed step must leave the rates as schedulers know them.
            self._put_back()

    @torch.no_grad()
    def multiply(self, optimizer: Any, factor: float) -> None:
        """Multiply an optimizer's learning rates by ``factor`` for its next step; skip groups without a rate."""
        self._put_back()
        for group in optimizer.param_groups if factor != 1.0 else ():
            lr = group.get("lr")
            # A captured CUDA graph reads this tensor's memory, so it must change in place.
            if isinstance(lr, torch.Tensor):
                self._before.append((group, lr.clone()))
                lr.mul_(factor)
            elif lr is not None:
                self._before.append((group, lr))
                group["lr"] = lr * factor

    @torch.no_grad()
    def _put_back(self) -> None:
        while self._before:
            group, lr = self._before.pop()
            if isinstance(lr, torch.Tensor):
                group["lr"].copy_(lr)
            else:
                group["lr"] = lr

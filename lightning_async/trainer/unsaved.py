"""What Lightning's checkpoint leaves out of the module and of the loops, besides random states and data."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from torch import nn

from lightning_async.trainer.averaged_models import averaged_models_of
from lightning_async.trainer.inheritance import inheritance_of
from lightning_async.trainer.patches import callbacks_of
from lightning_async.trainer.updates import updates_of

__all__ = ["keep_weight", "limits_of", "put_unsaved", "take_plain", "take_unsaved"]

log = logging.getLogger(__name__)


def take_unsaved(trainer: Any) -> dict[str, Any]:
    """Plain values; gradients and buffers by reference."""
    return {**take_plain(trainer), "gradients": _gradients(trainer), "buffers": _buffers(trainer)}


def take_plain(trainer: Any) -> dict[str, Any]:
    """Of these the plain values."""
    fit, epoch, inheritance = trainer.fit_loop, trainer.fit_loop.epoch_loop, inheritance_of(trainer)
    averages = averaged_models_of(trainer)
    return {
        "averaged": averages.updates() if averages is not None else [],
        "left": inheritance.left() if inheritance is not None else [],  # by ranks that were lost
        # `EarlyStopping` may have said so before `min_epochs`: training ends there, whatever has become of its metric
        "stopped": limits_of(trainer) if trainer.should_stop else None,
        "reloaded": fit._last_train_dl_reload_epoch,
        "stepped": epoch._batches_that_stepped,
        "window": _window(trainer),
        "is_last_batch": epoch.batch_progress.is_last_batch,
        "val_reloaded": epoch.val_loop._last_val_dl_reload_epoch,
        "val_batches": dict(getattr(epoch.val_loop, "_seen_batches_per_dataloader", {})),
        "since_validation_s": time.monotonic() - (getattr(trainer, "_last_val_time", None) or time.monotonic()),
        # DDP: whether the next forward pass begins with rank 0's buffers; not amid an accumulation
        "syncs_buffers": getattr(trainer.model, "require_forward_param_sync", None),
    }


@torch.no_grad()
def put_unsaved(trainer: Any, state: dict[str, Any]) -> None:
    """As it was when ``state`` was taken; after the gradients were zeroed, and DDP has made all ranks alike."""
    epoch, module = trainer.fit_loop.epoch_loop, trainer.lightning_module
    trainer.should_stop |= state.get("stopped") == limits_of(trainer)  # older checkpoints do not say
    epoch._batches_that_stepped = state["stepped"]
    if epoch.val_loop._combined_loader is not None:
        epoch.val_loop._last_val_dl_reload_epoch = state["val_reloaded"]
        epoch.val_loop._seen_batches_per_dataloader.update(state["val_batches"])
    if getattr(trainer, "_last_val_time", None) is not None:
        trainer._last_val_time = time.monotonic() - state["since_validation_s"]
    if state["syncs_buffers"] is not None and hasattr(trainer.model, "require_forward_param_sync"):
        trainer.model.require_forward_param_sync = state["syncs_buffers"]
    if (averages := averaged_models_of(trainer)) is not None:
        averages.go_on(state["averaged"])
    parameters = dict(module.named_parameters())
    for name, gradient in state["gradients"].items():
        parameters[name].grad = gradient.to(parameters[name].device, copy=True)
    for name, value in state["buffers"].items():
        _put_buffer(module, name, value, trainer.strategy.root_device)


def keep_weight(trainer: Any, state: dict[str, Any]) -> None:
    r"""Have gradients in accumulation count as the batches in whose place they stand, where a resume has put the next
    batch elsewhere in a window of ``accumulate_grad_batches``; what they lose is told.

    .. math:: g \leftarrow \frac{p / k'}{m / k} g

    They are of :math:`m` batches of :math:`k`, and the next batch is number :math:`p` of :math:`k'`, from 0 on.
    """
    gradients, then, now = state["gradients"], state.get("window"), _window(trainer)
    if then is None or now is None or list(then) == now or state["is_last_batch"]:
        return
    (made, size), (place, length) = then, now
    if made and place and gradients:
        factor = (place / length) / (made / size)
        state["gradients"] = {name: gradient * factor for name, gradient in gradients.items()}
        outcome = f"count as {place} of the {length} batches of the window that goes on"
    elif made and gradients:
        outcome = "are lost, as the next batch begins a window"
    elif place:
        outcome = f"are none: the first optimizer step has those of {length - place} batches, divided by {length}"
    else:
        return
    log.warning(
        "Rank %d: with other batches, or another `accumulate_grad_batches`, than when the checkpoint was made, the "
        "gradients of %d batches that were in accumulation %s.", trainer.global_rank, made, outcome,
    )  # fmt: skip


def _window(trainer: Any) -> list[int] | None:
    """Return how many batches of a window are behind, and how many it has; None where Lightning does not accumulate."""
    loop = trainer.fit_loop.epoch_loop
    is_led = "_accumulated_batches_reached" in vars(loop)  # by `Windows`, which go on from a state of their own
    if is_led or updates_of(trainer) is not None or not trainer.lightning_module.automatic_optimization:
        return None
    size = trainer.accumulate_grad_batches
    return [loop.batch_progress.current.ready % size, size]


def limits_of(trainer: Any) -> list[float | None]:
    """What ends training: where it is another one at a resume, training goes on although it was stopped."""
    timers = [getattr(timer, "_duration", None) for timer in callbacks_of(trainer, "Timer")]
    return [trainer.max_epochs, trainer.max_steps, *timers]


def _put_buffer(module: nn.Module, name: str, value: torch.Tensor, device: torch.device) -> None:
    """In place where there is one like it; a cache that training has made, or made larger, is assigned anew."""
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    buffer = getattr(owner, last, None)
    if isinstance(buffer, torch.Tensor) and buffer.shape == value.shape and buffer.dtype == value.dtype:
        buffer.copy_(value)
    elif last in owner._buffers:
        owner._buffers[last] = value.to(device if buffer is None else buffer.device, copy=True)
    else:
        owner.register_buffer(last, value.to(device, copy=True), persistent=False)


def _gradients(trainer: Any) -> dict[str, torch.Tensor]:
    """Those that the next backward pass adds to. In automatic optimization the others are zeroed before it."""
    module = trainer.lightning_module
    accumulates = updates_of(trainer) is None and trainer.fit_loop._should_accumulate()
    if module.automatic_optimization and not accumulates:
        return {}
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def _buffers(trainer: Any) -> dict[str, torch.Tensor]:
    """Those that no `state_dict` holds; and all where there are other ranks, for DDP starts with rank 0's."""
    module = trainer.lightning_module
    saved = set() if trainer.world_size > 1 else module.state_dict().keys()
    return {name: buffer for name, buffer in module.named_buffers() if name not in saved}

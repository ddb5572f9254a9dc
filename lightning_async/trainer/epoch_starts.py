"""What was done at the start of the epoch under way and is in no state: within it, its hooks are not called again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_async.trainer.patches import callbacks_of

__all__ = ["Modes", "go_on_averaging", "start_again"]


class Modes:
    """Which parameters are trained, and the mode of each submodule: what training has changed of that since it began.

    What it has not changed is as the program says, which may be another one when it is started again.

    Args:
        trainer: in a fit.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._first: dict[str, bool] = {}
        self._changed: set[str] = set()

    def begin(self) -> None:
        """Training begins: from here on changes count."""
        self._first = _modes(self._trainer.lightning_module)

    def take(self) -> dict[str, bool]:
        """What has changed, as it is now."""
        now = _modes(self._trainer.lightning_module)
        return {name: on for name, on in now.items() if name in self._changed or on is not self._first.get(name, on)}

    def put_trained(self, state: dict[str, bool]) -> None:
        """Which parameters are trained, ahead of the rest: a strategy looks at that before training begins."""
        self.put({name: on for name, on in state.items() if name.endswith(".requires_grad")})

    def put(self, state: dict[str, bool]) -> None:
        """As it was when ``state`` was taken."""
        self._changed = set(state)
        module = self._trainer.lightning_module
        owners: dict[str, Any] = {**dict(module.named_modules()), **dict(module.named_parameters())}
        for name, on in state.items():
            path, _, mode = name.rpartition(".")
            if path in owners:
                setattr(owners[path], mode, on)


def start_again(trainer: Any) -> None:
    """Have Lightning's callbacks repeat, in the middle of an epoch, what they did at its start, where that can be."""
    for kind in ("GradientAccumulationScheduler", "TQDMProgressBar"):
        for callback in callbacks_of(trainer, kind):
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
    go_on_averaging(trainer, in_epoch=True)


def go_on_averaging(trainer: Any, in_epoch: bool = False) -> None:
    """`StochasticWeightAveraging` makes its scheduler where an epoch starts, which sets learning rates, and takes what
    the last epoch needs from there: make it now, and let the learning rates and BatchNorm's statistics be."""
    module, epoch = trainer.lightning_module, trainer.current_epoch
    for callback in callbacks_of(trainer, "StochasticWeightAveraging"):
        averages = callback._scheduler_state is not None and callback.swa_start <= epoch <= callback.swa_end
        if not averages and not (in_epoch and epoch == callback.swa_end + 1):
            continue
        rates = [(group, group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups]
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        callback.on_train_epoch_start(trainer, module)
        for group, rate in rates:
            group["lr"] = rate
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])


def _modes(module: nn.Module) -> dict[str, bool]:
    modes = {f"{name}.requires_grad": parameter.requires_grad for name, parameter in module.named_parameters()}
    for name, child in module.named_modules():
        modes[f"{name}.training"] = child.training
        if isinstance(child, nn.modules.batchnorm._NormBase):
            modes[f"{name}.track_running_stats"] = child.track_running_stats
    return modes

"""The part of Lightning's state that a joining rank takes over."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_async.checkpoint.buffers import Buffer
from lightning_async.engine.collectives import Packed, packed
from lightning_async.trainer.loops.averaged_models import averages_of
from lightning_async.trainer.loops.loop_state import LoggedValues, tensors_left_out
from lightning_async.trainer.loops.sync_points import CollectiveCallback
from lightning_async.trainer.loops.updates import updates_of

_NOT_SENT = ("hparams_name", "hyper_parameters", "datamodule_hparams_name", "datamodule_hyper_parameters")


class JoinState:
    """The part of Lightning's state that a joining rank takes over from a live rank.

    The state is copied while all ranks wait, into memory that was reserved before, because copies into new memory are
    slower.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._buffer = Buffer("joining")

    def prepare_for(self, more: int) -> None:
        """Reserve memory for the state that a joining rank receives, and for ``more`` further bytes.

        Any thread may call this, also while training goes on.
        """
        trainer = self._trainer
        modules = [trainer.lightning_module, *averages_of(trainer)]
        tensors: list[Any] = [tensor for module in modules for tensor in parameters_and_buffers(module).values()]
        for optimizer in trainer.optimizers:
            # Copy the values at once, because a step of the training thread may add to the dict.
            for state in list(dict.values(optimizer.state)):
                tensors += list(state.values()) if isinstance(state, dict) else [state]
        self._buffer.reserve(more + sum(each.nbytes for each in tensors if isinstance(each, Tensor)))

    def packed(self, more: dict[str, Any]) -> Packed:
        """Return the state for a joining rank, with the entries of ``more``, in packed form."""
        trainer = self._trainer
        module = trainer.lightning_module
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        state = checkpoint.get("current_model_state", checkpoint["state_dict"])
        # Hyper-parameters are the joining rank's own, and may be objects that cannot be sent.
        own = {
            "checkpoint": {key: value for key, value in checkpoint.items() if key not in _NOT_SENT},
            "tensors": tensors_left_out(state, parameters_and_buffers(module)),
            "averages": [parameters_and_buffers(average) for average in averages_of(trainer)],
            "trained": {name: parameter.requires_grad for name, parameter in module.named_parameters()},
            "directories": [str(getattr(callback, "dirpath", None) or "") for callback in trainer.callbacks],
            "should_stop": bool(trainer.should_stop),
            "logged": LoggedValues(trainer).take(),
            "told": [
                each.for_joining_ranks() if isinstance(each, CollectiveCallback) else None for each in trainer.callbacks
            ],
        }
        return packed({**own, **more}, self._buffer.part_with)

    def close(self) -> None:
        self._buffer.release()

    def restore(self, state: dict[str, Any]) -> None:
        """Take over the ``state`` that a live rank captured, before the fit's loop begins an epoch."""
        trainer = self._trainer
        connector = trainer._checkpoint_connector
        module = trainer.lightning_module
        fit = trainer.fit_loop
        for callback, directory in zip(trainer.callbacks, state["directories"], strict=False):
            # A callback ignores a state that was saved with another directory.
            if directory and hasattr(callback, "dirpath"):
                callback.dirpath = directory
        connector._loaded_checkpoint = state["checkpoint"]
        connector.restore_datamodule()
        connector.restore_model()
        connector.restore_callbacks()
        connector.restore_training_state()
        connector._loaded_checkpoint = {}
        copy_tensors(parameters_and_buffers(module), state["tensors"])
        for average, theirs in zip(averages_of(trainer), state["averages"], strict=True):
            copy_tensors(parameters_and_buffers(average), theirs)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(state["trained"][name])
        trainer.should_stop = state["should_stop"]
        for callback, told in zip(trainer.callbacks, state["told"], strict=False):
            if isinstance(callback, CollectiveCallback) and told is not None:
                callback.come(told)
        epochs = fit.epoch_progress
        for count in (epochs.total, epochs.current):
            count.ready = count.started = count.completed = count.processed
        if (updates := updates_of(trainer)) is not None:
            updates.rates.join()
        fit.epoch_loop.batch_progress.reset_on_run()
        fit.epoch_loop.val_loop.batch_progress.reset_on_run()
        # The property's setter would set True if there is a `max_steps`.
        fit._restarting = fit.epoch_loop.restarting = False
        fit._loaded_from_state_dict = fit.epoch_loop._loaded_from_state_dict = False
        fit.reset_restart_stage()


def parameters_and_buffers(module: Any) -> dict[str, Tensor]:
    """Return all parameters and buffers of a module, by name."""
    return {name: t.detach() for name, t in [*module.named_parameters(), *module.named_buffers()]}


@torch.no_grad()
def copy_tensors(own: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Copy values into the tensors of ``own`` that have the same name and shape."""
    for name, tensor in theirs.items():
        # A module makes buffers that no `state_dict` holds by itself, and may not have made this one yet.
        if name in own and own[name].shape == tensor.shape:
            own[name].copy_(tensor)

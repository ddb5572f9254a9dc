"""The state of Lightning that a joining rank takes over, and where its loops begin and end the epoch under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_async.checkpoint.buffers import Buffer
from lightning_async.engine.collectives import Packed, packed
from lightning_async.trainer.loops.averaged_models import averages_of
from lightning_async.trainer.loops.loop_state import LoggedValues
from lightning_async.trainer.loops.sync_points import CollectiveCallback
from lightning_async.trainer.namespace import Undo, override

_NOT_SENT = ("hparams_name", "hyper_parameters", "datamodule_hparams_name", "datamodule_hyper_parameters")


class StateCopying:
    """Copies what a joining rank takes over, while all stand, into memory that was there: new memory is slower."""

    def __init__(self) -> None:
        self._buffer = Buffer("joining")

    def prepare_for(self, trainer: Any, more: int) -> None:
        """Get memory for the state and ``more`` bytes, while training goes on; from any thread."""
        modules = [trainer.lightning_module, *averages_of(trainer)]
        tensors: list[Any] = [tensor for module in modules for tensor in _tensors(module).values()]
        for optimizer in trainer.optimizers:
            for state in list(optimizer.state.values()):  # at once: a step may add to it meanwhile
                tensors += list(state.values()) if isinstance(state, dict) else [state]
        self._buffer.reserve(more + sum(each.nbytes for each in tensors if isinstance(each, Tensor)))

    def packed(self, state: dict[str, Any]) -> Packed:
        return packed(state, self._buffer.part_with)

    def close(self) -> None:
        self._buffer.release()


def state_for_joining_ranks(trainer: Any) -> dict[str, Any]:
    """Return what a joining rank takes over of this one: a checkpoint, tensors that it lacks, directories."""
    module = trainer.lightning_module
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    return {
        "checkpoint": {key: value for key, value in checkpoint.items() if key not in _NOT_SENT},
        "tensors": {name: t for name, t in _tensors(module).items() if name not in checkpoint["state_dict"]},
        "averages": [_tensors(average) for average in averages_of(trainer)],
        "trained": {name: parameter.requires_grad for name, parameter in module.named_parameters()},
        "directories": [str(getattr(callback, "dirpath", None) or "") for callback in trainer.callbacks],
        "should_stop": bool(trainer.should_stop),
        "logged": LoggedValues(trainer).take(),
        "told": [
            each.for_joining_ranks() if isinstance(each, CollectiveCallback) else None for each in trainer.callbacks
        ],
    }


def take_over(trainer: Any, state: dict[str, Any]) -> None:
    """Be as the rank that `state_for_joining_ranks` is of; the fit's loop is about to begin an epoch."""
    connector = trainer._checkpoint_connector
    module = trainer.lightning_module
    fit = trainer.fit_loop
    for callback, directory in zip(trainer.callbacks, state["directories"], strict=False):
        if directory and hasattr(callback, "dirpath"):  # else it would not believe its state
            callback.dirpath = directory
    connector._loaded_checkpoint = state["checkpoint"]
    connector.restore_datamodule()
    connector.restore_model()
    connector.restore_callbacks()
    connector.restore_training_state()
    connector._loaded_checkpoint = {}
    _copy(_tensors(module), state["tensors"])
    for average, theirs in zip(averages_of(trainer), state["averages"], strict=True):
        _copy(_tensors(average), theirs)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(state["trained"][name])
    trainer.should_stop = state["should_stop"]
    for callback, told in zip(trainer.callbacks, state["told"], strict=False):
        if isinstance(callback, CollectiveCallback) and told is not None:
            callback.come(told)
    epochs = fit.epoch_progress
    for count in (epochs.total, epochs.current):
        count.ready = count.started = count.completed = count.processed
    fit.epoch_loop.batch_progress.reset_on_run()
    fit.epoch_loop.val_loop.batch_progress.reset_on_run()
    fit._restarting = fit.epoch_loop.restarting = False  # its setter says yes wherever there is a `max_steps`
    fit._loaded_from_state_dict = fit.epoch_loop._loaded_from_state_dict = False
    fit.reset_restart_stage()


def begin_within_epoch(trainer: Any, state: dict[str, Any], has_part: Callable[[], bool]) -> list[Undo]:
    """Begin with a part of the epoch's rest; without one go to its end, as its data is the others'.

    ``has_part`` is asked as the epoch begins here. Patches the fit's loop, and returns what takes it back.
    """
    fit = trainer.fit_loop
    logged = state["logged"]
    done = False  # the rest of the state is large, and goes
    given: list[float] = []

    def run(original: Any, fetcher: Any) -> None:
        if done:
            original(fetcher)
            return
        LoggedValues(trainer).put_blank(logged)
        if has_part():
            original(fetcher)
            return
        given.append(fit.max_batches)
        fit.max_batches = 0  # so that the end of the epoch is one to the schedulers of learning rates

    def end(original: Any) -> None:
        nonlocal done
        original()
        done = True
        if given:
            fit.max_batches = given.pop()

    return [override(fit.epoch_loop, "run", run), override(fit, "on_advance_end", end)]


def how_it_ended(trainer: Any, stepped: dict[int, int]) -> dict[str, Any]:
    """Return what a joining rank lacks at an epoch's end, not having had this rank's part: steps, learning rates."""
    return {
        "steps": [(count.ready, count.completed) for count in _steps(trainer)],
        "logged": trainer.fit_loop.epoch_loop._batches_that_stepped,
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "groups": [
            [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
            for optimizer in trainer.optimizers
        ],
        "stepped": stepped,
        "metrics": LoggedValues(trainer).take(),
    }


def end_as_others(trainer: Any, ended: dict[str, Any]) -> None:
    LoggedValues(trainer).put_blank(ended["metrics"])
    for count, (ready, completed) in zip(_steps(trainer), ended["steps"], strict=True):
        count.ready = ready
        count.completed = completed
    trainer.fit_loop.epoch_loop._batches_that_stepped = ended["logged"]
    for config, state in zip(trainer.lr_scheduler_configs, ended["schedulers"], strict=False):
        config.scheduler.load_state_dict(state)
    for optimizer, groups in zip(trainer.optimizers, ended["groups"], strict=True):
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)


def _steps(trainer: Any) -> list[Any]:
    epoch = trainer.fit_loop.epoch_loop
    progress = epoch.automatic_optimization.optim_progress.optimizer.step, epoch.manual_optimization.optim_step_progress
    return [each.total for each in progress]


def _tensors(module: Any) -> dict[str, Tensor]:
    return {name: t.detach() for name, t in [*module.named_parameters(), *module.named_buffers()]}


@torch.no_grad()
def _copy(own: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for name, tensor in theirs.items():
        own[name].copy_(tensor)

"""The state of a fit at a safe point, and what it was there when something goes wrong on the way to the next one.

The state that a fit can go on from, by where it is (`step_position`):

| within | the state |
| --- | --- |
| fetching a batch, its hooks, forward, backward, clipping | that of the safe point before: the batch comes again |
| behind the backward pass, where gradients are gathered apart (`updates`) | after the batch; see `WindowSteps` |
| the optimizer's step, a scheduler's | none: a part is written, and nobody knows which |
| averaging, behind the optimizer's step | after the batch; its schedulers step now |
| hooks and loggers at the end of the batch | after the batch; a validation that is due then is still to come |
| a validation | before it: it comes again |

What a batch changes ahead of the optimizer's step is kept at each safe point: counters, random states, the place in the
data, what was logged, and buffers. Parameters and optimizers need not be.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_async.data.random_states import Generators, States
from lightning_async.data.stateful_loader import Source, generators_of
from lightning_async.trainer.data.epoch_data import lost_rank_data_of
from lightning_async.trainer.loops.averaged_models import averaged_models_of
from lightning_async.trainer.loops.loop_state import LoggedValues, Modes
from lightning_async.trainer.loops.updates import updates_of
from lightning_async.trainer.namespace import Undo, callbacks_of, override, pytorch, take_back

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Kept:
    state: dict[str, Any]
    random: Callable[[], States]
    loaders: list[Callable[[], Any]]
    plain: dict[str, Any]
    callbacks: dict[str, Any] | None
    counters: list[dict[str, Any]]


class LastSafeState(NamedTuple):
    """The state that `Resume.capture` would have given, or None; and callbacks' states, where hooks have run since."""

    resume: dict[str, Any] | None
    callbacks: dict[str, Any] | None


class SafePoints:
    """The states of one fit at its safe points."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.sources: list[Source] = []
        self.dealt = [0, 1]
        """Number of this rank's part of the epoch's data, and of all parts."""
        self.keeps = True
        self.step_position = StepPosition(trainer)
        self.modes = Modes(trainer)
        self.began: dict[str, Any] | None = None
        self._kept: _Kept | None = None
        self._buffers: KeptBuffers | None = None
        self._generators: Generators | None = None
        self._logged: LoggedValues | None = None
        self._before: dict[str, Any] | None = None
        self._reached = -1

    def generators(self) -> Generators:
        self._generators = generators_of(self.sources)
        return self._generators

    def follow(self) -> Undo:
        if (updates := updates_of(self._trainer)) is not None:
            updates.on_gathered = self.step_position.gathered
            updates.on_step_between = self.stepped_between
        return self.step_position.follow()

    def begin_validation(self) -> None:
        self.step_position.within = StepPhase.VALIDATION
        self.began = self._moving()
        self._before = self._callbacks()

    def capture(self, where: str) -> dict[str, Any]:
        held, ended = self._place(where)
        return {
            "where": where,
            **((self.began if where == "validation" else None) or self._moving()),
            "loaders": [source.position(held, ended) for source in self.sources],
            "rest": self._rest(where, held),
            "combined": self._combined(),
            "dealt": self._parts(where),
            "unsaved": take_unsaved(self._trainer),
        }

    def _parts(self, where: str) -> list[int]:
        """Return which part of the epoch this rank has, of how many; none where it joined within it and has none."""
        lost_rank_data = lost_rank_data_of(self._trainer)
        if lost_rank_data is None:
            return self.dealt
        return [] if lost_rank_data.epoch.has_none and where != "epoch" else lost_rank_data.epoch.dealt or self.dealt

    def _moving(self) -> dict[str, Any]:
        """Return what a validation changes, which begins anew at a resume."""
        return {
            "random": self.generators().take(),
            "logged": LoggedValues(self._trainer).take(),
            "modes": self.modes.take(),
        }

    def _callbacks(self) -> dict[str, Any]:
        """Return their states, ahead of hooks at the end of a validation or epoch, which count and compare."""
        return _containers(pytorch("trainer.call")._call_callbacks_state_dict(self._trainer))

    def _place(self, where: str) -> tuple[bool, bool]:
        """Return whether a batch was fetched and not trained on, and whether no more is read of this iteration."""
        fit = self._trainer.fit_loop
        ended = where == "epoch" or fit.epoch_loop._num_ready_batches_reached()
        return len(getattr(fit._data_fetcher, "batches", ())) > 0, ended

    def _rest(self, where: str, held: bool) -> list[Any] | None:
        """Return the loaders' positions at the end of an epoch that ended before its data; None for any other."""
        epoch = self._trainer.fit_loop.epoch_loop
        if where != "epoch" or not epoch.batch_progress.current.ready or epoch._num_ready_batches_reached():
            return None
        return [source.position(held, ended=False) for source in self.sources]

    def _combined(self) -> dict[str, Any]:
        iterator = self._trainer.fit_loop._combined_loader._iterator
        return {name: copy.copy(value) for name, value in vars(iterator).items() if name in ("_idx", "_consumed")}

    def reach(self, where: str) -> None:
        if not self.keeps or where == "validation":
            return
        trainer = self._trainer
        (held, ended) = self._place(where)
        if self._logged is None or self._buffers is None or self._generators is None or where == "epoch":
            # To look for them takes longer than to copy them; modules seldom get others within an epoch.
            self._buffers = self._buffers or KeptBuffers(trainer.lightning_module)
            self._logged = LoggedValues(trainer)
            self._buffers.look()
            self.generators()
        assert self._generators is not None
        self._buffers.keep()
        random = self._generators.hold()
        loaders = [source.keep(held, ended) for source in self.sources]
        logged = self._logged.take()
        state = {"where": where, "rest": self._rest(where, held), "combined": self._combined(), "logged": logged}
        if ended:
            state["modes"] = self.modes.take()
        callbacks = self._callbacks() if ended else None
        counters = [dict(vars(each)) for each in self._counters()]
        self._kept = _Kept(state, random, loaders, take_plain(trainer), callbacks, counters)
        self.began = None
        self._reached = trainer.fit_loop.epoch_loop.batch_progress.total.completed
        self.step_position.begin_batch()

    def stepped_between(self) -> None:
        """Keep the state anew: the optimizer has stepped outside of a batch, at a sync point."""
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        if progress.total.ready != progress.total.completed or not progress.current.ready:
            self.step_position.within = StepPhase.STEP
        elif progress.total.completed == self._reached:  # else the batch has yet to come to its safe point
            self.reach("batch")

    @contextlib.contextmanager
    def as_it_was(self, ending: bool = False) -> Iterator[LastSafeState | None]:
        """Give the state to go on from, outside of safe points; None where there is none, and `step_position` says why.

        Inside, counters and buffers are put back, so that Lightning's checkpoint is of the same moment. Where training
        is ``ending``, what is left to do of a step can be done.
        """
        within = self.step_position.within
        if within in (StepPhase.STEPPED, StepPhase.GATHERED) and ending:
            self._complete_step()
            within = self.step_position.within
        if within is StepPhase.BATCH and self._kept is not None:
            with self._rewound(self._kept) as state:
                yield LastSafeState(state, self._kept.callbacks)
        elif within is StepPhase.VALIDATION:
            yield LastSafeState(self.capture("validation"), self._before)
        elif within is StepPhase.LOGGERS:
            yield LastSafeState(self.capture("batch"), None)
        elif within is StepPhase.BATCH_END:
            progress = self._trainer.fit_loop.epoch_loop.batch_progress
            with self._counters_kept():
                for each in (progress.total, progress.current):
                    each.completed = each.processed
                yield LastSafeState(self.capture("batch end"), None)
        else:
            yield None

    @contextlib.contextmanager
    def _rewound(self, kept: _Kept) -> Iterator[dict[str, Any]]:
        assert self._buffers is not None
        # At a sync point only what all have agreed on has changed buffers since, and the engine reads them.
        at_rest = self._trainer.fit_loop.epoch_loop.batch_progress.total.ready == self._reached
        with self._counters_kept() as counters, contextlib.nullcontext() if at_rest else self._buffers.put_back():
            for each, before in zip(counters, kept.counters, strict=True):
                vars(each).update(before)
            yield {
                "modes": self.modes.take(),
                **kept.state,
                "random": kept.random(),
                "loaders": [position() for position in kept.loaders],
                "dealt": self._parts(kept.state["where"]),
                "unsaved": {**take_unsaved(self._trainer), **kept.plain},
            }

    def _complete_step(self) -> None:
        epoch = self._trainer.fit_loop.epoch_loop
        automatic = epoch.automatic_optimization.optim_progress.optimizer.step
        manual = epoch.manual_optimization
        for step in (automatic, manual.optim_step_progress):
            for each in (step.total, step.current):
                each.completed = each.ready
        epoch.batch_progress.increment_processed()
        epoch.update_lr_schedulers("step", update_plateau_schedulers=False)
        if epoch._num_ready_batches_reached():
            epoch.update_lr_schedulers("epoch", update_plateau_schedulers=False)

    @contextlib.contextmanager
    def _counters_kept(self) -> Iterator[list[Any]]:
        counters = self._counters()
        now = [dict(vars(each)) for each in counters]
        try:
            yield counters
        finally:
            for each, values in zip(counters, now, strict=True):
                vars(each).update(values)

    def _counters(self) -> list[Any]:
        fit = self._trainer.fit_loop
        epoch = self._trainer.fit_loop.epoch_loop
        optimizer = epoch.automatic_optimization.optim_progress.optimizer
        progress = [
            fit.epoch_progress, epoch.batch_progress, epoch.scheduler_progress, optimizer.step, optimizer.zero_grad,
            epoch.manual_optimization.optim_step_progress, epoch.val_loop.batch_progress,
        ]  # fmt: skip
        return [part for each in progress for part in (each, each.total, each.current)]


def _containers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _containers(entry) for name, entry in value.items()}
    return [_containers(entry) for entry in value] if isinstance(value, list) else value


class StepPhase(enum.Enum):
    NOTHING = "nothing was trained yet"
    BATCH = "a batch"
    ACCUMULATED = "gradients in accumulation have changed"
    GATHERED = "gradients have joined those that leave together"
    MANUAL = "the training step was within manual optimization, which may have stepped"
    STEP = "the optimizer or a scheduler had begun a step"
    STEPPED = "the optimizer has stepped, schedulers have not"
    BATCH_END = "hooks at the end of a batch"
    VALIDATION = "a validation"
    LOGGERS = "loggers are written"


class StepPosition:
    """How far a fit is between two safe points: whether a part of a step is written, and which part is done."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.within = StepPhase.NOTHING
        self._accumulates = False
        self._steps = 0
        """Steps of optimizers under way, one within another: that of a class calls that of its base."""

    def install(self) -> list[Undo]:
        epoch = self._trainer.fit_loop.epoch_loop
        return [
            override(self._trainer.strategy, "backward", self._backward),
            override(self._trainer.precision_plugin, "_after_closure", self._after_closure),
            override(epoch.manual_optimization, "run", self._step_manually),
            override(epoch, "update_lr_schedulers", self._update_lr_schedulers),
            override(epoch, "_save_loggers_on_train_batch_end", self._save_loggers),
            override(self._trainer.fit_loop, "on_advance_end", self._end_epoch),
        ]

    def follow(self) -> Undo:
        self.within = StepPhase.NOTHING  # a search for a learning rate may have trained before
        optimizers = self._trainer.strategy.optimizers
        hooks = [each.register_step_pre_hook(self._begin_step) for each in optimizers]
        hooks += [each.register_step_post_hook(self._stepped) for each in optimizers]
        return partial(take_back, [hook.remove for hook in hooks])

    def begin_batch(self) -> None:
        self.within = StepPhase.BATCH
        self._accumulates = updates_of(self._trainer) is None and self._trainer.fit_loop._should_accumulate()
        self._steps = 0

    def gathered(self) -> None:
        """Note that the batch under way need not come again: its gradients are gathered apart from the parameters."""
        self.within = StepPhase.GATHERED

    def _backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self.within is StepPhase.BATCH and self._accumulates:
            self.within = StepPhase.ACCUMULATED
        return original(*args, **kwargs)

    def _after_closure(self, original: Any, *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        self.within = StepPhase.STEP

    def _begin_step(self, *_: Any) -> None:
        self._steps += 1

    def _stepped(self, *_: Any) -> None:
        self._steps -= 1
        if self.within is StepPhase.STEP and self._steps == 0:
            self.within = StepPhase.STEPPED

    def _step_manually(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.within = StepPhase.MANUAL
        return original(*args, **kwargs)

    def _update_lr_schedulers(self, original: Any, interval: str, update_plateau_schedulers: bool) -> None:
        before = self.within
        self.within = StepPhase.STEP
        original(interval, update_plateau_schedulers)
        at_end = interval == "epoch" and before is StepPhase.BATCH  # of an epoch, and in no batch, see `ShortEpochs`
        if before is StepPhase.NOTHING:
            self.within = StepPhase.NOTHING
        elif not update_plateau_schedulers and not at_end:
            self.within = StepPhase.BATCH_END

    def _save_loggers(self, original: Any) -> None:
        self.within = StepPhase.LOGGERS
        original()

    def _end_epoch(self, original: Any) -> None:
        if self.within is StepPhase.BATCH_END:  # the rest was left out: the safe point before lies far behind
            self.within = StepPhase.STEP
        original()


SMALL = 1 << 16
"""Bytes; smaller buffers are copied each time, for BatchNorm's kernels do not count what they write."""


class KeptBuffers:
    """Copies of a module's buffers, which a forward pass changes; large ones from when they are seen to change."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._owners: list[tuple[str, dict[str, Tensor | None]]] = []
        self._copies: dict[str, Tensor] = {}
        self._seen: dict[str, tuple[Tensor, int | None]] = {}
        """Large buffers, and how many writes each had counted."""
        self.look()

    def look(self) -> None:
        modules = self._module.named_modules()
        self._owners = [(f"{path}." if path else "", each._buffers) for path, each in modules if each._buffers]

    @torch.no_grad()
    def keep(self) -> None:
        copies = {}
        old = []
        new = []
        for name, buffer in self._all():
            if buffer.nbytes > SMALL and not self._moves(name, buffer):
                if name in self._copies:
                    copies[name] = self._copies[name]
                continue
            copy = self._copies.get(name)
            if copy is None or copy.shape != buffer.shape or copy.dtype != buffer.dtype or copy.device != buffer.device:
                copies[name] = buffer.detach().clone()
            else:
                copies[name] = copy
                old.append(copy)
                new.append(buffer)
        if old:
            torch._foreach_copy_(old, new)
        self._copies = copies

    def _moves(self, name: str, buffer: Tensor) -> bool:
        version = None if buffer.is_inference() else buffer._version
        seen = self._seen.get(name)
        self._seen[name] = buffer, version
        return seen is not None and (seen[0] is not buffer or version is None or seen[1] != version)

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        live = [dict(buffers) for _, buffers in self._owners]
        for path, buffers in self._owners:
            buffers.update({name: self._copies.get(path + name, now) for name, now in buffers.items()})
        try:
            yield
        finally:
            for (_, buffers), now in zip(self._owners, live, strict=True):
                buffers.update(now)

    def _all(self) -> list[tuple[str, Tensor]]:
        return [
            (path + name, buffer)
            for path, buffers in self._owners
            for name, buffer in buffers.items()
            if buffer is not None
        ]


def take_unsaved(trainer: Any) -> dict[str, Any]:
    """Return what Lightning's checkpoint leaves out of module and loops; gradients and buffers by reference."""
    module = trainer.lightning_module
    # Those that the next backward pass adds to: in automatic optimization others are zeroed before it.
    accumulates = updates_of(trainer) is None and trainer.fit_loop._should_accumulate()
    adds = accumulates or not module.automatic_optimization
    gradients = {name: p.grad for name, p in module.named_parameters() if adds and p.grad is not None}
    # Those that no `state_dict` holds; and all where there are other ranks, for DDP starts with rank 0's.
    saved = set() if trainer.world_size > 1 else module.state_dict().keys()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name not in saved}
    return {**take_plain(trainer), "gradients": gradients, "buffers": buffers}


def take_plain(trainer: Any) -> dict[str, Any]:
    epoch = trainer.fit_loop.epoch_loop
    lost_rank_data = lost_rank_data_of(trainer)
    averages = averaged_models_of(trainer)
    return {
        "averaged": averages.updates() if averages is not None else [],
        "left": lost_rank_data.left() if lost_rank_data is not None else [],  # by ranks that were lost
        # `EarlyStopping` may have said so before `min_epochs`: training ends there, whatever has become of its metric
        "stopped": limits_of(trainer) if trainer.should_stop else None,
        "reloaded": trainer.fit_loop._last_train_dl_reload_epoch,
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
    """Put ``state`` in place, after the gradients were zeroed, and DDP has made all ranks alike."""
    epoch = trainer.fit_loop.epoch_loop
    module = trainer.lightning_module
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
    gradients = state["gradients"]
    then = state.get("window")
    now = _window(trainer)
    if then is None or now is None or list(then) == now or state["is_last_batch"]:
        return
    (made, size) = then
    (place, length) = now
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
    is_led = "_accumulated_batches_reached" in vars(loop)  # by `AccumulationWindows`, with a state of its own
    if is_led or updates_of(trainer) is not None or not trainer.lightning_module.automatic_optimization:
        return None
    size = trainer.accumulate_grad_batches
    return [loop.batch_progress.current.ready % size, size]


def limits_of(trainer: Any) -> list[float | None]:
    """Return what ends training: where it is another one at a resume, training goes on although it was stopped."""
    timers = [getattr(timer, "_duration", None) for timer in callbacks_of(trainer, "Timer")]
    return [trainer.max_epochs, trainer.max_steps, *timers]


def _put_buffer(module: nn.Module, name: str, value: torch.Tensor, device: torch.device) -> None:
    """Copy in place where there is one like it; assign a cache that training has made, or made larger."""
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    buffer = getattr(owner, last, None)
    if isinstance(buffer, torch.Tensor) and buffer.shape == value.shape and buffer.dtype == value.dtype:
        buffer.copy_(value)
    elif last in owner._buffers:
        owner._buffers[last] = value.to(device if buffer is None else buffer.device, copy=True)
    else:
        owner.register_buffer(last, value.to(device, copy=True), persistent=False)

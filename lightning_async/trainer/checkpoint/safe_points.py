"""The state of a fit at its safe points, and the state that can be saved if the fit fails between two of them.

A safe point is a moment from which training can be resumed exactly: the end of a batch, the end of an epoch, or a
moment within a validation between two of its batches. Between two safe points, `StepPosition` has the phase of the fit.
The phase decides from which state a resume continues:

| the fit is within | the state from which a resume continues |
| --- | --- |
| fetching a batch, its hooks, forward, backward, clipping | that of the last safe point: the batch is repeated |
| after a backward pass whose step comes in a later batch | after the batch; the gradients are saved, too |
| a step of the optimizer or of a scheduler | none, because an unknown part of the step is done |
| averaging, after the optimizer's step | after the batch; its schedulers step before the save |
| hooks and loggers at the end of the batch | after the batch; a validation that is due follows after the resume |
| a validation | before the validation, which is repeated |

At each safe point, copies are made of everything that a batch changes before the optimizer's step: counters, random
states, the position in the data, logged values and buffers. Parameters and optimizers do not change before that step.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_async.data.random_states import Generators, States, reseed
from lightning_async.data.stateful_loader import Source, generators_of
from lightning_async.trainer.loops.averaged_models import averaged_models_of
from lightning_async.trainer.loops.loop_state import LoggedValues, Modes
from lightning_async.trainer.loops.updates import updates_of
from lightning_async.trainer.namespace import Undo, callbacks_of, override, pytorch, take_back
from lightning_async.trainer.strategy_view import view_of

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
    """A state from which the fit can resume.

    Args:
        resume: The state, as `Resume.capture` returns it; None if there is none.
        callbacks: The callbacks' states at that safe point, if hooks of callbacks may have changed them since; None if
            the present states are valid.
    """

    resume: dict[str, Any] | None
    callbacks: dict[str, Any] | None


class SafePoints:
    """The states of one fit at its safe points, which are the moments from which training can be resumed exactly.

    `reach` stores a state at each safe point. `capture` returns the present state. `as_it_was` returns the last state
    from which the fit can resume, also between two safe points.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.sources: list[Source] = []
        # This rank's part of the epoch's data, and the number of parts.
        self.dealt = [0, 1]
        # Whether to keep a state at each safe point, which costs time. False if no save can need one.
        self.keeps = True
        self.step_position = StepPosition(trainer)
        self.modes = Modes(trainer)
        self.limits = Limits(trainer)
        # The state before the validation under way; None outside of validations.
        self.began: dict[str, Any] | None = None
        self._kept: _Kept | None = None
        self._buffers: KeptBuffers | None = None
        self._generators: Generators | None = None
        self._logged: LoggedValues | None = None
        self._before: dict[str, Any] | None = None
        # The number of completed batches at the last safe point.
        self._reached = -1

    def generators(self) -> Generators:
        self._generators = generators_of(self.sources)
        return self._generators

    def follow(self) -> Undo:
        # With synchronous steps, gradients are kept apart from the parameters, and steps happen outside of batches.
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
            "unsaved": self._unsaved(),
        }

    def _parts(self, where: str) -> list[int]:
        """Return the index of this rank's part of the epoch's data, and the number of parts.

        Return an empty list if this rank has joined in the middle of the epoch and has no part of it. ``where`` is the
        kind of safe point. For ``"epoch"`` the list is never empty.
        """
        lost_rank_data = view_of(self._trainer.strategy).lost_rank_data
        if lost_rank_data is None:
            return self.dealt
        return [] if lost_rank_data.epoch.has_none and where != "epoch" else lost_rank_data.epoch.dealt or self.dealt

    def _moving(self) -> dict[str, Any]:
        """Return random states, logged values and modes of modules.

        A validation changes these values. A resume that repeats the validation needs the values from before it.
        """
        return {
            "random": self.generators().take(),
            "logged": LoggedValues(self._trainer).take(),
            "modes": self.modes.take(),
        }

    def _callbacks(self) -> dict[str, Any]:
        """Return copies of the callbacks' states.

        Hooks at the end of an epoch or of a validation may change the originals.
        """
        return _containers(pytorch("trainer.call")._call_callbacks_state_dict(self._trainer))

    def _place(self, where: str) -> tuple[bool, bool]:
        """Return whether a batch was fetched but not trained on, and whether the epoch's data is at its end."""
        fit = self._trainer.fit_loop
        ended = where == "epoch" or fit.epoch_loop._num_ready_batches_reached()
        return len(getattr(fit._data_fetcher, "batches", ())) > 0, ended

    def _rest(self, where: str, held: bool) -> list[Any] | None:
        """Return the loaders' positions if the epoch ended before its data did, as at ``max_steps``; None otherwise.

        ``held`` says whether a batch was fetched but not trained on.
        """
        epoch = self._trainer.fit_loop.epoch_loop
        if where != "epoch" or not epoch.batch_progress.current.ready or epoch._num_ready_batches_reached():
            return None
        return [source.position(held, ended=False) for source in self.sources]

    def _combined(self) -> dict[str, Any]:
        iterator = self._trainer.fit_loop._combined_loader._iterator
        return {name: copy.copy(value) for name, value in vars(iterator).items() if name in ("_idx", "_consumed")}

    def reach(self, where: str) -> None:
        # A validation keeps its own state, in `begin_validation`.
        """Store the state at this safe point, in case the fit fails before the next one."""
        if not self.keeps or where == "validation":
            return
        trainer = self._trainer
        (held, ended) = self._place(where)
        if self._logged is None or self._buffers is None or self._generators is None or where == "epoch":
            # Finding these objects takes longer than copying them, and a module seldom gets others within an epoch.
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
        self._kept = _Kept(state, random, loaders, self._plain(), callbacks, counters)
        self.began = None
        self._reached = trainer.fit_loop.epoch_loop.batch_progress.total.completed
        self.step_position.begin_batch()

    def stepped_between(self) -> None:
        """Replace the stored state after the optimizer has stepped at a sync point, outside of any batch."""
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        if progress.total.ready != progress.total.completed or not progress.current.ready:
            self.step_position.within = StepPhase.STEP
        # Otherwise the batch still has to reach its own safe point.
        elif progress.total.completed == self._reached:
            self.reach("batch")

    @contextlib.contextmanager
    def as_it_was(self, ending: bool = False) -> Iterator[LastSafeState | None]:
        """Yield the last state from which the fit can resume, at a moment between safe points; None if there is none.

        If there is none, the attribute `step_position` has the reason. During the block, Lightning's counters and the
        module's buffers have the values of the yielded state. A Lightning checkpoint that is captured in the block
        therefore fits this state. After the block, counters and buffers have their present values again.

        Args:
            ending: Whether training ends here. If the optimizer has stepped but the loop has not counted the step yet,
                the step is then completed first: it is counted, and schedulers step. Default: False.
        """
        within = self.step_position.within
        # Training ends, so what the loop would have done next can be done here.
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
        # The batch's step is complete, although the loop has not counted the batch yet.
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
        # At a sync point only the agreed state has changed buffers since, and the engine reads them.
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
                "unsaved": {**self._unsaved(), **kept.plain},
            }

    def _complete_step(self) -> None:
        """Count the optimizer's step as done, and step the schedulers, as Lightning would have done next."""
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

    def _unsaved(self) -> dict[str, Any]:
        """Return the state of module and loops that Lightning's checkpoint does not hold; tensors by reference."""
        trainer = self._trainer
        module = trainer.lightning_module
        # Only gradients to which the next backward pass adds. Automatic optimization zeroes all others first.
        accumulates = updates_of(trainer) is None and trainer.fit_loop._should_accumulate()
        adds = accumulates or not module.automatic_optimization
        gradients = {name: p.grad for name, p in module.named_parameters() if adds and p.grad is not None}
        # Buffers that no `state_dict` holds. With several ranks all buffers, because DDP begins with rank 0's.
        saved = set() if trainer.world_size > 1 else module.state_dict().keys()
        buffers = {name: buffer for name, buffer in module.named_buffers() if name not in saved}
        return {**self._plain(), "gradients": gradients, "buffers": buffers}

    def _plain(self) -> dict[str, Any]:
        trainer = self._trainer
        epoch = trainer.fit_loop.epoch_loop
        lost_rank_data = view_of(trainer.strategy).lost_rank_data
        averages = averaged_models_of(trainer)
        return {
            "averaged": averages.updates() if averages is not None else [],
            # The shares of lost ranks in this epoch.
            "left": lost_rank_data.left() if lost_rank_data is not None else [],
            # `EarlyStopping` may have asked for a stop before `min_epochs`. Training ends there, whatever the metric is
            # by then.
            "stopped": self.limits.now() if trainer.should_stop else None,
            "reloaded": trainer.fit_loop._last_train_dl_reload_epoch,
            "stepped": epoch._batches_that_stepped,
            "window": self._window(),
            "unstepped": view_of(trainer.strategy).step_runner.unstepped(),
            "is_last_batch": epoch.batch_progress.is_last_batch,
            "val_reloaded": epoch.val_loop._last_val_dl_reload_epoch,
            "val_batches": dict(getattr(epoch.val_loop, "_seen_batches_per_dataloader", {})),
            "since_validation_s": time.monotonic() - (getattr(trainer, "_last_val_time", None) or time.monotonic()),
            # For DDP: whether the next forward pass begins with rank 0's buffers. It does not within an accumulation.
            "syncs_buffers": getattr(trainer.model, "require_forward_param_sync", None),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a result of `capture`; called when Lightning has restored its own checkpoint."""
        self.modes.put(state["modes"])
        self._put_unsaved(state["unsaved"])
        LoggedValues(self._trainer).put(state["logged"])
        # The state is another rank's, and this rank was not there when it was saved.
        if "seed" in state["random"]:
            reseed(state["random"]["seed"])
        else:
            self.generators().put(state["random"])

    @torch.no_grad()
    def _put_unsaved(self, state: dict[str, Any]) -> None:
        """Restore a result of `_unsaved`: the state that Lightning's checkpoint does not hold.

        Call this after gradients were zeroed and DDP has made all ranks equal, because either would overwrite that
        state.
        """
        trainer = self._trainer
        epoch = trainer.fit_loop.epoch_loop
        module = trainer.lightning_module
        trainer.should_stop |= self.limits.are(state["stopped"])
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
        if state["unstepped"]:
            view_of(trainer.strategy).step_runner.restore_unstepped(state["unstepped"])
        parameters = dict(module.named_parameters())
        for name, gradient in state["gradients"].items():
            parameters[name].grad = gradient.to(parameters[name].device, copy=True)
        for name, value in state["buffers"].items():
            _put_buffer(module, name, value, trainer.strategy.root_device)

    def keep_weight(self, state: dict[str, Any]) -> None:
        r"""Rescale accumulated gradients after a resume, if their place in the window of batches has changed; log this.

        A window is the ``accumulate_grad_batches`` batches of one optimizer step. After a resume, the next batch may
        have another place in its window than at the save.

        .. math:: g \leftarrow \frac{p / k'}{m / k} g

        The saved gradients are of :math:`m` batches in a window of :math:`k`. The next batch has number :math:`p`,
        counted from 0, in a window of :math:`k'`. After rescaling, the gradients count as :math:`p` batches of that
        window. ``state`` is a result of `_unsaved`, and is changed.
        """
        gradients = state["gradients"]
        then = state["window"]
        now = self._window()
        # The gradients stand for the same batches as before, or the next step begins a new window.
        if then is None or now is None or list(then) == now or state["is_last_batch"]:
            return
        (made, size) = then
        (place, length) = now
        if made and place and gradients:
            factor = (place / length) / (made / size)
            state["gradients"] = {name: gradient * factor for name, gradient in gradients.items()}
            outcome = f"count as {place} of the {length} batches of the window that goes on"
        elif made and gradients:
            state["unstepped"] = []
            outcome = "are lost, as the next batch begins a window"
        elif place:
            outcome = f"are none: the first optimizer step has those of {length - place} batches, divided by {length}"
        else:
            return
        log.warning(
            "Rank %d: with other batches, or another `accumulate_grad_batches`, than when the checkpoint was made, the "
            "gradients of %d batches that were in accumulation %s.", self._trainer.global_rank, made, outcome,
        )  # fmt: skip

    def _window(self) -> list[int] | None:
        """Return the number of completed batches in the present accumulation window, and the window's size.

        Return None if Lightning does not accumulate gradients.
        """
        trainer = self._trainer
        loop = trainer.fit_loop.epoch_loop
        # `AccumulationWindows` replaces Lightning's accumulation, and saves its own state.
        is_led = "_accumulated_batches_reached" in vars(loop)
        if is_led or updates_of(trainer) is not None or not trainer.lightning_module.automatic_optimization:
            return None
        size = trainer.accumulate_grad_batches
        return [loop.batch_progress.current.ready % size, size]


def _containers(value: Any) -> Any:
    """Return a copy of nested dicts and lists; all other values are not copied."""
    if isinstance(value, dict):
        return {name: _containers(entry) for name, entry in value.items()}
    return [_containers(entry) for entry in value] if isinstance(value, list) else value


class Limits:
    """The limits ``max_steps`` and ``max_epochs`` of a fit, raised for a moment if the fit resumes at its last step.

    Lightning does not start the loop of a fit that has taken its last step, even if the epoch or the training was not
    finished. Other replicas may still have steps to take, and this rank must take part in their sync points. `lift`
    therefore raises the limits, so that the loop starts. `put_back` restores them before a batch is trained on, so that
    the loop only finishes the epoch and the training.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._given: tuple[int, int] | None = None
        self._expected = False

    def now(self) -> list[float | None]:
        """Return the present limits of training: ``max_epochs``, ``max_steps``, and the duration of each `Timer`.

        A checkpoint of a stopped training holds these limits. A resume with other limits continues the training.
        """
        timers = [getattr(timer, "_duration", None) for timer in callbacks_of(self._trainer, "Timer")]
        return [self._trainer.max_epochs, self._trainer.max_steps, *timers]

    def are(self, limits: Sequence[float | None] | None) -> bool:
        """Return whether the saved ``limits`` of a stopped training equal the present ones; False for None."""
        return limits == self.now()

    @property
    def are_reached(self) -> bool:
        """Whether training ends with this epoch, because of a limit or a request to stop."""
        fit = self._trainer.fit_loop
        epochs = fit.max_epochs is not None and 0 <= fit.max_epochs <= fit.epoch_progress.current.processed
        steps = 0 <= fit.max_steps <= self._trainer.global_step
        # A stop takes effect only after `min_epochs`.
        return epochs or steps or (self._trainer.should_stop and fit._can_stop_early)

    def expect(self) -> None:
        """Allow the next `lift` to raise ``max_steps`` and ``max_epochs``; called on a resume."""
        self._expected = True

    def lift(self, epoch_is_open: bool) -> None:
        """Raise ``max_steps`` and ``max_epochs`` of a resumed fit if this rank has no step left, but work to do.

        It has work to do if another rank has steps left, or if its own epoch is unfinished (``epoch_is_open``) at
        ``max_steps``. Does nothing unless `expect` was called before. All ranks call this together.
        """
        expected = self._expected
        self._expected = False
        fit = self._trainer.fit_loop
        if not expected:
            return
        step = fit.epoch_loop.global_step
        epoch = fit.epoch_progress.current.processed
        done = _reached(step, fit.max_steps) or _reached(epoch, fit.max_epochs)
        # All ranks decide together, because a rank without steps must take part in the others' sync points.
        others = self._trainer.strategy.reduce_boolean_decision(not done, all=False)
        if done and (others or (epoch_is_open and step == fit.max_steps)):
            self._given = fit.max_steps, fit.max_epochs
            self._raise()

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Restore the user's limits during the block, so that hooks read them; afterwards raise the limits again.

        Does nothing if `lift` has not raised the limits.
        """
        given = self._given
        self.put_back()
        yield
        if given is not None:
            self._given = given
            self._raise()

    def put_back(self) -> None:
        if self._given is not None:
            fit = self._trainer.fit_loop
            (steps, epochs) = self._given
            fit.epoch_loop.max_steps = steps
            fit.max_epochs = epochs
            self._given = None

    def _raise(self) -> None:
        assert self._given is not None
        fit = self._trainer.fit_loop
        (steps, epochs) = self._given
        # If this changed -1, Lightning's loops would take another value for the number of the epoch.
        if steps != -1:
            fit.epoch_loop.max_steps = max(steps, fit.epoch_loop.global_step + 1)
        if epochs != -1:
            fit.max_epochs = max(epochs, fit.epoch_progress.current.processed + 1)


def _reached(now: int, limit: int) -> bool:
    return limit != -1 and now >= limit


class StepPhase(enum.Enum):
    """The phase in which a fit is between two safe points. The value of each phase is its description in the log."""

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
    """The phase of a fit between two safe points: the attribute ``within`` says which part of a step is being executed.

    From the phase follows which state can be saved, see the module's docstring.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.within = StepPhase.NOTHING
        self.held = threading.Event()
        """Whether the main thread may begin an optimizer step; cleared while another thread saves."""
        self.held.set()
        self._accumulates = False
        self._steps = 0
        """Number of nested optimizer steps in progress: the step of a subclass may call the step of its base class."""

    def install(self) -> list[Undo]:
        epoch = self._trainer.fit_loop.epoch_loop
        return [
            override(self._trainer.strategy, "backward", self._backward),
            override(self._trainer.precision_plugin, "_after_closure", self._after_closure),
            override(epoch.manual_optimization, "run", self._step_manually),
            override(epoch, "update_lr_schedulers", self._update_lr_schedulers),
            override(epoch, "_save_loggers_on_train_batch_end", self._save_loggers),
        ]

    def follow(self) -> Undo:
        # A search for a learning rate may have trained before.
        self.within = StepPhase.NOTHING
        optimizers = self._trainer.strategy.optimizers
        hooks = [each.register_step_pre_hook(self._begin_step) for each in optimizers]
        hooks += [each.register_step_post_hook(self._stepped) for each in optimizers]
        return partial(take_back, [hook.remove for hook in hooks])

    def begin_batch(self) -> None:
        self.within = StepPhase.BATCH
        self._accumulates = updates_of(self._trainer) is None and self._trainer.fit_loop._should_accumulate()
        self._steps = 0

    def gathered(self) -> None:
        """Record that the batch's gradients were moved from the parameters into the window of gradients to be sent.

        A resume after a failure from here on does not repeat the batch.
        """
        self.within = StepPhase.GATHERED

    def _backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self.within is StepPhase.BATCH and self._accumulates:
            # The gradients have changed in place, and a repeated batch would add to them twice.
            self.within = StepPhase.ACCUMULATED
        return original(*args, **kwargs)

    def _after_closure(self, original: Any, *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        # The optimizer's step follows, and may fail with a part of the parameters written.
        self.within = StepPhase.STEP
        self.held.wait()

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
        # At the end of an epoch, and within no batch; see `ShortEpochs`.
        at_end = interval == "epoch" and before is StepPhase.BATCH
        if before is StepPhase.NOTHING:
            self.within = StepPhase.NOTHING
        elif not update_plateau_schedulers and not at_end:
            self.within = StepPhase.BATCH_END

    def _save_loggers(self, original: Any) -> None:
        self.within = StepPhase.LOGGERS
        original()

    def end_epoch(self) -> None:
        # The end of the epoch was skipped, so the last safe point lies too far back to resume from.
        if self.within is StepPhase.BATCH_END:
            self.within = StepPhase.STEP


SMALL = 1 << 16
"""Largest size in bytes of a buffer that is always copied, because BatchNorm's kernels do not count versions."""


class KeptBuffers:
    """Copies of a module's buffers, which a forward pass may change.

    `keep` copies small buffers every time. It copies a large buffer only if the buffer's version counter has changed
    since the last call.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._owners: list[tuple[str, dict[str, Tensor | None]]] = []
        self._copies: dict[str, Tensor] = {}
        self._seen: dict[str, tuple[Tensor, int | None]] = {}
        """Each large buffer by name, with its version at the last `keep`."""
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
        # One fused copy: a kernel for each buffer would dominate the time of a batch boundary.
        if old:
            torch._foreach_copy_(old, new)
        self._copies = copies

    def _moves(self, name: str, buffer: Tensor) -> bool:
        # Inference tensors have no version counter, so they are copied always.
        """Return whether a large buffer was replaced or written since the last call of this method for this buffer."""
        version = None if buffer.is_inference() else buffer._version
        seen = self._seen.get(name)
        self._seen[name] = buffer, version
        return seen is not None and (seen[0] is not buffer or version is None or seen[1] != version)

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Give the module the stored copies as its buffers during the block."""
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


def _put_buffer(module: nn.Module, name: str, value: torch.Tensor, device: torch.device) -> None:
    """Copy ``value`` into the module's buffer ``name`` if shape and dtype match; else replace the buffer by a copy.

    Replacing is needed for buffers that serve as caches, which training may have created or enlarged.
    """
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    buffer = getattr(owner, last, None)
    if isinstance(buffer, torch.Tensor) and buffer.shape == value.shape and buffer.dtype == value.dtype:
        buffer.copy_(value)
    elif last in owner._buffers:
        owner._buffers[last] = value.to(device if buffer is None else buffer.device, copy=True)
    else:
        owner.register_buffer(last, value.to(device, copy=True), persistent=False)

"""What a fit's state is at a safe point, and what it was there when something goes wrong on the way to the next one.

The state that a fit can go on from, by where it is (`whereabouts`):

| within | the state |
| --- | --- |
| fetching a batch, its hooks, forward, backward, clipping | that of the safe point before: the batch comes again |
| behind the backward pass, where gradients are gathered apart (`updates`) | after the batch; see `Accumulating` |
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_async.data.random_states import Generators, States
from lightning_async.data.source import Source, generators_of
from lightning_async.trainer.epoch_starts import Modes
from lightning_async.trainer.inheritance import inheritance_of
from lightning_async.trainer.kept_buffers import KeptBuffers
from lightning_async.trainer.logged import Known, take_logged
from lightning_async.trainer.namespace import pytorch
from lightning_async.trainer.patches import Undo
from lightning_async.trainer.unsaved import take_plain, take_unsaved
from lightning_async.trainer.updates import updates_of
from lightning_async.trainer.whereabouts import Whereabouts, Within

__all__ = ["AsItWas", "SafePoints"]


@dataclass(frozen=True)
class _Kept:
    """A safe point that lies behind."""

    where: str
    random: Callable[[], States]
    loaders: list[Callable[[], Any]]
    rest: list[Any] | None
    combined: dict[str, Any]
    plain: dict[str, Any]
    logged: dict[str, Any]
    callbacks: dict[str, Any] | None
    modes: dict[str, bool] | None
    counters: list[dict[str, Any]]


class AsItWas(NamedTuple):
    """A state to go on from.

    Args:
        resume: what `Resume.capture` would have given; None: nothing.
        callbacks: their states, where hooks have run since; None: as they are.
    """

    resume: dict[str, Any] | None
    callbacks: dict[str, Any] | None


class SafePoints:
    """The states of one fit.

    Args:
        trainer: whose fit it is.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.sources: list[Source] = []
        """Its loaders."""
        self.dealt = [0, 1]
        """Of how many parts of the epoch's data this rank has which: ``[part, parts]``."""
        self.keeps = True
        """Whether a batch that goes wrong has a state to go on from."""
        self.whereabouts, self.modes = Whereabouts(trainer), Modes(trainer)
        self.began: dict[str, Any] | None = None
        """What `_moving` was before the validation that is under way."""
        self._kept: _Kept | None = None
        self._buffers: KeptBuffers | None = None
        self._generators: Generators | None = None
        self._known: Known | None = None
        self._before: dict[str, Any] | None = None
        """States of callbacks before the validation that is under way."""
        self._reached = -1
        """Batches behind the last one."""

    # ------------------------------------------------------------------ taken now

    def generators(self) -> Generators:
        """Of this process and of the loaders."""
        self._generators = generators_of(self.sources)
        return self._generators

    def follow(self) -> Undo:
        """Training begins, and optimizers are there: hear of their steps; returns what ends that."""
        if (updates := updates_of(self._trainer)) is not None:
            updates.on_gathered, updates.on_step_between = self.whereabouts.gathered, self.stepped_between
        return self.whereabouts.follow()

    def begin_validation(self) -> None:
        """A batch is done with, and its validation begins."""
        self.whereabouts.within = Within.VALIDATION
        self.began, self._before = self._moving(), self._callbacks()

    def capture(self, where: str) -> dict[str, Any]:
        """The state now: plain values, and gradients and buffers by reference."""
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
        """Of how many parts of the epoch this rank has which; none where it has come within it and has none."""
        inheritance = inheritance_of(self._trainer)
        if inheritance is None:
            return self.dealt
        return [] if inheritance.epoch.has_none and where != "epoch" else inheritance.epoch.dealt or self.dealt

    def _moving(self) -> dict[str, Any]:
        """What a validation changes; it is validated from its beginning."""
        return {
            "random": self.generators().take(),
            "logged": take_logged(self._trainer),
            "modes": self.modes.take(),
        }

    def _callbacks(self) -> dict[str, Any]:
        """Their states, ahead of hooks at the end of a validation or of an epoch, which count and compare."""
        return _containers(pytorch("trainer.call")._call_callbacks_state_dict(self._trainer))

    def _place(self, where: str) -> tuple[bool, bool]:
        """Whether a batch was fetched that is not trained on, and whether no more is read of this iteration."""
        fit = self._trainer.fit_loop
        ended = where == "epoch" or fit.epoch_loop._num_ready_batches_reached()
        return len(getattr(fit._data_fetcher, "batches", ())) > 0, ended

    def _rest(self, where: str, held: bool) -> list[Any] | None:
        """Where the loaders stand at the end of an epoch that `max_steps` or a callback has ended before its data."""
        epoch = self._trainer.fit_loop.epoch_loop
        if where != "epoch" or not epoch.batch_progress.current.ready or epoch._num_ready_batches_reached():
            return None
        return [source.position(held, ended=False) for source in self.sources]

    def _combined(self) -> dict[str, Any]:
        iterator = self._trainer.fit_loop._combined_loader._iterator
        return {name: copy.copy(value) for name, value in vars(iterator).items() if name in ("_idx", "_consumed")}

    # ------------------------------------------------------------------ kept, for later

    def reach(self, where: str) -> None:
        """A safe point: keep what the next batch changes before it steps."""
        if not self.keeps or where == "validation":
            return
        trainer, (held, ended) = self._trainer, self._place(where)
        if self._known is None or self._buffers is None or self._generators is None or where == "epoch":
            # To look for them takes longer than to copy them; modules seldom get others within an epoch.
            self._buffers, self._known = self._buffers or KeptBuffers(trainer.lightning_module), Known(trainer)
            self._buffers.look()
            self.generators()
        assert self._generators is not None
        self._buffers.keep()
        self._kept = _Kept(
            where, self._generators.hold(), [source.keep(held, ended) for source in self.sources],
            self._rest(where, held), self._combined(),
            take_plain(trainer), take_logged(trainer, self._known), self._callbacks() if ended else None,
            self.modes.take() if ended else None,
            [dict(vars(each)) for each in self._counters()],
        )  # fmt: skip
        self.began, self._reached = None, trainer.fit_loop.epoch_loop.batch_progress.total.completed
        self.whereabouts.begin_batch()

    def stepped_between(self) -> None:
        """The optimizer has stepped outside of a batch, at a gate: what was kept of the safe point is no more so."""
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        if progress.total.ready != progress.total.completed or not progress.current.ready:
            self.whereabouts.within = Within.STEP
        elif progress.total.completed == self._reached:  # else the batch has yet to come to its safe point
            self.reach("batch")

    @contextlib.contextmanager
    def as_it_was(self, ending: bool = False) -> Iterator[AsItWas | None]:
        """The state to go on from, outside of safe points; None where there is none, and `whereabouts` say why.

        Inside, counters and buffers are put back, so that Lightning's checkpoint is of the same moment.

        Args:
            ending: training does not go on: what is left to do of a step can be done. Default: False.
        """
        within = self.whereabouts.within
        if within in (Within.STEPPED, Within.GATHERED) and ending:
            self._complete_step()
            within = self.whereabouts.within
        if within is Within.BATCH and self._kept is not None:
            with self._rewound(self._kept) as state:
                yield AsItWas(state, self._kept.callbacks)
        elif within is Within.VALIDATION:
            yield AsItWas(self.capture("validation"), self._before)
        elif within is Within.LOGGERS:
            yield AsItWas(self.capture("batch"), None)
        elif within is Within.BATCH_END:
            with self._batch_completed():
                yield AsItWas(self.capture("batch end"), None)
        else:
            yield None

    @contextlib.contextmanager
    def _rewound(self, kept: _Kept) -> Iterator[dict[str, Any]]:
        assert self._buffers is not None
        # At a gate nothing has changed buffers since but what all have agreed on there, and the engine reads them.
        at_rest = self._trainer.fit_loop.epoch_loop.batch_progress.total.ready == self._reached
        counters = self._counters()
        now = [dict(vars(each)) for each in counters]
        for each, before in zip(counters, kept.counters, strict=True):
            vars(each).update(before)
        try:
            with contextlib.nullcontext() if at_rest else self._buffers.put_back():
                yield {
                    "where": kept.where,
                    "random": kept.random(),
                    "loaders": [position() for position in kept.loaders],
                    "rest": kept.rest,
                    "combined": kept.combined,
                    "dealt": self._parts(kept.where),
                    "unsaved": {**take_unsaved(self._trainer), **kept.plain},
                    "logged": kept.logged,
                    "modes": self.modes.take() if kept.modes is None else kept.modes,
                }
        finally:
            for each, values in zip(counters, now, strict=True):
                vars(each).update(values)

    def _complete_step(self) -> None:
        """What Lightning does when the optimizer has stepped."""
        epoch = self._trainer.fit_loop.epoch_loop
        automatic, manual = epoch.automatic_optimization.optim_progress.optimizer.step, epoch.manual_optimization
        for step in (automatic, manual.optim_step_progress):
            for each in (step.total, step.current):
                each.completed = each.ready
        epoch.batch_progress.increment_processed()
        epoch.update_lr_schedulers("step", update_plateau_schedulers=False)
        if epoch._num_ready_batches_reached():
            epoch.update_lr_schedulers("epoch", update_plateau_schedulers=False)

    @contextlib.contextmanager
    def _batch_completed(self) -> Iterator[None]:
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        before = [(each, each.completed) for each in (progress.total, progress.current)]
        for each, _ in before:
            each.completed = each.processed
        try:
            yield
        finally:
            for each, completed in before:
                each.completed = completed

    def _counters(self) -> list[Any]:
        """What Lightning counts in, of a fit."""
        fit, epoch = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop
        optimizer = epoch.automatic_optimization.optim_progress.optimizer
        progress = [
            fit.epoch_progress, epoch.batch_progress, epoch.scheduler_progress, optimizer.step, optimizer.zero_grad,
            epoch.manual_optimization.optim_step_progress, epoch.val_loop.batch_progress,
        ]  # fmt: skip
        return [part for each in progress for part in (each, each.total, each.current)]


def _containers(value: Any) -> Any:
    """Copied, but for what they hold."""
    if isinstance(value, dict):
        return {name: _containers(entry) for name, entry in value.items()}
    return [_containers(entry) for entry in value] if isinstance(value, list) else value

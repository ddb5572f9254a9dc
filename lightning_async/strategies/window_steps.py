"""One replica's windows of gradients: when one closes, when it leaves, and when the step that it is for is taken.

`WindowSteps` is the step runner of automatic optimization, `ManualWindowSteps` that of manual optimization, where each
of several optimizers asks for steps of its own. `WindowSchedule` says what holds for windows just now: whether they
have a size, and steps a delay. `LastBackward` lets the gradients of a step without delay leave as the last backward
pass makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from torch.optim import Optimizer

from lightning_async.algorithms.accumulation import BalancedWindows
from lightning_async.algorithms.schedules import Action
from lightning_async.engine.averaging.averager import BackgroundAverager
from lightning_async.engine.gradients.reduction import SynchronousGradients
from lightning_async.engine.gradients.window import Window, WindowTotals
from lightning_async.engine.shared_state import SyncPointKind, Vote
from lightning_async.engine.sync_points import SyncPointParticipant
from lightning_async.strategies.delay_correction import correcting
from lightning_async.strategies.local_steps import StepBatches, learning_rate
from lightning_async.strategies.server_steps import SampleCounts
from lightning_async.trainer.loops.updates import OptimizerUpdates
from lightning_async.trainer.namespace import changes_gradients, loss_scale, pulls, searches_lr
from lightning_async.trainer.step_runner import StepRunner

if TYPE_CHECKING:
    from lightning_async.strategies.gradients import AsyncGradientStrategy


_LAST = (SyncPointKind.EPOCH_END, SyncPointKind.TRAIN_END)


class WindowSteps(StepRunner, SyncPointParticipant):
    """The step runner of windows of gradients, in automatic optimization; it takes part in sync points.

    A sync point finds nothing in flight: what is, is reduced and stepped with while the replica stands there, and so
    are the gradients of others who train on, so that all replicas have taken the same steps when it opens. The last
    sync points, of an epoch and of training, close the open window, too.
    """

    missed_steps = 0

    def __init__(
        self,
        strategy: AsyncGradientStrategy,
        averager: BackgroundAverager,
        gradients: SynchronousGradients,
    ) -> None:
        self._strategy = strategy
        self._averager = averager
        self._gradients = gradients
        gradients.rounds.follows = True
        gradients.compress(strategy.compression)
        self._window_schedule = WindowSchedule(strategy, averager)
        self._window = Window(gradients)
        self._pass = LastBackward(strategy.module, self._window_schedule, gradients, self._window, strategy.tell_place)
        self._size = self._batch_samples = self._sent_samples = 0.0
        self._totals = cast(WindowTotals, averager.summary.totals)
        self._seen = 0
        self._batches = StepBatches(strategy.module, strategy.buffers, self._count_samples)
        self._made = self._held = self._restored = False
        """Held: the window is full, and leaves with the next batch: first a checkpoint is made that has it."""
        self._prepare()
        self._correcting = correcting(strategy.correction, gradients, lambda: averager.step)
        self.recent = self._batches.recent
        averager.sync_points.add(self)
        averager.gathered = self._gathered
        averager.alike = self._correcting.state
        saved, alike = strategy.saved.take_gathered()
        self._load(saved or {}, alike)
        self._hooks = [optimizer.register_step_post_hook(self._count) for optimizer in strategy.optimizers]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._gradients.close()

    def _prepare(self) -> None:
        """Prepare for the optimizers, before a saved window is loaded."""

    def _gathered(self) -> dict[str, Any] | None:
        """Return for a checkpoint the open window, with what has left it and is in no step yet, and the residual of
        compression."""
        gradients = self._gradients
        carried_residual = gradients.carried_residual()
        held: dict[str, Any] = {} if carried_residual is None else {"compression": carried_residual}
        if self._window_schedule.updates.rates.ends_epoch:
            held["ends_epoch"] = True
        if self._window.batches or gradients.unstepped() is not None:
            held |= {"size": self._size, "asks": list(gradients.asks), "window": self._window.state_dict()}
        return held or None

    def _load(self, saved: dict[str, Any], alike: Any) -> None:
        """Go on with what `_gathered` has returned."""
        gradients = self._gradients
        if gradients.rounds.feedback is not None and "compression" in saved:
            gradients.rounds.feedback.load_state_dict(saved["compression"])
        if "window" in saved:
            self._window.load_state_dict(saved["window"])
            if "asks" in saved:  # it may leave at a sync point, before a batch begins that says so
                gradients.asks = saved["asks"][0], saved["asks"][1]
            self._size = float(saved["size"])
            self._held = self._window_schedule.fills(self._window.batches, self._window.samples, self._size)
        self._window_schedule.updates.rates.ends_epoch |= "ends_epoch" in saved
        if alike is not None:
            self._correcting.load(alike)
            self._restored = True

    def _count(self, *_: Any) -> None:
        """Count a real optimizer step: mixed precision skips some."""
        self._seen += 1

    def start_batch(self, batch: Any) -> None:
        self._averager.sync_points.resume()
        if self._held:
            self._go()
        self._made = False
        self._batches.start(batch)

    def _count_samples(self, batch: Any) -> None:
        self._batch_samples = self._strategy.count_samples(batch)

    @contextmanager
    def batch(self) -> Iterator[None]:
        with self._pass.guard(), self._correcting.batch(opens=not self._window.batches):
            yield

    def backward(self) -> AbstractContextManager[None]:
        size = self._size if self._window.batches else self._window_schedule.size
        self._pass.begin(self._batch_samples, size, self._averager.step)
        return self._pass.guard()

    def after_backward(self) -> None:
        """Note that there are gradients of the batch, or of a piece of it where memory is short."""
        self._made = True

    def skip_batch(self) -> None:
        """`training_step` has made no loss of the batch under way. It counts for the window's size, so that windows of
        all replicas stay as long as each other, and brings no samples."""
        self._batches.see()
        self._batch_samples = 0.0
        self._made = True

    def after_batch(self) -> None:
        """Add the batch's gradients to the window; if that is full, step with the window before, then send it."""
        if self._made:
            self._made = False
            if not self._window.batches:
                self._size = self._window_schedule.size
            self._batches.see()
            if not self._pass.under_way:
                self._window.add_(self._batch_samples, self._window_schedule.batch_scale, self._averager.step)
            self._window_schedule.updates.on_gathered()
        if self._window_schedule.in_turn:
            full = self._window_schedule.fills(self._window.batches, self._window.samples, self._size)
            if self._pass.under_way or full or self._window_schedule.updates.ends_epoch:
                if not self._pass.under_way:
                    self._arrive()
                if not self._hold():
                    self._go()
        elif not self._gradients.in_flight:
            self._take()
            if not self._hold():
                self._leave()
                self._end_if_last()

    @property
    def between_windows(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return not self._window_schedule.in_turn or self._held or not self._window.batches

    @property
    def stops_here(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        schedule = self._window_schedule
        unstepped = self._gradients.in_flight or self._gradients.arrived is not None
        return not (unstepped and schedule.late and schedule.in_turn and schedule.size == 1)

    @property
    def accumulates(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._window.batches > 0

    def _arrive(self) -> None:
        """Wait for what is in flight, and step with it."""
        self._gradients.wait()
        self._take()

    def _hold(self) -> bool:
        """Return whether a checkpoint comes first, at the end of this batch, with nothing in flight.

        All hear behind one mean that one of them was told to stop: each holds its next window.
        """
        schedule = self._window_schedule
        stops = schedule.in_turn and Vote.STOP in self._averager.sync_points.agreed
        self._held = schedule.late and schedule.updates.left > 1 and (self._averager.marks.due or stops)
        return self._held

    def _go(self) -> None:
        """Send the window, and wait for it where steps have no delay."""
        if self._pass.under_way:
            self._totals.leave(self._window.batches + 1, self._averager.sync_points)
            self._sent_samples = self._pass.finish()
        else:
            self._send()
        if not self._window_schedule.late:
            self._arrive()
            self._arrive()  # again, where that was a step of others
        self._end_if_last()

    def _send(self) -> None:
        """Send the window, as soon as the buckets are free."""
        self._held = False
        while True:
            self._arrive()
            if self._leave():
                return
            self._gradients.wait_until_free()

    def _end_if_last(self) -> None:
        """Take the last step before ``max_steps`` without a delay: no window follows that would bring it."""
        if self._window_schedule.updates.left == 1:
            self._arrive()

    def _leave(self) -> bool:
        """Send the window, if the buckets are free; without batches, or after ``max_steps``, it is dropped.

        One without samples leaves, too: the others wait for it, and steps stay the same on all replicas.
        """
        window = self._window
        if self._window_schedule.updates.left <= 0 or not window.batches:
            window.clear()
            return True
        if not self._gradients.free:
            return False
        samples = window.samples
        self._strategy.tell_place()
        self._totals.leave(window.batches, self._averager.sync_points)
        if not window.leave():
            return False
        self._sent_samples = samples
        return True

    def _take(self) -> None:
        """Step with the mean that has arrived, if one has."""
        gradients = self._gradients
        averager = self._averager
        strategy = self._strategy
        if (arrived := gradients.arrived) is None:
            return
        before = self._seen
        samples = 0.0
        if arrived.message is not None:
            samples = self._sent_samples
            self._sent_samples = 0.0
            samples = 0.0 if getattr(arrived.message, "dropped", False) else samples
        self._step()
        if gradients.arrived is not None:
            raise RuntimeError(
                f"Rank {strategy.global_rank}: `{type(strategy.module).__name__}.optimizer_step` did not call its "
                "`optimizer_closure`, which puts the averaged gradients in place. Pass it on: "
                "`optimizer.step(closure=optimizer_closure)`."
            )
        for p in gradients.replica.tensors.trained.values():
            p.grad = None
        self._totals.arrive(arrived, averager.sync_points, gradients.rounds.message_bytes)
        stepped = self._seen > before
        lr = learning_rate(strategy.optimizers)
        averager.tick(Action.GRADIENTS, samples, stepped=stepped, lr=lr)
        gradients.stepped()

    def _step(self) -> None:
        """Have the optimizer step with the mean that has arrived, corrected."""
        self._window_schedule.updates.take(
            lambda: self._gradients.take_(self._window_schedule.scale, self._correcting.change_)
        )

    def before_sync_point(self) -> None:
        """Ahead of the sync point, while nobody goes on without this replica: what it says there shall hold."""
        averager = self._averager
        sync_point = averager.sync_points.coming  # those of no size end wherever that helps
        ends = sync_point in _LAST or (sync_point is SyncPointKind.DECIDE and not self._window_schedule.in_turn)
        if (self._held and sync_point is not SyncPointKind.STOP) or (ends and self._window.batches):
            self._arrive()
            averager.marks.settle()
            self._send()

    def at_sync_point(self) -> None:
        """Step with what arrives, one's own and others'."""
        self._take()

    def leave_sync_point(self) -> None:
        if not self._restored:  # else training goes on as from within an epoch, behind no sync point
            self._correcting.forget()
        self._restored = False


class ManualWindowSteps(WindowSteps):
    """``optimizer.step()`` in `training_step` moves the gradients of that optimizer's parameters into the window.

    A batch in which an optimizer has asked for a step counts for the window's size. What an optimizer steps with, when
    the window has arrived, is the mean over the samples whose gradients were there when it asked: those of the batch,
    and of batches since `zero_grad` has set them to None. Where no replica has asked for a step of an optimizer, it
    takes none.
    """

    steps = False
    """An optimizer takes a step, in place of asking for one."""
    _uncounted = 0.0
    """Samples since any optimizer has asked for a step."""
    _asked = False

    def _prepare(self) -> None:
        self._gradients.rounds.apart = True
        self._sample_counts = SampleCounts(self._strategy.optimizers)
        self._window_schedule.updates.each = len(self._sample_counts.params)

    def _gathered(self) -> dict[str, Any] | None:
        behind = self._sample_counts.samples
        pending = {"behind": list(behind), "uncounted": self._uncounted} if any(behind) else {}
        return pending | (super()._gathered() or {}) or None

    def _load(self, saved: dict[str, Any], alike: Any) -> None:
        super()._load(saved, alike)
        if len(saved.get("behind", ())) == len(self._sample_counts.samples):
            self._sample_counts.samples = list(saved["behind"])
            self._uncounted = float(saved["uncounted"])

    def start_batch(self, batch: Any) -> None:
        super().start_batch(batch)
        self._sample_counts.start_batch()
        self._asked = False

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Return a context for a backward pass, which counts its samples for all gradients that are there after it."""
        self._sample_counts.begin_pass()
        yield
        self._batches.see()
        self._sample_counts.end_pass(self._batch_samples)

    def after_backward(self) -> None:
        """Gradients stay where they are, until their optimizer asks for a step."""

    def step(self, optimizer: Optimizer, closure: Callable[[], Any], run: Callable[[Callable[[], Any]], Any]) -> Any:
        if self.steps:
            return run(closure)
        output = closure()
        self._batches.see()
        number = self._strategy.optimizers.index(optimizer)
        if not self._window.batches:
            self._size = self._window_schedule.size
        samples = self._sample_counts.take(number) or self._batch_samples
        self._window.add_(samples, self._window_schedule.scale, self._averager.step, self._sample_counts.params[number])
        self._asked = True
        return output

    def after_batch(self) -> None:
        self._batches.see()
        if self._asked:
            self._window.count(self._uncounted + self._batch_samples)
            self._uncounted = 0.0
            self._window_schedule.updates.on_gathered()
        else:
            self._uncounted += self._batch_samples
        if self._asked or self._window_schedule.updates.ends_epoch:
            super().after_batch()

    def _take(self) -> None:
        """Step as always, beside gradients that wait for their optimizer to ask."""
        if self._gradients.arrived is None:
            return
        kept = [(p, p.grad) for p in self._gradients.replica.tensors.trained.values()]
        for p, _ in kept:
            p.grad = None
        try:
            super()._take()
        finally:
            for p, gradient in kept:
                p.grad = gradient

    def _step(self) -> None:
        self._window_schedule.updates.take_each(self._each())

    def _each(self) -> Iterator[Callable[[], None]]:
        arrived = self._gradients.arrived
        scale = self._window_schedule.scale
        replica = self._gradients.replica
        assert arrived is not None
        self._gradients.take_(scale, self._correcting.change_)
        used = {
            p for p, any_used in zip(replica.tensors.trained.values(), arrived.used.tolist(), strict=True) if any_used
        }
        for optimizer, params in zip(self._strategy.optimizers, self._sample_counts.params, strict=True):
            if mine := used & params:
                yield partial(self._step_with, optimizer, mine, scale)

    def _step_with(self, optimizer: Optimizer, params: set[Any], scale: float) -> None:
        def closure() -> None:
            if (now := self._window_schedule.scale) != scale:  # the scaler has changed it with another optimizer's step
                for p in params:
                    p.grad.mul_(now / scale)

        self.steps = True
        try:
            self._strategy.optimizer_step(optimizer, closure)
        finally:
            self.steps = False


def check_apart(owner: str, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Check that each parameter is of one optimizer at most.

    Raises:
        ValueError: one is of two; names it.
    """
    names = {p: name for name, p in module.named_parameters()}
    seen: dict[Any, int] = {}
    for number, optimizer in enumerate(optimizers):
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if seen.setdefault(p, number) != number:
                raise ValueError(
                    f"Optimizers {seen[p]} and {number} both have {names.get(p, 'a parameter')!r}: `{owner}` gathers "
                    "gradients by optimizer. Give each parameter to one of them."
                )


class WindowSchedule:
    """The size and delay of one replica's windows now; callbacks may change them at any moment."""

    def __init__(self, strategy: AsyncGradientStrategy, averager: BackgroundAverager) -> None:
        self._strategy = strategy
        self._averager = averager

    @property
    def updates(self) -> OptimizerUpdates:
        """Steps of this fit."""
        assert self._strategy.updates is not None
        return self._strategy.updates

    @property
    def warming_up(self) -> bool:
        """Steps have no delay yet."""
        return self._averager.step < self._strategy.warmup_steps or searches_lr(self._strategy.module.trainer)

    @property
    def in_turn(self) -> bool:
        """Windows have a size; else each lasts until the one before is reduced."""
        return self.warming_up or self._strategy.accumulate != "until_reduced"

    @property
    def late(self) -> bool:
        """Steps have a delay by now."""
        return self._strategy.delay > 0 and not self.warming_up

    @property
    def size(self) -> int:
        """Batches in the window that begins, at the least."""
        accumulate = self._strategy.accumulate
        if (sizes := self._strategy.sizes) is not None:
            return sizes.size
        if isinstance(accumulate, BalancedWindows):
            speeds = self._averager.sync_points.speeds
            name = self._averager.sync_points.name
            if name not in speeds:
                return accumulate.batches
            return accumulate.size(list(speeds.values()), list(speeds).index(name))
        return 1 if accumulate == "until_reduced" else accumulate

    def fills(self, batches: int, samples: float, size: float) -> bool:
        """Return whether these batches and samples fill a window of ``size`` batches."""
        sizes = self._strategy.sizes
        return batches >= max(1, size) and (sizes is None or samples >= sizes.least)

    @property
    def scale(self) -> float:
        """The factor by which mixed precision multiplies losses."""
        return loss_scale(self._strategy.precision_plugin)

    @property
    def batch_scale(self) -> float:
        """The factor by which a batch's gradients are multiplied: Lightning divides the loss, too."""
        return self.scale / self._strategy.module.trainer.accumulate_grad_batches


class LastBackward:
    """The last backward pass of a window whose step has no delay, on the training thread of one replica.

    the training thread                                the engine's thread
    the pass begins: what the window holds goes into
    `sent`, and the message is ready       ----------> headers meet
    the pass makes gradients, from the
    last parameter on                      ----------> of each part, that in `sent` and that of the pass are summed
    the batch ends: the window is empty    ----------> the rest, and the commit
    its step is taken

    Until the pass is over the window holds what it has held.

    A window leaves as a whole, behind the pass, where its gradients may change without a trace, a module takes its
    batches by itself, in manual optimization, compressed, and on GPUs.
    """

    def __init__(
        self,
        module: Any,
        window_schedule: WindowSchedule,
        gradients: SynchronousGradients,
        window: Window,
        tell_place: Callable[[], None],
    ) -> None:
        self._window_schedule = window_schedule
        self._gradients = gradients
        self._window = window
        self._tell_place = tell_place
        self._possible = module.automatic_optimization and not pulls(module) and not changes_gradients(module)
        self._samples = 0.0
        self.under_way = False
        """The window is on its way, and its pass, or the batch that it is of, is not over."""

    def begin(self, samples: float, size: float, step: int) -> None:
        """Begin a backward pass, and let the window leave with it where that is possible.

        Args:
            samples: of the batch.
            size: batches that the window is to have.
            step: steps that were taken before.
        """
        window = self._window
        window_schedule = self._window_schedule
        if (
            self.under_way
            or not self._possible
            or samples <= 0.0
            or window_schedule.late
            or not window_schedule.in_turn
        ):
            return
        full = window_schedule.fills(window.batches + 1, window.samples + samples, size)
        if not (full or window_schedule.updates.ends_epoch) or window_schedule.updates.left <= 0:
            return
        self._samples = window.samples + samples
        self._tell_place()
        self.under_way = window.leave_with(samples, window_schedule.batch_scale, step)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Return a context for the pass, or its whole batch: where that fails, nobody waits for its gradients."""
        try:
            yield
        except BaseException:
            if self.under_way:
                self.under_way = False
                self._gradients.withdraw()
            raise

    def finish(self) -> float:
        """End the batch, which is in the window that has left; return the number of samples in it."""
        self.under_way = False
        self._window.clear()
        self._gradients.finish_last()
        return self._samples

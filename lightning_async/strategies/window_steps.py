"""The windows of gradients of one replica: when each is full, when it is sent, and when its step is taken.

A window is the sum of one replica's gradients over several batches; the windows of all replicas are averaged together.
`WindowSteps` is the step runner of automatic optimization. `ManualWindowSteps` is that of manual optimization, where
each of several optimizers asks for its own steps. `WindowSchedule` returns the current size of windows and the current
delay of steps. If steps have no delay, `LastBackward` sends a window already during the window's last backward pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from torch.optim import Optimizer

from lightning_async.algorithms.accumulation import BalancedWindows
from lightning_async.engine.gradients.reduction import SynchronousGradients
from lightning_async.engine.gradients.window import Window, WindowTotals
from lightning_async.engine.replica_engine import ReplicaEngine
from lightning_async.engine.shared_state import SyncPointKind, Vote
from lightning_async.engine.sync_points import SyncPointParticipant
from lightning_async.strategies.delay_correction import correcting
from lightning_async.strategies.local_steps import StepBatches
from lightning_async.strategies.server_steps import SampleCounts
from lightning_async.trainer.loops.updates import OptimizerUpdates
from lightning_async.trainer.namespace import changes_gradients, loss_scale, pulls, searches_lr, take_back
from lightning_async.trainer.step_runner import StepRunner

if TYPE_CHECKING:
    from lightning_async.strategies.gradients import AsyncGradientStrategy


_LAST = (SyncPointKind.EPOCH_END, SyncPointKind.TRAIN_END)


class WindowSteps(StepRunner, SyncPointParticipant):
    """The step runner of windows of gradients, in automatic optimization; it takes part in sync points.

    A window is the sum of this replica's gradients over several batches. A replica that waits at a sync point still
    takes part in averaging the windows of replicas that train on, and takes an optimizer step with each mean. So all
    replicas have taken the same steps when the sync point opens. At the end of an epoch and of training, a window is
    sent before the sync point, even if it is not full.

    Args:
        strategy: Strategy of this rank.
        averager: Averager of the session.
        gradients: The component that averages gradients.
    """

    missed_steps = 0

    def __init__(
        self,
        strategy: AsyncGradientStrategy,
        averager: ReplicaEngine,
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
        """`_made`: whether the batch has gradients. `_held`: whether the window is full, but kept back until the next
        batch, because a checkpoint must hold it. `_restored`: whether a checkpoint was loaded since the last sync
        point."""
        self._prepare()
        self._correcting = correcting(strategy.correction, gradients, lambda: averager.step)
        self.recent = self._batches.recent
        averager.sync_points.add(self)
        averager.gathered = self._gathered
        averager.alike = self._correcting.state
        saved, alike = strategy.saved.take_gathered()
        self._load(saved or {}, alike)
        self._hooks = [each.register_step_post_hook(self._count).remove for each in strategy.optimizers]

    def close(self) -> None:
        # The optimizers outlive the session.
        take_back(self._hooks)
        self._gradients.close()

    def _prepare(self) -> None:
        """Set up state that depends on the optimizers, before a saved window is loaded; this base does nothing."""

    def _gathered(self) -> dict[str, Any] | None:
        """Return this rank's state for a checkpoint; None if there is nothing to save.

        The state is the current window, including gradients that are being averaged, and the residual of compression.
        """
        gradients = self._gradients
        carried_residual = gradients.carried_residual()
        held: dict[str, Any] = {} if carried_residual is None else {"compression": carried_residual}
        if self._window_schedule.updates.rates.ends_epoch:
            held["ends_epoch"] = True
        if self._window.batches or gradients.unstepped() is not None:
            held |= {"size": self._size, "asks": list(gradients.asks), "window": self._window.state_dict()}
        return held or None

    def _load(self, saved: dict[str, Any], alike: Any) -> None:
        """Load the state of a checkpoint.

        Args:
            saved: State of this rank, as `_gathered` has returned it; empty for none.
            alike: State of the correction of late gradients, which is equal on all ranks; None for none.
        """
        gradients = self._gradients
        if gradients.rounds.feedback is not None and "compression" in saved:
            gradients.rounds.feedback.load_state_dict(saved["compression"])
        if "window" in saved:
            self._window.load_state_dict(saved["window"])
            if "asks" in saved:  # the window may be sent at a sync point, before the next batch sets this
                gradients.asks = saved["asks"][0], saved["asks"][1]
            self._size = float(saved["size"])
            self._held = self._window_schedule.fills(self._window.batches, self._window.samples, self._size)
        self._window_schedule.updates.rates.ends_epoch |= "ends_epoch" in saved
        if alike is not None:
            self._correcting.load(alike)
            self._restored = True

    def _count(self, *_: Any) -> None:
        """Count a step that the optimizer has really taken.

        A hook of the optimizer calls this: mixed precision may skip a step, and the hook does not run then.
        """
        self._seen += 1

    def start_batch(self, batch: Any) -> None:
        self._averager.sync_points.resume()
        # The checkpoint for which the window was held back was made at the end of the last batch.
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
        """Record that the current batch has gradients."""
        self._made = True

    def skip_batch(self) -> None:
        """Count the current batch without samples: in automatic optimization, `training_step` has returned None.

        The batch counts for the window's size, so that the windows of all replicas have the same number of batches.
        """
        self._batches.see()
        self._batch_samples = 0.0
        self._made = True

    def after_batch(self) -> None:
        """Add the batch's gradients to the window. If it is full, step with the previous mean, then send the window."""
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
        # A window without a size is sent as soon as the one before is reduced.
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
        """Wait until gradients in flight are averaged, and step with their mean; return at once if there are none."""
        self._gradients.wait()
        self._take()

    def _hold(self) -> bool:
        """Keep the full window back, if a checkpoint is due at the end of this batch; return whether it is kept back.

        So no gradients are being averaged when the checkpoint is made. The window is also kept back if a rank was told
        to stop. All ranks learn of this with the same mean, so each of them keeps its next window back.
        """
        schedule = self._window_schedule
        stops = schedule.in_turn and Vote.STOP in self._averager.sync_points.agreed
        self._held = schedule.late and schedule.updates.left > 1 and (self._averager.marks.due or stops)
        return self._held

    def _go(self) -> None:
        """Send the window; if steps have no delay, wait for its mean and take the step."""
        if self._pass.under_way:
            self._totals.leave(self._window.batches + 1, self._averager.sync_points)
            self._sent_samples = self._pass.finish()
        else:
            self._send()
        if not self._window_schedule.late:
            self._arrive()
            self._arrive()  # again, in case the first mean was made by other replicas without this window
        self._end_if_last()

    def _send(self) -> None:
        """Wait until the buckets are free, and send the window's gradients.

        If an averaged gradient arrives during the wait, take an optimizer step with it.
        """
        self._held = False
        # Each turn takes a mean that has arrived: until its step is taken, the buckets are not free.
        while True:
            self._arrive()
            if self._leave():
                return
            self._gradients.wait_until_free()

    def _end_if_last(self) -> None:
        """Before ``max_steps`` ends training, wait for the last averaged gradient and take its step.

        Earlier steps are taken when the next window is sent. After the last window there is none.
        """
        if self._window_schedule.updates.left == 1:
            self._arrive()

    def _leave(self) -> bool:
        """Send the window if the buckets are free; drop it if it has no batches or ``max_steps`` are taken.

        A window with batches but without samples is sent as well, because the other replicas wait for it.

        Returns:
            Whether the window was sent or dropped; False if the buckets are not free.
        """
        window = self._window
        if self._window_schedule.updates.left <= 0 or not window.batches:
            window.clear()
            return True
        if not self._gradients.free:
            return False
        # Read before `leave`, which empties the window.
        samples = window.samples
        self._strategy.tell_place()
        self._totals.leave(window.batches, self._averager.sync_points)
        if not window.leave():
            return False
        self._sent_samples = samples
        return True

    def _take(self) -> None:
        """Take an optimizer step with the mean gradient that has arrived; do nothing if none has arrived."""
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
        # Mixed precision may have skipped the step.
        stepped = self._seen > before
        averager.end_step(samples, stepped)
        # Last, because a sync point may open for this replica from here on.
        gradients.stepped()

    def _step(self) -> None:
        """Correct the mean gradient that has arrived for its delay, and let the optimizer step with it."""

        def put() -> None:
            if self._gradients.arrived is None:
                raise RuntimeError(self._evaluates_again(type(self._strategy.module).__name__))
            self._gradients.take_(self._window_schedule.scale, self._correcting.change_)

        self._window_schedule.updates.take(put)

    def _evaluates_again(self, owner: str) -> str:
        """Return the text of the error for a step of ``owner`` that calls its closure again, as SAM's does."""
        return (
            f"Rank {self._strategy.global_rank}: a step of `{owner}` calls its closure twice, or after it has moved "
            f"the parameters, as SAM does. `{type(self._strategy).__name__}` steps with gradients of earlier batches, "
            "which it would only repeat. Use `AsyncAveragingStrategy()`, whose replicas step with their own batch."
        )

    def count_unseen_step(self) -> bool:
        return False

    def before_sync_point(self) -> None:
        """Send the unfinished window, if its step must be taken before the sync point.

        This is so at the end of an epoch or of training, where the other replicas wait for the window.
        """
        averager = self._averager
        sync_point = averager.sync_points.coming
        # Windows without a fixed size end here before a decision, too.
        ends = sync_point in _LAST or (sync_point is SyncPointKind.DECIDE and not self._window_schedule.in_turn)
        if (self._held and sync_point is not SyncPointKind.STOP) or (ends and self._window.batches):
            self._arrive()
            averager.marks.settle()
            self._send()

    def at_sync_point(self) -> None:
        """Take an optimizer step with an averaged gradient that arrives while this replica waits at a sync point."""
        self._take()

    def leave_sync_point(self) -> None:
        if not self._restored:  # else training goes on from a checkpoint that was made at no sync point
            self._correcting.forget()
        self._restored = False


class ManualWindowSteps(WindowSteps):
    """The step runner of windows of gradients, in manual optimization.

    ``optimizer.step()`` in `training_step` moves the gradients of that optimizer's parameters into the window. A batch
    in which an optimizer has asked for a step counts for the window's size. When the window's mean has arrived, each
    optimizer takes one step with it. The mean is over the samples of the gradients that were in ``p.grad`` when the
    optimizer asked: samples of that batch, and of earlier batches if `zero_grad` has not set gradients to None since.
    An optimizer that no replica has asked for a step takes none.
    """

    steps = False
    """Whether a call of ``optimizer.step`` takes a step now; otherwise it asks for one."""
    _uncounted = 0.0
    """The number of samples since the last batch in which an optimizer has asked for a step."""
    _asked: frozenset[int] = frozenset()
    """Indices of the optimizers that have asked for a step in the current batch."""

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
        self._asked = frozenset()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Return a context for a backward pass; at its end, the batch counts for each optimizer that has gradients."""
        self._sample_counts.begin_pass()
        yield
        self._batches.see()
        self._sample_counts.end_pass(self._batch_samples)

    def after_backward(self) -> None:
        """Do nothing: gradients stay in ``p.grad`` until their optimizer asks for a step."""

    def step(self, optimizer: Optimizer, closure: Callable[[], Any], run: Callable[[Callable[[], Any]], Any]) -> Any:
        if self.steps:
            return run(closure)
        output = closure()
        self._batches.see()
        number = self._strategy.optimizers.index(optimizer)
        if number in self._asked:
            raise RuntimeError(
                f"Rank {self._strategy.global_rank}: `{type(optimizer).__name__}.step` (optimizer {number}) was called "
                f"twice in one batch, as PPO does. `{type(self._strategy).__name__}` takes one step, after the batch, "
                "so that all gradients of the batch would be of the same parameters. Use "
                "`AsyncAveragingStrategy()`, whose replicas take each step at once."
            )
        if not self._window.batches:
            self._size = self._window_schedule.size
        samples = self._sample_counts.take(number) or self._batch_samples
        self._window.add_(samples, self._window_schedule.scale, self._averager.step, self._sample_counts.params[number])
        self._asked |= {number}
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
        """Take a step with the mean gradient that has arrived.

        ``p.grad`` already has gradients for later steps, and is the same afterwards.
        """
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
        """Yield, for each optimizer for which a replica has asked for a step, a function that takes this step."""
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
        calls = itertools.count(1)
        versions = [p._version for p in params]

        def closure() -> None:
            if next(calls) > 1 or versions != [p._version for p in params]:
                raise RuntimeError(self._evaluates_again(type(optimizer).__name__))
            if (now := self._window_schedule.scale) != scale:  # the scaler has changed its factor in an earlier step
                for p in params:
                    p.grad.mul_(now / scale)

        self.steps = True
        try:
            self._strategy.optimizer_step(optimizer, closure)
        finally:
            self.steps = False


def check_apart(owner: str, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raise an error if a parameter belongs to two optimizers.

    Args:
        owner: Name of the strategy, for the message.
        module: The user's module.
        optimizers: Its optimizers.

    Raises:
        ValueError: a parameter belongs to two optimizers.
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
    """The current length of one replica's windows, and the number of windows by which steps are late.

    Callbacks may change both at any time.
    """

    def __init__(self, strategy: AsyncGradientStrategy, averager: ReplicaEngine) -> None:
        self._strategy = strategy
        self._averager = averager

    @property
    def updates(self) -> OptimizerUpdates:
        assert self._strategy.updates is not None
        return self._strategy.updates

    @property
    def warming_up(self) -> bool:
        """Whether steps use gradients without delay: during ``warmup_steps``, and while a learning-rate finder runs."""
        return self._averager.step < self._strategy.warmup_steps or searches_lr(self._strategy.module.trainer)

    @property
    def in_turn(self) -> bool:
        """Whether windows have a fixed length.

        Otherwise a window ends when the gradients of the previous one are averaged.
        """
        return self.warming_up or self._strategy.accumulate != "until_reduced"

    @property
    def late(self) -> bool:
        """Whether the step at the end of a window uses the gradients of the window before."""
        return self._strategy.delay > 0 and not self.warming_up

    @property
    def size(self) -> int:
        """Smallest number of batches of a window that begins now."""
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
        """Return whether a window is full, by its number of batches and of samples.

        It is full if it has ``size`` batches and, if a callback sets the size of windows, the least number of samples
        that the callback asks for.
        """
        sizes = self._strategy.sizes
        return batches >= max(1, size) and (sizes is None or samples >= sizes.least)

    @property
    def scale(self) -> float:
        """Factor by which mixed precision multiplies losses."""
        return loss_scale(self._strategy.precision_plugin)

    @property
    def batch_scale(self) -> float:
        """The factor by which a batch's gradients were multiplied.

        It is mixed precision's scale, divided by Lightning's number of accumulated batches.
        """
        return self.scale / self._strategy.module.trainer.accumulate_grad_batches


class LastBackward:
    """The last backward pass of a window whose step has no delay: gradients are sent while others are computed.

    training thread                                    engine's thread
    the pass begins: the window's gradients go
    into the `sent` bucket                 ----------> headers are exchanged
    the pass makes gradients, from the
    last parameter on                      ----------> each part is sent once the pass has added to it
    the batch ends, and the window is
    emptied                                ----------> the remaining parts are sent, and the commit follows
    the step is taken

    The window keeps its gradients until the pass is over, so that a failed pass changes nothing.

    A window is sent as a whole, after the pass, if a hook may change its gradients unnoticed, if `training_step` takes
    a ``dataloader_iter``, in manual optimization, with compression, and on GPUs.

    Args:
        module: The user's module.
        window_schedule: Size and delay of windows.
        gradients: The component that averages gradients.
        window: Window of this replica.
        tell_place: Function that records how far this replica is in its data.
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
        """Whether the window is being sent, and the batch of its last backward pass has not ended."""

    def begin(self, samples: float, size: float, step: int) -> None:
        """Begin a backward pass; if it is the window's last one, begin to send the window if possible.

        Args:
            samples: Number of samples of the batch.
            size: Number of batches after which the window is full.
            step: Number of steps taken so far.
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
        """Return a context for the pass or its whole batch.

        If an error is raised in it, gradients are withdrawn, so that other replicas do not wait for them.
        """
        try:
            yield
        except BaseException:
            if self.under_way:
                self.under_way = False
                self._gradients.withdraw()
            raise

    def finish(self) -> float:
        """End the batch, clear the gradients that were sent during it, and return their number of samples."""
        self.under_way = False
        self._window.clear()
        self._gradients.finish_last()
        return self._samples

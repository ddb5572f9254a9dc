"""The sync points of one fit, and what all ranks do there: stop, validate, run callbacks, or wait for replicas.

Lightning 2.6 broadcasts a SIGTERM flag before every batch, which makes all ranks wait for one another. Here a signal, a
time limit or a spike of the loss becomes a vote, which travels with the headers.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from lightning_async.engine.collectives import LightningCollectives
from lightning_async.engine.fingerprint import digest
from lightning_async.engine.replica import persistent_buffers
from lightning_async.engine.shared_state import Arrival, SyncPointKind, Vote
from lightning_async.engine.sync_points import SyncPoints
from lightning_async.errors import PeerLost
from lightning_async.events import tell
from lightning_async.trainer.loops.averaged_models import AveragedModels
from lightning_async.trainer.loops.preemption import in_this_process
from lightning_async.trainer.namespace import Undo, callbacks_of, override, override_for_users, pytorch, set_for_now
from lightning_async.trainer.strategy_view import StrategyView


class Spikes:
    """The patches of every `SpikeDetection` callback of a Trainer.

    Unpatched, the callback compares all ranks after every batch, so that replicas would wait for each other. With the
    patches each rank looks at its own loss only. A rank that sees a spike calls ``vote``, which asks all ranks to stop.
    When all ranks have stopped, every rank raises the callback's exception.
    """

    def __init__(self, trainer: Any, vote: Callable[[], None]) -> None:
        self._trainer = trainer
        self._vote = vote
        # Lightning has this callback since version 2.3.
        self._callbacks = callbacks_of(trainer, "SpikeDetection")
        self._handlers = [callback._handle_spike for callback in self._callbacks]
        self._seen = -1
        """The first batch in which this rank saw a spike; -1 for none."""

    def install(self) -> list[Undo]:
        undo = []
        for callback in self._callbacks:
            undo.append(override_for_users(callback, "_handle_spike", self._note))
            undo.append(override_for_users(callback, "on_train_batch_end", self._end_batch))
        return undo

    def raise_agreed(self, world: LightningCollectives) -> None:
        """Record the first batch in which any rank saw a spike, and raise the callback's exception on every rank.

        All ranks call this together, after they have stopped. Without a spike on any rank this does nothing.
        """
        if not self._callbacks:
            return
        seen = [batch for batch in world.gather_objects(self._seen) if batch >= 0]
        if seen:
            for handle in self._handlers:
                handle(self._trainer, min(seen))

    def _note(self, original: Any, trainer: Any, batch_idx: int) -> None:
        if self._seen < 0:
            self._seen = batch_idx
            self._vote()

    def _end_batch(self, original: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Call ``original``, the ``on_train_batch_end`` of a `SpikeDetection`, so that it waits for no other rank.

        In place of the Trainer, it gets a substitute whose barrier and reduction return at once.
        """
        strategy = SimpleNamespace(
            root_device=trainer.strategy.root_device,
            barrier=lambda *_: None,
            reduce_boolean_decision=lambda decision, all=True: decision,
        )
        original(SimpleNamespace(strategy=strategy, default_root_dir=trainer.default_root_dir), *args, **kwargs)


class Stopping:
    """Patches by which all ranks stop at the same batch, although one rank learns of the stop before the others.

    A rank learns of a stop by a signal, a `Timer` or `SpikeDetection`, and votes for it.
    """

    def __init__(self, view: StrategyView, trainer: Any) -> None:
        self._view = view
        self._trainer = trainer
        self._spikes = Spikes(trainer, self._vote)
        self._told = False
        """Whether a signal has come before there were sync points."""
        self._validated = 0
        """The digest of the model that is validated."""

    def install(self) -> list[Undo]:
        epoch = self._trainer.fit_loop.epoch_loop
        signals = self._trainer._signal_connector
        before = signals._sigterm_notifier_fn
        undo = [
            set_for_now(signals, "_sigterm_notifier_fn", in_this_process(self._on_sigterm)),
            *self._spikes.install(),
        ]
        # On a joining rank, training begins after Lightning has registered its handlers.
        registered = getattr(signal.getsignal(signal.SIGTERM), "signal_handlers", [])
        if before in registered:
            registered[registered.index(before)] = signals._sigterm_notifier_fn
        if hasattr(epoch, "_broadcast_sigterm_tensor"):
            undo.append(set_for_now(epoch, "_broadcast_sigterm_tensor", lambda: None))
        undo.append(override(epoch.val_loop, "_evaluation_step", self._evaluate))
        for timer in callbacks_of(self._trainer, "Timer"):
            undo.append(override_for_users(timer, "_check_time_remaining", partial(self._check_time, timer)))
        return undo

    def pass_on(self, sync_points: SyncPoints) -> None:
        """Vote for a stop if this rank received a stop signal before ``sync_points`` existed."""
        if self._told:
            self._told = False
            sync_points.request_stop()

    def leave(self, sync_points: SyncPoints | None) -> None:
        """End training on all ranks together, at a sync point with one model, because a rank was told to stop.

        Without sync points, training has not begun.
        """
        if sync_points is not None:
            sync_points.rendezvous(SyncPointKind.STOP)
        if self._view.world is not None:
            self._view.world.asynchronous = False
            self._spikes.raise_agreed(self._view.world)
        self._trainer._signal_connector.received_sigterm = True
        raise pytorch("utilities.exceptions").SIGTERMException

    def begin_validation(self) -> None:
        """Record the model at the start of a validation, which callbacks may replace by an average for its duration."""
        self._validated = digest(self._trainer.lightning_module.parameters())

    def _evaluate(self, original: Any, *args: Any) -> None:
        """Take a step of a validation, unless a rank was told to stop: then all ranks leave, and a resume validates.

        Where a callback has put other weights into the model, the validation ends first, as a save would have these.
        """
        world = self._view.world
        sync_points = self._view.sync_points
        if world is not None and not world.asynchronous:
            world.begin_steps()
            if sync_points is not None:
                stops = sync_points.is_any_stopping() and self._has_own_weights()
            else:
                # The sanity check comes before there are votes, and has few steps.
                stops = world.reduce(torch.tensor(float(self._told)), "max") > 0.0
            if stops:
                world.interrupt_steps()
        original(*args)

    def _has_own_weights(self) -> bool:
        return self._validated == digest(self._trainer.lightning_module.parameters())

    def _vote(self) -> None:
        if (sync_points := self._view.sync_points) is not None:
            sync_points.vote(Vote.STOP)

    def _on_sigterm(self, number: int, frame: Any) -> None:
        sync_points = self._view.sync_points
        # Before training there is no vote yet, and Lightning's own flag would end this rank alone.
        if sync_points is None:
            self._told = True
        else:
            sync_points.request_stop()

    def after_batch(self) -> None:
        """Leave training, or let it end as after its last epoch, if the ranks have voted for that.

        If this rank's ``Trainer.should_stop`` is set, and no rank has voted to end training, this rank votes for it.
        """
        sync_points = self._view.sync_points
        if sync_points is None:
            return
        self.pass_on(sync_points)
        sync_points.resume()
        if Vote.STOP in sync_points.agreed and self._view.step_runner.stops_here:
            self._view.step_runner.finish_batch()
            self.leave(sync_points)
        if Vote.END in sync_points.agreed:
            # This rank alone has decided to stop, and asks the others.
            self._trainer.should_stop = True
        elif self._trainer.should_stop:
            sync_points.vote(Vote.END)

    def _check_time(self, timer: Any, original: Any, trainer: Any) -> None:
        """Check a time limit on this rank's clock; when the time is up, vote for the end of training on all ranks."""
        sync_points = self._view.sync_points
        if sync_points is None:
            original(trainer)
        elif timer.time_elapsed() >= timer._duration:
            sync_points.vote(Vote.END)


class FitSyncPoints:
    """The sync points of one fit, at which all ranks wait for one another.

    If a sync point has replaced the model, all ranks call the registered functions (``on_model_changed``, ``on_met``).
    """

    _averaged_models: AveragedModels  # from `begin` on

    def __init__(self, view: StrategyView, trainer: Any, stopping: Stopping) -> None:
        self._view = view
        self._trainer = trainer
        self._stopping = stopping
        self._validation = UnscheduledValidation(trainer)
        self.leave = stopping.leave
        self.begin_validation = stopping.begin_validation
        self.on_model_changed: list[Callable[[], None]] = []
        """Functions that all ranks call together when a sync point has given all replicas another model."""
        self.on_met: Callable[[LightningCollectives], None] = lambda world: None
        """Function that all ranks call together after `on_model_changed`, except at sync points within a batch."""
        self.on_called: Callable[[], None] = lambda: None
        """Function that goes to `SyncPointKind.DECIDE`; called if another rank has asked all ranks to come there."""

    def begin(self, world: LightningCollectives) -> None:
        """Prepare the sync points when training begins, or begins again.

        From then on, each sync point makes weight averages (EMA, SWA) equal by the collectives ``world``.
        """
        self._averaged_models = AveragedModels(self._trainer, world)
        # Checkpoints find the averages there.
        vars(self._trainer.strategy)["averaged_models"] = self._averaged_models

    def rendezvous(self, sync_point: SyncPointKind, index: int = 0) -> None:
        """Wait until every rank is at this sync point with the same model.

        Meanwhile, take part in the validations, callbacks' actions and stops that other ranks ask for.
        """
        view = self._view
        view.begin_again()
        sync_points = view.sync_points
        world = view.world
        if sync_points is None or world is None or view.failed:
            return
        view.step_runner.finish_batch()
        # A joining rank may wait here before its first batch, and has not passed on its signal yet.
        self._stopping.pass_on(sync_points)
        share_averages = self._averaged_models.before_sync_point()
        while (arrival := sync_points.rendezvous(sync_point, index)) is not Arrival.OPEN:
            if arrival is Arrival.STOP:
                self._stopping.leave(sync_points)
            if arrival is Arrival.DECIDE:
                self.on_called()
                # The decision may have begun averaging again, with other sync points, so nothing of these is used.
                self.rendezvous(sync_point, index)
                return
            self._validation.run()
            # Averaging may have begun again during the validation, with other sync points.
            if view.sync_points is not sync_points:
                self.rendezvous(sync_point, index)
                return
        self._opened(sync_points, world, share_averages)
        if sync_points.moved_at_sync_point:
            self.on_met(world)

    def within_batch(self, sync_point: SyncPointKind) -> Arrival:
        """Wait at a sync point in the middle of a batch; return how the wait has ended.

        It ends when all ranks have arrived, or when another rank asks for a validation, a stop or callbacks' actions.
        The caller does what the other rank asks for at the end of the batch.
        """
        sync_points = self._view.sync_points
        world = self._view.world
        assert sync_points is not None
        assert world is not None
        share_averages = self._averaged_models.before_sync_point()
        arrival = sync_points.rendezvous(sync_point)
        if arrival is Arrival.OPEN:
            self._opened(sync_points, world, share_averages)
            # Replicas continue within the batch, where they must not wait for others.
            world.asynchronous = True
        return arrival

    def _opened(self, sync_points: SyncPoints, world: LightningCollectives, share_averages: Callable[[], None]) -> None:
        world.asynchronous = False
        if Vote.END in sync_points.agreed:
            self._trainer.should_stop = True
        if sync_points.moved_at_sync_point:
            for listener in self.on_model_changed:
                listener()
        share_averages()


class UnscheduledValidation:
    """Validations that run although this rank's own loop has none due now.

    They run in the same way as in Lightning's `_TrainingEpochLoop.on_advance_end`.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def run(self) -> None:
        trainer = self._trainer
        was_training = trainer.training
        first_loop_iter = trainer._logger_connector._first_loop_iter
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training = was_training
        trainer._logger_connector._first_loop_iter = first_loop_iter

    def run_at_end(self, missed: int = 1) -> None:
        """Validate once at the end of an epoch, if any validation was missed."""
        if missed > 0:
            with self.at_last_step():
                self.run()

    @contextlib.contextmanager
    def at_last_step(self) -> Iterator[None]:
        """Log the validations in the block under the step number ``global_step - 1``, as Lightning does.

        Lightning validates before it counts the step, so its validations have the smaller number in the logs.
        ``global_step`` itself does not change, because saves within a validation use it.
        """
        epoch = self._trainer.fit_loop.epoch_loop

        # Lower the number for this call only.
        def log_eval_end_metrics(original: Any, metrics: Any) -> None:
            epoch._batches_that_stepped -= 1
            try:
                original(metrics)
            finally:
                epoch._batches_that_stepped += 1

        undo = override(self._trainer._logger_connector, "log_eval_end_metrics", log_eval_end_metrics)
        try:
            yield
        finally:
            undo()


class CollectiveCallback:
    """The base of callbacks and loop parts that act together on all ranks. This base does nothing."""

    call_together: Callable[[], None] | None = None
    """Function that asks all ranks to come to a sync point at their next batch boundary.

    None while replicas are synchronous.
    """

    def decide(self, world: LightningCollectives) -> bool:
        """Act together with all ranks at a sync point, where they have one model. An example is a rollback.

        Returns whether the model was replaced, which must be the same on all ranks.
        """
        return False

    def save_together(self, world: LightningCollectives) -> None:
        """Save, if a save is due, after `decide` of all callbacks has returned and none has replaced the model.

        All ranks call this at a sync point, where they have one model that does not change.
        """

    def for_joining_ranks(self) -> dict[str, Any]:
        """Return plain values that a joining rank needs besides this callback's state.

        Called on rank 0 at a sync point.
        """
        return {}

    def come(self, told: dict[str, Any]) -> None:
        """Take over, on a joining rank, the values that `for_joining_ranks` has returned on a live rank.

        The joining rank has loaded this callback's state before.
        """


class CollectiveActions:
    """The actions of callbacks on all ranks together, at sync points for which a callback has asked.

    Args:
        view: The strategy.
        trainer: The Trainer.
        meeting: Sync points of the fit.
        saving: Object that saves, and that acts before the callbacks.
        host: Object that admits joining ranks afterwards, unless a callback has replaced the model; None if no rank can
            join.
    """

    def __init__(
        self,
        view: StrategyView,
        trainer: Any,
        meeting: FitSyncPoints,
        saving: CollectiveCallback,
        host: CollectiveCallback | None,
    ) -> None:
        self._view = view
        self._trainer = trainer
        self._meeting = meeting
        self._saving = saving
        self._host = host
        self._called = False
        """Whether a callback of this rank has asked all ranks to come to a sync point."""

    def install(self) -> list[Undo]:
        callers = [*self._callbacks(), *([self._host] if self._host else [])]
        return [
            *(set_for_now(each, "call_together", self._call) for each in callers),
            set_for_now(self._meeting, "on_called", self.hold),
        ]

    def _callbacks(self) -> list[CollectiveCallback]:
        return [self._saving, *(each for each in self._trainer.callbacks if isinstance(each, CollectiveCallback))]

    def _call(self) -> None:
        # A synchronous step carries the call, if it can. Otherwise this rank goes at its next batch boundary.
        if not self._view.step_runner.call_all():
            self._called = True

    def after_batch(self) -> None:
        sync_points = self._view.sync_points
        if sync_points is not None and self.is_called(sync_points) and self._view.step_runner.between_windows:
            self.hold()

    def is_called(self, sync_points: SyncPoints) -> bool:
        """Return whether any rank has asked all ranks to come to a sync point for callbacks' actions."""
        return self._called or self._view.step_runner.called or Vote.DECIDE in sync_points.agreed

    def hold(self) -> None:
        """Wait for all ranks at a sync point, and let the callbacks act.

        If a callback has replaced the model, start a new training within this fit. Otherwise, make the saves that are
        due and admit joining ranks.
        """
        self._called = False
        self._meeting.rendezvous(SyncPointKind.DECIDE)
        world = self._view.world
        sync_points = self._view.sync_points
        if world is None or sync_points is None:
            return
        replaced = [callback.decide(world) for callback in self._callbacks()]
        # With other sync points, a checkpoint that a callback has loaded has begun another training already.
        if any(replaced) and self._view.sync_points is sync_points:
            module = self._trainer.lightning_module
            # Ranks may have gone back to different models, such as each to its own last good one.
            world.make_equal_([*module.parameters(), *persistent_buffers(module).values()])
            self._view.start_over()
        elif not any(replaced):
            for callback in self._callbacks():
                callback.save_together(world)
            if self._host is not None:
                self._host.decide(world)


class WaitForReplicas:
    """The wait for ranks to join, at the end of a batch, while there are too few live ranks.

    After a time limit, the wait raises `PeerLost`.
    """

    def __init__(self, view: StrategyView, collective_actions: CollectiveActions, stopping: Stopping) -> None:
        self._view = view
        self._collective_actions = collective_actions
        self._stopping = stopping

    @property
    def _is_short(self) -> bool:
        live_ranks = self._view.live_ranks
        return self._view.sync_points is not None and live_ranks is not None and live_ranks.are_short

    def after_batch(self) -> None:
        if self._is_short:
            self._wait()

    def _wait(self) -> None:
        patience = self._view.patience
        live_ranks = self._view.live_ranks
        began = time.monotonic()
        until = began + patience.total_seconds()
        rank = live_ranks.generation.rank
        left = live_ranks.generation.world_size
        text = f"Rank {rank}: {left} of at least {live_ranks.wanted} replicas are left, and wait {patience} for others."
        tell("short", logging.WARNING, text, rank=rank, world_size=left)
        # A call or a vote interrupts the wait, and joining ranks come by a call.
        while self._is_short:
            sync_points = self._view.sync_points
            assert sync_points is not None
            # The wait also ends when the engine's thread raises, such as after the loss of the store.
            sync_points.wait(lambda sync_points=sync_points: self._wakes(sync_points) or time.monotonic() > until)
            if Vote.STOP in sync_points.agreed:
                self._view.step_runner.finish_batch()
                self._stopping.leave(sync_points)
            if self._collective_actions.is_called(sync_points):
                self._collective_actions.hold()
            elif self._is_short and time.monotonic() > until:
                self._give_up(patience)
        tell("enough", logging.WARNING, f"There are enough replicas again, after {time.monotonic() - began:.1f} s.")

    def _wakes(self, sync_points: SyncPoints) -> bool:
        return not self._is_short or self._collective_actions.is_called(sync_points) or Vote.STOP in sync_points.agreed

    def _give_up(self, patience: timedelta) -> None:
        live_ranks = self._view.live_ranks
        raise PeerLost(
            f"Rank {live_ranks.generation.rank}: {live_ranks.generation.world_size} of at least {live_ranks.wanted} "
            f"replicas are left (`min_replicas`), and none has joined within {patience} (`Timeouts(replicas=)`). "
            "Training ends here; start the others again, and resume from the last checkpoint.",
            (),
        )

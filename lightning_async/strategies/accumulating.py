"""One replica's windows of gradients: when one closes, when it leaves, and when the step that it is for is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

from lightning_async.engine.averaging.averager import BackgroundAverager
from lightning_async.engine.gradients.synchronous import SynchronousGradients
from lightning_async.engine.gradients.totals import WindowTotals
from lightning_async.engine.gradients.window import Window
from lightning_async.engine.header import Arrival, Gate
from lightning_async.rules.schedules.protocol import Action, Step
from lightning_async.strategies.batches import Batches
from lightning_async.strategies.corrections import correcting
from lightning_async.strategies.gathered import Windows, put, take
from lightning_async.strategies.last_pass import LastPass
from lightning_async.strategies.stepping import learning_rate
from lightning_async.strategies.terms import Terms

__all__ = ["Accumulating"]

_GRADIENTS = Step(Action.GRADIENTS)
_LAST = (Gate.EPOCH_END, Gate.TRAIN_END)


class Accumulating:
    """In place of `Stepping`, which it is like to whoever calls it; at gates, see `Visitor`.

    A gate finds nothing in flight: what is, is reduced and stepped with while the replica stands there, and so are the
    gradients of others who train on, so that all replicas have taken the same steps when it opens. The last gates, of
    an epoch and of training, close the open window, too.

    Args:
        strategy: its module, optimizers and precision, and how it accumulates.
        averager: started; has the gates, and counts the steps.
        gradients: by which windows leave.
        meet: how a gate that a step needs is opened; no step needs one here.
    """

    def __init__(
        self,
        strategy: Windows,
        averager: BackgroundAverager,
        gradients: SynchronousGradients,
        meet: Callable[[Gate], Arrival],
    ) -> None:
        self._strategy, self._averager, self._gradients = strategy, averager, gradients
        gradients.rounds.follows = True
        gradients.compress(strategy.compression)
        self._terms, self._window = Terms(strategy, averager), Window(gradients)
        self._pass = LastPass(strategy, self._terms, gradients, self._window)
        self._size = self._batch_samples = self._sent_samples = 0.0
        self._totals = cast(WindowTotals, averager.summary.totals)
        self._seen, self._batches = 0, Batches(strategy, self._count_samples)
        self._made = self._held = self._restored = False
        """Held: the window is full, and leaves with the next batch: first a checkpoint is made that has it."""
        self._correcting = correcting(strategy.correction, gradients, lambda: averager.step)
        self.recent = self._batches.recent
        averager.gates.add(self)
        averager.gathered = lambda: take(self._window, gradients, self._size, self._terms.updates.rates.ends_epoch)
        averager.alike = self._correcting.state
        saved, alike = strategy.saved.take_gathered()
        self._load(saved or {}, alike)
        self._hooks = [optimizer.register_step_post_hook(self._count) for optimizer in strategy.optimizers]

    def close(self) -> None:
        """Let go of the optimizers."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._gradients.close()

    def _load(self, saved: dict[str, Any], alike: Any) -> None:
        if (size := put(saved, self._window, self._gradients)) is not None:
            self._size, self._held = size, self._terms.fills(self._window.batches, self._window.samples, size)
        self._terms.updates.rates.ends_epoch |= "ends_epoch" in saved
        if alike is not None:
            self._correcting.load(alike)
            self._restored = True

    def _count(self, *_: Any) -> None:
        """After every real optimizer step: mixed precision skips some."""
        self._seen += 1

    # ---- batches ----

    def start_batch(self, batch: Any) -> None:
        """The training thread has a batch."""
        self._averager.gates.resume()
        if self._held:
            self._go()
        self._made = False
        self._batches.start(batch)

    def _count_samples(self, samples: float) -> None:
        self._batch_samples = samples

    def finish_batch(self) -> None:
        """Nothing is put off to the end of a batch."""

    def sum_up(self) -> None: ...

    def step(self, closure: Callable[[], Any], run: Callable[[Callable[[], Any]], Any]) -> Any:
        """``run`` the optimizer's step."""
        return run(closure)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Its forward and backward pass."""
        with self._pass.guard(), self._correcting.batch(opens=not self._window.batches):
            yield

    def backward(self) -> AbstractContextManager[None]:
        """A backward pass."""
        size = self._size if self._window.batches else self._terms.size
        self._pass.begin(self._batch_samples, size, self._averager.step)
        return self._pass.guard()

    def after_backward(self) -> None:
        """A batch's gradients are there; or those of a piece of it, where there is no memory for more at once."""
        self._made = True

    def skip_batch(self) -> None:
        """`training_step` has made no loss of the batch under way. It counts for the window's size, so that windows of
        all replicas stay as long as each other, and brings no samples."""
        self._batches.see()
        self._batch_samples, self._made = 0.0, True

    def after_batch(self) -> None:
        """Its gradients go into the window: close that, if it is time."""
        if self._made:
            self._made = False
            if not self._window.batches:
                self._size = self._terms.size
            self._batches.see()
            if not self._pass.under_way:
                self._window.add_(self._batch_samples, self._terms.batch_scale, self._averager.step)
            self._terms.updates.on_gathered()
        if self._terms.in_turn:
            full = self._terms.fills(self._window.batches, self._window.samples, self._size)
            if self._pass.under_way or full or self._terms.updates.ends_epoch:
                self._close()
        elif not self._gradients.in_flight:
            self._take()
            if not self._hold():
                self._leave()
                self._end_if_last()

    @property
    def between_windows(self) -> bool:
        """None of a size is open."""
        return not self._terms.in_turn or self._held or not self._window.batches

    @property
    def gathers(self) -> bool:
        """Gradients of batches are here that are in no step, and not on their way to one."""
        return self._window.batches > 0

    # ---- windows ----

    def _close(self) -> None:
        """The window is full: step with the one before, then this one leaves."""
        if not self._pass.under_way:
            self._arrive()
        if not self._hold():
            self._go()

    def _arrive(self) -> None:
        """Wait for what is in flight, and step with it."""
        self._gradients.wait()
        self._take()

    def _hold(self) -> bool:
        """Whether a checkpoint of the model as it is comes first, at the end of this batch, with nothing in flight."""
        self._held = self._terms.late and self._terms.updates.left > 1 and self._averager.marks.due
        return self._held

    def _go(self) -> None:
        """Send the window, and wait for it where steps have no delay."""
        if self._pass.under_way:
            self._totals.leave(self._window.batches + 1, self._averager.gates)
            self._sent_samples = self._pass.finish()
        else:
            self._send()
        if not self._terms.late:
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
        """The last step before ``max_steps`` has no delay: no window follows that would bring it."""
        if self._terms.updates.left == 1:
            self._arrive()

    def _leave(self) -> bool:
        """Send the window, if the buckets are free; without batches, or after ``max_steps``, it is dropped.

        One without samples leaves, too: the others wait for it, and steps stay the same on all replicas.
        """
        window = self._window
        if self._terms.updates.left <= 0 or not window.batches:
            window.clear()
            return True
        if not self._gradients.free:
            return False
        samples = window.samples
        self._strategy.tell_place()
        self._totals.leave(window.batches, self._averager.gates)
        if not window.leave():
            return False
        self._sent_samples = samples
        return True

    def _take(self) -> None:
        """Step with the mean that has arrived, if one has."""
        gradients, averager, strategy = self._gradients, self._averager, self._strategy
        if (arrived := gradients.arrived) is None:
            return
        before, samples = self._seen, 0.0
        if arrived.message is not None:
            samples, self._sent_samples = self._sent_samples, 0.0
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
        self._totals.arrive(arrived, averager.gates, gradients.rounds.message_bytes)
        stepped, lr = self._seen > before, learning_rate(strategy.optimizers)
        averager.tick(_GRADIENTS, samples, stepped=stepped, lr=lr)
        gradients.stepped()

    def _step(self) -> None:
        """Have the optimizer step with the mean that has arrived, corrected."""
        self._terms.updates.take(lambda: self._gradients.take_(self._terms.scale, self._correcting.change_))

    # ---- at gates, see `Visitor` ----

    def come(self) -> None:
        """Ahead of the gate, while nobody goes on without this replica: what it says there shall hold."""
        averager = self._averager
        gate = averager.gates.coming  # those of no size end wherever that helps
        ends = gate in _LAST or (gate is Gate.DECIDE and not self._terms.in_turn)
        if self._held or (ends and self._window.batches):
            self._arrive()
            averager.marks.settle()
            self._send()

    def stand(self) -> None:
        """Step with what arrives, one's own and others'."""
        self._take()

    def go(self, waited_s: float) -> None: ...

    def leave(self) -> None:
        if not self._restored:  # else training goes on as from within an epoch, behind no gate
            self._correcting.forget()
        self._restored = False

    def resume(self) -> None: ...

"""One replica's windows of gradients: when one closes, when it leaves, and when the step that it is for is taken."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from lightning_async.engine.averaging.averager import BackgroundAverager
from lightning_async.engine.averaging.batch_norm import RECENT_BATCHES
from lightning_async.engine.gradients.synchronous import SynchronousGradients
from lightning_async.engine.gradients.window import Window
from lightning_async.engine.header import Arrival, Gate
from lightning_async.rules.delays import DelayCorrection
from lightning_async.rules.schedules.protocol import Action, Step
from lightning_async.strategies.saved_state import SavedState
from lightning_async.strategies.stepping import Steps, learning_rate
from lightning_async.trainer.batch import batch_size
from lightning_async.trainer.updates import Updates

__all__ = ["Accumulating", "Windows"]

_GRADIENTS = Step(Action.GRADIENTS)
_LAST = (Gate.EPOCH_END, Gate.TRAIN_END, Gate.STOP)


class Windows(Steps, Protocol):
    """What a strategy has whose windows these are."""

    accumulate: int | Literal["until_reduced"]
    delay: int
    warmup_steps: int
    correction: DelayCorrection | None
    updates: Updates | None
    saved: SavedState

    def tell_place(self) -> None: ...


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
        gradients.follows = True
        self._window = Window(gradients)
        self._size = self._batch_samples = self._sent_samples = 0.0
        self._seen = 0
        self._before: Tensor | None = None
        """The parameters ahead of the last step."""
        self.recent: deque[Any] = deque(maxlen=RECENT_BATCHES)
        averager.gates.add(self)
        averager.gathered = self._state
        if (saved := strategy.saved.take_gathered()) is not None:
            self._size = saved["size"]
            self._window.load_state_dict(saved["window"])
        self._hooks = [optimizer.register_step_post_hook(self._count) for optimizer in strategy.optimizers]

    def close(self) -> None:
        """Let go of the optimizers."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _state(self) -> dict[str, Any] | None:
        """For a checkpoint at a gate, where nothing is in flight: the open window."""
        return {"size": self._size, "window": self._window.state_dict()} if self._window.batches else None

    def _count(self, *_: Any) -> None:
        """After every real optimizer step: mixed precision skips some."""
        self._seen += 1

    # ---- batches ----

    def start_batch(self, batch: Any) -> None:
        """The training thread has a batch."""
        self._averager.gates.resume()
        self._batch_samples = batch_size(batch)
        if self._strategy.buffers == "recompute":
            self.recent.append(batch)

    def finish_batch(self) -> None:
        """Nothing is put off to the end of a batch."""

    def step(self, closure: Callable[[], Any], run: Callable[[Callable[[], Any]], Any]) -> Any:
        """``run`` the optimizer's step."""
        return run(closure)

    def after_backward(self) -> None:
        """A batch's gradients are there, and go into the window."""
        if not self._window.batches:
            self._size = self._next_size()
        parts = self._strategy.module.trainer.accumulate_grad_batches  # by which Lightning has divided the loss
        self._window.add_(self._batch_samples, self._scale / parts, self._averager.step)

    def after_batch(self) -> None:
        """Its gradients are in the window: close that, if it is time."""
        if self._in_turn:
            if self._window.batches >= self._size or self._updates.ends_epoch:
                self._close()
        elif not self._gradients.in_flight:
            self._take()
            self._leave()
            self._end_if_last()

    @property
    def between_windows(self) -> bool:
        """None of a size is open."""
        return not self._in_turn or not self._window.batches

    @property
    def _updates(self) -> Updates:
        assert self._strategy.updates is not None
        return self._strategy.updates

    @property
    def _warming_up(self) -> bool:
        return self._averager.step < self._strategy.warmup_steps

    @property
    def _in_turn(self) -> bool:
        """Windows have a size; else each lasts until the one before is reduced."""
        return self._warming_up or self._strategy.accumulate != "until_reduced"

    def _next_size(self) -> int:
        return 1 if self._strategy.accumulate == "until_reduced" else int(self._strategy.accumulate)

    @property
    def _scale(self) -> float:
        scaler = getattr(self._strategy.precision_plugin, "scaler", None)
        return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0

    # ---- windows ----

    def _close(self) -> None:
        """The window is full: step with the one before, send this one, and wait for it where steps have no delay."""
        self._send()
        if self._strategy.delay == 0 or self._warming_up:
            self._gradients.wait()
            self._take()
        self._end_if_last()

    def _send(self) -> None:
        """Send the window, as soon as the buckets are free."""
        while True:
            self._gradients.wait()
            self._take()
            if self._leave():
                return
            self._gradients.wait_until_free()

    def _end_if_last(self) -> None:
        """The last step before ``max_steps`` has no delay: no window follows that would bring it."""
        if self._updates.left == 1:
            self._gradients.wait()
            self._take()

    def _leave(self) -> bool:
        """Send the window, if the buckets are free; without samples, or after ``max_steps``, it is dropped."""
        window = self._window
        if self._updates.left <= 0 or window.samples <= 0.0:
            window.clear()
            return True
        if not self._gradients.free:
            return False
        samples = window.samples
        self._strategy.tell_place()
        if not window.leave():
            return False
        self._sent_samples = samples
        return True

    def _take(self) -> None:
        """Step with the mean that has arrived, if one has."""
        gradients, averager, strategy = self._gradients, self._averager, self._strategy
        if not gradients.arrived:
            return
        before, samples = self._seen, self._sent_samples
        self._updates.take(lambda: gradients.take_(self._scale, self._correct_))
        if gradients.arrived:
            raise RuntimeError(
                f"Rank {strategy.global_rank}: `{type(strategy.module).__name__}.optimizer_step` did not call its "
                "`optimizer_closure`, which puts the averaged gradients in place. Pass it on: "
                "`optimizer.step(closure=optimizer_closure)`."
            )
        for p in gradients.replica.tensors.trained.values():
            p.grad = None
        self._sent_samples = 0.0
        averager.tick(_GRADIENTS, samples, stepped=self._seen > before, lr=learning_rate(strategy.optimizers))

    def _correct_(self, mean: Tensor, since: int) -> None:
        """Of a mean that is late by a step, make one for the parameters of now."""
        correction, before = self._strategy.correction, self._before
        if correction is None:
            return
        now = torch.empty_like(mean)
        self._gradients.replica.pack_parameters_(now)
        if before is not None and before.shape == now.shape and since < self._averager.step:
            correction.correct_(mean, torch.sub(now, before, out=before))
        self._before = now

    # ---- at gates, see `Visitor` ----

    def come(self) -> None:
        """Ahead of the gate, while nobody goes on without this replica: what it says there shall hold."""
        if self._averager.gates.coming in _LAST and self._window.batches:
            self._send()

    def stand(self) -> None:
        """Step with what arrives, one's own and others'."""
        self._take()

    def go(self, waited_s: float) -> None: ...

    def leave(self) -> None: ...

    def resume(self) -> None: ...

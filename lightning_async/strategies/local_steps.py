"""One replica's optimizer steps, as the averager sees them: planned before, counted after.

`LocalSteps` is the step runner of averaging, in automatic and in manual optimization. `StepBatches` counts the batch
under way, and keeps the last ones where BatchNorm's statistics are recomputed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from lightning_async.algorithms.schedules import Action, Synchronous
from lightning_async.callbacks.accumulation import AdaptiveGradientAccumulation
from lightning_async.engine.averaging.averager import BackgroundAverager
from lightning_async.engine.averaging.optimizer_state import RECENT_BATCHES, reset
from lightning_async.engine.gradients.reduction import SynchronousGradients
from lightning_async.trainer.namespace import changes_gradients, loss_scale, pulled, pulls, scaled_zero
from lightning_async.trainer.step_runner import StepRunner

if TYPE_CHECKING:
    from lightning_async.strategies.async_strategy import AsyncStrategy


class LocalSteps(StepRunner):
    """The step runner that tells the averager of every step; closed by `close`."""

    def __init__(
        self,
        strategy: AsyncStrategy,
        averager: BackgroundAverager,
        gradients: SynchronousGradients,
    ) -> None:
        self._strategy = strategy
        self._averager = averager
        self._gradients = gradients
        averager.on_healed = self._forget_state
        self._samples = self._of_batch = 0.0
        self._batch_step: Action | None = None
        self._seen = self._counted = self._dropped = 0
        self._reduced = False
        """Manual optimization: gradients were averaged since the last batch with a step."""
        self._overlaps = not changes_gradients(strategy.module)
        self._skipped = False
        """Automatic optimization: the batch under way has no loss."""
        self._without_loss = 0
        """Automatic optimization: batches without a loss since the last step."""
        self._in_step = False
        """Automatic optimization: the closure of a synchronous step runs."""
        self._batches = StepBatches(strategy.module, strategy.buffers, self._count_samples)
        self.recent = self._batches.recent
        self._hooks = [optimizer.register_step_post_hook(self._count) for optimizer in strategy.optimizers]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._gradients.close()

    def start_batch(self, batch: Any) -> None:
        self.finish_batch()
        self._averager.sync_points.resume()
        self._batches.start(batch)
        if not self._strategy.module.automatic_optimization:
            self._batch_step = self._averager.plan()
            self._counted = self._seen

    def _count_samples(self, batch: Any) -> None:
        samples = self._strategy.count_samples(batch)
        self._samples += samples
        self._of_batch = samples

    def finish_batch(self) -> None:
        """Manual optimization: a batch is one step, and merges happen between batches.

        Between the steps of two losses a merge would break their graphs.
        """
        planned = self._batch_step
        self._batch_step = None
        if planned is not None:
            stepped = self._seen > self._counted
            self._reduced &= not stepped
            self._tick(planned, stepped)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any], run: Callable[[Callable[[], Any]], Any]) -> Any:
        if not self._strategy.module.automatic_optimization:
            return run(closure)
        planned = self._averager.plan()
        self._gradients.told = None
        synchronous = planned is Action.GRADIENTS
        before = self._seen
        self._skipped = False
        output = run(self._synchronised(closure) if synchronous else closure)
        empty = synchronous and self._gradients.told is not None and not self._gradients.told.weight
        if self._skipped and not synchronous:  # an optimizer's step without a gradient moves nothing
            empty = all(p.grad is None for p in self._gradients.replica.tensors.trained.values())
        self._tick(planned, stepped=self._seen > before and not empty)
        return output

    def skip_batch(self) -> None:
        self._batches.see()
        self._samples -= self._of_batch
        self._of_batch = 0.0
        self._skipped = True
        self._without_loss += 1

    @property
    def missed_steps(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        ledger = self._averager.ledger
        return ledger.missed if ledger.synchronous or isinstance(self._averager.schedule, Synchronous) else None

    @missed_steps.setter
    def missed_steps(self, missed: int) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._averager.ledger.missed = missed

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Return a context for a backward pass; gradients to be averaged leave as it makes them."""
        self._batches.see()
        trained = self._gradients.replica.tensors.trained.values()
        if self._strategy.module.automatic_optimization and all(p.grad is None for p in trained):
            self._samples = self._of_batch  # whatever came before is in no gradient
        # What has left cannot be multiplied any more.
        if self._overlaps and (self._in_step or self._is_synchronous()) and self._factor == 1.0:
            self._gradients.begin_backward(self._sample_counts, loss_scale(self._strategy.precision_plugin))
        try:
            yield
        except BaseException:
            self._gradients.withdraw()
            raise

    def after_backward(self) -> None:
        """Manual optimization: gradients are there."""
        if self._is_synchronous():
            self._reduce_gradients()
            self._reduced = True

    def _is_synchronous(self) -> bool:
        """Manual optimization: this batch's step is one on averaged gradients."""
        return self._batch_step is Action.GRADIENTS

    def _synchronised(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """``closure``, then the mean of all replicas' gradients: before they are unscaled and clipped."""

        def wrapped() -> Any:
            self._in_step = True
            try:
                result = closure()
            except BaseException:
                self._gradients.withdraw()
                raise
            finally:
                self._in_step = False
            self._reduce_gradients()
            told = self._gradients.told
            if result is None and told is not None and told.weight > 0.0:
                # `training_step` has returned None here: the others' mean is stepped with all the same.
                return scaled_zero(self._strategy.precision_plugin, self._strategy.module.device)
            return result

        return wrapped

    def _reduce_gradients(self) -> None:
        self._batches.see()
        gradients = self._gradients
        if (factor := self._factor) != 1.0:
            trained = gradients.replica.tensors.trained.values()
            torch._foreach_mul_([p.grad for p in trained if p.grad is not None], factor)
        gradients.reduce_(self._sample_counts, loss_scale(self._strategy.precision_plugin))
        if gradients.told is not None and gradients.told.weight > 0.0:  # else no rank had any, and nothing has moved
            self._averager.summary.payload_bytes += gradients.rounds.message_bytes

    @property
    def _factor(self) -> float:
        """The factor that makes accumulated gradients a mean over the batches that have a loss.

        Lightning divides each loss by the number of all batches, while samples are counted of these only.
        """
        trainer: Any = self._strategy.module.trainer
        if not self._without_loss or any(isinstance(each, AdaptiveGradientAccumulation) for each in trainer.callbacks):
            return 1.0  # the batches of a window are weighted by their samples already
        batches = (trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1) % trainer.accumulate_grad_batches + 1
        counted = batches - self._without_loss
        return batches / counted if counted > 0 else 1.0

    @property
    def _sample_counts(self) -> float:
        """Samples behind what gradients are each replica's own. In manual optimization each backward pass is averaged:
        what batches before have made in accumulation is a mean already."""
        return self._samples if self._strategy.module.automatic_optimization else self._of_batch

    def _tick(self, planned: Action, stepped: bool) -> None:
        self._batches.see()
        strategy = self._strategy
        samples = self._samples
        if stepped or strategy.module.automatic_optimization:  # else: manual accumulation, the step is yet to come
            self._samples = 0.0
            self._without_loss = 0
        if self._gradients.rounds.dropped > self._dropped:
            self._dropped = self._gradients.rounds.dropped
            samples = 0.0
        report = self._averager.tick(planned, samples, stepped=stepped, lr=learning_rate(strategy.optimizers))
        if report is not None and strategy.optimizer_state_policy == "reset":
            reset(strategy.optimizers)

    def _forget_state(self) -> None:
        """Reset the optimizers, where their state is not averaged: this replica was not finite, so neither are they."""
        if self._strategy.optimizer_state_policy != "average":
            reset(self._strategy.optimizers)

    def _count(self, *_: Any) -> None:
        """Count a real optimizer step: mixed precision skips some, and users step optimizers themselves."""
        self._seen += 1
        if self._is_synchronous() and not self._reduced:
            raise RuntimeError(
                f"Rank {self._strategy.global_rank}: `schedule={self._strategy.schedule!r}` asks for a step on "
                "averaged gradients, and the optimizer has stepped on this replica's own. With manual optimization "
                "`self.manual_backward(loss)` is what averages them; `loss.backward()` does not."
            )


class StepBatches:
    """The batches of one replica. One that `training_step` takes by itself is known once it has been taken: it is
    looked at where its gradients are, at the latest as the next one begins.

    Args:
        module: of the user's.
        buffers: the policy of buffers: the last batches are kept where it is "recompute".
        take: called once for each batch.
    """

    def __init__(self, module: Any, buffers: str, take: Callable[[Any], None]) -> None:
        self._module = module
        self._recomputes = buffers == "recompute"
        self._take = take
        self._pulls = pulls(module)
        self._unseen = False
        self._taken: Any = None
        self.recent: deque[Any] = deque(maxlen=RECENT_BATCHES)
        """For recomputing BatchNorm's statistics, where that is asked for."""

    def start(self, batch: Any) -> None:
        """Begin a batch; where `training_step` takes batches by itself, it is not known yet."""
        self.see()
        self._unseen = self._pulls
        if not self._pulls:
            self._see(batch)

    def see(self) -> None:
        """Whatever batch there is has been taken by now."""
        if not self._pulls:
            return
        taken = pulled(self._module.trainer)
        if taken is not None and (self._unseen or taken is not self._taken):  # it may take several
            self._unseen = False
            self._taken = taken
            self._see(taken)

    def _see(self, batch: Any) -> None:
        if self._recomputes:
            self.recent.append(batch)
        self._take(batch)


def learning_rate(optimizers: Iterable[Any]) -> float:
    """Return that of the first optimizer's first group; 0.0 where there is none, as in some users' optimizers."""
    groups = next((optimizer.param_groups for optimizer in optimizers), ())
    lr = groups[0].get("lr") if groups else None
    return 0.0 if lr is None else float(lr)

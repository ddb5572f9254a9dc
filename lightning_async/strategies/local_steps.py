"""`LocalSteps`: the step runner of averaging.

Before each step, it asks the averager which kind of step to take. After the step, it reports the step to the averager,
which may merge the result of a round. It is for automatic and manual optimization. `StepBatches` counts the samples of
the current batch, and keeps the last batches if BatchNorm's statistics are recomputed.
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
from lightning_async.engine.replica import BufferPolicies
from lightning_async.trainer.namespace import changes_gradients, loss_scale, pulled, pulls, scaled_zero, take_back
from lightning_async.trainer.step_runner import StepRunner

if TYPE_CHECKING:
    from lightning_async.strategies.async_strategy import AsyncStrategy


class LocalSteps(StepRunner):
    """The step runner of averaging: the averager decides whether each step is local or synchronous, and counts it."""

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
        """Whether gradients were averaged since the last batch with a step; for manual optimization."""
        self._overlaps = not changes_gradients(strategy.module)
        self._skipped = False
        """Whether the current batch has no loss; for automatic optimization."""
        self._without_loss = 0
        """Number of batches without a loss since the last step; for automatic optimization."""
        self._in_step = False
        """Whether the closure of a synchronous step runs; for automatic optimization."""
        self._batches = StepBatches(strategy.module, strategy.buffers, self._count_samples)
        self.recent = self._batches.recent
        self._hooks = [each.register_step_post_hook(self._count).remove for each in strategy.optimizers]

    def close(self) -> None:
        # The optimizers outlive the session.
        take_back(self._hooks)
        self._gradients.close()

    def start_batch(self, batch: Any) -> None:
        self.finish_batch()
        self._averager.sync_points.resume()
        self._batches.start(batch)
        if not self._strategy.module.automatic_optimization:
            # Before the batch, because `training_step` itself calls the optimizers.
            self._batch_step = self._averager.plan()
            self._counted = self._seen

    def _count_samples(self, batch: Any) -> None:
        samples = self._strategy.count_samples(batch)
        self._samples += samples
        self._of_batch = samples

    def finish_batch(self) -> None:
        """Report the batch as one step to the averager, which may then merge a round; only in manual optimization.

        Rounds are merged only between batches. Between the steps of two losses of a batch, a merge would change
        parameters that the second loss's graph still needs.
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

        def with_loss() -> Any:
            loss = closure()
            # After a backward pass that broke off there are no gradients, which a scaler would ask for.
            return None if self._skipped else loss

        output = run(self._synchronised(with_loss) if synchronous else with_loss)
        empty = synchronous and self._gradients.told is not None and not self._gradients.told.weight
        if self._skipped and not synchronous:
            # An optimizer's step without any gradient changes nothing.
            empty = self._is_empty()
        self._tick(planned, stepped=self._seen > before and not empty)
        return output

    def skip_batch(self) -> None:
        self._batches.see()
        self._samples -= self._of_batch
        self._of_batch = 0.0
        self._skipped = True
        self._without_loss += 1
        if self._is_empty():  # a backward pass that broke off has taken the gradients of earlier batches along
            self._samples = 0.0
            self._without_loss = self._num_accumulated

    def unstepped(self) -> list[float]:
        return [self._samples, self._without_loss]

    def restore_unstepped(self, counts: list[float]) -> None:
        self._samples = counts[0]
        self._without_loss = int(counts[1])

    @property
    def missed_steps(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        ledger = self._averager.ledger
        return ledger.missed if ledger.synchronous or isinstance(self._averager.schedule, Synchronous) else None

    @missed_steps.setter
    def missed_steps(self, missed: int) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._averager.ledger.missed = missed

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Return a context for a backward pass; if possible, gradients of a synchronous step are sent during it."""
        self._batches.see()
        if self._strategy.module.automatic_optimization and self._is_empty():
            self._samples = self._of_batch  # without gradients, samples of earlier batches do not count
        # Gradients that were sent cannot be multiplied by a factor any more, so they are sent only if it is 1.
        if self._overlaps and (self._in_step or self._is_synchronous()) and self._factor == 1.0:
            self._gradients.begin_backward(self._sample_counts, loss_scale(self._strategy.precision_plugin))
        try:
            yield
        except BaseException:
            # The other replicas must not wait for gradients of a pass that has failed.
            self._gradients.withdraw()
            raise

    def after_backward(self) -> None:
        """In manual optimization, average the gradients of a backward pass if the batch's step is synchronous."""
        if self._is_synchronous():
            self._reduce_gradients()
            self._reduced = True

    def _is_empty(self) -> bool:
        return all(p.grad is None for p in self._gradients.replica.tensors.trained.values())

    def _is_synchronous(self) -> bool:
        return self._batch_step is Action.GRADIENTS

    def _synchronised(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that calls ``closure``, then averages the gradients over all replicas.

        Lightning unscales and clips gradients after the closure, so it does so with the mean.
        """

        def wrapped() -> Any:
            self._in_step = True
            try:
                result = closure()
            except BaseException:
                # Here, too: the others would wait for this replica.
                self._gradients.withdraw()
                raise
            finally:
                self._in_step = False
            self._reduce_gradients()
            told = self._gradients.told
            if result is None and told is not None and told.weight > 0.0:
                # `training_step` has returned None here, and this replica steps with the mean of the others. Lightning
                # steps only if the closure returns a loss.
                return scaled_zero(self._strategy.precision_plugin, self._strategy.module.device)
            return result

        return wrapped

    def _reduce_gradients(self) -> None:
        self._batches.see()
        gradients = self._gradients
        if (factor := self._factor) != 1.0 and not self._is_empty():
            trained = gradients.replica.tensors.trained.values()
            torch._foreach_mul_([p.grad for p in trained if p.grad is not None], factor)
        gradients.reduce_(self._sample_counts, loss_scale(self._strategy.precision_plugin))
        if gradients.told is not None and gradients.told.weight > 0.0:  # else no rank had gradients, and none were sent
            self._averager.summary.payload_bytes += gradients.rounds.message_bytes

    @property
    def _factor(self) -> float:
        """Factor that turns accumulated gradients into their mean over the batches that have a loss.

        Lightning divides each loss by the number of all accumulated batches, even if `training_step` returned None for
        some of them. Only the samples of the batches with a loss are counted.
        """
        trainer: Any = self._strategy.module.trainer
        if not self._without_loss or any(isinstance(each, AdaptiveGradientAccumulation) for each in trainer.callbacks):
            return 1.0  # the callback has weighted the batches of a window by their samples
        counted = self._num_accumulated - self._without_loss
        return self._num_accumulated / counted if counted > 0 else 1.0

    @property
    def _num_accumulated(self) -> int:
        """Number of batches since the last step, with the current one."""
        trainer: Any = self._strategy.module.trainer
        return (trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1) % trainer.accumulate_grad_batches + 1

    @property
    def _sample_counts(self) -> float:
        """Number of samples of the gradients that are averaged next.

        In automatic optimization these are the samples of all accumulated batches. In manual optimization they are
        those of the current batch only, because gradients are averaged after each backward pass, even if several passes
        accumulate.
        """
        return self._samples if self._strategy.module.automatic_optimization else self._of_batch

    def _tick(self, planned: Action, stepped: bool) -> None:
        """Report a step to the averager, which may then merge the mean of a round into the parameters.

        Args:
            planned: Kind of step that the averager has asked for.
            stepped: Whether an optimizer step was taken.
        """
        self._batches.see()
        strategy = self._strategy
        samples = self._samples
        if stepped or strategy.module.automatic_optimization:  # else gradients are accumulated for a later step
            self._samples = 0.0
            self._without_loss = 0
        if self._gradients.rounds.dropped > self._dropped:
            self._dropped = self._gradients.rounds.dropped
            samples = 0.0  # gradients that were not finite were dropped, so that their samples are in no step
        report = self._averager.tick(planned, samples, stepped=stepped, lr=learning_rate(strategy.optimizers))
        if report is not None and strategy.optimizer_state_policy == "reset":
            reset(strategy.optimizers)

    def _forget_state(self) -> None:
        """Reset the optimizers after this replica's parameters were not finite, unless their state is averaged.

        The averager has replaced the parameters, but the state of the optimizers may not be finite, either.
        """
        if self._strategy.optimizer_state_policy != "average":
            reset(self._strategy.optimizers)

    def count_unseen_step(self) -> bool:
        self._seen += 1
        return not self._strategy.module.automatic_optimization

    def _count(self, *_: Any) -> None:
        """Count a step that an optimizer has taken; called by a hook of the optimizer.

        Lightning's calls do not show how many steps were taken: mixed precision may skip a step, and users may call
        optimizers themselves.

        Raises:
            RuntimeError: in manual optimization, the step was to be synchronous, and the gradients were not averaged.
        """
        self._seen += 1
        if self._is_synchronous() and not self._reduced:
            raise RuntimeError(
                f"Rank {self._strategy.global_rank}: `schedule={self._averager.schedule!r}` asks for a step on "
                "averaged gradients, and the optimizer has stepped on this replica's own. With manual optimization "
                "`self.manual_backward(loss)` is what averages them; `loss.backward()` does not."
            )


class StepBatches:
    """The current batch of one replica, which is counted once, and the batches before it.

    A `training_step` with a ``dataloader_iter`` fetches its batch from this iterator. Such a batch is counted when its
    gradients are used, at the latest when the next batch begins.

    Args:
        module: The user's module.
        buffers: Treatment of buffers. If it is ``"recompute"``, the last `RECENT_BATCHES` batches are kept.
        take: Function that counts a batch; it is called once for each batch.
    """

    def __init__(self, module: Any, buffers: BufferPolicies, take: Callable[[Any], None]) -> None:
        self._module = module
        self._recomputes = buffers == "recompute"
        self._take = take
        self._pulls = pulls(module)
        self._unseen = False
        self._taken: Any = None
        self.recent: deque[Any] = deque(maxlen=RECENT_BATCHES)
        """The last batches, for recomputing BatchNorm's statistics; empty if the statistics are not recomputed."""

    def start(self, batch: Any) -> None:
        """Begin a batch. Count it now, unless `training_step` will fetch it from its ``dataloader_iter``."""
        self.see()
        self._unseen = self._pulls
        if not self._pulls:
            self._see(batch)

    def see(self) -> None:
        """Count the batch that `training_step` has fetched from its ``dataloader_iter``, if it is not counted yet."""
        if not self._pulls:
            return
        taken = pulled(self._module.trainer)
        if taken is not None and (self._unseen or taken is not self._taken):  # one step may get several batches
            self._unseen = False
            self._taken = taken
            self._see(taken)

    def _see(self, batch: Any) -> None:
        if self._recomputes:
            self.recent.append(batch)
        self._take(batch)


def learning_rate(optimizers: Iterable[Any]) -> float:
    """Return the learning rate of the first optimizer's first group; 0.0 if there is no optimizer, group or rate."""
    groups = next((optimizer.param_groups for optimizer in optimizers), ())
    lr = groups[0].get("lr") if groups else None
    return 0.0 if lr is None else float(lr)

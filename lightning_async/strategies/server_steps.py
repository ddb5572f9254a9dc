"""`PushSteps`: the step runner of a worker.

It pushes gradients, or changes of the weights, to servers, and pulls weights.

`SampleCounts` and `PushSamples` count the samples of gradients; `Requests` makes requests on a thread of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

from torch.optim import Optimizer

from lightning_async.engine.averaging.optimizer_state import reset
from lightning_async.engine.gradients.reduction import SynchronousGradients
from lightning_async.engine.replica_engine import ReplicaEngine
from lightning_async.engine.shared_state import SyncPointKind
from lightning_async.engine.sync_points import SyncPointParticipant
from lightning_async.errors import AsyncTrainingError
from lightning_async.parameter_server.discovery import Agreement
from lightning_async.parameter_server.metrics import PushTotals
from lightning_async.parameter_server.store import in_words
from lightning_async.parameter_server.tables import HeldState, ParameterGroups, rates_of, refuse_groups
from lightning_async.strategies.local_steps import StepBatches
from lightning_async.trainer.namespace import (
    Undo,
    callbacks_of,
    changes_gradients,
    override_for_users,
    scaler_of,
    set_for_now,
    take_back,
)
from lightning_async.trainer.step_runner import StepRunner

if TYPE_CHECKING:
    from lightning_async.strategies.parameter_server import ParameterServerStrategy


class SampleCounts:
    """The number of samples of each optimizer's gradients.

    A batch counts once for an optimizer, even after several calls of `manual_backward`. When `zero_grad` has set all
    gradients of an optimizer to None, its number starts again at zero.

    Args:
        optimizers: The optimizers, no two of which have a parameter in common.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.params = [{p for group in each.param_groups for p in group["params"]} for each in optimizers]
        self.samples = [0.0] * len(self.params)
        self._counted: set[int] = set()
        """Indices of the optimizers for which the current batch is counted."""

    def start_batch(self) -> None:
        self._counted.clear()

    def begin_pass(self) -> None:
        """Begin a backward pass: reset to zero the number of samples of every optimizer that has no gradients."""
        for number in range(len(self.params)):
            if not self._has_gradients(number):
                self.samples[number] = 0.0
                self._counted.discard(number)

    def end_pass(self, samples: float) -> None:
        """End a backward pass: add ``samples`` to the count of each optimizer that has gradients now.

        A batch with several backward passes counts only once for an optimizer.
        """
        for number in range(len(self.params)):
            if number not in self._counted and self._has_gradients(number):
                self.samples[number] += samples
                self._counted.add(number)

    def take(self, number: int) -> float:
        """Return the number of samples of an optimizer's gradients, and set it to zero.

        Args:
            number: Index of the optimizer.

        Returns:
            The number of samples; 0.0 if no backward pass was counted.
        """
        samples = self.samples[number]
        self.samples[number] = 0.0
        return samples

    def _has_gradients(self, number: int) -> bool:
        return any(p.grad is not None for p in self.params[number])


class PushSamples(SampleCounts):
    """The numbers of samples by which a worker's pushes are weighted.

    Args:
        optimizers: The optimizers, no two of which have a parameter in common.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        super().__init__(optimizers)
        self.batch = 0.0
        """Number of samples of the current batch."""
        self._since = self._reported = 0.0
        """`_since`: samples since the last batch with a step. `_reported`: how many of them are reported or dropped."""
        self.spent = False
        """Whether a step was taken, so that the next batch starts the count again."""

    def start_batch(self) -> None:
        if self.spent:
            self._since = 0.0
            self._reported = 0.0
            self.spent = False
        super().start_batch()

    def count(self, samples: float) -> None:
        """Set the current batch's number of samples, and add it to the samples since the last batch with a step."""
        self.batch = samples
        self._since += samples

    def skip(self) -> None:
        """Undo `count` for the current batch, because it has no loss."""
        self._since -= self.batch
        self.batch = 0.0

    def counts(self) -> list[float]:
        """Return the counts of batches that no step has used yet, for `restore`."""
        return [0.0, 0.0, *self.samples] if self.spent else [self._since, self._reported, *self.samples]

    def restore(self, counts: list[float]) -> None:
        # Another strategy's step runner has saved other counts.
        if len(counts) == 2 + len(self.samples):
            (self._since, self._reported, *self.samples) = counts

    def drop(self) -> None:
        """Record that the samples so far are not reported to the servers, because their gradients were dropped."""
        self._reported = self._since

    def take(self, number: int) -> float:
        """Return how many samples are in the gradients that optimizer ``number`` pushes next, and reset this count.

        If no backward pass was counted, because the user called `loss.backward()`, return the number of samples since
        the last batch with a step.
        """
        return super().take(number) or self._since

    def report(self) -> float:
        """Return the number of samples that no step has reported yet, and mark them as reported with this step."""
        samples = self._since - self._reported
        self._reported = self._since
        self.spent = True
        return samples


class Requests:
    """The requests of a worker to its servers, made one at a time on a thread of their own.

    While a worker waits for an answer, it checks for failures as it does at sync points. So the wait raises an error if
    another worker is lost, or if a sync point fails.
    """

    def __init__(self, averager: ReplicaEngine, totals: PushTotals) -> None:
        self._averager = averager
        self._totals = totals
        self._thread = ThreadPoolExecutor(1, "lightning_async pushes")
        self._under_way: Future[Any] | None = None

    @property
    def under_way(self) -> bool:
        return self._under_way is not None

    @property
    def answered(self) -> bool:
        """Whether the request under way is answered, so that `finish` does not wait."""
        return self._under_way is not None and self._under_way.done()

    @property
    def submit(self) -> Callable[..., Any]:
        """Function that submits another function to the requests' thread, which runs it after earlier requests."""
        return self._thread.submit

    def begin(self, ask: Callable[[], Any]) -> None:
        """Begin a request: call ``ask`` on the requests' thread. No other request may be under way."""
        self._under_way = self._thread.submit(self._totals.timed, ask)
        # The training thread waits for changes of the control plane, so the answer must wake it.
        self._under_way.add_done_callback(lambda _: self._averager.control.wake())

    def wait(self) -> None:
        """Wait until the request under way is answered, if there is one; `finish` then returns the answer."""
        if self._under_way is not None:
            self._averager.sync_points.wait(self._under_way.done)

    def finish(self) -> Any:
        """Wait for the answer of the request under way, and return it; no request is under way afterwards."""
        asked = self._under_way
        assert asked is not None
        if not asked.done():
            began = time.monotonic()
            self.wait()
            self._totals.waited_s += time.monotonic() - began
        self._under_way = None
        return asked.result()

    def finish_within(self, timeout_s: float) -> None:
        """Wait for the request under way, after training has failed; raise TimeoutError after ``timeout_s``."""
        if self._under_way is not None:
            self._under_way.result(timeout_s)

    def ask_within(self, timeout_s: float, ask: Callable[[], Any]) -> None:
        """Make a request and wait for its end, after training has failed; raise TimeoutError after ``timeout_s``.

        A request that takes longer is not cancelled here; `close` cancels it.
        """
        self._under_way = self._thread.submit(ask)
        self._under_way.result(timeout_s)
        self._under_way = None

    def close(self, tables: ParameterGroups) -> None:
        """End the thread, and close the connections of ``tables`` to the servers.

        A request that is under way is abandoned.
        """
        if self._under_way is not None:
            # Without this, the thread's end would wait for an answer.
            tables.give_up()
        self._thread.shutdown()
        tables.close()


_ALWAYS = 2  # Number of first steps before which all parameters are checked for writes, and not only some.


class PushSteps(StepRunner, SyncPointParticipant):
    """The step runner of a worker; it takes part in sync points.

    With the optimizer on the servers, ``optimizer.step`` pushes the gradients and pulls the weights. Otherwise the
    worker has the optimizer, and pushes the changes of its weights. At a sync point no request is under way.

    Before each push and each sync point the worker looks for parameters that other code than the optimizer has changed,
    such as a callback. If changes of the weights are pushed, these include the changes by other code. If gradients are
    pushed, changes by other code raise an error, because the next pull would overwrite them.

    The state of optimizers on servers is fetched for checkpoints. Rank 0 loads it into its own optimizers before each
    checkpoint; other ranks do so only within `states_here`.

    Args:
        strategy: Strategy of this rank.
        averager: Averager of the session.
        gradients: Component of other step runners; not used here.
    """

    def __init__(
        self,
        strategy: ParameterServerStrategy,
        averager: ReplicaEngine,
        gradients: SynchronousGradients,
    ) -> None:
        self._strategy = strategy
        self._averager = averager
        self._agreement = Agreement(averager.control)
        self._totals = cast(PushTotals, averager.summary.totals)
        by_hand = not strategy.module.automatic_optimization
        self._samples = PushSamples(strategy.optimizers)
        own = not strategy.update_on_server or by_hand
        # Gradients may be sent during the backward pass only if they do not change after it. A scaler divides them by
        # its scale, and hooks may change them, both without a trace.
        changed = scaler_of(strategy.precision_plugin) is not None or changes_gradients(
            strategy.module, until_step=True
        )
        self._overlaps = not own and not changed
        self._stepped = self._steps = self._looks = self.pushes = 0
        self._brings = False
        """Whether an optimizer had a gradient in a local step since the last push."""
        self._requests = Requests(averager, self._totals)
        self.calls = self.called = False
        """`calls`: whether the next push calls all ranks to a sync point. `called`: whether a rank's last push did."""
        self._batches = StepBatches(
            strategy.module, strategy.buffers, lambda batch: self._samples.count(strategy.count_samples(batch))
        )
        self.recent = self._batches.recent
        self.tables = strategy.join_servers(averager)
        self._agreement.pulled(self.tables.versions, self.tables.restored)
        saved, _ = strategy.saved.take_gathered()
        self.tables.load_residual(saved or {})
        averager.gathered = self._state
        averager.sync_points.add(self)
        self._states_are_here = False
        swas = callbacks_of(strategy.module.trainer, "StochasticWeightAveraging")
        self._undo: list[Undo] = [
            override_for_users(swa, "on_train_epoch_start", partial(self._start_epoch, swa)) for swa in swas
        ]
        self._held: list[HeldState] = []
        for optimizer in strategy.optimizers:
            self._undo.append(set_for_now(optimizer, "add_param_group", refuse_groups))
            if strategy.update_on_server:
                self._held.append(HeldState(optimizer, fetches=strategy.is_global_zero))
                self._undo.append(self._held[-1].release)
                step = self._step_of(optimizer, self._held[-1])
                led = strategy.own_steps.led(optimizer, step)
                self._undo.append(set_for_now(optimizer, "step", led))
            else:
                self._undo.append(optimizer.register_step_post_hook(self._count).remove)

    def close(self) -> None:
        take_back(self._undo)
        self._requests.close(self.tables)

    def _state(self) -> dict[str, Any] | None:
        self._requests.wait()
        return self.tables.state()

    def start_batch(self, batch: Any) -> None:
        self.finish_batch()
        self._averager.sync_points.resume()
        if self._samples.spent and self._requests.answered:
            self._finish()  # the weights that were pulled meanwhile are used for this batch
        self._samples.start_batch()
        self._batches.start(batch)

    def fetch_states(self, optimizers: Iterable[Optimizer]) -> None:
        """Fetch the state of these optimizers from the servers, on rank 0, without waiting for other ranks."""
        if self._strategy.is_global_zero and not self._states_are_here:
            for optimizer in optimizers:
                self._fetch_state(optimizer)

    @contextmanager
    def states_here(self, alone_s: float | None = None) -> Iterator[None]:
        """Return a context in which this rank's optimizers hold the state that the servers have.

        Args:
            alone_s: Given only after training has failed: longest time in seconds to wait for each answer. The newest
                weights are then fetched, too. Default: None.

        Raises:
            TimeoutError: a server takes longer than ``alone_s``.
        """
        optimizers = self._strategy.optimizers
        if alone_s is not None:
            self.rescue(optimizers, alone_s)
        else:
            for optimizer in optimizers:
                self._fetch_state(optimizer)
        self._states_are_here = True
        try:
            yield
        finally:
            self._states_are_here = False
            if not self._strategy.is_global_zero:
                for held in self._held:
                    held.drop()

    def _fetch_state(self, optimizer: Optimizer) -> None:
        self._finish()
        self._ask(partial(self.tables.fill_state, optimizer, self._tables_of(optimizer)))

    def rescue(self, optimizers: Sequence[Optimizer], timeout_s: float) -> None:
        """Fetch the weights and the optimizers' state, after training has failed.

        Raises:
            TimeoutError: an answer takes longer than ``timeout_s``.
        """
        # A worker has one request at a time.
        self._requests.finish_within(timeout_s)
        self._requests.ask_within(timeout_s, self.tables.meet)
        self.tables.take_()
        for optimizer in optimizers:
            fill = partial(self.tables.fill_state, optimizer, self._tables_of(optimizer))
            self._requests.ask_within(timeout_s, fill)

    def complete_summary(self) -> None:
        self._totals.lags = in_words(self._ask(self.tables.lags))

    def finish_batch(self) -> None:
        """Push the changes of the weights after a batch, in manual optimization, if a push is due."""
        if not self._strategy.module.automatic_optimization:
            self._push_change()

    def step(self, optimizer: Optimizer, closure: Callable[[], Any], run: Callable[[Callable[[], Any]], Any]) -> Any:
        before = self.pushes
        output = run(closure)  # the optimizer's step in it is a push
        if self._strategy.module.automatic_optimization:
            self._samples.spent = True
            if not self._strategy.update_on_server:
                self._push_change()
        if self.pushes == before:
            self.skip(optimizer)
        return output

    def skip(self, optimizer: Optimizer) -> None:
        """Drop the samples of a step that mixed precision has skipped.

        If other workers wait for this worker's push, push without gradients.
        """
        self._samples.take(self._strategy.optimizers.index(optimizer))
        if self._strategy.update_on_server and self.tables.in_step:
            self._push(dict.fromkeys(self._tables_of(optimizer)), 0.0)

    def skip_batch(self) -> None:
        self._batches.see()
        self._samples.skip()

    def unstepped(self) -> list[float]:
        return self._samples.counts()

    def restore_unstepped(self, counts: list[float]) -> None:
        self._samples.restore(counts)

    def backward(self) -> AbstractContextManager[None]:
        """Return a context for a backward pass; gradients may be sent during the last pass before a step."""
        self._batches.see()
        self._samples.begin_pass()
        free = self._overlaps and not self._requests.under_way
        leaves = free and not self._strategy.module.trainer.fit_loop.epoch_loop._should_accumulate()
        return self.tables.backward(self._requests.submit if leaves else None)

    def after_backward(self) -> None:
        self._samples.end_pass(self._samples.batch)

    def _refuse(self, written: list[str]) -> None:
        """Raise AsyncTrainingError if there are parameters that other code than the optimizer has changed.

        Args:
            written: Names of these parameters.
        """
        if written:
            more = f" and {len(written) - 3} more" if len(written) > 3 else ""
            raise AsyncTrainingError(
                f"Rank {self._strategy.global_rank}: {', '.join(written[:3])}{more} changed beside the optimizer's "
                "step (a callback, or the module, writes to parameters). Servers hold the weights and would not hear "
                "of it. Use `ParameterServerStrategy(update_on_server=False)`, which pushes all changes, or leave "
                "parameters that are not trained out of the optimizer."
            )

    def _start_epoch(self, swa: Any, original: Callable[..., None], trainer: Any, module: Any) -> None:
        """Call the callback's hook ``original``. If it has put averaged weights into the module, begin a new session.

        The callback is `StochasticWeightAveraging`. With the new session the servers get the averaged weights.
        """
        original(trainer, module)
        if trainer.current_epoch == swa.swa_end + 1:
            strategy = self._strategy
            averager = self._averager
            if strategy.update_on_server:
                self.fetch_states(strategy.optimizers)  # of the servers that end
            clocks = {**averager.state_dict(), "replicas": [averager.clocks()] * strategy.world_size}
            strategy.saved.go_on(clocks, averager.gathered())
            strategy.start_over()

    def _count(self, optimizer: Optimizer, *_: Any) -> None:
        """Count a step of the worker's own optimizer, and record whether the optimizer had a gradient."""
        self._stepped += 1
        self._brings |= any(p.grad is not None for group in optimizer.param_groups for p in group["params"])

    def count_unseen_step(self) -> bool:
        if self._strategy.update_on_server or self._strategy.module.automatic_optimization:
            return False
        self._stepped += 1
        self._brings = True
        return True

    def _tables_of(self, optimizer: Optimizer) -> list[int]:
        number = self._strategy.optimizers.index(optimizer)
        return [table for table, group in enumerate(self._strategy.handle.groups) if group.optimizer == number]

    def _step_of(self, optimizer: Optimizer, held: HeldState) -> Callable[..., Any]:
        """Return the function that replaces an optimizer's ``step``: it pushes the gradients."""
        groups = self._strategy.handle.groups
        tables = self._tables_of(optimizer)
        number = self._strategy.optimizers.index(optimizer)

        def step(optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
            loss = None if closure is None else closure()
            self._batches.see()
            self._looks += 1
            held.check_unchanged()
            self._refuse(self.tables.written(self._requests.under_way, every=self._looks <= _ALWAYS))
            self._finish()
            self.tables.fill_gradients(tables)
            rates = rates_of(optimizer, groups, tables)
            empty = not self.tables.has_gradients(tables)  # all were dropped: no step, as in torch
            if not empty and not self.tables.is_finite(tables):
                empty = True
                self._samples.take(number)
                self._samples.drop()
                self._averager.summary.drop()
            together = self.tables.in_step
            self._push(rates, 0.0 if empty else self._samples.take(number))
            optimizer._opt_called = True
            self._tick(stepped=not empty or together)
            return loss

        hooked: Any = Optimizer.profile_hook_step(step)  # runs the optimizer's hooks on steps
        hooked._wrapped_by_lr_sched = True  # as schedulers ask for
        return MethodType(hooked, optimizer)

    def _push_change(self) -> None:
        """Count the local steps, and push the change of the weights after `ServerOptions.update_frequency` of them."""
        if not self._stepped:
            return
        self._steps += self._stepped
        self._stepped = 0
        self._tick()
        if self._steps >= self._strategy.service.options.update_frequency:
            self._send_change()

    def _send_change(self) -> None:
        """Push the change of all parameters since the last push."""
        self._finish()
        self._steps = self._stepped = 0
        self.tables.fill_change()
        # Steps without a gradient have changed nothing, and must not count in the mean over all workers.
        how = {"weight": float(self._brings or self.tables.has_change), **self._how()}
        self._brings = False
        healthy = self.tables.is_finite(range(len(self._strategy.handle.groups)))
        if not healthy:
            # Changes that are not finite are not sent, and the servers' weights replace this worker's.
            how |= {"weight": 0.0, "pull": True}
            self._averager.summary.drop()
            reset(self._strategy.optimizers)
        self._ask(partial(self.tables.push_change, **how))

    def _push(self, rates: Mapping[int, float | None], weight: float) -> None:
        self._requests.begin(partial(self.tables.push, rates, weight=weight, **self._how()))
        # Without overlap, the next batch is computed at the weights that are pulled with this push.
        if not self._strategy.service.overlap or self.tables.in_step:
            self._finish()

    def _how(self) -> dict[str, Any]:
        """Count a push, and return the arguments that pushes of gradients and of changes have in common."""
        self.pushes += 1
        self._totals.pushes += 1
        pull = self.pushes % self._strategy.service.pull_every == 0 or self.tables.in_step
        return {"pull": pull, "sync_point": self._sync_point, "call": self.calls}

    @property
    def _sync_point(self) -> int:
        """Number of sync points that this worker has passed, plus an offset that grows with each run."""
        return (self._strategy.num_runs << 32) + self._averager.sync_points.opened

    def _tick(self, stepped: bool = True) -> None:
        self._batches.see()
        samples = self._samples.report()
        self._averager.end_step(samples, stepped)

    def _ask(self, ask: Callable[[], Any]) -> Any:
        self._requests.begin(ask)
        return self._finish()

    def _finish(self) -> Any:
        """Wait for the request under way, write pulled weights to the parameters, and return the answer.

        Return None if no request is under way.
        """
        if not self._requests.under_way:
            return None
        answer = self._requests.finish()
        # Servers only pass calls on while pushes wait for one another. When a warm-up has ended, this rank's own call
        # counts.
        self.called |= self.tables.called or (self.calls and not self.tables.in_step)
        if self.tables.pulled:
            self.tables.take_()
            self._totals.pulled(version := self.tables.updates(self._strategy.handle.groups))
            self._strategy.handle.progress.see(version, self._strategy.world_size)
            self._agreement.pulled(self.tables.versions, self.tables.restored)
        return answer

    def before_sync_point(self) -> None:
        """Finish the request under way, push remaining changes, and tell servers not to wait for this worker."""
        self._finish()
        written = self.tables.written(coming=False, every=True)
        if self._strategy.update_on_server:
            self._refuse(written)
        if written or self._steps or self._stepped:
            self._send_change()
        self._ask(partial(self._rest, self._sync_point))
        if self._averager.sync_points.coming is SyncPointKind.DECIDE:
            self.calls = self.called = self.tables.called = False

    def call_all(self) -> bool:
        # If pushes wait for one another, all ranks must come after the same push: a rank that pushed once more would
        # wait for the others' pushes. Otherwise each rank may come at any step.
        if together := self.tables.in_step:
            self.calls = True
        return together

    def _rest(self, sync_point: int) -> None:
        self.tables.rest(sync_point)
        self.tables.meet()

    def at_sync_point(self) -> None:
        """Pull until this worker's weights are as new as those of every other worker."""
        while self._agreement.behind:
            self._ask(self.tables.meet)
        assert self._strategy.fit_sessions is not None
        self._strategy.fit_sessions.patches.rates.follow()

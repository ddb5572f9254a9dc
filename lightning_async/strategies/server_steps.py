"""One worker's steps: gradients, or changes, go to servers, and weights come back; failures end what is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol, cast

from torch.optim import Optimizer

from lightning_async.algorithms.schedules import Action, Step
from lightning_async.engine.averaging.averager import BackgroundAverager
from lightning_async.engine.averaging.optimizer_state import reset
from lightning_async.engine.gradients.reduction import SynchronousGradients
from lightning_async.engine.shared_state import Arrival, SyncPointKind
from lightning_async.errors import AsyncTrainingError
from lightning_async.parameter_server.discovery import Agreement
from lightning_async.parameter_server.metrics import PushTotals
from lightning_async.parameter_server.store import in_words
from lightning_async.parameter_server.tables import ParameterGroups, rates_of, refuse_groups, tables_of
from lightning_async.strategies.local_steps import StepBatches, is_scaled, learning_rate
from lightning_async.trainer.namespace import (
    Undo,
    callbacks_of,
    changes_gradients,
    override_for_users,
    replace,
    take_back,
)
from lightning_async.trainer.step_runner import StepRunner

if TYPE_CHECKING:
    from lightning_async.strategies.parameter_server import ParameterServerStrategy

# How many samples are behind gradients: of each optimizer in manual optimization, and of a worker's pushes.


class SampleCounts:
    """Told of batches, and of the passes of `manual_backward` within them; of an optimizer whose gradients are taken.

    A batch counts once for what an optimizer takes, with however many passes. Gradients that `zero_grad` has set to
    None have nothing behind them.

    Args:
        optimizers: no two have a parameter in common.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.params = [{p for group in each.param_groups for p in group["params"]} for each in optimizers]
        """Of each optimizer."""
        self.samples = [0.0] * len(self.params)
        self._counted: set[int] = set()
        """Optimizers for which the batch under way is counted."""

    def start_batch(self) -> None:
        """A batch begins."""
        self._counted.clear()

    def begin_pass(self) -> None:
        """A backward pass begins."""
        for number in range(len(self.params)):
            if not self._has_gradients(number):
                self.samples[number] = 0.0
                self._counted.discard(number)

    def end_pass(self, samples: float) -> None:
        """Its batch has so many, and they are behind all gradients that are there now."""
        for number in range(len(self.params)):
            if number not in self._counted and self._has_gradients(number):
                self.samples[number] += samples
                self._counted.add(number)

    def take(self, number: int) -> float:
        """Those of this optimizer, which has none from here on; 0.0 where nobody has told of a pass."""
        samples = self.samples[number]
        self.samples[number] = 0.0
        return samples

    def _has_gradients(self, number: int) -> bool:
        return any(p.grad is not None for p in self.params[number])


class Samples:
    """What a worker's pushes weigh.

    Args:
        optimizers: that are stepped with them.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._sample_counts = SampleCounts(optimizers)
        self._batch = self._since = self._told = 0.0
        self.spent = False
        """There was a step since these samples began to be counted: the next batch begins anew."""

    def start_batch(self) -> None:
        """A batch begins."""
        if self.spent:
            self._since = 0.0
            self._told = 0.0
            self.spent = False
        self._sample_counts.start_batch()

    def count(self, samples: float) -> None:
        """It has so many."""
        self._batch = samples
        self._since += samples

    def skip(self) -> None:
        """There is no loss of the batch under way."""
        self._since = self._since - self._batch
        self._batch = 0.0

    def begin_pass(self) -> None:
        """See `SampleCounts`."""
        self._sample_counts.begin_pass()

    def end_pass(self) -> None:
        """See `SampleCounts`."""
        self._sample_counts.end_pass(self._batch)

    def drop(self) -> None:
        """Gradients are dropped: what no step was told with yet is in none."""
        self._told = self._since

    def take(self, number: int) -> float:
        """Those behind the gradients of this optimizer, which are pushed; where nobody has told of a pass
        (`loss.backward()`) those since the last batch with a step of any."""
        return self._sample_counts.take(number) or self._since

    def tell(self) -> float:
        """A step is told of; those that no other was told with."""
        samples = self._since - self._told
        self._told = self._since
        self.spent = True
        return samples


# What one worker asks of its servers: one thing at a time, on a thread of its own, beside training.


class Requests:
    """Closed by `close`.

    Args:
        averager: has the gates, which end what waits in vain.
        totals: count how long it takes.
    """

    def __init__(self, averager: BackgroundAverager, totals: PushTotals) -> None:
        self._averager = averager
        self._totals = totals
        self._thread = ThreadPoolExecutor(1, "lightning_async pushes")
        self._under_way: Future[Any] | None = None

    @property
    def under_way(self) -> bool:
        return self._under_way is not None

    @property
    def answered(self) -> bool:
        """What is under way is done, but for `finish`."""
        return self._under_way is not None and self._under_way.done()

    @property
    def submit(self) -> Callable[..., Any]:
        """Beside a request, in order with it."""
        return self._thread.submit

    def begin(self, ask: Callable[[], Any]) -> None:
        """Nothing is under way."""
        self._under_way = self._thread.submit(self._totals.timed, ask)
        self._under_way.add_done_callback(lambda _: self._averager.control.wake())

    def wait(self) -> None:
        """Until it is answered; it stays under way."""
        if self._under_way is not None:
            self._averager.sync_points.wait(self._under_way.done)

    def finish(self) -> Any:
        """Until nothing is under way; what was answered."""
        asked = self._under_way
        assert asked is not None
        if not asked.done():
            began = time.monotonic()
            self.wait()
            self._totals.waited_s += time.monotonic() - began
        self._under_way = None
        return asked.result()

    def finish_within(self, timeout_s: float) -> None:
        """The same where training has failed, and no gate is heard; TimeoutError where it takes longer."""
        if self._under_way is not None:
            self._under_way.result(timeout_s)

    def ask_within(self, timeout_s: float, ask: Callable[[], Any]) -> None:
        """What takes longer is under way still: `close` breaks it off."""
        self._under_way = self._thread.submit(ask)
        self._under_way.result(timeout_s)
        self._under_way = None

    def close(self, tables: ParameterGroups) -> None:
        """And the way to the servers."""
        if self._under_way is not None:
            tables.give_up()
        self._thread.shutdown()
        tables.close()


# The optimizers' state of a training whose optimizers are on servers: brought here for a checkpoint.


class _Trained(Protocol):
    update_on_server: bool

    @property
    def optimizers(self) -> list[Any]: ...

    @property
    def is_global_zero(self) -> bool: ...

    @property
    def _session(self) -> Any: ...


class States:
    """Rank 0's optimizers hold it wherever a checkpoint is made; those of others inside of `here`.

    Args:
        strategy: its optimizers, and its servers while it trains.
    """

    def __init__(self, strategy: _Trained) -> None:
        self._strategy = strategy
        self._are_here = False

    @property
    def _step_runner(self) -> Any:
        """What asks the servers; None where there is nothing to ask for."""
        session = self._strategy._session
        return session.step_runner if self._strategy.update_on_server and session is not None else None

    def fetch(self, optimizers: Iterable[Any]) -> None:
        """On rank 0, have the servers' state in these; it waits for no other rank."""
        if self._step_runner is not None and self._strategy.is_global_zero and not self._are_here:
            for optimizer in optimizers:
                self._step_runner.fetch_state(optimizer)

    @contextmanager
    def here(self, alone_s: float | None = None) -> Iterator[None]:
        """On each rank for itself: inside, its optimizers have it.

        Args:
            alone_s: training has failed: take the newest weights, too, and wait so long for each. Default: it has not.

        Raises:
            TimeoutError: a server does not answer in time.
        """
        optimizers = self._strategy.optimizers
        step_runner = self._step_runner
        if step_runner is None:
            yield
            return
        if alone_s is not None:
            step_runner.rescue(optimizers, alone_s)
        else:
            for optimizer in optimizers:
                step_runner.fetch_state(optimizer)
        self._are_here = True
        try:
            yield
        finally:
            self._are_here = False
            for optimizer in optimizers if not self._strategy.is_global_zero else ():
                optimizer.state.clear()


# What is written to parameters beside the optimizer's step: servers hear of it, or it is refused by name.

_ALWAYS = 2  # pushes before which all values are looked at


class Writing(Protocol):
    """What a strategy has whose parameters these are."""

    update_on_server: bool

    @property
    def module(self) -> Any: ...

    @property
    def global_rank(self) -> int: ...

    def start_over(self) -> None: ...


class Writes:
    """Looks at a worker's parameters before each push, and before a gate.

    A change of the weights is pushed; beside gradients there is no way for it, and it would be lost with the next pull.

    Args:
        strategy: whose worker this is.
        tables: its servers.
    """

    def __init__(self, strategy: Writing, tables: ParameterGroups) -> None:
        self._strategy = strategy
        self._tables = tables
        self._pushes = 0

    def refuse(self, coming: bool) -> None:
        """Before gradients are pushed; ``coming``: weights may be on their way from an earlier push.

        Raises:
            AsyncTrainingError: a parameter was written to since weights were pulled.
        """
        self._pushes += 1
        self._refuse(self._tables.written(coming, every=self._pushes <= _ALWAYS))

    def at_sync_point(self) -> bool:
        """Nothing is under way; whether there is a change to be pushed.

        Raises:
            AsyncTrainingError: as above.
        """
        written = self._tables.written(coming=False, every=True)
        if self._strategy.update_on_server:
            self._refuse(written)
        return bool(written)

    def _refuse(self, written: list[str]) -> None:
        if written:
            more = f" and {len(written) - 3} more" if len(written) > 3 else ""
            raise AsyncTrainingError(
                f"Rank {self._strategy.global_rank}: {', '.join(written[:3])}{more} changed beside the optimizer's "
                "step (a callback, or the module, writes to parameters). Servers hold the weights and would not hear "
                "of it. Use `ParameterServerStrategy(update_on_server=False)`, which pushes all changes, or leave "
                "parameters that are not trained out of the optimizer."
            )

    def install(self) -> list[Undo]:
        """`StochasticWeightAveraging` ends with another model: servers are given it, and go on with all else as it is.
        Returns what takes that back."""
        swas = callbacks_of(self._strategy.module.trainer, "StochasticWeightAveraging")
        return [override_for_users(swa, "on_train_epoch_start", partial(self._start_epoch, swa)) for swa in swas]

    def _start_epoch(self, swa: Any, original: Callable[..., None], trainer: Any, module: Any) -> None:
        original(trainer, module)
        if trainer.current_epoch == swa.swa_end + 1:
            strategy: Any = self._strategy
            averager = strategy.averager
            strategy.states.fetch(strategy.optimizers)  # of the servers that end
            clocks = {**averager.state_dict(), "replicas": [averager.clocks()] * strategy.world_size}
            strategy.saved.go_on(clocks, averager.gathered())
            self._strategy.start_over()


_STEP = Step(Action.GRADIENTS)


class PushSteps(StepRunner):
    """In place of `LocalSteps`, which it is like to whoever calls it; at gates, see `SyncPointParticipant`.

    With the optimizer on the servers its ``step`` is a push of the gradients and a pull of the weights; whoever calls
    it, with whatever is done before and after. Else the optimizer is the worker's, and changes of the weights are
    pushed. A gate finds nothing under way.

    Args:
        strategy: its module and optimizers, and how it pushes.
        averager: has the gates, and counts the steps.
        gradients: not needed here.
        meet: how a gate that a step needs is opened; no step needs one here.
    """

    def __init__(
        self,
        strategy: ParameterServerStrategy,
        averager: BackgroundAverager,
        gradients: SynchronousGradients,
        meet: Callable[[SyncPointKind], Arrival],
    ) -> None:
        self._strategy = strategy
        self._averager = averager
        self._agreement = Agreement(averager.control)
        self._totals = cast(PushTotals, averager.summary.totals)
        by_hand = not strategy.module.automatic_optimization
        self._samples = Samples(strategy.optimizers)
        own = not strategy.update_on_server or by_hand
        # A scaler takes its scale out of gradients without a trace.
        changed = is_scaled(strategy) or changes_gradients(strategy.module, until_step=True)
        self._overlaps = not own and not changed
        self._stepped = self._steps = self.pushes = 0
        self._brings = False
        """A local step since the last push had a gradient."""
        self._requests = Requests(averager, self._totals)
        self.calls = self.called = False
        """The next push is to call all; somebody has, with the last one."""
        self._batches = StepBatches(strategy, self._samples.count)
        self.recent = self._batches.recent
        self.tables = strategy.join_servers(averager)
        self._agreement.pulled(self.tables.versions, self.tables.restored)
        saved, _ = strategy.saved.take_gathered()
        self.tables.load_residual(saved or {})
        averager.gathered = self._state
        averager.sync_points.add(self)
        self._writes = Writes(strategy, self.tables)
        self._undo: list[Undo] = self._writes.install()
        for optimizer in strategy.optimizers:
            self._undo.append(replace(optimizer, "add_param_group", refuse_groups))
            if strategy.update_on_server:
                step = self._step_of(optimizer)
                led = strategy.own_steps.led(optimizer, step)
                self._undo.append(replace(optimizer, "step", lambda original, led=led: led))
            else:
                self._undo.append(optimizer.register_step_post_hook(self._count).remove)

    @property
    def accumulates(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._strategy.module.trainer.fit_loop.epoch_loop._should_accumulate()

    def close(self) -> None:
        take_back(self._undo)
        self._requests.close(self.tables)

    def _state(self) -> dict[str, Any] | None:
        self._requests.wait()
        return self.tables.state(first=self._strategy.global_rank == 0)

    # ---- batches ----

    def start_batch(self, batch: Any) -> None:
        self.finish_batch()
        self._averager.sync_points.resume()
        if self._samples.spent and self._requests.answered:
            self._finish()  # newer weights have come by now
        self._samples.start_batch()
        self._batches.start(batch)

    def fetch_state(self, optimizer: Optimizer) -> None:
        """Have the servers' state where torch keeps its own."""
        self._finish()
        self._requests.begin(partial(self.tables.fill_state, optimizer, self._tables_of(optimizer)))
        self._finish()

    def rescue(self, optimizers: Sequence[Optimizer], timeout_s: float) -> None:
        """The same, and the newest weights, where training has failed; TimeoutError where a server takes longer."""
        self._requests.finish_within(timeout_s)
        self._requests.ask_within(timeout_s, self.tables.meet)
        self.tables.take_()
        for optimizer in optimizers:
            fill = partial(self.tables.fill_state, optimizer, self._tables_of(optimizer))
            self._requests.ask_within(timeout_s, fill)

    def complete_summary(self) -> None:
        self._requests.begin(self.tables.lags)
        self._totals.lags = in_words(self._finish())

    def finish_batch(self) -> None:
        """Manual optimization: what a batch has changed goes at its end."""
        if not self._strategy.module.automatic_optimization:
            self._push_change()

    def step(self, optimizer: Optimizer, closure: Callable[[], Any], run: Callable[[Callable[[], Any]], Any]) -> Any:
        before = self.pushes
        output = run(closure)  # in which gradients leave
        if self._strategy.module.automatic_optimization:
            self._samples.spent = True
            if not self._strategy.update_on_server:
                self._push_change()
        if self.pushes == before:
            self.skip(optimizer)
        return output

    def skip(self, optimizer: Optimizer) -> None:
        """Mixed precision has skipped its step: the others do not wait for it."""
        self._samples.take(self._strategy.optimizers.index(optimizer))
        if self._strategy.update_on_server and self.tables.in_step:
            self._push(dict.fromkeys(self._tables_of(optimizer)), 0.0)

    def skip_batch(self) -> None:
        """Automatic optimization: `training_step` has made no loss of the batch under way."""
        self._batches.see()
        self._samples.skip()

    def backward(self) -> AbstractContextManager[None]:
        """A backward pass: gradients leave as it makes them, where they are the step's."""
        self._batches.see()
        self._samples.begin_pass()
        leaves = self._overlaps and not self._requests.under_way and not self.accumulates
        return self.tables.backward(self._requests.submit if leaves else None)

    def after_backward(self) -> None:
        """Gradients are there."""
        self._samples.end_pass()

    def _count(self, optimizer: Optimizer, *_: Any) -> None:
        """After every step of the worker's own optimizers."""
        self._stepped += 1
        self._brings |= any(p.grad is not None for group in optimizer.param_groups for p in group["params"])

    # ---- pushes ----

    def _tables_of(self, optimizer: Optimizer) -> list[int]:
        return tables_of(self._strategy.groups, self._strategy.optimizers.index(optimizer))

    def _step_of(self, optimizer: Optimizer) -> Callable[..., Any]:
        """In place of ``optimizer.step``."""
        groups = self._strategy.groups
        tables = self._tables_of(optimizer)
        number = self._strategy.optimizers.index(optimizer)

        def step(optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
            loss = None if closure is None else closure()
            self._batches.see()
            self._writes.refuse(coming=self._requests.under_way)
            self._finish()
            self.tables.fill_gradients(tables)
            rates = rates_of(optimizer, groups, tables)
            empty = not self.tables.has_gradients(tables)  # somebody has dropped them all: as torch, no step
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

        heard: Any = Optimizer.profile_hook_step(step)  # whoever has a hook on steps is called
        heard._wrapped_by_lr_sched = True  # schedulers ask whether they are heard of steps
        return MethodType(heard, optimizer)

    def _push_change(self) -> None:
        """Push what local steps have changed, if there were enough."""
        if not self._stepped:
            return
        self._steps += self._stepped
        self._stepped = 0
        self._tick()
        if self._steps >= self._strategy.update_frequency:
            self._send_change()

    def _send_change(self) -> None:
        self._finish()
        self._steps = self._stepped = 0
        self.tables.fill_change()
        # Steps without a gradient have moved nothing: in the mean of all workers they count for nothing.
        how = {"weight": float(self._brings or self.tables.has_change), **self._how()}
        self._brings = False
        healthy = self.tables.is_finite(range(len(self._strategy.groups)))
        if not healthy:  # nothing of it leaves, and the servers' weights take its place
            how |= {"weight": 0.0, "pull": True}
            self._averager.summary.drop()
            reset(self._strategy.optimizers)
        self._requests.begin(partial(self.tables.push_change, **how))
        self._finish()

    def _push(self, rates: Mapping[int, float | None], weight: float) -> None:
        """Push what these tables have been filled with."""
        self._requests.begin(partial(self.tables.push, rates, weight=weight, **self._how()))
        if not self._strategy.overlap or self.tables.in_step:
            self._finish()

    def _how(self) -> dict[str, Any]:
        self.pushes += 1
        self._totals.pushes += 1
        pull = self.pushes % self._strategy.pull_every == 0 or self.tables.in_step
        return {"pull": pull, "sync_point": self._sync_point, "call": self.calls}

    @property
    def _sync_point(self) -> int:
        """Gates that are behind this worker, by a number that grows from run to run, too."""
        return (self._strategy.num_runs << 32) + self._averager.sync_points.opened

    def _tick(self, stepped: bool = True) -> None:
        self._batches.see()
        samples = self._samples.tell()
        self._averager.tick(_STEP, samples, stepped=stepped, lr=learning_rate(self._strategy.optimizers))

    def _finish(self) -> Any:
        """Until nothing is under way, and what was pulled is in the parameters; what was answered."""
        if not self._requests.under_way:
            return None
        answer = self._requests.finish()
        self.called |= self.tables.called or (self.calls and not self.tables.in_step)  # a warm-up may have ended
        if self.tables.pulled:
            self.tables.take_()
            self._totals.pulled(version := self.tables.updates(self._strategy.groups))
            self._strategy.progress.see(version, self._strategy.world_size)
            self._agreement.pulled(self.tables.versions, self.tables.restored)
        return answer

    # ---- at gates, see `SyncPointParticipant` ----

    def come(self) -> None:
        """Nothing is under way from here on, and nobody waits for this worker."""
        self._finish()
        if self._writes.at_sync_point() or self._steps or self._stepped:
            self._send_change()
        self._requests.begin(partial(self._rest, self._sync_point))
        self._finish()
        if self._averager.sync_points.coming is SyncPointKind.DECIDE:
            self.calls = self.called = self.tables.called = False

    def call_all(self) -> bool:  # where pushes wait for one another: else some would push once more, without the others
        if together := self.tables.in_step:
            self.calls = True
        return together

    def _rest(self, sync_point: int) -> None:
        self.tables.rest(sync_point)
        self.tables.meet()

    def stand(self) -> None:
        """Pull what others have pushed since."""
        while self._agreement.behind:
            self._requests.begin(self.tables.meet)
            self._finish()
        assert self._strategy.fit_sessions is not None
        self._strategy.fit_sessions.patches.rates.follow()

    def go(self, waited_s: float) -> None: ...

    def leave(self) -> None: ...

    def resume(self) -> None: ...

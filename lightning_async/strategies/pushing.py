"""One worker's steps: gradients, or changes, go to servers, and weights come back; failures end what is waited for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import MethodType
from typing import Any, Protocol, cast

from torch.optim import Optimizer

from lightning_async.engine.averaging.averager import BackgroundAverager
from lightning_async.engine.averaging.optimizer_state import reset
from lightning_async.engine.gradients.synchronous import SynchronousGradients
from lightning_async.engine.header import Arrival, Gate
from lightning_async.engine.server.agreement import Agreement
from lightning_async.engine.server.lags import in_words
from lightning_async.engine.server.optimizer_state import Group, rates_of, refuse_groups, tables_of
from lightning_async.engine.server.progress import Progress
from lightning_async.engine.server.tables import Tables
from lightning_async.engine.server.totals import PushTotals
from lightning_async.rules.schedules.protocol import Action, Step
from lightning_async.strategies.batches import Batches
from lightning_async.strategies.behind import Samples
from lightning_async.strategies.requests import Requests
from lightning_async.strategies.saved_state import SavedState
from lightning_async.strategies.stepping import Steps, is_scaled, learning_rate
from lightning_async.strategies.writes import Writes
from lightning_async.trainer.own_gradients import changes_gradients
from lightning_async.trainer.own_steps import OwnSteps
from lightning_async.trainer.patches import Undo, replace, take_back

__all__ = ["Pushing", "Served"]

_STEP = Step(Action.GRADIENTS)


class Served(Steps, Protocol):
    """What a strategy has whose worker this is."""

    update_on_server: bool
    update_frequency: int
    pull_every: int
    overlap: bool
    num_runs: int
    saved: SavedState
    groups: list[Group]
    progress: Progress
    course: Any
    own_steps: OwnSteps

    @property
    def gathers(self) -> bool: ...

    @property
    def world_size(self) -> int: ...

    def start_over(self) -> None: ...

    def join_servers(self, averager: BackgroundAverager) -> Tables: ...


class Pushing:
    """In place of `Stepping`, which it is like to whoever calls it; at gates, see `Visitor`.

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
        strategy: Served,
        averager: BackgroundAverager,
        gradients: SynchronousGradients,
        meet: Callable[[Gate], Arrival],
    ) -> None:
        self._strategy, self._averager, self._agreement = strategy, averager, Agreement(averager.control)
        self._totals, by_hand = cast(PushTotals, averager.summary.totals), not strategy.module.automatic_optimization
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
        self._batches = Batches(strategy, self._samples.count)
        self.recent = self._batches.recent
        self.tables = strategy.join_servers(averager)
        self._agreement.pulled(self.tables.versions, self.tables.restored)
        saved, _ = strategy.saved.take_gathered()
        self.tables.owe(saved or {})
        averager.gathered = self._state
        averager.gates.add(self)
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

    def close(self) -> None:
        """Let go of the optimizers and the servers."""
        take_back(self._undo)
        self._requests.close(self.tables)

    def _state(self) -> dict[str, Any] | None:
        self._requests.wait()
        return self.tables.state(first=self._strategy.global_rank == 0)

    # ---- batches ----

    def start_batch(self, batch: Any) -> None:
        """The training thread has a batch."""
        self.finish_batch()
        self._averager.gates.resume()
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

    def sum_up(self) -> None:
        """How late pushes were."""
        self._requests.begin(self.tables.lags)
        self._totals.lags = in_words(self._finish())

    def finish_batch(self) -> None:
        """Manual optimization: what a batch has changed goes at its end."""
        if not self._strategy.module.automatic_optimization:
            self._push_change()

    def step(self, closure: Callable[[], Any], run: Callable[[Callable[[], Any]], Any]) -> Any:
        """Automatic optimization: ``run`` the optimizer's step, in which gradients leave, or after which changes do."""
        output = run(closure)
        self._samples.spent = True
        if not self._strategy.update_on_server:
            self._push_change()
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
        leaves = self._overlaps and not self._requests.under_way and not self._strategy.gathers
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
        groups, tables = self._strategy.groups, self._tables_of(optimizer)
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
        return {"pull": pull, "gate": self._gate, "call": self.calls}

    @property
    def _gate(self) -> int:
        """Gates that are behind this worker, by a number that grows from run to run, too."""
        return (self._strategy.num_runs << 32) + self._averager.gates.opened

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

    # ---- at gates, see `Visitor` ----

    def come(self) -> None:
        """Nothing is under way from here on, and nobody waits for this worker."""
        self._finish()
        if self._writes.at_gate() or self._steps or self._stepped:
            self._send_change()
        self._requests.begin(partial(self._rest, self._gate))
        self._finish()
        if self._averager.gates.coming is Gate.DECIDE:
            self.calls = self.called = self.tables.called = False

    def call(self) -> bool:
        """Call all with the next push, where pushes wait for one another; else some would push once more, without those
        that wait."""
        if together := self.tables.in_step:
            self.calls = True
        return together

    def _rest(self, gate: int) -> None:
        self.tables.rest(gate)
        self.tables.meet()

    def stand(self) -> None:
        """Pull what others have pushed since."""
        while self._agreement.behind:
            self._requests.begin(self.tables.meet)
            self._finish()
        self._strategy.course.patches.follow_schedule()

    def go(self, waited_s: float) -> None: ...

    def leave(self) -> None: ...

    def resume(self) -> None: ...

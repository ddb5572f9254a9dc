"""Detection of training that diverges, and its remedies, from skipping a batch to rolling back."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor

from lightning_async._checks import check_choice, check_int, check_protocol, check_real
from lightning_async.algorithms.divergence import Escalation, History, Relative, Remedy, SignalAlarm, Threshold
from lightning_async.algorithms.schedules import Denser
from lightning_async.callbacks.divergence_signals import (
    LockstepAgreement,
    RemedyAgreement,
    Row,
    Signal,
    SignalTracker,
    SyncPointAgreement,
    council_of,
    optimizer_state,
    parameters,
    severest,
    thresholds_by_signal,
)
from lightning_async.engine.collectives import LightningCollectives
from lightning_async.engine.fingerprint import is_finite
from lightning_async.errors import TrainingDiverged
from lightning_async.trainer.loops.sync_points import CollectiveCallback
from lightning_async.trainer.loops.updates import updates_of
from lightning_async.trainer.namespace import Callback, check_object, searches_lr, set_for_now, take_back
from lightning_async.trainer.strategy_view import view_of

log = logging.getLogger(__name__)


class Alarm(NamedTuple):
    """A report of the signals that are out of bounds on one rank; the argument of `DivergenceMonitor(alert=...)`."""

    rank: int  # the rank that reports
    step: int  # the rank's number of optimizer steps
    epoch: int  # the rank's epoch
    findings: tuple[SignalAlarm, ...]  # the signals that are out of bounds
    remedy: Remedy  # the remedy that follows

    def __str__(self) -> str:
        found = "; ".join(map(str, self.findings))
        return f"Rank {self.rank}, epoch {self.epoch}, step {self.step}: {found}. Remedy: {self.remedy.name.lower()}."


_RATES = ("lr", "initial_lr", "max_lr", "min_lr")  # the entries of parameter groups in which schedulers keep rates


@runtime_checkable
class RollsBack(Protocol):
    """An object, such as a callback on the same Trainer, that can restore the last good state."""

    def roll_back(self, trainer: Any) -> int | None:
        """Restore the last good parameters, buffers, optimizers, scaler and schedulers, but not the data's position.

        All ranks call this together, between two batches, and all restore the same state. Returns the step of that
        state, or None if no good state exists; then nothing has changed.
        """
        ...


def drop_gradients(optimizer: Any) -> None:
    """Set an optimizer's gradients to None, so that its step changes no parameter and no optimizer state."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = None


def cut_learning_rates(groups: Iterable[dict[str, Any]], schedulers: Iterable[Any], factor: float) -> None:
    """Multiply by ``factor`` the learning rates of parameter groups, and the base and bounds of their schedulers."""
    for group in groups:
        for name in _RATES:
            if isinstance(group.get(name), (float, torch.Tensor)):
                group[name] = group[name] * factor
    for scheduler in schedulers:
        _cut(scheduler, factor)


def _cut(scheduler: Any, factor: float) -> None:
    for inner in getattr(scheduler, "_schedulers", ()):
        _cut(inner, factor)
    for name in ("base_lrs", "min_lrs", "max_lrs"):
        if isinstance(rates := getattr(scheduler, name, None), list):
            setattr(scheduler, name, [rate * factor for rate in rates])
    if isinstance(least := getattr(scheduler, "eta_min", None), float):
        scheduler.eta_min = least * factor


def sync_more(averager: Any) -> Callable[[], None]:
    """Make an averager's rounds twice as frequent; return a function that restores the averager's schedule."""
    schedule = averager.schedule
    averager.schedule = Denser(schedule)

    def undo() -> None:
        if isinstance(averager.schedule, Denser):
            averager.schedule = schedule

    return undo


def call_unfit(replica: Any) -> Callable[[], None]:
    """Mark this replica as unfit; return a function that removes the mark.

    At the next sync point an unfit replica takes over the other replicas' model, and its optimizers start without
    state. Its own parameters do not enter the mean.
    """
    watched = replica.watched
    # A replica counts as unfit if one of its watched tensors is not finite.
    nan = torch.tensor(math.nan)
    return set_for_now(replica, "watched", lambda: [*watched(), nan])


RemedyName = Literal["log", "alert", "sync_more", "sync", "cut_lr", "skip", "reset", "roll_back", "stop"]
_OF_REPLICAS = {Remedy.SYNC_MORE, Remedy.SYNC, Remedy.RESET}  # of use only for asynchronous replicas


class DivergenceMonitor(CollectiveCallback, Callback):
    r"""A callback that detects diverging training, with any strategy, and applies the mildest remedy that may help.

    A signal :math:`x` is out of bounds if it is not finite, or if :math:`x > m + k \max(\sigma, f |m|)` with the
    median :math:`m` and the deviation :math:`\sigma` of its own recent values (``Relative(k, f)``), or :math:`x > c`
    (``Absolute(c)``). If a signal is out of bounds again after a remedy, the next remedy in this list is applied:

    - "log" and "alert" report;
    - "sync_more" makes rounds twice as frequent, and "sync" brings all replicas to a sync point now;
    - "cut_lr" cuts learning rates, and "skip" drops the gradients of batches;
    - "reset" replaces a replica's model by that of the others, and its optimizers begin without state;
    - "roll_back" restores the last good state on all ranks, while the data continues;
    - "stop" raises `TrainingDiverged` on all ranks.

    For a gradient that is not finite, the first remedy is "skip"; for a model that is not finite, it is "reset".
    "sync_more", "sync" and "reset" exist for asynchronous replicas only, and "roll_back" only with an object for
    ``rollback``.

    All ranks apply the same remedy at the same step, and none waits for another. Ranks in lockstep exchange a few
    numbers in the background and read them one step later. An asynchronous replica that needs a remedy of all ranks
    calls all ranks to a sync point. Checks of gradients and parameters take less than 1% of the time, so with small
    batches not every step is checked. Numbers on a GPU are read one step later. A gradient scaler continues to skip
    steps.

    Args:
        signals: Names of the signals to watch. Default: all of "loss", "gradient_norm", "parameters",
            "optimizer_state", "loss_variance" (over replicas), "replica_spread" (at the last round).
        alert_threshold: Threshold of all signals, or a mapping by signal (other signals keep `Relative()`). A number
            means `Absolute`.
        remedies: Names of the remedies to use. Default: all that are possible.
        history: Number of steps over which signals are judged; see `History`. Default: the median of the last 100
            values, relative bounds from 20 values on, and 10 steps between two remedies.
        rollback: Object that restores the last good state; see `RollsBack`. Default: the first of the Trainer's
            callbacks that has a method ``roll_back``.
        max_rollbacks: Largest number of rollbacks in one training. Default: 3.
        lr_factor: Factor by which "cut_lr" multiplies learning rates. Default: 0.5.
        skip_batches: Number of optimizer steps that one "skip" drops, for signals that are finite. Default: 1.
        alert: Function that is called with an `Alarm` on the rank whose signals are out of bounds. The rank's loggers
            get the values, too.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: An argument is out of range, or is no name of a signal or remedy.

    Source: skipping batches around spikes as in PaLM (Chowdhery et al., 2022), https://arxiv.org/abs/2204.02311
    """

    of_all_ranks = True

    def __init__(
        self,
        *,
        signals: Collection[Signal] = get_args(Signal),
        alert_threshold: Threshold | float | Mapping[Signal, Threshold | float] = Relative(),  # noqa: B008 (frozen)
        remedies: Collection[RemedyName] | None = None,
        history: History = History(),  # noqa: B008 (frozen)
        rollback: RollsBack | None = None,
        max_rollbacks: int = 3,
        lr_factor: float = 0.5,
        skip_batches: int = 1,
        alert: Callable[[Alarm], None] | None = None,
    ) -> None:
        owner = type(self).__name__
        for name in signals:
            check_choice(owner, "signals", name, get_args(Signal))
        for name in remedies or ():
            check_choice(owner, "remedies", name, get_args(RemedyName))
        if rollback is not None:
            check_protocol(owner, "rollback", rollback, RollsBack, "something with a `roll_back(trainer)`")
        self.max_rollbacks = max_rollbacks
        self.lr_factor = lr_factor
        self.skip_batches = skip_batches
        # Remedies that all ranks apply, whichever rank asks for them, must use the same numbers.
        self.compared = f"{owner}({lr_factor=}, {skip_batches=})"
        check_int(self, "max_rollbacks", at_least=0)
        check_int(self, "skip_batches", at_least=1)
        check_real(self, "lr_factor", above=0.0, below=1.0)
        self._signals = tuple(signals)
        self._history = history
        self._thresholds = thresholds_by_signal(owner, alert_threshold)
        self._remedies = None if remedies is None else {Remedy[name.upper()] for name in remedies}
        self._given_rollback = rollback
        self.alert = alert
        self._council: RemedyAgreement | None = None
        self._rollback: RollsBack | None = None
        self._observer = SignalTracker((), {}, history, skips=False)
        self._escalation = Escalation((), history, 0)
        self._to_skip = 0
        self._asked = Remedy.NONE
        self._words = ""
        self._served = False
        self._trainer: Any = None
        self._undo: list[Callable[[], None]] = []
        self._clean_everywhere = 0
        self._dense: Callable[[], None] | None = None
        self.rollbacks = 0
        """Number of rollbacks so far."""

    @property
    def clean_steps(self) -> int:
        """The number of batches since a signal was last out of bounds. It decides which checkpoints are good.

        Some signals are read one step late, so call a state good only if this number is 3 or more. Ranks in lockstep
        have the same number. Each asynchronous replica has its own.
        """
        return self._clean_everywhere if isinstance(self._council, LockstepAgreement) else self._escalation.clean_steps

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        check_object(self, trainer)
        self.rollbacks = 0
        able = (each for each in trainer.callbacks if isinstance(each, RollsBack))
        self._rollback = self._given_rollback or next(able, None)
        if stage == "fit" and self._rollback is None and Remedy.ROLL_BACK in (self._remedies or ()):
            raise ValueError(
                "`DivergenceMonitor(remedies=[..., 'roll_back'])` needs something that holds the last good state: "
                "add a `FaultTolerantCheckpoint` to the Trainer's callbacks, or pass `rollback=`."
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._end()
        # A search for a learning rate diverges on purpose.
        if searches_lr(trainer):
            return
        self._council = council_of(self, trainer)
        self._trainer = trainer
        asynchronous = isinstance(self._council, SyncPointAgreement)
        alone = not asynchronous and not isinstance(self._council, LockstepAgreement)
        # Replicas with windows have sync points as asynchronous replicas do, but all take every step.
        windows = updates_of(trainer) is not None
        # Parameter servers hold one model, to which each worker pushes by itself.
        self._served = view_of(trainer.strategy).served
        able = set(Remedy) - {Remedy.NONE} if self._remedies is None else set(self._remedies)
        if not asynchronous or windows or self._served:
            able -= _OF_REPLICAS
        if self._rollback is None or self.max_rollbacks == 0:
            able -= {Remedy.ROLL_BACK}
        self._escalation = Escalation(able, self._history, self.max_rollbacks)
        self._escalation.used[Remedy.ROLL_BACK] = self.rollbacks
        observer = SignalTracker(self._signals, self._thresholds, self._history, Remedy.SKIP in able)
        observer.alone = (asynchronous and not windows) or alone
        observer.alike = view_of(trainer.strategy).equal_gradients
        self._observer = observer
        self._to_skip = 0
        self._asked = Remedy.NONE

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end()

    def _end(self) -> None:
        self._fit_again()
        if self._council is not None:
            self._council.close()
        self._council = self._dense = self._trainer = None

    def state_dict(self) -> dict[str, Any]:
        return {"rollbacks": self.rollbacks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rollbacks = int(state_dict["rollbacks"])

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._observer.start_batch()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        if self._council is not None:
            self._observer.before_backward(trainer, loss)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._council is None:
            return
        drop = self._observer.before_step(trainer, optimizer)
        if self._to_skip:
            self._to_skip = self._to_skip - 1
            drop = True
        if drop:
            drop_gradients(optimizer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        council = self._council
        observer = self._observer
        if council is None:
            return
        heard = council.hear()
        self._clean_everywhere = self._clean_everywhere + 1 if all(row.clean for row in heard) else 0
        # After a rollback, this batch's numbers are of a model that is gone.
        if self._do(trainer, severest(heard)):
            council.say(Row(every=observer.every))
            return
        found = observer.after_batch(trainer, pl_module, outputs)
        found += observer.compare(heard, view_of(trainer.strategy).summary)
        wanted = self._escalation.next(found)
        if self._escalation.calm and self._dense is not None:
            self._dense()
            self._dense = None
        if wanted is not Remedy.NONE:
            self._tell(trainer, found, wanted)
        averager = view_of(trainer.strategy).averager
        in_step = averager is not None and averager.ledger.synchronous and not self._served
        free = observer.alone and not in_step
        here = wanted <= Remedy.ALERT or (wanted is Remedy.SKIP and (observer.dropped or free))
        if here and wanted is not Remedy.NONE:
            self._escalation.note(wanted)
            self._to_skip = self.skip_batches if wanted is Remedy.SKIP and not observer.dropped else self._to_skip
        # A request stays until all ranks are at a sync point, which may take some batches.
        kept = self._asked if isinstance(council, SyncPointAgreement) else Remedy.NONE
        self._asked = kept if here else max(wanted, kept)
        if self._asked is Remedy.RESET and averager is not None:
            self._fit_again()
            self._undo.append(call_unfit(averager.replica))
        now = council.say(Row(self._asked, observer.loss, observer.every, clean=not found))
        self._do(trainer, severest(now))

    def _tell(self, trainer: Any, found: list[SignalAlarm], remedy: Remedy) -> None:
        alarm = Alarm(trainer.global_rank, trainer.global_step, trainer.current_epoch, tuple(found), remedy)
        self._words = str(alarm)
        if self._escalation.has(Remedy.LOG):
            log.warning("%s", alarm)
        if remedy < Remedy.ALERT or not self._escalation.has(Remedy.ALERT):
            return
        numbers = {f"divergence/{finding.signal}": finding.value for finding in found}
        for logger in trainer.loggers:
            logger.log_metrics({**numbers, "divergence/remedy": float(remedy)}, step=alarm.step)
        if self.alert is not None:
            try:
                self.alert(alarm)
            except Exception:
                # A failing alert, such as a message to a chat, must not end the training.
                log.exception("Rank %d: `DivergenceMonitor(alert=...)` failed; training goes on.", alarm.rank)

    def decide(self, world: LightningCollectives) -> bool:
        """Apply the most severe remedy that any rank requests; return whether a rollback has replaced the model.

        All ranks call this together, at a sync point. Before the call, replicas whose parameters are not finite have
        copied the model of another replica.
        """
        trainer = self._trainer
        asked = self._asked
        self._asked = Remedy.NONE
        self._fit_again()
        if trainer is None:
            return False
        if not is_finite([*parameters(trainer.lightning_module), *optimizer_state(trainer.optimizers)]):
            # Even the merged model is not finite, so no replica was fit.
            asked = self._escalation.climb(max(asked, Remedy.ROLL_BACK))
        said = world.gather_objects((int(asked), self._words if asked else ""))
        self._words = " ".join(words for wanted, words in said if wanted) or self._words
        return self._do(trainer, severest([Row(Remedy(wanted)) for wanted, _ in said]))

    def _do(self, trainer: Any, remedy: Remedy) -> bool:
        if remedy is Remedy.NONE:
            return False
        self._clean_everywhere = 0
        self._escalation.note(remedy)
        averager = view_of(trainer.strategy).averager
        if remedy is Remedy.SYNC_MORE and averager is not None and self._dense is None:
            self._dense = sync_more(averager)
        # Schedulers are cut, too, because they would restore the old rates.
        elif remedy is Remedy.CUT_LR:
            groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
            cut_learning_rates(groups, [each.scheduler for each in trainer.lr_scheduler_configs], self.lr_factor)
            lr = float(groups[0].get("lr", math.nan)) if groups else math.nan
            log.warning("Rank %d: learning rates are cut, to %.3g.", trainer.global_rank, lr)
        elif remedy is Remedy.SKIP:
            self._to_skip = self.skip_batches
        # The replica has taken over another model at the sync point. Old measurements do not apply to it.
        elif remedy is Remedy.RESET:
            self._observer.forget()
        elif remedy is Remedy.ROLL_BACK:
            return self._go_back(trainer)
        elif remedy is Remedy.STOP:
            raise self._diverged(trainer)
        return False

    def _diverged(self, trainer: Any) -> TrainingDiverged:
        used = self._escalation.used
        tried = ", ".join(f"{remedy.name.lower()} {n}x" for remedy, n in sorted(used.items()) if n) or "nothing"
        return TrainingDiverged(
            f"Rank {trainer.global_rank}: training has diverged at step {trainer.global_step} of epoch "
            f"{trainer.current_epoch}. {self._words or 'Another rank says why.'} Done so far: {tried}. Lower the "
            "learning rate, clip gradients, or look at the data of this step; then resume from the last good "
            "checkpoint (`FaultTolerantCheckpoint(recover='last_good')`)."
        )

    def _go_back(self, trainer: Any) -> bool:
        assert self._rollback is not None
        rank = trainer.global_rank
        started = time.monotonic()
        here = trainer.global_step
        step = self._rollback.roll_back(trainer)
        if step is None:
            self._escalation.used[Remedy.ROLL_BACK] = self.max_rollbacks
            log.error("Rank %d: there is no good state yet to roll back to at step %d.", rank, here)
            if self._escalation.has(Remedy.STOP):
                raise self._diverged(trainer)
            return False
        # Accumulated gradients are of the model before the rollback.
        for optimizer in trainer.optimizers:
            drop_gradients(optimizer)
        self._observer.forget()
        self.rollbacks += 1
        log.warning(
            "Rank %d: rolled back from step %d to the state of step %d in %.2f s (%d of at most %d times).",
            rank, here, step, time.monotonic() - started, self.rollbacks, self.max_rollbacks,
        )  # fmt: skip
        return True

    def _fit_again(self) -> None:
        take_back(self._undo)

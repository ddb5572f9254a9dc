"""The signals that one rank measures at each step, and the agreement of ranks on a remedy."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lightning_async._checks import check_choice, check_protocol
from lightning_async.algorithms.divergence import Absolute, History, Relative, Remedy, SignalAlarm, Threshold, Track
from lightning_async.engine.fingerprint import is_finite, real
from lightning_async.trainer.checkpoint.save_timing import DelayedGather, lagged_of
from lightning_async.trainer.namespace import scaler_of


class Row(NamedTuple):
    """The numbers that one rank sends to all ranks at one step, so that all choose the same remedy."""

    wanted: Remedy = Remedy.NONE  # the remedy that the rank asks for
    loss: float = float("nan")  # the loss of its batch; NaN if unknown
    every: int = 1  # interval in steps at which the rank has time to check gradients
    clean: bool = True  # whether no signal was out of bounds


def severest(rows: Sequence[Row]) -> Remedy:
    """Return the most severe of the remedies that ranks request; all ranks apply it.

    >>> severest([Row(), Row(Remedy.CUT_LR), Row(Remedy.SYNC)]).name
    'CUT_LR'
    """
    return max((row.wanted for row in rows), default=Remedy.NONE)


class RemedyAgreement:
    """An exchange of rows (`Row`: each rank's numbers of a step), from which all ranks choose the same remedy.

    The chosen remedy is the most severe one that any rank requests. This base class is for a single rank.
    """

    def hear(self) -> list[Row]:
        """Return the rows that have arrived, one from each rank; the list is empty if none have arrived.

        All ranks get the same rows.
        """
        return []

    def say(self, row: Row) -> list[Row]:
        """Send this rank's row to the other ranks, and return an empty list: `hear` returns all rows later.

        If there are no other ranks, return the row at once.
        """
        return [row]

    def close(self) -> None:
        """Close the channel through which ranks exchange rows, if there is one."""


class SyncPointAgreement(RemedyAgreement):
    """The agreement of asynchronous replicas on a remedy, which they apply at a sync point.

    A replica that requests a remedy calls all ranks to a sync point with ``callback.call_together()``. The ranks send
    their losses in the headers of the strategy's sync points.
    """

    def __init__(self, callback: Any, strategy: Any) -> None:
        self._callback = callback
        self._strategy = strategy

    def hear(self) -> list[Row]:
        sync_points = self._strategy.sync_points
        return [] if sync_points is None else [Row(loss=loss) for loss in sync_points.losses]

    def say(self, row: Row) -> list[Row]:
        if self._strategy.sync_points is not None:
            self._strategy.sync_points.tell_loss(row.loss if abs(row.loss) < float("inf") else float("inf"))
        if row.wanted > Remedy.NONE:
            self._callback.call_together()
        return []


class LockstepAgreement(RemedyAgreement):
    """The agreement on a remedy of ranks that take every step together.

    The ranks exchange rows (`Row`: each rank's numbers of a step) through ``lagged``, which delivers them one step
    later.
    """

    def __init__(self, lagged: DelayedGather) -> None:
        self._lagged = lagged

    def hear(self) -> list[Row]:
        rows = self._lagged.receive()
        return [Row(Remedy(int(wanted)), loss, int(every), bool(clean)) for wanted, loss, every, clean in rows]

    def say(self, row: Row) -> list[Row]:
        self._lagged.send([float(x) for x in row])
        return []

    def close(self) -> None:
        self._lagged.close()


def council_of(callback: Any, trainer: Any) -> RemedyAgreement:
    """Return the `RemedyAgreement` for the Trainer's strategy, by which the ranks choose a common remedy.

    All ranks call this together, when training begins.

    Raises:
        ValueError: The ranks can be reached neither by this package nor by torch.distributed.
    """
    if callback.call_together is not None and trainer.world_size > 1:
        return SyncPointAgreement(callback, trainer.strategy)
    lagged = lagged_of("DivergenceMonitor", trainer)
    return RemedyAgreement() if lagged is None else LockstepAgreement(lagged)


# Number of elements that `sample` takes of a tensor.
_SAMPLE = 1024


@torch.no_grad()
def norm(tensors: Iterable[Tensor]) -> Tensor | None:
    r"""Return the norm of all elements, :math:`\sqrt{\sum_k \lVert x_k \rVert^2}`; None if there are no tensors.

    The norm is on the device of the tensors, and on a GPU this does not wait. The norm is finite exactly if all
    elements are, unless fp32 overflows.

    >>> norm([torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.float64)])
    tensor(5.)
    """
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in map(_plain, tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    norms: list[Tensor] = []
    # Sums of squares would overflow in half precision.
    for (_, dtype), group in groups.items():
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        norms += torch._foreach_norm(group, 2.0, dtype=wide)
    if not norms:
        return None
    return torch.linalg.vector_norm(torch.stack([n.to(norms[0].device, torch.float32) for n in norms]))


def _plain(tensor: Tensor) -> Tensor:
    """Return the values of a tensor that this rank holds, as a dense tensor of real numbers.

    Of a sharded tensor, they are this rank's shard. Of a sparse tensor, they are the stored values.
    """
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()  # type: ignore[operator]
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    return real(tensor.resolve_conj())


def gradients(optimizer: Any) -> list[Tensor]:
    """Return the gradients of an optimizer that are not None."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def sample(optimizer: Any) -> list[Tensor]:
    """Return the first elements of an optimizer's first gradient and of its last one.

    At steps at which not all gradients are checked, these elements are checked. A non-finite value in any later layer
    reaches the first gradient in the backward pass.
    """
    groups = optimizer.param_groups
    first = next((p.grad for group in groups for p in group["params"] if p.grad is not None), None)
    last = next((p.grad for group in reversed(groups) for p in reversed(group["params"]) if p.grad is not None), None)
    few = [grad for grad in (first, last) if grad is not None]
    return [_plain(grad).flatten()[:_SAMPLE] if grad.is_contiguous() else grad for grad in few]


def parameters(module: Any) -> Iterator[Tensor]:
    """Yield the parameters of a module that are floating-point or complex."""
    return (p for p in module.parameters() if p.is_floating_point() or p.is_complex())


def optimizer_state(optimizers: Iterable[Any]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        for state in dict.values(optimizer.state):  # a `HeldState` of servers refuses other readers
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
                    yield value


class StepMetrics:
    """A step's metrics by name, which are read without waiting for a GPU.

    Metrics on the CPU are read in the same step. Metrics on a GPU are copied in the background, and read one step
    later.
    """

    def __init__(self) -> None:
        self._put: dict[str, Tensor] = {}
        self._coming: tuple[list[str], Tensor, Any] | None = None

    def put(self, name: str, value: Tensor) -> None:
        self._put[name] = value.detach()

    def forget(self) -> None:
        self._put = {}
        self._coming = None

    def take(self) -> dict[str, float]:
        """Return the metrics that are known now.

        They are this step's if the metrics are on the CPU, and the previous step's if they are on a GPU.
        """
        put = self._put
        self._put = {}
        here = {name: float(value) for name, value in put.items() if value.device.type != "cuda"}
        there = [name for name, value in put.items() if value.device.type == "cuda"]
        coming = self._coming
        self._coming = None
        if there:
            stacked = torch.stack([put[name].double().reshape(()) for name in there])
            copy = torch.empty(len(there), dtype=torch.float64, pin_memory=True)
            copy.copy_(stacked, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._coming = there, copy, event
        if coming is not None:
            names, values, event = coming
            # The copy began a whole step ago, so this hardly ever waits.
            event.synchronize()
            here |= dict(zip(names, values.tolist(), strict=True))
        return here


class SamplingBudget:
    r"""A budget for checks: the interval in steps at which checks take a given share of the training time.

    .. math:: n = \lceil t_\text{look} / (s\, t_\text{step}) \rceil

    :math:`t_\text{look}` is the duration of a check, :math:`t_\text{step}` is the duration of a step, and :math:`s` is
    the share.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._share = share
        self._clock = clock
        self._look_s = self._step_s = 0.0
        self._began: float | None = None

    def step(self) -> None:
        now = self._clock()
        if self._began is not None:
            # Follow the shortest recent step, because a validation, a first step or another process may prolong one.
            step_s = now - self._began
            self._step_s = min(step_s, 1.05 * self._step_s) if self._step_s else step_s
        self._began = now

    def looked(self, seconds: float) -> None:
        self._look_s = 0.8 * self._look_s + 0.2 * seconds if self._look_s else seconds

    @property
    def every(self) -> int:
        """The number of steps from one check to the next; 1 while the durations are unknown."""
        if not self._step_s or not self._look_s:
            return 1
        return max(1, math.ceil(self._look_s / (self._share * self._step_s)))


Signal = Literal["loss", "gradient_norm", "parameters", "optimizer_state", "loss_variance", "replica_spread"]
# Share of the training time for each of the two checks: of the gradients, and of the model.
_SHARE = 0.0025
_SELDOM = (25, 100)
"""Least and largest number of batches between two checks of the model, unless a signal is suspicious."""
# If one of these is not finite, the model may not be, either.
_SUSPECT = ("loss", "gradient_norm", "sample:gradient_norm")


class SignalTracker:
    """The signals of one rank: they are measured at each step and compared with their thresholds.

    Args:
        signals: Names of the signals to watch.
        thresholds: Threshold of each signal, by name.
        history: Numbers of recent values on which relative thresholds are based.
        skips: Whether non-finite gradients are dropped before the optimizer uses them.
    """

    def __init__(
        self, signals: Collection[Signal], thresholds: Mapping[str, Threshold], history: History, skips: bool
    ) -> None:
        self._signals = frozenset(signals)
        self._thresholds = thresholds
        self._history = history
        self._skips = skips
        self._tracks: dict[str, Track] = {}
        self._readings = StepMetrics()
        self._gradients = SamplingBudget(_SHARE)
        self._model = SamplingBudget(_SHARE)
        self._batch = 0
        self._every = 1
        # Whether a loss since the last step was not finite.
        self._suspicious = False
        self._losses: Sequence[float] = ()
        self._rounds = 0
        # Whether non-finite gradients of this batch were dropped, so that no harm is done.
        self.dropped = False
        # The loss of the last batch; NaN if unknown.
        self.loss = math.nan
        self.alone = True
        """Whether this rank may drop a step that others take. Otherwise all check their gradients at the same steps."""
        # Whether all ranks have the same gradients, and so drop the same steps.
        self.alike = True

    @property
    def every(self) -> int:
        return self._gradients.every

    def forget(self) -> None:
        self._readings.forget()
        self._suspicious = self.dropped = False

    def start_batch(self) -> None:
        self._batch += 1
        self.dropped = False
        self._gradients.step()
        self._model.step()
        if self.alone:
            self._every = self.every

    def before_backward(self, trainer: Any, loss: Tensor) -> None:
        # Gradients of a loss that is not finite are not finite, either, so their norm suffices.
        if "gradient_norm" in self._signals:
            return
        if self.alone and self._skips and "loss" in self._signals and loss.device.type == "cpu":
            known = loss.numel() == 1 and scaler_of(trainer.precision_plugin) is None
            self._suspicious |= known and not math.isfinite(float(loss.detach()))

    def before_step(self, trainer: Any, optimizer: Any) -> bool:
        """Check the gradients that ``optimizer`` is about to use; return whether to drop them."""
        # A gradient scaler skips such steps itself, and needs to see them to find its scale.
        if scaler_of(trainer.precision_plugin) is not None:
            return False
        drop = self._suspicious
        self._suspicious = False
        number = next((i for i, each in enumerate(trainer.optimizers) if each is optimizer), 0)
        name = f"gradient_norm/{number}"
        if "gradient_norm" in self._signals:
            if whole := self._batch % self._every == 0:
                started = time.perf_counter()
                size = norm(gradients(optimizer))
                self._gradients.looked(time.perf_counter() - started)
            else:
                size = norm(sample(optimizer))
            if size is not None:
                # A bad sample is reported as the whole norm below, so that it is reported once.
                bad = self._is_to_drop(optimizer, size)
                self._readings.put(name if whole or bad else f"sample:{name}", size)
                drop |= bad
        if drop:
            self._readings.put(name, torch.tensor(math.nan))
        self.dropped |= drop
        return drop

    def _is_to_drop(self, optimizer: Any, size: Tensor) -> bool:
        if not self._skips or not (self.alone or self.alike):
            return False
        if size.device.type == "cpu":
            return not math.isfinite(float(size))
        # torch's fused optimizers skip a step by this flag, without a wait for the GPU.
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.found_inf = (~torch.isfinite(size)).float()
        return False

    def after_batch(self, trainer: Any, module: Any, outputs: Any) -> list[SignalAlarm]:
        """Return alarms for the signals that are out of bounds after a batch.

        Signals on the CPU are those of this batch. Signals on a GPU are those of the previous batch.
        """
        for optimizer in trainer.optimizers:
            if hasattr(optimizer, "found_inf"):
                del optimizer.found_inf
        parts = trainer.accumulate_grad_batches if module.automatic_optimization else 1
        loss = _loss_of(outputs, parts)
        if loss is not None and self._signals & {"loss", "loss_variance"}:
            self._readings.put("loss", loss)
        taken = self._readings.take()
        self.loss = taken.get("loss", math.nan)
        suspects = [name for name, value in taken.items() if name.startswith(_SUSPECT) and not math.isfinite(value)]
        seldom = min(max(self._model.every, _SELDOM[0]), _SELDOM[1])
        if self._batch % seldom == 0 or suspects:
            self._look_at_model(trainer, module, taken)
        return [finding for name, value in taken.items() if (finding := self._judge(name, value)) is not None]

    def _look_at_model(self, trainer: Any, module: Any, taken: dict[str, float]) -> None:
        started = time.perf_counter()
        looks = {"parameters": list(parameters(module)), "optimizer_state": list(optimizer_state(trainer.optimizers))}
        for name, tensors in looks.items():
            size = norm(tensors) if name in self._signals else None
            if size is None:
                continue
            if size.device.type == "cuda":
                self._readings.put(name, size)
            # If all elements are finite, only the norm has overflowed.
            elif not math.isfinite(float(size)) and not is_finite(tensors):
                taken[name] = math.nan
        self._model.looked(time.perf_counter() - started)

    def _judge(self, name: str, value: float) -> SignalAlarm | None:
        signal = name.removeprefix("sample:").partition("/")[0]
        if signal not in self._signals:
            return None
        if signal in ("parameters", "optimizer_state"):
            return None if math.isfinite(value) else SignalAlarm(name, value, math.inf, Remedy.RESET)
        if not math.isfinite(value):
            name = name.removeprefix("sample:")
            return SignalAlarm(name, value, math.inf, Remedy.SKIP if self.dropped else Remedy.LOG)
        if name.startswith("sample:"):
            return None
        limit = self._tracks.setdefault(name, Track(self._history)).add(value, self._thresholds[signal])
        return SignalAlarm(name, value, limit) if value > limit else None

    def compare(self, rows: Sequence[Row], summary: Any = None) -> list[SignalAlarm]:
        """Return alarms for the variance of all ranks' losses, and for the distance between replicas at the last round.

        For ranks in lockstep, this also sets the interval between checks of gradients to the longest one of all ranks.

        Args:
            rows: Each rank's numbers of a step.
            summary: Summary of the strategy's averaging rounds. Default: None, there are no rounds.
        """
        if rows and not self.alone:
            self._every = max(row.every for row in rows)
        found = []
        losses = [row.loss for row in rows if math.isfinite(row.loss)]
        if len(losses) > 1 and losses != self._losses:
            self._losses = losses
            found.append(self._judge("loss_variance", statistics.pvariance(losses)))
        if summary is not None and summary.rounds > self._rounds:
            self._rounds = summary.rounds
            found.append(self._judge("replica_spread", summary.spread))
        return [finding for finding in found if finding is not None]


def _loss_of(outputs: Any, parts: int) -> Tensor | None:
    """Return the loss in a result of `training_step`, multiplied by ``parts``; None if it has no loss.

    Lightning has divided the loss by ``parts``, the number of accumulated batches.
    """
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        return None
    return loss.detach() * parts if parts > 1 else loss.detach()


def thresholds_by_signal(owner: str, given: Any) -> dict[str, Threshold]:
    """Return the threshold of each signal; raise ValueError or TypeError for a bad ``alert_threshold``."""
    for name in given if isinstance(given, Mapping) else ():
        check_choice(owner, "alert_threshold", name, get_args(Signal))
    thresholds: dict[str, Threshold] = {}
    value: Any
    for name in get_args(Signal):
        value = given.get(name, Relative()) if isinstance(given, Mapping) else given
        value = Absolute(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value
        check_protocol(owner, "alert_threshold", value, Threshold, "a number, a `Relative(...)` or an `Absolute(...)`")
        thresholds[name] = value
    return thresholds

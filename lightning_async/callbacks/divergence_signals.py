"""The signals that one rank sees of its training, step by step, and which of them are out of bounds."""

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
    """A rank's word on one step."""

    wanted: Remedy = Remedy.NONE  # what it asks for
    loss: float = float("nan")  # of its batch; NaN where there is none
    every: int = 1  # it has time to look at gradients every so many steps
    clean: bool = True  # nothing was out of bounds


def severest(rows: Sequence[Row]) -> Remedy:
    """Return what all do.

    >>> severest([Row(), Row(Remedy.CUT_LR), Row(Remedy.SYNC)]).name
    'CUT_LR'
    """
    return max((row.wanted for row in rows), default=Remedy.NONE)


class RemedyAgreement:
    """The way in which all ranks do the same at the same step: each says what it asks for, and the severest is done.
    This one is that of a single rank."""

    def hear(self) -> list[Row]:
        """Return what all ranks have said, the same on all of them at this step."""
        return []

    def say(self, row: Row) -> list[Row]:
        """Say this, and return what all say, where that is known at once."""
        return [row]

    def close(self) -> None:
        """Hear no more."""


class SyncPointAgreement(RemedyAgreement):
    """The agreement of asynchronous replicas: what is more than a word is decided at a sync point.

    ``callback`` calls the others, see `CollectiveCallback`; losses travel in the headers of the strategy's sync points.
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
    """The agreement of ranks that take every step together; ``lagged`` carries the rows."""

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
    """Return the right one for this Trainer's strategy. All ranks call it together, as training begins.

    Raises:
        ValueError: ranks that this package and torch.distributed know nothing of.
    """
    if callback.call_together is not None and trainer.world_size > 1:
        return SyncPointAgreement(callback, trainer.strategy)
    lagged = lagged_of("DivergenceMonitor", trainer)
    return RemedyAgreement() if lagged is None else LockstepAgreement(lagged)


_SAMPLE = 1024  # elements of a tensor


@torch.no_grad()
def norm(tensors: Iterable[Tensor]) -> Tensor | None:
    r"""Return the norm of all elements, :math:`\sqrt{\sum_k \lVert x_k \rVert^2}`, where the tensors are; None of none.

    It is finite exactly if all elements are, short of an overflow of fp32. On a GPU nothing is waited for.

    >>> norm([torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.float64)])
    tensor(5.)
    """
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in map(_plain, tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    norms: list[Tensor] = []
    for (_, dtype), group in groups.items():  # half types would overflow
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        norms += torch._foreach_norm(group, 2.0, dtype=wide)
    if not norms:
        return None
    return torch.linalg.vector_norm(torch.stack([n.to(norms[0].device, torch.float32) for n in norms]))


def _plain(tensor: Tensor) -> Tensor:
    """Return the memory of this rank as real numbers: of a sharded tensor its shard, of a sparse one its values."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()  # type: ignore[operator]
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    return real(tensor.resolve_conj())


def gradients(optimizer: Any) -> list[Tensor]:
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def sample(optimizer: Any) -> list[Tensor]:
    """Return a few elements of its gradients, for want of time: of the last tensor, and of the first, which whatever is
    not finite further on in a network reaches in the backward pass."""
    groups = optimizer.param_groups
    first = next((p.grad for group in groups for p in group["params"] if p.grad is not None), None)
    last = next((p.grad for group in reversed(groups) for p in reversed(group["params"]) if p.grad is not None), None)
    few = [grad for grad in (first, last) if grad is not None]
    return [_plain(grad).flatten()[:_SAMPLE] if grad.is_contiguous() else grad for grad in few]


def parameters(module: Any) -> Iterator[Tensor]:
    return (p for p in module.parameters() if p.is_floating_point() or p.is_complex())


def optimizer_state(optimizers: Iterable[Any]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
                    yield value


class StepMetrics:
    """Numbers by name. Those on the CPU are taken at once; those on a GPU are copied over beside the training, and
    taken one step later.
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
        """Return what is there: this step's numbers of the CPU, the last step's of a GPU."""
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
            event.synchronize()  # of a whole step ago
            here |= dict(zip(names, values.tolist(), strict=True))
        return here


class SamplingBudget:
    r"""A budget for looks: every how many steps there is time for one, where ``share`` of the time is for them.

    .. math:: n = \lceil t_\text{look} / (s\, t_\text{step}) \rceil
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._share = share
        self._clock = clock
        self._look_s = self._step_s = 0.0
        self._began: float | None = None

    def step(self) -> None:
        now = self._clock()
        if self._began is not None:
            # The least of late: what a validation, a first step or another process took in between is no step's.
            step_s = now - self._began
            self._step_s = min(step_s, 1.05 * self._step_s) if self._step_s else step_s
        self._began = now

    def looked(self, seconds: float) -> None:
        self._look_s = 0.8 * self._look_s + 0.2 * seconds if self._look_s else seconds

    @property
    def every(self) -> int:
        """Steps between two looks; 1 while nothing is known."""
        if not self._step_s or not self._look_s:
            return 1
        return max(1, math.ceil(self._look_s / (self._share * self._step_s)))


Signal = Literal["loss", "gradient_norm", "parameters", "optimizer_state", "loss_variance", "replica_spread"]
_SHARE = 0.0025  # of the time of training, for each of the two looks: at gradients, and at the model
_SELDOM = (25, 100)
"""The model is looked at no more and no less often than every so many batches, where nothing points to it."""
_SUSPECT = ("loss", "gradient_norm", "sample:gradient_norm")  # what is not finite there may have reached the model


class SignalTracker:
    """The signals of one rank; with ``skips``, gradients that are not finite are dropped before they reach the
    model."""

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
        self._suspicious = False  # a loss since the last step was not finite
        self._losses: Sequence[float] = ()
        self._rounds = 0
        self.dropped = False  # gradients of this batch's were not finite, and are gone: no harm is done
        self.loss = math.nan  # of the last batch, as far as it is known
        self.alone = True
        """Whether this rank may drop a step that others take. Else all look at their gradients in the same steps."""
        self.alike = True  # whether all ranks have the same gradients, so that all drop the same steps

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
        if "gradient_norm" in self._signals:  # which say it too
            return
        if self.alone and self._skips and "loss" in self._signals and loss.device.type == "cpu":
            known = loss.numel() == 1 and scaler_of(trainer.precision_plugin) is None
            self._suspicious |= known and not math.isfinite(float(loss.detach()))

    def before_step(self, trainer: Any, optimizer: Any) -> bool:
        """Look at the gradients that this optimizer is about to use; return whether they are to be dropped."""
        if scaler_of(trainer.precision_plugin) is not None:  # it skips steps that are not finite, to find its scale
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
                bad = self._is_to_drop(optimizer, size)  # and is told as the whole norm below: once
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
        if getattr(optimizer, "_step_supports_amp_scaling", False):  # torch's fused ones skip by themselves
            optimizer.found_inf = (~torch.isfinite(size)).float()
        return False

    def after_batch(self, trainer: Any, module: Any, outputs: Any) -> list[SignalAlarm]:
        """Return what is out of bounds: on the CPU in this batch, on a GPU in the one before."""
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
            elif not math.isfinite(float(size)) and not is_finite(tensors):  # else the norm has overflowed
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
        """Return what all ranks' losses, and the last round, say of the replicas."""
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
    """Return what `training_step` returned, not divided by the number of batches that are accumulated."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        return None
    return loss.detach() * parts if parts > 1 else loss.detach()


def thresholds_by_signal(owner: str, given: Any) -> dict[str, Threshold]:
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

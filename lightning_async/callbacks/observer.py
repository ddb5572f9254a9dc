"""What one rank sees of its training: signals, step by step, and which of them are out of bounds."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_async.arguments import check_choice, check_protocol
from lightning_async.callbacks.councils import Row
from lightning_async.callbacks.readings import (
    Budget,
    Readings,
    gradients,
    norm,
    optimizer_state,
    parameters,
    sample,
)  # fmt: skip
from lightning_async.engine.digest import is_finite
from lightning_async.rules.divergence import Absolute, Finding, History, Relative, Remedy, Threshold, Track

__all__ = ["Observer", "Signal", "thresholds_by_signal"]

Signal = Literal["loss", "gradient_norm", "parameters", "optimizer_state", "loss_variance", "replica_spread"]
_SHARE = 0.0025
"""Of the time of training, for each of the two looks: at gradients, and at the model."""
_SELDOM = (25, 100)
"""The model is looked at no more and no less often than every so many batches, where nothing points to it."""
_SUSPECT = ("loss", "gradient_norm", "sample:gradient_norm")
"""What is not finite there may have reached the model."""


class Observer:
    """The signals of one rank.

    Args:
        signals: those that are looked at.
        thresholds: where each is out of bounds.
        history: how much of its past counts.
        skips: gradients that are not finite are to be dropped before they reach the model.
    """

    def __init__(
        self, signals: Collection[Signal], thresholds: Mapping[str, Threshold], history: History, skips: bool
    ) -> None:
        self._signals, self._thresholds, self._history = frozenset(signals), thresholds, history
        self._skips = skips
        self._tracks: dict[str, Track] = {}
        self._readings = Readings()
        self._gradients, self._model = Budget(_SHARE), Budget(_SHARE)
        self._batch, self._every = 0, 1
        self._suspicious = False
        """A loss since the last step was not finite."""
        self._losses: Sequence[float] = ()
        self._rounds = 0
        self.dropped = False
        """Gradients of this batch's were not finite, and are gone: no harm is done."""
        self.loss = math.nan
        """Of the last batch, as far as it is known."""
        self.alone = True
        """Whether this rank may drop a step that others take. Else all look at their gradients in the same steps."""
        self.alike = True
        """Whether all ranks have the same gradients, so that all drop the same steps."""

    @property
    def every(self) -> int:
        """Gradients can be looked at every so many steps."""
        return self._gradients.every

    def forget(self) -> None:
        """The model is another one."""
        self._readings.forget()
        self._suspicious = self.dropped = False

    def start_batch(self) -> None:
        """A batch begins."""
        self._batch += 1
        self.dropped = False
        self._gradients.step()
        self._model.step()
        if self.alone:
            self._every = self.every

    def before_backward(self, trainer: Any, loss: Tensor) -> None:
        """A loss that is not finite will have gradients that are not."""
        if "gradient_norm" in self._signals:  # which say it too
            return
        if self.alone and self._skips and "loss" in self._signals and loss.device.type == "cpu":
            known = loss.numel() == 1 and not _scaled(trainer)
            self._suspicious |= known and not math.isfinite(float(loss.detach()))

    def before_step(self, trainer: Any, optimizer: Any) -> bool:
        """Look at the gradients that this optimizer is about to use; whether they are to be dropped."""
        if _scaled(trainer):  # it skips steps that are not finite, to find its scale
            return False
        drop, self._suspicious = self._suspicious, False
        name = f"gradient_norm/{_number_of(trainer, optimizer)}"
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

    def after_batch(self, trainer: Any, module: Any, outputs: Any) -> list[Finding]:
        """What is out of bounds: on the CPU in this batch, on a GPU in the one before."""
        for optimizer in trainer.optimizers:
            if hasattr(optimizer, "found_inf"):
                del optimizer.found_inf
        loss = _loss_of(trainer, module, outputs)
        if loss is not None and self._signals & {"loss", "loss_variance"}:
            self._readings.put("loss", loss)
        taken = self._readings.take()
        self.loss = taken.get("loss", math.nan)
        suspects = [name for name, value in taken.items() if name.startswith(_SUSPECT) and not math.isfinite(value)]
        if self._look_due() or suspects:
            self._look_at_model(trainer, module, taken)
        return [finding for name, value in taken.items() if (finding := self._judge(name, value)) is not None]

    def _look_due(self) -> bool:
        return self._batch % min(max(self._model.every, _SELDOM[0]), _SELDOM[1]) == 0

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

    def _judge(self, name: str, value: float) -> Finding | None:
        signal = name.removeprefix("sample:").partition("/")[0]
        if signal not in self._signals:
            return None
        if signal in ("parameters", "optimizer_state"):
            return None if math.isfinite(value) else Finding(name, value, math.inf, Remedy.RESET)
        if not math.isfinite(value):
            name = name.removeprefix("sample:")
            return Finding(name, value, math.inf, Remedy.SKIP if self.dropped else Remedy.LOG)
        if name.startswith("sample:"):
            return None
        limit = self._tracks.setdefault(name, Track(self._history)).add(value, self._thresholds[signal])
        return Finding(name, value, limit) if value > limit else None

    def compare(self, rows: Sequence[Row], summary: Any = None) -> list[Finding]:
        """What all ranks' losses, and the last round, say of the replicas."""
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


def _number_of(trainer: Any, optimizer: Any) -> int:
    return next((i for i, each in enumerate(trainer.optimizers) if each is optimizer), 0)


def _loss_of(trainer: Any, module: Any, outputs: Any) -> Tensor | None:
    """What `training_step` returned, not divided by the number of batches that are accumulated."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        return None
    parts = trainer.accumulate_grad_batches if module.automatic_optimization else 1
    return loss.detach() * parts if parts > 1 else loss.detach()


def _scaled(trainer: Any) -> bool:
    """Whether there is a scaler of gradients."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler is not None and scaler.is_enabled()


def thresholds_by_signal(owner: str, given: Any) -> dict[str, Threshold]:
    """A threshold for each signal.

    Raises:
        TypeError, ValueError: names the argument.
    """
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

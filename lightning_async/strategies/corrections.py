"""What a correction of the delay needs of one replica, on its training thread.

    a late gradient (`Late`)     how far the parameters have moved since: a copy of them, from before the last step
    a prediction (`Ahead`)       for a batch's forward and backward pass, and for nothing else, the parameters and a
                                 copy change places; at every other time they are those that were stepped with
    an estimate (`Twice`)        parameters and the optimizer's state from before a step, until that is taken again

A gate forgets all of it: what follows depends on nothing that a checkpoint lacks. So a step that a gate finds estimated
stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_async import ops
from lightning_async.engine.gradients.records import Reduction
from lightning_async.engine.gradients.synchronous import SynchronousGradients
from lightning_async.rules.delays import DelayCorrection, Estimation, GradientCorrection, Prediction
from lightning_async.strategies.estimates import Estimate, change_settings, settings_of

__all__ = ["Ahead", "Correcting", "Late", "Twice", "correcting"]

Change = Callable[[Tensor, Reduction], None]


class Steps(Protocol):
    """Takes the optimizer's steps; ``change`` sees the mean before the optimizer does."""

    def take(self, change: Change) -> bool:
        """A step more; False if mixed precision has skipped it."""
        ...

    def take_again(self, change: Change) -> None:
        """The optimizer's step, which training has counted before."""
        ...

    @property
    def late(self) -> bool:
        """Steps have a delay by now."""
        ...

    @property
    def number(self) -> int:
        """Steps that were taken."""
        ...

    @property
    def optimizer(self) -> Optimizer: ...


class Correcting:
    """Nothing is done about the delay; others depart from that.

    Args:
        gradients: of the windows.
        steps: takes them.
    """

    def __init__(self, gradients: SynchronousGradients, steps: Steps) -> None:
        self._gradients, self._replica, self._steps = gradients, gradients.replica, steps

    @contextmanager
    def batch(self, opens: bool) -> Iterator[None]:
        """A batch's forward and backward pass; ``opens``: it is the first of its window."""
        yield

    def step(self, arrived: Reduction) -> bool:
        """Step with what has arrived; False where that was the last step again."""
        self._steps.take(self._change_)
        return True

    def stepped(self) -> None:
        """The optimizer has just stepped, and no scheduler since."""

    def forget(self) -> None:
        """A gate has opened."""

    def state(self) -> Any:
        """For a checkpoint: plain values and tensors."""
        return None

    def load(self, state: Any) -> None:
        """Go on from there, unless it is another correction's."""

    def _change_(self, mean: Tensor, arrived: Reduction) -> None: ...


class Late(Correcting):
    """For a `GradientCorrection`.

    Args:
    correction: of gradients.
    """

    def __init__(self, gradients: SynchronousGradients, steps: Steps, correction: GradientCorrection) -> None:
        super().__init__(gradients, steps)
        self._correction = correction
        self._before: Tensor | None = None

    def state(self) -> Any:
        return self._before

    def load(self, state: Any) -> None:
        if isinstance(state, Tensor):
            self._before = state.to(self._replica.device)

    def _change_(self, mean: Tensor, arrived: Reduction) -> None:
        """Of a mean that is late by a step, make one for the parameters of now."""
        now, before = torch.empty_like(mean), self._before
        self._replica.pack_parameters_(now)
        if before is not None and before.shape == now.shape and arrived.since < self._steps.number:
            self._correction.correct_(mean, torch.sub(now, before, out=before))
        self._before = now


class Ahead(Correcting):
    """For a `Prediction`.

    Args:
    correction: says where gradients are computed.
    """

    def __init__(self, gradients: SynchronousGradients, steps: Steps, correction: Prediction) -> None:
        super().__init__(gradients, steps)
        self._correction = correction
        self._there: dict[str, Tensor] = {}
        """By name: parameters from before the last step; within a window of which `_is_ahead`, where that computes."""
        self._is_ahead = self._has_stepped = False

    @contextmanager
    def batch(self, opens: bool) -> Iterator[None]:
        if opens:
            self._is_ahead = self._has_stepped and (self._gradients.in_flight or self._gradients.arrived is not None)
            if self._is_ahead:
                self._has_stepped = False
                self._predict()
        if not self._is_ahead:
            yield
            return
        self._swap_()
        versions = {name: p._version for name, p in self._parameters.items()}
        try:
            yield
        finally:
            moved = [name for name, p in self._parameters.items() if p._version != versions[name]]
            self._swap_()
        if moved:
            raise RuntimeError(
                f"`training_step` has changed {moved[:3]} by itself, which is lost where gradients are computed at "
                f"predicted parameters. Change them in `on_train_batch_end`, or do without `{self._correction!r}`."
            )

    def forget(self) -> None:
        self._there.clear()
        self._is_ahead = self._has_stepped = False

    def state(self) -> Any:
        if not self._there:
            return None
        return {"there": dict(self._there), "ahead": self._is_ahead, "stepped": self._has_stepped}

    def load(self, state: Any) -> None:
        if not isinstance(state, dict):
            return
        mine = self._parameters
        self._there = {name: t.to(mine[name].device, copy=True) for name, t in state["there"].items() if name in mine}
        self._is_ahead, self._has_stepped = state["ahead"], state["stepped"]

    @property
    def _parameters(self) -> dict[str, Any]:
        return self._replica.tensors.trained

    @torch.no_grad()
    def _change_(self, mean: Tensor, arrived: Reduction) -> None:
        for name, p in self._parameters.items():
            if name in self._there:
                self._there[name].copy_(p)
            else:
                self._there[name] = p.detach().clone()
        self._has_stepped = True

    @torch.no_grad()
    def _predict(self) -> None:
        for name, there in self._there.items():
            self._correction.predict_(there, self._parameters[name].detach())

    @torch.no_grad()
    def _swap_(self) -> None:
        for name, there in self._there.items():
            here = self._parameters[name].detach().clone()
            self._parameters[name].copy_(there)
            there.copy_(here)


class Twice(Correcting):
    """For an `Estimation`.

    Args:
    correction: says with what a step is taken again.
    """

    def __init__(self, gradients: SynchronousGradients, steps: Steps, correction: Estimation) -> None:
        super().__init__(gradients, steps)
        self._correction = correction
        self._estimate: Estimate | None = None

    def step(self, arrived: Reduction) -> bool:
        estimate = self._estimate
        if estimate is None or estimate.gates != arrived.gates:
            self.forget()
            if not self._steps.take(self._keep_) or arrived.mark is not None:  # a checkpoint has no place for it
                self.forget()
            return True
        groups = settings_of(self._steps.optimizer)
        self._steps.take_again(self._combine_)
        if estimate.is_restored:  # with the learning rate that the estimate had
            change_settings(self._steps.optimizer, estimate.groups_after, groups)
        self.forget()
        return False

    def stepped(self) -> None:
        if self._estimate is not None:
            self._estimate.groups_after = settings_of(self._steps.optimizer)

    def forget(self) -> None:
        self._estimate = None

    def _keep_(self, mean: Tensor, arrived: Reduction) -> None:
        if self._steps.late:
            self._estimate = Estimate(self._steps.optimizer, mean, arrived)

    def _combine_(self, mean: Tensor, arrived: Reduction) -> None:
        """Both windows' mean; where that is not finite the estimate stays, and the scaler hears of it."""
        estimate = self._estimate
        assert estimate is not None
        self._correction.combine_(mean, arrived.told.weight, estimate.mean, estimate.weight)
        torch.maximum(arrived.used, estimate.used, out=arrived.used)
        if ops.all_finite(mean):
            estimate.restore_()


def correcting(correction: DelayCorrection | None, gradients: SynchronousGradients, steps: Steps) -> Correcting:
    """What does as a correction says."""
    if isinstance(correction, GradientCorrection):
        return Late(gradients, steps, correction)
    if isinstance(correction, Prediction):
        return Ahead(gradients, steps, correction)
    if isinstance(correction, Estimation):
        return Twice(gradients, steps, correction)
    return Correcting(gradients, steps)

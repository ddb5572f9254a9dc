"""Corrections of the delay of gradients, applied to one replica on its training thread.

- `LateGradientCorrection` keeps a copy of the parameters from before the last step, and corrects a late gradient by how
  far the parameters have moved since it was computed.
- `ParameterLookahead` swaps the parameters with a predicted copy during a batch's forward and backward pass. At all
  other times the parameters are those that the optimizer has stepped to.

Both discard their state at sync points. So a checkpoint that is saved at a sync point does not need this state:
training that resumes from it goes on exactly like the training that has saved it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_async.algorithms.staleness import DelayCorrection, GradientCorrection, Prediction
from lightning_async.engine.gradients.reduction import Reduction, SynchronousGradients


class Correcting:
    """A correction of the delay of gradients; this base class corrects nothing.

    Args:
        gradients: The component that averages gradients of windows.
    """

    def __init__(self, gradients: SynchronousGradients) -> None:
        self._gradients = gradients
        self._replica = gradients.replica

    @contextmanager
    def batch(self, opens: bool) -> Iterator[None]:
        """Return a context in which a batch's forward and backward passes run, for example at predicted parameters.

        Args:
            opens: Whether the batch is the first of its window (the batches whose gradients are averaged together).
        """
        yield

    def change_(self, mean: Tensor, arrived: Reduction) -> None:
        """Correct ``mean`` in place, before the optimizer steps with it.

        Args:
            mean: Mean of the gradients, as one flat tensor.
            arrived: Reduction that computed the mean.
        """

    def forget(self) -> None:
        """Discard the correction's state, because a sync point has opened."""

    def state(self) -> Any:
        """Return the correction's state for a checkpoint, as plain values and tensors; None if there is none."""
        return None

    def load(self, state: Any) -> None:
        """Load a saved state; ignore it if it belongs to another correction."""


class LateGradientCorrection(Correcting):
    """A correction that changes each late gradient by a `GradientCorrection`.

    Args:
        gradients: The component that averages gradients of windows.
        correction: Formula of the correction.
        number: Function that returns the number of steps taken so far.
    """

    def __init__(
        self, gradients: SynchronousGradients, correction: GradientCorrection, number: Callable[[], int]
    ) -> None:
        super().__init__(gradients)
        self._correction = correction
        self._number = number
        self._before: Tensor | None = None

    def state(self) -> Any:
        return self._before

    def load(self, state: Any) -> None:
        if isinstance(state, Tensor):
            self._before = state.to(self._replica.device)

    def change_(self, mean: Tensor, arrived: Reduction) -> None:
        """Correct ``mean`` in place if a step was taken since its gradients were computed.

        The correction follows from how far the parameters have moved in that step.
        """
        now = torch.empty_like(mean)
        before = self._before
        self._replica.pack_parameters_(now)
        # If no step was taken since the gradients were computed, they are not late.
        if before is not None and before.shape == now.shape and arrived.since < self._number():
            self._correction.correct_(mean, torch.sub(now, before, out=before))
        self._before = now


class ParameterLookahead(Correcting):
    """A correction that computes gradients at parameters that a `Prediction` predicts.

    Args:
        gradients: The component that averages gradients of windows.
        correction: Formula of the prediction.
    """

    def __init__(self, gradients: SynchronousGradients, correction: Prediction) -> None:
        super().__init__(gradients)
        self._correction = correction
        self._there: dict[str, Tensor] = {}
        """A second copy of the parameters, by name: the parameters from before the last step or, while `_is_ahead`, the
        predicted parameters."""
        self._is_ahead = self._has_stepped = False

    @contextmanager
    def batch(self, opens: bool) -> Iterator[None]:
        if opens:
            # A prediction helps only while a mean is on its way, since the optimizer steps with that mean before it
            # uses the gradients of this window.
            self._is_ahead = self._has_stepped and (self._gradients.in_flight or self._gradients.arrived is not None)
            if self._is_ahead:
                self._has_stepped = False
                self._predict()
        if not self._is_ahead:
            yield
            return
        self._swap_()
        # torch counts the in-place changes of a tensor. The swap would undo a change by `training_step`.
        versions = {name: p._version for name, p in self._parameters.items()}
        try:
            yield
        finally:
            # After an error, too: the parameters must be those that the optimizer has stepped to.
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
        self._is_ahead = state["ahead"]
        self._has_stepped = state["stepped"]

    @property
    def _parameters(self) -> dict[str, Any]:
        return self._replica.tensors.trained

    @torch.no_grad()
    def change_(self, mean: Tensor, arrived: Reduction) -> None:
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


def correcting(
    correction: DelayCorrection | None, gradients: SynchronousGradients, number: Callable[[], int]
) -> Correcting:
    """Return the object that applies a correction to a replica: a subclass of `Correcting`.

    Args:
        correction: The correction; None for none.
        gradients: The component that averages gradients of windows.
        number: Function that returns the number of steps taken so far.
    """
    if isinstance(correction, GradientCorrection):
        return LateGradientCorrection(gradients, correction, number)
    if isinstance(correction, Prediction):
        return ParameterLookahead(gradients, correction)
    return Correcting(gradients)

"""Where an optimizer stood before a step that is taken again, see `corrections.Twice`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_async.engine.gradients.records import Reduction

__all__ = ["Estimate", "change_settings", "settings_of"]


class Estimate:
    """Where a step that is to be taken again began, and what it was taken with.

    Args:
        optimizer: before its step.
        mean: with which that is estimated.
        arrived: how that came about.
    """

    def __init__(self, optimizer: Optimizer, mean: Tensor, arrived: Reduction) -> None:
        self.mean, self.weight, self.used = mean.clone(), arrived.told.weight, arrived.used.clone()
        self.gates = arrived.gates
        self.groups_after: list[dict[str, Any]] = []
        """The optimizer's settings after its step."""
        self.is_restored = False
        self._optimizer, self._groups = optimizer, settings_of(optimizer)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self._params = [(p, p.detach().clone()) for p in params]
        self._state = {p: {key: _copied(x) for key, x in kept.items()} for p, kept in optimizer.state.items()}

    @torch.no_grad()
    def restore_(self) -> None:
        """Back to there, in the same memory. It is used up."""
        state: dict[Any, Any] = self._optimizer.state
        for p, value in self._params:
            p.copy_(value)
        for p in [p for p in state if p not in self._state]:
            del state[p]
        for p, kept in self._state.items():
            now = state[p]
            for key in [key for key in now if key not in kept]:
                del now[key]
            for key, value in kept.items():
                if isinstance(value, Tensor) and isinstance(now[key], Tensor) and value.shape == now[key].shape:
                    now[key].copy_(value)
                else:
                    now[key] = value
        for group, settings in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(settings)
        self.is_restored = True


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Learning rates, and whatever else a group has beside its parameters; copied."""
    return [copy.deepcopy({k: v for k, v in g.items() if k != "params"}) for g in optimizer.param_groups]


def change_settings(optimizer: Optimizer, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
    """What a scheduler has changed from ``before`` to ``after``."""
    for group, old, new in zip(optimizer.param_groups, before, after, strict=True):
        group.update({key: value for key, value in new.items() if key not in old or bool(old[key] != value)})

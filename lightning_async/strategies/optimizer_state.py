"""The optimizers' state as tensors that can be averaged or reset."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["materialise", "reset", "state_tensors"]


def materialise(optimizers: Iterable[Optimizer]) -> None:
    """Give every optimizer its state before its first step, by a step with zero gradients and learning rate zero.

    So every replica has the same tensors to average from the start, one without any data too. Parameters do not
    change; the state is zeroed afterwards. An optimizer that has state already (after a resume) is left alone.
    """
    for optimizer in optimizers:
        if optimizer.state:
            continue
        groups = optimizer.param_groups
        params = [p for group in groups for p in group["params"] if p.requires_grad]
        rates = [group["lr"] for group in groups]
        kept = [(p, p.grad, p.detach().clone()) for p in params]
        for group in groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        with torch.no_grad():
            for p, grad, value in kept:
                p.copy_(value)
                p.grad = grad
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        value.zero_()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate


def state_tensors(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Floating-point state with more than one element: moments and momenta, not step counts."""
    return [
        value
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
        for _, value in sorted(optimizer.state[p].items(), key=lambda item: str(item[0]))
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape == p.shape
    ]


def reset(optimizers: Iterable[Optimizer]) -> None:
    """Forget the state: the next step begins as the first."""
    for optimizer in optimizers:
        optimizer.state.clear()

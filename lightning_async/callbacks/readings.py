"""The numbers of one training step, looked at without stopping a GPU; and how often there is time to look."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_async.engine.digest import real

__all__ = ["Budget", "Readings", "gradients", "norm", "optimizer_state", "parameters", "sample"]

_SAMPLE = 1024
"""Elements of a tensor."""


@torch.no_grad()
def norm(tensors: Iterable[Tensor]) -> Tensor | None:
    r"""The norm of all elements, :math:`\sqrt{\sum_k \lVert x_k \rVert^2}`, where the tensors are; None of none.

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
    """The memory of this rank as real numbers: of a sharded tensor its shard, of a sparse one its values."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()  # type: ignore[operator]
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    return real(tensor.resolve_conj())


def gradients(optimizer: Any) -> list[Tensor]:
    """What this optimizer is about to use."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def sample(optimizer: Any) -> list[Tensor]:
    """A few elements of its gradients, to look at where there is no time for all: of the first tensor, which whatever
    is not finite further on in a network reaches in the backward pass, and of the last."""
    groups = optimizer.param_groups
    first = next((p.grad for group in groups for p in group["params"] if p.grad is not None), None)
    last = next((p.grad for group in reversed(groups) for p in reversed(group["params"]) if p.grad is not None), None)
    few = [grad for grad in (first, last) if grad is not None]
    return [_plain(grad).flatten()[:_SAMPLE] if grad.is_contiguous() else grad for grad in few]


def parameters(module: Any) -> Iterator[Tensor]:
    """All that can be other than finite."""
    return (p for p in module.parameters() if p.is_floating_point() or p.is_complex())


def optimizer_state(optimizers: Iterable[Any]) -> Iterator[Tensor]:
    """All tensors that optimizers keep."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
                    yield value


class Readings:
    """Numbers by name. Those on the CPU are taken at once; those on a GPU are copied over beside the training, and
    taken one step later."""

    def __init__(self) -> None:
        self._put: dict[str, Tensor] = {}
        self._coming: tuple[list[str], Tensor, Any] | None = None

    def put(self, name: str, value: Tensor) -> None:
        """A number of this step's."""
        self._put[name] = value.detach()

    def forget(self) -> None:
        """What was put belongs to a model that is no more."""
        self._put, self._coming = {}, None

    def take(self) -> dict[str, float]:
        """What is there: this step's numbers of the CPU, the last step's of a GPU."""
        put, self._put = self._put, {}
        here = {name: float(value) for name, value in put.items() if value.device.type != "cuda"}
        there = [name for name, value in put.items() if value.device.type == "cuda"]
        coming, self._coming = self._coming, None
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


class Budget:
    r"""Every how many steps there is time for a look.

    .. math:: n = \lceil t_\text{look} / (s\, t_\text{step}) \rceil

    Args:
        share: :math:`s`, of the time of training.
        clock: seconds.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._share, self._clock = share, clock
        self._look_s = self._step_s = 0.0
        self._began: float | None = None

    def step(self) -> None:
        """A batch begins."""
        now = self._clock()
        if self._began is not None:
            # The least of late: what a validation, a first step or another process took in between is no step's.
            step_s = now - self._began
            self._step_s = min(step_s, 1.05 * self._step_s) if self._step_s else step_s
        self._began = now

    def looked(self, seconds: float) -> None:
        """A look took so long."""
        self._look_s = 0.8 * self._look_s + 0.2 * seconds if self._look_s else seconds

    @property
    def every(self) -> int:
        """Steps between two looks; 1 while nothing is known."""
        if not self._step_s or not self._look_s:
            return 1
        return max(1, math.ceil(self._look_s / (self._share * self._step_s)))

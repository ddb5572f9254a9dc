"""A small regression, its data, and plain-torch training to compare with. No Lightning here."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

FEATURES = 6
Batch = tuple[Tensor, Tensor]


def network(width: int = 8) -> nn.Sequential:
    """The same start in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, 1))


def normalised() -> nn.Sequential:
    """The same behind BatchNorm."""
    return nn.Sequential(nn.BatchNorm1d(FEATURES), network())


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def batches(rank: int, number: int, size: int = 4, offset: int = 0) -> list[Batch]:
    """Deterministic batches of one rank."""
    made = []
    for i in range(number):
        generator = torch.Generator().manual_seed(1000 * rank + offset + i)
        x = torch.randn(size, FEATURES, generator=generator)
        made.append((x, x.sin().sum(1, keepdim=True) + 0.1 * rank))
    return made


def uneven(rank: int, number: int) -> list[Batch]:
    """The same of 1 to 5 samples each, of which ranks have unequal ones at the same time."""
    return [batches(rank, 1, 1 + (2 * rank + i) % 5, offset=i)[0] for i in range(number)]


def joined(*shards: Sequence[Batch]) -> list[Batch]:
    """Batch by batch, the union of all ranks' samples."""
    return [(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])) for parts in zip(*shards, strict=True)]


def loss_of(module: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return nn.functional.mse_loss(module(x), y)


def train_alone(
    data: Sequence[Batch],
    *,
    epochs: int = 1,
    accumulate: int = 1,
    clip: float | None = None,
    module: nn.Module | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda ps: torch.optim.SGD(ps, lr=0.05),
) -> nn.Module:
    """One process, as Lightning would: a step after every ``accumulate`` batches and after the last of an epoch."""
    module = network() if module is None else module
    stepper = optimizer(module.parameters())
    for _ in range(epochs):
        for i, batch in enumerate(data):
            (loss_of(module, batch) / accumulate).backward()
            if (i + 1) % accumulate == 0 or i + 1 == len(data):
                if clip is not None:
                    nn.utils.clip_grad_norm_(module.parameters(), clip)
                stepper.step()
                stepper.zero_grad()
    return module


def flat(module: nn.Module) -> list[float]:
    """All parameters, one after the other; of complex ones, both parts."""
    found = [torch.view_as_real(p.detach()) if p.is_complex() else p.detach() for p in module.parameters()]
    return torch.cat([each.double().reshape(-1) for each in found]).tolist()


def digest(module: nn.Module, buffers: bool = True) -> str:
    """Equal if and only if the models are equal to the bit."""
    tensors = [*module.parameters(), *(module.buffers() if buffers else ())]
    whole = b"".join(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors)
    return hashlib.sha256(whole).hexdigest()[:16]


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """The largest difference of two lists of equal length."""
    assert len(a) == len(b)
    return max(abs(x - y) for x, y in zip(a, b, strict=True))

"""Digits, drawn by chance, and a small CNN that reads them. No Lightning here."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["SIZE", "accuracy", "digits", "network"]

SIZE = 12
_ROWS = """
01110 00100 01110 11111 00010 11111 00110 11111 01110 01110
10001 01100 10001 00010 00110 10000 01000 00001 10001 10001
10011 00100 00001 00100 01010 11110 10000 00010 10001 10001
10101 00100 00010 00010 10010 00001 11110 00100 01110 01111
11001 00100 00100 00001 11111 00001 10001 01000 10001 00001
10001 00100 01000 10001 00010 10001 10001 01000 10001 00010
01110 01110 11111 01110 00010 01110 01110 01000 01110 01100
"""
_GLYPHS = torch.tensor([[[int(x) for x in word] for word in row.split()] for row in _ROWS.split("\n") if row])
"""7 rows of 10 digits of 5 columns, as on a display."""


def digits(count: int, seed: int, noise: float = 0.2) -> tuple[Tensor, Tensor]:
    """Images ``[count, 1, SIZE, SIZE]``, each with a digit somewhere, and which digits."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(10, (count,), generator=generator)
    x = noise * torch.randn(count, 1, SIZE, SIZE, generator=generator)
    rows, columns = (torch.randint(SIZE - side + 1, (count,), generator=generator).tolist() for side in (7, 5))
    for image, digit, row, column in zip(x, y.tolist(), rows, columns, strict=True):
        image[0, row : row + 7, column : column + 5] += _GLYPHS[:, digit]
    return x, y


def network() -> nn.Sequential:
    """The same start in every process; 6 thousand parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(),
            nn.Linear(16 * 9, 32), nn.ReLU(), nn.Linear(32, 10),
        )  # fmt: skip


@torch.no_grad()
def accuracy(module: nn.Module, count: int = 2000) -> float:
    """On digits that nobody trains on."""
    x, y = digits(count, seed=10**6)
    return float((module(x).argmax(1) == y).float().mean())

"""States that follow from the number of their save, so that what is loaded can be told from what was saved."""

from __future__ import annotations

from typing import Any

import torch

from lightning_async.checkpoint.shards import Loaded
from lightning_async.checkpoint.writer import SaveJob


def shared_of(number: int, numel: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    return {
        "module": {"weight": torch.full((numel,), float(number)), "bias": torch.randn(100, 3, generator=generator)},
        "optimizer": {"state": {0: {"exp_avg": torch.arange(numel // 2) + number, "step": torch.tensor(number)}}},
        "epoch": number // 10,
    }


def own_of(number: int, rank: int) -> dict[str, Any]:
    return {"rank": rank, "random": torch.arange(5000) * (rank + 1) + number, "number": (number, None)}


def job_of(number: int, rank: int = 0, ranks: tuple[int, ...] = (0,), numel: int = 1000, run: str = "run") -> SaveJob:
    return SaveJob(
        number, number * 10, run, ranks, shared_of(number, numel), own_of(number, rank), {"reason": "test", "epoch": 3}
    )


def assert_loaded(loaded: Loaded, number: int, rank: int, numel: int = 1000, has_own: bool = True) -> None:
    assert (loaded.manifest.number, loaded.manifest.step) == (number, number * 10)
    assert_equal(loaded.shared, shared_of(number, numel))
    assert_equal(loaded.own, own_of(number, rank) if has_own else None)


def assert_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, torch.Tensor):
        assert one.dtype is other.dtype and torch.equal(one, other)
    else:
        assert one == other

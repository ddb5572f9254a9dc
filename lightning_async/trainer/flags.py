"""What any rank asks for becomes known to all at one and the same step, without a wait: it is heard a step later."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

__all__ = ["Flags", "flags_of"]

_PATIENCE = timedelta(minutes=30)


class Flags:
    """The largest of all ranks' numbers, of one step ago.

    Args:
        begin: begins a reduction of a CPU tensor to the maximum over all ranks, in place, and returns what waits for
            it; None where there is one rank.
    """

    def __init__(self, begin: Callable[[Tensor], Callable[[], object]] | None = None) -> None:
        self._begin = begin
        self._under_way: tuple[Tensor, Callable[[], object]] | None = None

    def exchange(self, mine: list[float]) -> list[float]:
        """Say what this rank asks for; all ranks call it at every batch.

        Returns what any of them has asked for at the last one. With one rank, what it asks for now.
        """
        if self._begin is None:
            return mine
        heard = [0.0] * len(mine)
        if self._under_way is not None:
            tensor, wait = self._under_way
            wait()
            heard = tensor.tolist()
        tensor = torch.tensor(mine, dtype=torch.float64)
        self._under_way = tensor, self._begin(tensor)
        return heard


def flags_of(strategy: Any) -> Flags:
    """For a strategy of Lightning's or of this package; all ranks call this together."""
    if getattr(strategy, "world_size", 1) == 1:
        return Flags()
    connection = getattr(strategy, "_connection", None)
    if connection is not None:
        return _over(connection.root.fork("flags", _PATIENCE))
    return _over_torch()


def _over(collectives: Any) -> Flags:
    from lightning_async.comm.protocols import ReduceOp

    def begin(tensor: Tensor) -> Callable[[], object]:
        pending = collectives.all_reduce(tensor, ReduceOp.MAX)
        return lambda: tensor.copy_(pending.result())

    return Flags(begin)


def _over_torch() -> Flags:
    import torch.distributed as dist

    group = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def begin(tensor: Tensor) -> Callable[[], object]:
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group, async_op=True)
        assert work is not None
        return work.wait

    return Flags(begin)

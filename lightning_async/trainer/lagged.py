"""What each rank says with every step, known to all at the next one: none waits, and all decide alike."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from lightning_async.comm.membership.start import is_loopback
from lightning_async.comm.protocols import Collectives, Pending
from lightning_async.comm.torch.collectives import TorchCollectives
from lightning_async.comm.torch.forming import Terms
from lightning_async.engine.world import World
from lightning_async.errors import CollectiveError

__all__ = ["Lagged", "lagged_of"]

_DEADLINE = timedelta(minutes=30)
_GOODBYE = timedelta(seconds=2)
_made = itertools.count(1)


class Lagged:
    """Rows of numbers, gathered beside training. All ranks take every step together, and call this alike.

    Args:
        collectives: a communicator of its own, for CPU tensors; closed by `close` if ``owned``.
        owned: nobody else closes it.
    """

    def __init__(self, collectives: Collectives, owned: bool = False) -> None:
        self._collectives, self._owned = collectives, owned
        self._pending: Pending[Tensor] | None = None

    def hear(self) -> list[list[float]]:
        """Every rank's row of the last step, by rank; none before the first, and none twice."""
        pending, self._pending = self._pending, None
        return [] if pending is None else pending.result().tolist()  # of a step ago: it has long arrived

    def say(self, row: Sequence[float]) -> None:
        """This rank's row; what was said before must have been heard."""
        assert self._pending is None
        self._pending = self._collectives.all_gather(torch.tensor(row, dtype=torch.float64))

    def ask(self, row: Sequence[float], patience: timedelta) -> list[list[float]]:
        """Return every rank's row, where all call this within ``patience``; none where some do not.

        For ranks that cannot go on: nothing is said afterwards.
        """
        until = time.monotonic() + patience.total_seconds()
        try:
            if self._pending is not None:
                self._pending.result(patience)
            last = self._collectives.all_gather(torch.tensor(row, dtype=torch.float64))
            return last.result(timedelta(seconds=max(0.0, until - time.monotonic()))).tolist()
        except CollectiveError:
            return []
        finally:
            self._pending = None

    def close(self) -> None:
        """Training is over."""
        if self._pending is not None:
            self._pending.wait(_GOODBYE)
            self._pending = None
        if self._owned:
            self._collectives.close()


def lagged_of(owner: str, trainer: Any) -> Lagged | None:
    """Over the ranks of a Trainer; None where there is one. All ranks call it together.

    Args:
        owner: names who needs it, for messages.
        trainer: its strategy is one of this package, or one over torch.distributed.

    Raises:
        ValueError: it is neither.
    """
    strategy, world = trainer.strategy, getattr(trainer.strategy, "world", None)
    if trainer.world_size == 1:
        return None
    name = f"lagged{next(_made)}"
    if isinstance(world, World):
        return Lagged(world.fork(name, _DEADLINE))
    if not dist.is_initialized():
        raise ValueError(
            f"`{owner}` cannot reach the other ranks of {type(strategy).__name__}: use a strategy of this package, or "
            "one over torch.distributed (DDPStrategy, FSDPStrategy)."
        )
    store = distributed_c10d.PrefixStore(f"lightning_async/{name}", distributed_c10d._get_default_store())
    host = "127.0.0.1" if is_loopback(os.environ.get("MASTER_ADDR", "")) else None
    collectives = TorchCollectives(
        store, trainer.global_rank, trainer.world_size, name=name, timeout=_DEADLINE, form_timeout=_DEADLINE,
        terms=Terms(host=host),
    )  # fmt: skip
    collectives.open()
    return Lagged(collectives, owned=True)

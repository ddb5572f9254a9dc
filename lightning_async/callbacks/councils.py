"""How all ranks come to do the same at the same step: each says what it asks for, and the severest is done.

Where ranks step together they say so with every step, in a gather that is read one step later, so that none waits for
it. Where replicas drift, the rank that needs the others calls them to a gate.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from lightning_async.comm.membership.start import is_loopback
from lightning_async.comm.protocols import Collectives, Pending
from lightning_async.comm.torch.collectives import TorchCollectives
from lightning_async.comm.torch.forming import Terms
from lightning_async.engine.world import World
from lightning_async.rules.divergence import Remedy

__all__ = ["Alone", "Council", "Drifting", "Lockstep", "Row", "council_of", "severest"]

_DEADLINE = timedelta(minutes=30)
_GOODBYE = timedelta(seconds=2)
_fits = itertools.count(1)


class Row(NamedTuple):
    """What one rank says of one step.

    Args:
        wanted: what it asks for.
        loss: of its batch; NaN where there is none.
        every: it has time to look at gradients every so many steps.
        clean: nothing was out of bounds.
    """

    wanted: Remedy = Remedy.NONE
    loss: float = float("nan")
    every: int = 1
    clean: bool = True


def severest(rows: Sequence[Row]) -> Remedy:
    """What all do.

    >>> severest([Row(), Row(Remedy.CUT_LR), Row(Remedy.SYNC)]).name
    'CUT_LR'
    """
    return max((row.wanted for row in rows), default=Remedy.NONE)


class Council(Protocol):
    """All ranks, as one of them sees them."""

    def hear(self) -> list[Row]:
        """What all ranks said, the same on all of them at this step; none where nothing was."""
        ...

    def say(self, row: Row) -> list[Row]:
        """This rank's row; what all said, where that is known at once."""
        ...

    def close(self) -> None:
        """Training is over."""
        ...


class Alone:
    """There is one rank."""

    def hear(self) -> list[Row]:
        return []

    def say(self, row: Row) -> list[Row]:
        return [row]

    def close(self) -> None: ...


class Drifting:
    """Replicas run at their own pace: what is more than a word is decided at a gate.

    Args:
        callback: is shown the gate, see `Convened`.
        strategy: has the gates, in whose headers losses travel.
    """

    def __init__(self, callback: Any, strategy: Any) -> None:
        self._callback, self._strategy = callback, strategy

    def hear(self) -> list[Row]:
        return [Row(loss=loss) for loss in self._strategy.gates.losses] if self._strategy.gates is not None else []

    def say(self, row: Row) -> list[Row]:
        if self._strategy.gates is not None:
            self._strategy.gates.tell_loss(row.loss if abs(row.loss) < float("inf") else float("inf"))
        if row.wanted > Remedy.NONE:
            self._callback.call_together()
        return []

    def close(self) -> None: ...


class Lockstep:
    """Ranks take every step together.

    Args:
        collectives: a communicator of its own, for CPU tensors; closed by `close` if ``owned``.
        owned: nobody else closes it.
    """

    def __init__(self, collectives: Collectives, owned: bool = False) -> None:
        self._collectives, self._owned = collectives, owned
        self._pending: Pending[Tensor] | None = None

    def hear(self) -> list[Row]:
        pending, self._pending = self._pending, None
        if pending is None:
            return []
        rows = pending.result().tolist()  # of a step ago: it has long arrived
        return [Row(Remedy(int(wanted)), loss, int(every), bool(clean)) for wanted, loss, every, clean in rows]

    def say(self, row: Row) -> list[Row]:
        assert self._pending is None
        self._pending = self._collectives.all_gather(torch.tensor([float(x) for x in row], dtype=torch.float64))
        return []

    def close(self) -> None:
        if self._pending is not None:
            self._pending.wait(_GOODBYE)
            self._pending = None
        if self._owned:
            self._collectives.close()


def council_of(callback: Any, trainer: Any) -> Council:
    """The right one for this Trainer's strategy. All ranks call it together, as training begins.

    Raises:
        ValueError: ranks that this package and torch.distributed know nothing of.
    """
    strategy, world = trainer.strategy, getattr(trainer.strategy, "world", None)
    if trainer.world_size == 1:
        return Alone()
    if callback.call_together is not None:
        return Drifting(callback, strategy)
    name = f"divergence{next(_fits)}"
    if isinstance(world, World):
        return Lockstep(world.fork(name, _DEADLINE))
    if not dist.is_initialized():
        raise ValueError(
            f"`DivergenceMonitor` cannot reach the other ranks of {type(strategy).__name__}: use a strategy of this "
            "package, or one over torch.distributed (DDPStrategy, FSDPStrategy)."
        )
    store = distributed_c10d.PrefixStore(f"lightning_async/{name}", distributed_c10d._get_default_store())
    host = "127.0.0.1" if is_loopback(os.environ.get("MASTER_ADDR", "")) else None
    collectives = TorchCollectives(
        store, trainer.global_rank, trainer.world_size, name=name, timeout=_DEADLINE, form_timeout=_DEADLINE,
        terms=Terms(host=host),
    )  # fmt: skip
    collectives.open()
    return Lockstep(collectives, owned=True)

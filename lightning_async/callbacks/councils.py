"""How all ranks come to do the same at the same step: each says what it asks for, and the severest is done.

Where ranks step together they say so with every step, in a gather that is read one step later, so that none waits for
it. Where replicas drift, the rank that needs the others calls them to a gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from lightning_async.rules.divergence import Remedy
from lightning_async.trainer.lagged import Lagged, lagged_of

__all__ = ["Alone", "Council", "Drifting", "Lockstep", "Row", "council_of", "severest"]


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
        lagged: carries the rows; closed by `close`.
    """

    def __init__(self, lagged: Lagged) -> None:
        self._lagged = lagged

    def hear(self) -> list[Row]:
        rows = self._lagged.hear()
        return [Row(Remedy(int(wanted)), loss, int(every), bool(clean)) for wanted, loss, every, clean in rows]

    def say(self, row: Row) -> list[Row]:
        self._lagged.say([float(x) for x in row])
        return []

    def close(self) -> None:
        self._lagged.close()


def council_of(callback: Any, trainer: Any) -> Council:
    """The right one for this Trainer's strategy. All ranks call it together, as training begins.

    Raises:
        ValueError: ranks that this package and torch.distributed know nothing of.
    """
    if callback.call_together is not None and trainer.world_size > 1:
        return Drifting(callback, trainer.strategy)
    lagged = lagged_of("DivergenceMonitor", trainer)
    return Alone() if lagged is None else Lockstep(lagged)

"""Too few replicas are left: they stand at a batch boundary until others have come, or the time is up."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import Any

from lightning_async.engine.gates import Gates
from lightning_async.engine.header import Vote
from lightning_async.errors import PeerLost
from lightning_async.events import tell
from lightning_async.trainer.convening import Convening
from lightning_async.trainer.patches import Undo, replace
from lightning_async.trainer.protocols import Drifting
from lightning_async.trainer.stopping import Stopping

__all__ = ["Shortage"]


class Shortage:
    """Patches the end of each batch.

    Args:
        strategy: knows who is left.
        trainer: its loop.
        convening: by whose gates newcomers are taken in.
        stopping: how all ranks leave early.
    """

    def __init__(self, strategy: Drifting, trainer: Any, convening: Convening, stopping: Stopping) -> None:
        self._strategy, self._trainer, self._convening, self._stopping = strategy, trainer, convening, stopping

    def install(self) -> list[Undo]:
        """Patch; returns what takes it back."""
        return [replace(self._trainer.fit_loop.epoch_loop, "on_advance_end", self._after_batch)]

    @property
    def _is_short(self) -> bool:
        survivors = self._strategy.survivors
        return self._strategy.gates is not None and survivors is not None and survivors.are_short

    def _after_batch(self, original: Any) -> Any:
        def on_advance_end(data_fetcher: Any) -> None:
            original(data_fetcher)
            if self._is_short:
                self._stand()

        return on_advance_end

    def _stand(self) -> None:
        """Until there are enough.

        Raises:
            PeerLost: nobody has come in time.
        """
        patience, survivors, began = self._strategy.patience, self._strategy.survivors, time.monotonic()
        until = began + patience.total_seconds()
        rank, left = survivors.generation.rank, survivors.generation.world_size
        words = f"Rank {rank}: {left} of at least {survivors.wanted} replicas are left, and wait {patience} for others."
        tell("short", logging.WARNING, words, rank=rank, world_size=left)
        while self._is_short:
            gates = self._strategy.gates
            assert gates is not None
            gates.wait(lambda gates=gates: self._wakes(gates) or time.monotonic() > until)
            if Vote.STOP in gates.agreed:
                self._strategy.finish_batch()
                self._stopping.leave(gates)
            if self._convening.is_called(gates):
                self._convening.hold()
            elif self._is_short and time.monotonic() > until:
                self._give_up(patience)
        tell("enough", logging.WARNING, f"There are enough replicas again, after {time.monotonic() - began:.1f} s.")

    def _wakes(self, gates: Gates) -> bool:
        return not self._is_short or self._convening.is_called(gates) or Vote.STOP in gates.agreed

    def _give_up(self, patience: timedelta) -> None:
        survivors = self._strategy.survivors
        raise PeerLost(
            f"Rank {survivors.generation.rank}: {survivors.generation.world_size} of at least {survivors.wanted} "
            f"replicas are left (`min_replicas`), and nobody has come within {patience} (`Deadlines(replicas=)`). "
            "Training ends here; start the others again, and resume from the last checkpoint.",
            (),
        )

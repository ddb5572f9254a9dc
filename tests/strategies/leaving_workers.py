"""What a rank of the tests of leaving does: train, and go alone when it is told to."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from lightning_async import (
    AsyncAveragingStrategy,
    EveryNSteps,
    FaultTolerantCheckpoint,
    ParameterServerStrategy,
    PeerMemory,
)
from lightning_async.rules.saving import Latest
from lightning_async.trainer.namespace import pl
from tests.strategies.joining_workers import wait_for
from tests.strategies.survivor_workers import DEADLINES, NUMBER, RANKS, Seen, loader


class Leaves(Seen):
    """Rank 2 is told to go in its fourth batch; rank 1 where it waits for rank 0 at the end of the epoch, or where two
    must be left, in its fourth batch, too: then each is told of both."""

    def __init__(self, folder: Path, fewest: int) -> None:
        super().__init__({})
        self._folder, self._goes = folder, (1, 2) if fewest == 1 else (2,)
        self._both = fewest == 2
        self.pause_s = 0.01 if fewest == 1 else 0.5  # all hear of it before the end

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        if (NUMBER, self.current_epoch, batch_idx) == (2, 0, 3):
            strategy.connection.dismiss((2,))  # as the launcher's word would, on a thread of its own
        if (NUMBER, self.current_epoch, batch_idx) == (1, 0, 3) and self._both:
            strategy.connection.dismiss((1, 2))
        if (NUMBER, self.current_epoch, batch_idx) == (1, 0, 6) and 1 in self._goes:
            threading.Thread(target=self._told_at_the_gate).start()
        if (NUMBER, self.current_epoch, batch_idx) == (0, 0, 6) and 1 in self._goes:
            wait_for(self._folder / "1 has gone")

    def _told_at_the_gate(self) -> None:
        strategy: Any = self.trainer.strategy
        while not strategy.gates.standing:
            time.sleep(0.01)
        strategy.connection.dismiss((1, 2))


def train(folder: str, fewest: int, served: bool = False) -> None:
    saved = Path(folder) / "saved"
    memory = PeerMemory(every_n_train_steps=1000)
    strategy: Any = AsyncAveragingStrategy(schedule=EveryNSteps(3), deadlines=DEADLINES, min_replicas=fewest)
    if served:
        strategy = ParameterServerStrategy(deadlines=DEADLINES, min_replicas=fewest)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=RANKS, max_epochs=2, default_root_dir=folder, logger=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        callbacks=[FaultTolerantCheckpoint(saved, every_n_train_steps=4, keep=Latest(1000)), memory],
    )  # fmt: skip
    module, kept = Leaves(Path(folder), fewest), {}

    def look() -> None:
        now: Any = memory._now
        kept.update({owner: parcel.label["step"] for owner, parcel in now.keeper._kept.items()})

    module.on_train_end = look  # type: ignore[method-assign]
    try:
        trainer.fit(module, loader(False, 0), loader(False, 0))
    finally:
        told = {"trained": module.trained, "steps": trainer.global_step, "kept": kept, "lost": strategy.summary.lost}
        os.write(1, b"\nENDED %b\n" % json.dumps(told).encode())

"""A user's script, for the launcher: ``train.py FOLDER BATCHES``.

Beside the folder, a file for each rank has a byte for each step since training began: what is printed may be lost with
the launcher. With SCENARIO_KILL set, rank 1 is killed after one save; started again, the training is not to come to its
end. Nor is it with SCENARIO_SLOW.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from lightning_async import AsyncAveragingStrategy, EveryNSteps, FaultTolerantCheckpoint
from lightning_async.checkpoint.store import CheckpointStore
from tests.strategies.failure_workers import Tiny, digest, loader, make_trainer


class Killed(Tiny):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.store, self.since = folder, CheckpointStore(folder), 0

    def on_train_start(self) -> None:
        self.steps = self.folder.with_name(f"steps.{self.global_rank}").open("wb", buffering=0)
        print("BEGINS", self.global_rank, self.trainer.global_step, flush=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.since += 1
        self.steps.write(b".")
        kill, first = "SCENARIO_KILL" in os.environ, os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        waits = kill and self.since > 12 and (not first or self.global_rank == 0)
        slow = "SCENARIO_SLOW" in os.environ or waits
        time.sleep(0.2 if slow else 0.01)
        if kill and first and self.global_rank == 1 and self.trainer.global_step > 10 and self.store.entries():
            print("KILLED at", self.trainer.global_step, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        self.steps.close()
        print("ENDS", self.global_rank, self.trainer.global_step, digest(self), flush=True)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    strategy = AsyncAveragingStrategy(schedule=EveryNSteps(4), min_replicas=2)
    checkpoint = FaultTolerantCheckpoint(folder, every_n_train_steps=8)
    trainer = make_trainer(strategy, 2, callbacks=[checkpoint], enable_checkpointing=True)
    trainer.fit(Killed(folder), loader(int(sys.argv[2])))

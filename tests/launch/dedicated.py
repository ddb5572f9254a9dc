"""A user's script: the last of three ranks serves. ``server_lifecycle.py FOLDER``: it is killed, and comes back; with
``endless`` training is to be ended."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from lightning_async import ParameterServerStrategy
from lightning_async.membership.launcher_channel import came_back
from lightning_async.strategies import server_lifecycle
from lightning_async.trainer.namespace import pl
from tests.strategies.failure_workers import Tiny, digest, loader, make_trainer


class Says(pl.Callback):
    """That training is under way."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3:
            print("\nTRAINS", flush=True)


class Kills(pl.Callback):
    """Rank 0 kills the rank that serves, trains on without it, and waits until it serves again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3 and trainer.global_rank == 0:
            os.kill(int((self.folder / "serves").read_text()), signal.SIGKILL)
        if trainer.global_step == 6:
            (beats,) = server_lifecycle._beats.values()
            while "server-0.1" not in beats.visitors():
                time.sleep(0.01)
            os.write(1, f"\nSERVER {trainer.strategy.servers.addresses[0]['name']}\n".encode())


def main(folder: Path, endless: bool) -> None:
    torch.set_num_threads(1)
    if os.environ["RANK"] == "2" and came_back() is None:
        (folder / "serves").write_text(str(os.getpid()))
    callbacks = [Says()] if endless else [Kills(folder)]
    trainer = make_trainer(ParameterServerStrategy("sync", placement="dedicated"), 3, callbacks=callbacks)
    net = Tiny()
    trainer.fit(net, loader(1_000_000 if endless else 10))
    os.write(1, f"\nFIT {trainer.global_rank} {trainer.world_size} {digest(net)}\n".encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]), "endless" in sys.argv)

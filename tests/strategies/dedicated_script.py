"""A user's script for the tests of launchers, with servers: ``dedicated_script.py DEVICES [PLACEMENT [START]]``."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from lightning_async import ParameterServerStrategy, TorchTransport
from tests.strategies.failure_workers import Tiny, digest, loader, make_trainer


class Says(Tiny):
    """Prints from every process, whoever started it."""

    def on_train_end(self) -> None:
        # One write: the lines of ranks that share a pipe must not mix.
        os.write(1, f"\nFIT {self.trainer.global_rank} {self.trainer.world_size} {digest(self)}\n".encode())


def main(devices: str, placement: Any = "colocated", start: Any = None) -> None:
    torch.set_num_threads(1)
    transport: Any = "auto" if start is None else TorchTransport(start=start)
    trainer = make_trainer(ParameterServerStrategy("sync", placement=placement, transport=transport), int(devices))
    trainer.fit(Says(), loader(6))


if __name__ == "__main__":
    main(*sys.argv[1:])

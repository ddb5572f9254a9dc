"""A user's script, for the tests of launchers: ``launch_script.py HOW DEVICES WHAT...``."""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import Any, cast

from lightning_async import AsyncAveragingStrategy, EveryNSteps, FaultTolerantCheckpoint, TorchTransport
from lightning_async._sockets import listening_port, snapshot
from lightning_async.membership.signing import Seal
from tests.strategies.failure_workers import Tiny, digest, finite, loader, make_trainer

BEFORE = set(os.environ)


class SaysHow(Tiny):
    """Prints from every process, whoever started it."""

    dies = fails = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.fails and self.trainer.global_rank == 1 and batch_idx == 10:
            raise ValueError("the data ran dry")
        if self.dies and self.trainer.global_rank == 1 and batch_idx == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        strategy = self.trainer.strategy
        # One write: the lines of ranks that share a pipe must not mix.
        os.write(
            1,
            f"\nFIT {strategy.global_rank} {strategy.world_size} {strategy.summary.rounds} {digest(self)} "
            f"{finite(self)}\n".encode(),
        )

        os.write(1, f"\nSIGNED {strategy.global_rank} {Seal.of_job().signs}\n".encode())
        os.write(1, f"\nLISTENS {strategy.global_rank} {' '.join(listens_at())}\n".encode())

    def on_test_end(self) -> None:
        loss = float(self.trainer.callback_metrics["test_loss"])
        os.write(1, f"\nTEST {self.trainer.strategy.global_rank} {loss!r}\n".encode())


def listens_at() -> list[str]:
    """The addresses of this process's listening sockets."""
    found = []
    for fd in snapshot():
        if listening_port(fd) is not None:
            with socket.socket(fileno=os.dup(fd)) as sock:
                found.append(sock.getsockname()[0])
    return sorted(found)


def main(how: str, devices: str, *what: str) -> None:
    module = SaysHow()
    for each in what:
        if each == "one too many":
            try:
                make_trainer(AsyncAveragingStrategy(), int(devices) + 1).fit(SaysHow(), loader(5))
            except ValueError as error:
                os.write(1, f"\nREFUSED {error}\n".encode())
            continue
        if each == "variables":
            found = sorted(set(os.environ) - BEFORE)
            found = [name for name in found if name.startswith(("MASTER_", "LIGHTNING_ASYNC_"))]
            os.write(1, f"\nVARIABLES {' '.join(found)}\n".encode())
            continue
        if each in ("fit", "refit", "saves", "killed", "fails", "caught"):
            named: dict[str, Any] = {"popen": "auto", "horovod": "horovod"}  # "auto" starts them so where nobody has
            transport: Any = named.get(how) or TorchTransport(start=cast(Any, how))
            strategy = AsyncAveragingStrategy(schedule=EveryNSteps(4), min_replicas=int(devices), transport=transport)
            saves = [FaultTolerantCheckpoint("saves", every_n_train_steps=10)] if each == "saves" else []
            trainer = make_trainer(strategy, int(devices), callbacks=saves, enable_checkpointing=bool(saves))
        if each in ("fit", "saves"):
            module = SaysHow()
        module.dies, module.fails = each == "killed", each in ("fails", "caught")
        if each == "caught":
            try:
                trainer.fit(module, loader(100_000))  # pyright: ignore[reportPossiblyUnboundVariable]
            except Exception as error:
                os.write(1, f"\nCAUGHT {type(error).__name__}\n".encode())
        elif each == "test":
            trainer.test(module, loader(5))  # pyright: ignore[reportPossiblyUnboundVariable]
        else:
            trainer.fit(module, loader(20 if each in ("fit", "refit", "saves") else 100_000))  # pyright: ignore[reportPossiblyUnboundVariable]
            summary = trainer.strategy.summary  # pyright: ignore[reportPossiblyUnboundVariable]
            os.write(1, f"\nSUMMARY {summary.rounds} {summary.samples}\n".encode())
    print("\nDONE", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

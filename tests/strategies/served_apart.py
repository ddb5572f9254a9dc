"""A scenario of trainings of one rank each that know nothing of each other, with the same servers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning_async import ParameterServerStrategy, ServerOptions
from lightning_async.membership.signing import SECRET
from lightning_async.trainer.namespace import pl
from tests.cli.test_serve import SECRET_OF_JOB, free_ports, serving
from tests.strategies import problem
from tests.strategies.workers import Net, loader, make_trainer, scenario

BATCHES, WARMUP, BEFORE = 6, 4, 4


class Amid(pl.Callback):
    """Another training begins, and ends, between two batches of this one."""

    def __init__(self, other: Any) -> None:
        self.other = other

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == BEFORE - 1:
            self.other()


class Steps(pl.Callback):
    """Whether the next step is one of all workers, as each batch begins."""

    def __init__(self) -> None:
        self.in_step: list[bool] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.in_step.append(trainer.strategy._session.step_runner.tables.in_step)


@scenario
def three(folder: Path) -> Any:
    """One ends, one goes on from its checkpoint, and another one comes amid that."""
    told: list[dict[str, Any]] = []

    def train(address: str, *callbacks: Any, epochs: int = 1, checkpoint: Path | None = None) -> Any:
        strategy = ParameterServerStrategy(
            staleness="none", warmup_steps=WARMUP, options=ServerOptions(server_address=address)
        )
        steps = Steps()
        trainer = make_trainer(strategy, callbacks=[steps, *callbacks], devices=1, max_epochs=epochs)
        trainer.fit(net := Net(), loader(problem.batches(0, BATCHES)), ckpt_path=checkpoint)
        told.append({"in_step": steps.in_step, "values": problem.flat(net), **strategy.summary.metrics()})
        return trainer

    os.environ[SECRET] = SECRET_OF_JOB
    try:
        with serving(free_ports(), "--staleness", "none", "--warmup-steps", f"{WARMUP}") as (_, address):
            train(address).save_checkpoint(saved := folder / "saved.ckpt")
            train(address, Amid(lambda: train(address)), epochs=2, checkpoint=saved)
    finally:
        del os.environ[SECRET]
    return told

"""Two ranks of which one ends by an exception, with what all have in common and what is each one's own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_async import DeltaMean, DiLoCo, EveryNSteps, Synchronous
from lightning_async.callbacks.checkpoint import FaultTolerantCheckpoint
from tests.callbacks.checkpoint_ranks import (
    BATCHES,
    EPOCHS,
    STOP,
    At,
    Interrupted,
    Noisy,
    Stands,
    interrupt,
    settled,
    train,
    until,
)
from tests.callbacks.window_ranks import AtBatch
from tests.strategies import problem
from tests.strategies.workers import logged, make_trainer, rank, scenario, together


class Plain(Noisy):
    """Nothing random in it but its data, which ranks divide; tells what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
        self.seen: dict[int, float] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen[self.trainer.global_step] = float(batch[0].sum())
        return super().training_step(batch, batch_idx)


def divided(folder: Path, *callbacks: Any, **settings: Any) -> Plain:
    x = torch.randn(8 * BATCHES, 4, generator=torch.Generator().manual_seed(5))
    data = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=4, shuffle=True)
    module, saved = Plain(), FaultTolerantCheckpoint(folder, every_n_train_steps=1000, **settings)
    trainer = make_trainer(
        "ddp", callbacks=[saved, *callbacks], max_epochs=EPOCHS, enable_checkpointing=True, use_distributed_sampler=True
    )
    module.error = None  # pyright: ignore
    try:
        trainer.fit(module, data)
    except Exception as error:
        module.error = type(error).__name__  # pyright: ignore
    return module


def ddp_fails(folder: str) -> Any:
    """Rank 1 ends; so rank 0's next collective fails."""
    began = time.monotonic()
    module = divided(Path(folder), *([At(STOP, interrupt)] if rank() == 1 else []))
    return {"error": module.error, "seconds": time.monotonic() - began, "last": max(module.losses)}


@scenario
def ddp(folder: Path) -> Any:
    """What an earlier pair of processes has left goes on."""
    with logged() as messages:
        rest = divided(folder.parent / "left")
    whole = divided(folder)
    return {
        "error": rest.error,
        "seen": [rest.seen[step] == whole.seen[step] for step in range(STOP, BATCHES * EPOCHS)],
        "losses": rest.losses == {step: loss for step, loss in whole.losses.items() if step >= STOP},
        "equal": problem.digest(rest) == problem.digest(whole),
        "said": [message for message in messages if "has no state of its own" in message],
    }


def hears(strategy: Any) -> None:
    """Rank 0 does not run to its end before it hears of the other one."""
    until, membership = time.monotonic() + 60.0, strategy.connection.membership
    while not membership.lost() and not membership.generation.number and time.monotonic() < until:
        time.sleep(0.01)  # the engine's thread may have left it behind already


def fails(folder: Path, strategy: Callable[[], Any]) -> dict[str, Any]:
    begun, error = Noisy(), None
    failing = strategy()
    does = At(STOP, interrupt) if rank() == 1 else At(STOP + 3, lambda: hears(failing))
    settings: dict[str, Any] = {"every_n_train_steps": 1000, "save_on_exception": True}
    try:
        train(folder, failing, does, module=begun, **settings)
    except Exception as raised:
        error = type(raised).__name__
    entry = settled(folder)[0]
    assert entry.manifest is not None
    rest = train(folder, strategy(), **settings)
    first = min(rest.losses)
    return {
        "error": error,
        "reason": entry.manifest.reason,
        "ranks": entry.manifest.ranks,
        "first": first,
        "last": max(begun.losses),
        "steps": len(rest.losses),
        "goes_on": rest.losses[first] == begun.losses.get(first, rest.losses[first]),  # it may have ended behind a step
        "digest": problem.digest(rest),
    }


@scenario
def synchronous(folder: Path) -> Any:
    return fails(folder, lambda: together(DeltaMean(), Synchronous()))


@scenario
def standing_still(folder: Path) -> Any:
    return fails(folder, lambda: together(DeltaMean(), EveryNSteps(4), overlap=False))


@scenario
def asynchronous(folder: Path) -> Any:
    return fails(folder, lambda: together(DiLoCo(), EveryNSteps(4)))


@scenario
def at_a_gate(folder: Path) -> Any:
    """Rank 0 waits at the end of the epoch for rank 1, which fails at its end's hooks' very beginning."""
    waits = folder / ".waits"

    class Late(Noisy):
        def on_train_batch_end(self, *_: Any) -> None:
            if rank() == 1 and self.trainer.global_step == BATCHES:
                until(waits.exists, "rank 0 stands at the gate")
                raise Interrupted

    begun, name, tell = Late(), None, [Stands(waits, BATCHES)] if rank() == 0 else []
    try:
        train(folder, together(DiLoCo(), EveryNSteps(4)), *tell, module=begun, save_on_exception=True)
    except Exception as error:
        name = type(error).__name__
    entry = settled(folder)[0]
    assert entry.manifest is not None
    rest = train(folder, together(DiLoCo(), EveryNSteps(4)))
    return {"error": name, "reason": entry.manifest.reason, "first": min(rest.losses), "digest": problem.digest(rest)}


def tell_this() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def ddp_ends_within_accumulation(folder: str, later: int) -> Any:
    """Rank 0 is told to stop, and cannot go on; rank 1, which exchanges no gradients with it, comes to its next batch.

    Args:
        folder: of the checkpoints.
        later: batches after the signal, in which something that rank 0 needs is missing.
    """
    code, error = None, None
    does = [AtBatch(16, tell_this), AtBatch(16 + later, interrupt)] if rank() == 0 else []
    limits = {"accumulate_grad_batches": 4}
    with logged() as messages:
        try:
            train(Path(folder), "ddp", *does, every_n_train_steps=1000, limits=limits)
        except SystemExit as ended:
            code = ended.code
        except Exception as raised:
            error = repr(raised)
    return {
        "code": code,
        "error": error,
        "said": [message for message in messages if "before it came to this batch" in message],
    }

"""What a rank of the tests of failures and launchers does: train a tiny model, say how it ended.

A rank prints ``step N`` for every step and ends with a line ``ENDED {...}``, whatever happened.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_async import AsyncAveragingStrategy, AsyncGradientStrategy, DeltaMean, EveryNSteps, Timeouts
from lightning_async.errors import StoreLost
from lightning_async.trainer.namespace import pl
from lightning_async.transports import torch as torch_transport
from tests.strategies.workers import logged

pl_rank = "LOCAL_RANK"


def digest(module: nn.Module) -> str:
    """Equal if and only if the parameters are, to the bit."""
    whole = b"".join(p.detach().cpu().numpy().tobytes() for p in module.parameters())
    return hashlib.sha256(whole).hexdigest()[:16]


def finite(module: nn.Module) -> bool:
    return all(bool(torch.isfinite(p).all()) for p in module.parameters())


class Tiny(pl.LightningModule):
    """Linear regression, a few milliseconds a step.

    Args:
        pause_s: sleep in every step.
        at: rank, step, and what happens there: "raise", "wait", "die"; or "raise in validation".
        sync_point: a file; the wait ends when it is there.
    """

    def __init__(self, pause_s: float = 0.0, at: tuple[int, int, str] | None = None, sync_point: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 1)
        self.pause_s, self.at, self.sync_point = pause_s, at, sync_point
        self.taken = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(self.pause_s)
        self.taken += 1
        print(f"step {self.taken}", flush=True)
        if self.at is not None and (self.trainer.global_rank, self.taken) == tuple(self.at[:2]):
            if self.at[2] == "raise":
                raise ValueError("the data ran dry")
            if self.at[2] == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            _wait_for(Path(self.sync_point).exists)
        return (self.layer(batch) - self.trainer.global_rank).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.at is not None and self.trainer.global_rank == self.at[0]:
            raise ValueError("the data ran dry")
        self.log("val_loss", self.layer(batch).pow(2).mean(), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.layer(batch).pow(2).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader(batches: int) -> DataLoader:
    data = torch.randn(2 * batches, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(data, batch_size=2)  # pyright: ignore[reportArgumentType]


def make_trainer(strategy: Any, num_ranks: int, **options: Any) -> Any:
    defaults = {
        "accelerator": "cpu",
        "devices": num_ranks,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 1,
    }
    return pl.Trainer(strategy=strategy, **(defaults | options))


def train(
    batches: list[int],
    period: int = 4,
    overlap: bool = True,
    timeouts: dict[str, float] | None = None,
    pause_s: float = 0.005,
    at: tuple[int, int, str] | None = None,
    sync_point: str = "",
    windows: int | None = None,
    fewest: int | None = None,
    **options: Any,
) -> None:
    """Train; ``batches`` by rank; ``windows`` of gradients of so many batches, in place of averaging.

    At least ``fewest`` ranks go on where others are lost; by default all are needed.
    """
    own = int(os.environ["RANK"])
    times = {name: timedelta(seconds=s) for name, s in (timeouts or {}).items()}
    limits: Any = {"min_replicas": fewest or len(batches), "timeouts": Timeouts(**times)}  # pyright: ignore
    if windows is None:
        strategy = AsyncAveragingStrategy(DeltaMean(), EveryNSteps(period), overlap=overlap, **limits)
    else:
        strategy = AsyncGradientStrategy(windows, **limits)
    module = Tiny(pause_s, at, sync_point)
    trainer = make_trainer(strategy, len(batches), **options)
    told: dict[str, Any] = {"rank": own}
    try:
        validates = at is not None and at[2] == "raise in validation"
        trainer.fit(module, loader(batches[own]), loader(2) if validates else None)
    except BaseException as error:
        told |= {"error": f"{type(error).__name__}: {error}", "ranks": list(getattr(error, "ranks", ()))}
        raise
    finally:
        summary = strategy.summary
        told |= {
            "at": time.time(),
            "digest": digest(module),
            "finite": finite(module),
            "taken": module.taken,
            "failed": summary.failed_rounds,
            "rounds": summary.rounds,
            "absent": summary.absent_rounds,
        }
        print("ENDED " + json.dumps(told), flush=True)


def left_alone() -> None:
    """Rank 1 is lost in the first of two fits; what rank 0 says in the second."""

    def fit(module: Tiny) -> int:
        strategy = AsyncAveragingStrategy(rule=DeltaMean(), schedule=EveryNSteps(2), min_replicas=1)
        make_trainer(strategy, 2).fit(module, loader(8))
        return module.taken

    fit(Tiny(at=(1, 3, "die")))
    with logged() as messages:
        taken = fit(Tiny())
    print("ENDED " + json.dumps({"said": messages, "taken": taken}), flush=True)


def without_the_store(sync_point: str, **kwargs: Any) -> None:
    """Train; where the store is lost, end as any script does, once the file ``sync_point`` is there."""
    try:
        train(**kwargs)
    except StoreLost:
        _wait_for(Path(sync_point).exists)
        raise


def between_runs(then: str, how: str, dead_after: float, folder: str) -> None:
    """Fit; then rank 1 is gone, and the others go on with another call of the Trainer; say how that ended."""
    num_ranks, own = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    strategy = AsyncAveragingStrategy(
        rule=DeltaMean(),
        schedule=EveryNSteps(4),
        min_replicas=num_ranks,
        timeouts=Timeouts(dead_after=timedelta(seconds=dead_after)),
    )
    module, trainer = Tiny(), make_trainer(strategy, num_ranks)
    trainer.fit(module, loader(8))
    if own == 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "leaves":
            return
        time.sleep(2.5 * dead_after)  # it lives, and comes late
    told: dict[str, Any] = {"rank": own, "error": ""}
    began = time.monotonic()
    try:
        if then == "save":
            trainer.save_checkpoint(os.path.join(folder, "between.ckpt"))
        else:
            getattr(trainer, then)(module, loader(8))
    except Exception as error:
        told |= {"error": f"{type(error).__name__}: {error}"}
    print("ENDED " + json.dumps(told | {"took_s": time.monotonic() - began}), flush=True)


def without_the_first(where: str, folder: str) -> None:
    """Rank 0 dies in the start, when the other rank has come to ``where``, which goes on there when it is gone."""
    here, victim = Path(folder, "here"), Path(folder, "victim")

    def gone(*args: Any, **kwargs: Any) -> Any:
        if os.environ["RANK"] == "0":
            _wait_for(here.exists)
            victim.with_suffix(".part").write_text(str(os.getpid()))
            victim.with_suffix(".part").rename(victim)
            os.kill(os.getpid(), signal.SIGKILL)
        here.touch()
        _wait_for(lambda: victim.exists() and not _lives(int(victim.read_text())))
        return original(*args, **kwargs)

    original = getattr(torch_transport, where)
    setattr(torch_transport, where, gone)
    train([8, 8])


def _wait_for(condition: Callable[[], bool]) -> None:
    """Until the test's deadline at the latest."""
    while not condition():
        time.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

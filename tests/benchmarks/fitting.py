"""A way of training, and how those that use Lightning's Trainer do a job."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy
from torch.utils.data import DataLoader

from tests.benchmarks.measured import Job, Meter, RankResult
from tests.benchmarks.model import BATCH, CharModule, Slot, loader

__all__ = ["Peer", "Work", "claims_of", "fit"]

Work = Callable[[Job, Slot], tuple[CharModule, DataLoader[Any]]]
"""What is trained by a rank, and with which batches."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One way of training.

    Args:
        about: a few words for the report.
        run: does a `Job`.
        sync_every: steps from one communication to the next; 0 for none.
        alone: whether it is a single process, whatever the number of replicas.
        ours: whether it is the package under test.
        horovod: whether Horovod's launcher starts it, rather than torchrun.
        compressed: whether its messages take fewer bytes than the model.
        batch: samples in a batch.
        timed: whether its ranks may end by time, each after another number of steps.
        update_s: what an optimizer step takes, by the seconds of a batch and of an exchange, to plan by.
    """

    about: str
    run: Callable[[Job], RankResult]
    sync_every: int = 0
    alone: bool = False
    ours: bool = False
    horovod: bool = False
    compressed: bool = False
    batch: int = BATCH
    timed: bool = False
    update_s: Callable[[float, float], float] | None = None


def small(job: Job, slot: Slot) -> tuple[CharModule, DataLoader[Any]]:
    """A few tokens a batch, so that a slot may be short."""
    return CharModule(slot), loader(job.rank, job.seconds)


def fit(
    job: Job,
    strategy: Strategy,
    *callbacks: pl.Callback,
    num_nodes: int = 1,
    accumulate: int = 1,
    work: Work = small,
) -> RankResult:
    """Train with Lightning's Trainer."""
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    torch.manual_seed(job.seed)
    meter = Meter(job)
    module, batches = work(job, Slot(job.step_s, job.tail_s))
    trainer = pl.Trainer(
        accumulate_grad_batches=accumulate,
        accelerator="cpu",
        devices=1,
        num_nodes=num_nodes,
        strategy=strategy,
        # The meter comes last, so that what the other callbacks do is in the step.
        callbacks=[*callbacks, meter],
        max_steps=-1 if job.seconds is not None else (job.warmup + job.steps) // job.accumulate,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, batches)
    meter.result.losses = module.losses
    return meter.result


def claims_of(strategy: Any) -> dict[str, float]:
    """The numbers of the strategy's own summary, and the share it says it hid."""
    summary = strategy.summary
    if summary is None:
        return {}
    numbers = summary.state_dict() if hasattr(summary, "state_dict") else vars(summary)
    claims = {name: float(value) for name, value in numbers.items() if isinstance(value, (int, float))}
    return {**claims, "hidden_share": float(summary.hidden_share)}

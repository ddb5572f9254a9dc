"""What one rank is asked to do, and what it measures."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from tests.benchmarks.link import sent_bytes

__all__ = ["Job", "Meter", "RankResult", "note_step"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one rank has to do, as the benchmark hands it to `worker`.

    Args:
        peer: a name in `PEERS`.
        rank: this replica.
        num_replicas: replicas in all.
        interface: the network interface whose counter tells the bytes sent.
        warmup: steps before the measurement starts.
        steps: steps measured (or all-reduces, for the probe).
        step_s: padded length of a step's compute; 0.0 for no padding.
        tail_s: what backward and optimizer need of it.
        seconds: where given, training ends by this time instead of a number of steps.
        round_s: period of time-triggered rounds.
        sync_every: replaces the peer's own number of steps per round.
        pace_mbit: where given, the rank holds its connections to this rate.
        seed: of the model, and of the batches.
        begin: file of a model, and of an optimizer's state, that training begins with.
        rates: learning rate of steps of a batch, power of the batches that it goes with, and factor where it is late.
        look_s: seconds from one look at the held-out loss to the next; 0 for none.
        copies: folder of files with the parameters of then and now; none are kept without, see `language.Copies`.
        copy_from: the number of steps after which the first is made.
        copy_every: steps from one to the next.
        width: of the layers of the wide model, which has 24 of them.
        accumulate: batches of an optimizer step, of peers that are bound by their gradients.
    """

    peer: str
    rank: int
    num_replicas: int
    interface: str
    warmup: int
    steps: int
    step_s: float = 0.0
    tail_s: float = 0.0
    seconds: float | None = None
    round_s: float = 2.0
    sync_every: int | None = None
    pace_mbit: float | None = None
    seed: int = 0
    begin: str | None = None
    rates: tuple[float, float, float] = (2e-3, 1 / 3, 0.5)
    look_s: float = 0.0
    copies: str | None = None
    copy_from: int = 0
    copy_every: int = 5
    width: int = 1024
    accumulate: int = 1

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(kw_only=True)
class RankResult:
    """What one rank measured.

    Args:
        ends: the moment at which each training step ended (a clock that all processes of a machine share).
        sent: pairs of a number of steps done and the bytes that this rank's interface had sent by then.
        cpu_s: this process's time on processors, of all its threads, at the ends of the measured part.
        losses: training loss of each step.
        held_out: moments, and the loss of the parameters of then on text that is not trained on.
        compute_s: seconds of forward, and of backward and optimizer, of each step (probe ``compute`` only).
        round_s: seconds of each blocking all-reduce of the model (probe ``round`` only).
        claims: what the strategy says of itself.
    """

    ends: list[float] = field(default_factory=list)
    sent: list[tuple[int, int]] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    held_out: list[tuple[float, float]] = field(default_factory=list)
    compute_s: list[tuple[float, float]] = field(default_factory=list)
    round_s: list[float] = field(default_factory=list)
    claims: dict[str, float] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> RankResult:
        return cls(**json.loads(path.read_text()))


class Meter(pl.Callback):
    """Notes when each step ends, and the interface's counter at both ends of the measured part."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.result = RankResult()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        note_step(self.job, self.result)


def note_step(job: Job, result: RankResult) -> None:
    """One more step has ended."""
    result.ends.append(time.monotonic())
    num_steps = len(result.ends)
    if num_steps in (job.warmup, job.warmup + job.steps):
        result.sent.append((num_steps, sent_bytes(job.interface)))
        result.cpu_s.append(time.process_time())

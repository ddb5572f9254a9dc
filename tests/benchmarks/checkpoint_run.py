"""One training of the benchmark of checkpoints, beside one way of saving.

``python -m tests.benchmarks.checkpoint_run JOB RESULT PARENT`` does it in a process of its own.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from tests.benchmarks.checkpoint_peers import PEERS, Job, Saves
from tests.benchmarks.worker import die_with_parent

__all__ = ["Measured", "run"]

EXPERTS, LAYERS = 8, 4


@dataclass(kw_only=True)
class Measured:
    """What one training measured.

    Args:
        run_s: seconds that a step took, of those measured, with all that was saved meanwhile.
        steps: so many were measured.
        step_s: one step, without what is between it and the next: the median.
        stalls_s: of each save, the first of the run too: how much longer than usually the training thread was held.
        work_s: of each save, the processor's time of the training thread: of it, not of others on the machine.
        written_s: of each save that the run has seen done: from where the thread was held, to within a step.
        saves: that began in the measured steps.
        bytes: of one checkpoint.
    """

    run_s: float
    steps: int
    step_s: float
    stalls_s: list[float] = field(default_factory=list)
    work_s: list[float] = field(default_factory=list)
    written_s: list[float] = field(default_factory=list)
    saves: int = 0
    bytes: float = 0.0


class Experts(pl.LightningModule):
    """One of eight experts learns at each step, in turn: parameters and Adam's moments are those of all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        stacks = [nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS))) for _ in range(EXPERTS)]
        self.experts = nn.ModuleList(stacks)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        # At the first step all of them do, so that all moments are there from then on.
        chosen = list(self.experts) if batch_idx == 0 else [self.experts[batch_idx % EXPERTS]]
        return torch.stack([F.mse_loss(expert(batch), batch) for expert in chosen]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4, fused=True)


class Same(Dataset[Tensor]):
    """One batch, so many times: fetching takes no time."""

    def __init__(self, batch: Tensor, times: int) -> None:
        self.batch, self.times = batch, times

    def __len__(self) -> int:
        return self.times

    def __getitem__(self, index: int) -> Tensor:
        return self.batch


class Meter(pl.Callback):
    """Notes when steps begin and end, and how many saves had begun and were done by then."""

    def __init__(self, saves: Saves) -> None:
        self.saves = saves
        self.begins: list[float] = []
        self.ends: list[float] = []
        self.worked: list[float] = []
        self.begun: list[int] = []
        self.done: list[int] = []
        self._worked_before = 0.0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.begins.append(time.monotonic())
        if self.ends:
            self.worked.append(time.thread_time() - self._worked_before)
        self.begun.append(self.saves.begun(trainer.global_step))
        self.done.append(self.saves.done(trainer.global_step))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.ends.append(time.monotonic())
        self._worked_before = time.thread_time()

    def measured(self, job: Job) -> Measured:
        """Of the whole run, and of the steps from the one on that makes the first save due."""
        gaps = [begin - end for begin, end in zip(self.begins[1:], self.ends, strict=False)]  # after step 1, 2, ...
        after = [i for i in range(len(gaps)) if self.begun[i + 1] > self.begun[i]]
        usual_s = statistics.median(gap for i, gap in enumerate(gaps) if i not in after)
        first, last = job.first - 1, job.steps - 1
        seen = [next((i for i, done in enumerate(self.done) if done > save), None) for save in range(len(after))]
        return Measured(
            run_s=(self.ends[last] - self.ends[first]) / (last - first),
            steps=last - first,
            step_s=statistics.median(end - begin for begin, end in zip(self.begins, self.ends, strict=True)),
            stalls_s=[gaps[i] - usual_s for i in after],
            work_s=[self.worked[i] for i in after],
            written_s=[self.begins[i] - self.ends[at] for i, at in zip(seen, after, strict=True) if i is not None],
            saves=sum(first <= i < last for i in after),
        )


def run(job: Job) -> Measured:
    """Train and save."""
    torch.manual_seed(0)
    saves = PEERS[job.peer].make(job)
    meter = Meter(saves)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, max_steps=job.steps, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[meter, *saves.callbacks], plugins=[saves.io] if saves.io else None,
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in saves.callbacks),
    )  # fmt: skip
    trainer.fit(Experts(job.width), DataLoader(Same(torch.randn(job.batch, job.width), job.steps), batch_size=None))
    saves.finish()
    measured = meter.measured(job)
    made = [path for path in Path(job.folder).iterdir() if not path.name.startswith(".")]
    sizes = [path.stat().st_size for path in Path(job.folder).rglob("*") if path.is_file()]
    measured.bytes = sum(sizes) / max(1, len(made))
    return measured


def main() -> None:
    job, result, parent = sys.argv[1:4]
    die_with_parent(int(parent))
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    Path(result).write_text(json.dumps(asdict(run(Job(**json.loads(job))))))


if __name__ == "__main__":
    main()

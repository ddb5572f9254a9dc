"""Train in a process that is killed twice, and compare it with a training without interruption.

Start it by::

    python examples/fault_tolerance.py

The same training runs twice at the same time: once without interruption, and once in a process that is ended by ``kill
-9`` at two random moments and started again. For this, the program only gives the Trainer a `FaultTolerantCheckpoint`.
In the end every loss of every step is compared, and all weights, bit by bit. The exit status is 0 if all are equal.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

TIMEOUT_S = 300.0
"""The longest time for one process, on a very busy machine."""


def train(folder: Path, attempt: int, steps: int) -> None:
    """Run the program that is killed; it uses ``attempt`` only for the name of the file of its losses."""
    import lightning.pytorch as pl  # or: import pytorch_lightning as pl
    import torch
    from torch import Tensor, nn
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_async import FaultTolerantCheckpoint

    class Regression(pl.LightningModule):
        """A model with all kinds of state: dropout, statistics, an optimizer's momentum, a scheduler, accumulation."""

        def __init__(self) -> None:
            super().__init__()
            width = 256
            self.net = nn.Sequential(
                nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2),
                nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1),
            )  # fmt: skip

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            x, y = batch
            loss = (self.net(x) - y).square().mean()
            batches = self.trainer.fit_loop.epoch_loop.total_batch_idx
            losses.write(f"{batches} {float(loss).hex()}\n")
            return loss

        def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
            x, y = batch
            self.log("val/loss", (self.net(x) - y).square().mean())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.003)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    torch.set_num_threads(1)
    pl.seed_everything(1, verbose=False)
    x = torch.randn(32 * 60, 8)
    data = TensorDataset(x, x.sin().sum(dim=1, keepdim=True))
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        accumulate_grad_batches=2,
        callbacks=[FaultTolerantCheckpoint(folder / "checkpoints", every_n_train_steps=10)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Regression()
    with (folder / f"losses-{attempt}.txt").open("w", buffering=1) as losses:
        trainer.fit(module, DataLoader(data, batch_size=32, shuffle=True), DataLoader(data, batch_size=320))
    weights = b"".join(value.numpy().tobytes() for value in module.state_dict().values())
    (folder / "weights.txt").write_text(hashlib.sha256(weights).hexdigest())


class Attempt(NamedTuple):
    """One process of a training.

    Args:
        losses: Exact losses, by the number of the batch.
        ended_by: Way in which the process has ended.
    """

    losses: dict[int, str]
    ended_by: str


class Training:
    """A training in a process of its own.

    Args:
        folder: Folder for checkpoints, losses and weights, which is created.
        attempt: Number of the process in this folder.
        steps: Number of optimizer steps to train.
    """

    def __init__(self, folder: Path, attempt: int, steps: int) -> None:
        folder.mkdir(exist_ok=True)
        self._losses = folder / f"losses-{attempt}.txt"
        self._log = folder / f"output-{attempt}.txt"
        command = [sys.executable, __file__, "--train", str(folder), str(attempt), "--steps", str(steps)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._until = time.monotonic() + TIMEOUT_S

    def losses(self) -> dict[int, str]:
        """Return the losses of the batches so far."""
        text = self._losses.read_text() if self._losses.exists() else ""
        rows = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return {int(batch): loss for batch, loss in rows}

    def kill(self, at: int, delay_s: float) -> Attempt:
        """Kill the process by ``kill -9``, after batch ``at`` and ``delay_s``, unless it has ended before."""
        while self._process.poll() is None and max(self.losses(), default=0) < at:
            self._check_time()
            time.sleep(0.005)
        time.sleep(delay_s)
        if self._process.poll() is not None:
            return self.finish()
        self._process.kill()
        self._process.wait()
        return Attempt(self.losses(), "kill -9")

    def finish(self) -> Attempt:
        """Wait until the process has ended without an error."""
        while self._process.poll() is None:
            self._check_time()
            time.sleep(0.05)
        if self._process.returncode:
            raise SystemExit(f"A training has failed:\n{self._log.read_text()}")
        return Attempt(self.losses(), "its end")

    def end(self) -> None:
        """Kill the process, whatever its state is."""
        self._process.kill()
        self._process.wait()

    def _check_time(self) -> None:
        if time.monotonic() > self._until:
            raise SystemExit(f"A training has not ended after {TIMEOUT_S:.0f} s:\n{self._log.read_text()}")


def interrupted(folder: Path, steps: int, kills: int, chance: random.Random) -> list[Attempt]:
    """Train in ``kills`` processes that are killed, and in a last one that finishes."""
    attempts: list[Attempt] = []
    batches = 2 * steps
    for number in range(1, kills + 2):
        training = Training(folder, number, steps)
        try:
            if number <= kills:
                # Each kill falls into a part of the training of its own, so that each attempt makes progress.
                part = batches / (kills + 1)
                at = int(part * (number - 1 + chance.uniform(0.3, 0.9)))
                attempts.append(training.kill(at, chance.uniform(0, 0.02)))
            else:
                attempts.append(training.finish())
        finally:
            training.end()
    return attempts


def report(whole: Attempt, attempts: Sequence[Attempt], weights_equal: bool) -> bool:
    """Print what was trained, and whether it is equal; return whether it is."""
    print(f"{'attempt':>7}  {'batches':>12}  {'ended by':<8}  {'trained again':>13}  losses equal to the bit")
    seen: set[int] = set()
    wrong: list[str] = []
    for number, (losses, ended_by) in enumerate(attempts, start=1):
        equal = [batch for batch, loss in losses.items() if whole.losses.get(batch) == loss]
        span = f"{min(losses)} to {max(losses)}" if losses else "none"
        print(f"{number:>7}  {span:>12}  {ended_by:<8}  {len(seen & losses.keys()):>13}  {len(equal)} of {len(losses)}")
        wrong += [f"batch {batch} of attempt {number}" for batch in sorted(losses.keys() - set(equal))]
        seen |= losses.keys()
    wrong += [f"batch {batch} was never trained" for batch in sorted(whole.losses.keys() - seen)]
    if not weights_equal:
        wrong.append("the weights at the end")
    print()
    if wrong:
        print(f"NOT equal with the training without interruption: {', '.join(wrong[:10])}.")
    else:
        print(f"All {len(whole.losses)} losses, and the weights at the end, are equal with those of the training that")
        print("nobody has interrupted.")
    return not wrong


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps to train (default: 200)")
    parser.add_argument("--kills", type=int, default=2, help="how often to kill it (default: 2)")
    parser.add_argument("--seed", type=int, help="of the moments (default: another one each time)")
    parser.add_argument("--train", nargs=2, metavar=("FOLDER", "ATTEMPT"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.train:
        train(Path(options.train[0]), int(options.train[1]), options.steps)
        return 0
    with tempfile.TemporaryDirectory(prefix="fault-tolerance-", ignore_cleanup_errors=True) as folder:
        at_peace = Training(Path(folder, "whole"), 1, options.steps)
        try:
            parts = Path(folder, "parts")
            attempts = interrupted(parts, options.steps, options.kills, random.Random(options.seed))
            whole = at_peace.finish()
        finally:
            at_peace.end()
        weights = [Path(folder, name, "weights.txt").read_text() for name in ("whole", "parts")]
        return 0 if report(whole, attempts, weights[0] == weights[1]) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Kill workers and servers of a training under the launcher: ``python -m tests.benchmarks.served_kills --out DIR``.

Each push takes the same away from the weights, so that they say how many were applied. Each worker counts those that
were answered; what it has counted last may be one less than that when it is killed. All that were killed come back.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_async import ParameterServerStrategy, Timeouts
from tests.benchmarks.averaging import termination_as_exception
from tests.benchmarks.elastic_run import DEATH_S, START_S, Run
from tests.benchmarks.elastic_trace import Life, Writer
from tests.benchmarks.report import Target, load_average, machine

MODULE = "tests.benchmarks.served_kills"
STEP_S = 0.01
NUMEL = 1000


class Counts(pl.LightningModule):
    """Its weights say how many pushes are in them."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.applied = nn.Parameter(torch.zeros(NUMEL))
        self.writer, self._stop = Writer(folder, os.environ["RANK"]), Path(folder, "stop")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(STEP_S)
        return -self.applied.sum()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        servers = [server.supervisor for server in strategy.servers.own]
        self.writer.note("pushed", pushes=strategy._session.step_runner.pushes, run=strategy.num_runs, servers=servers)
        if self._stop.exists():
            self.trainer.should_stop = True

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def train(folder: str) -> None:
    """One rank."""
    torch.set_num_threads(1)
    module = Counts(folder)
    module.writer.note("start", process=os.getpid(), name=os.environ["RANK"])
    strategy = ParameterServerStrategy(
        "async", staleness="none", min_replicas=1, timeouts=Timeouts(dead_after=timedelta(seconds=30))
    )
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), max_epochs=-1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    try:
        trainer.fit(module, DataLoader(torch.zeros(3_000_000, 1), batch_size=2))  # pyright: ignore[reportArgumentType]
    except BaseException as error:
        module.writer.note("error", error=f"{type(error).__name__}: {error}")
        raise
    module.writer.note("end", applied=[float(module.applied.min()), float(module.applied.max())])


def pushes_of(life: Life) -> int:
    """That it has counted; training begins anew with each rank that comes, and counts from there."""
    by_run: dict[int, int] = {}
    for event in life.of("pushed"):
        by_run[event["run"]] = event["pushes"]
    return sum(by_run.values())


@dataclass
class Kills:
    """What was found; times in seconds.

    Args:
        back: from the death of a worker until it trains with the others again.
        resumed: from the death of a server until all workers have pushed again.
        counted: pushes that workers have counted.
        applied: that are in the weights.
        lives: of workers that were killed.
        code: of the launcher.
    """

    back: list[float] = field(default_factory=list)
    resumed: list[float] = field(default_factory=list)
    counted: int = 0
    applied: float = -1.0
    lives: int = 0
    code: int = -1

    @property
    def exact(self) -> bool:
        """Each push is there once: of those that were killed, one more may be than they have counted."""
        return self.counted <= self.applied <= self.counted + self.lives


def kill(out: Path, ranks: int, workers: int, servers: int, seed: int) -> Kills:
    """So many of each, in turn by chance."""
    chance, found = random.Random(seed), Kills()
    order = ["worker"] * workers + ["server"] * servers
    chance.shuffle(order)
    with tempfile.TemporaryDirectory(prefix="served-", dir=out) as folder:
        run = Run(Path(folder), ranks, max_restarts=2 * workers + 8, program=[MODULE, "--rank", folder])
        try:
            run.wait("for all to begin", _go_on(run, ranks), START_S)
            for what in order:
                time.sleep(chance.uniform(0.0, 0.5))
                began = time.monotonic()
                if what == "worker":
                    os.kill(chance.choice(list(run.living().values())).process, signal.SIGKILL)
                    found.lives += 1
                    run.wait("for a worker to come back", _go_on(run, ranks), START_S)
                    found.back.append(time.monotonic() - began)
                else:
                    os.kill(_server(run), signal.SIGKILL)
                    run.wait("for a server to come back", _go_on(run, ranks), DEATH_S)
                    found.resumed.append(time.monotonic() - began)
                print(f"  {what} {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
            found.code = run.end()
            all_ = run.traces.read()
            found.counted = sum(map(pushes_of, all_))
            ends = [tuple(event["applied"]) for life in all_ for event in life.of("end")]
            if len(ends) == ranks and len({*ends[0], *(each for end in ends for each in end)}) == 1:
                found.applied = ends[0][0]
            errors = [event["error"] for life in all_ for event in life.of("error")]
            if found.code or not found.exact or errors:
                print("\n".join([*errors, run.said()]), file=sys.stderr)
        finally:
            run.close()
    return found


def _go_on(run: Run, ranks: int) -> Callable[[list[Life]], bool]:
    """Whether so many train, each with some pushes more than now."""
    before = {life.process: pushes_of(life) for life in run.traces.read()}

    def done(all_: list[Life]) -> bool:
        here = [life for life in all_ if life.alive and not life.ended]
        return len(here) == ranks and all(pushes_of(life) >= before.get(life.process, 0) + 3 for life in here)

    return done


def _server(run: Run) -> int:
    """The process that serves: its supervisor's child."""
    told = (event["servers"] for life in run.traces.read() for event in life.of("pushed"))
    (supervisor,) = next(servers for servers in told if servers)
    until = time.monotonic() + DEATH_S
    while time.monotonic() < until:
        if children := Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split():
            return int(children[0])
        time.sleep(0.01)
    raise RuntimeError(f"supervisor {supervisor} has no server")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rank", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("runs/servers"), help="folder for the numbers")
    parser.add_argument("--ranks", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--worker-kills", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--server-kills", type=int, default=30, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of who dies when (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.rank is not None:
        train(options.rank)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "-m", MODULE, *(sys.argv[1:] if arguments is None else arguments)])
    with termination_as_exception():
        found = kill(options.out, options.ranks, options.worker_kills, options.server_kills, options.seed)
    targets = [
        Target(about="workers that were killed and came back", value=len(found.back), limit=options.worker_kills),
        Target(about="servers that were killed and came back", value=len(found.resumed), limit=options.server_kills),
        Target(about="whether each push that was answered is in the weights once", value=found.exact, limit=1.0),
        Target(about="exit code", value=found.code, limit=0.0, at_most=True),
    ]
    lines = [
        "# Kills of workers and servers\n", f"- {machine()}; load average {load_average()}",
        f"- repeat with `{command}`",
        f"- {found.applied:g} pushes applied, of which workers have counted {found.counted}",
    ]  # fmt: skip
    for what, seconds in (("a worker is back", found.back), ("all push again after a server's death", found.resumed)):
        if seconds:
            lines.append(f"- {what}: {statistics.median(seconds):.1f} s, at most {max(seconds):.1f} s")
    text = "\n".join([*lines, "", *(target.line() for target in targets)])
    print(text)
    (options.out / "kills.md").write_text(text + "\n")
    (options.out / "kills.json").write_text(json.dumps(vars(found), indent=1))
    return int(not all(target.held for target in targets))


if __name__ == "__main__":
    sys.exit(main())

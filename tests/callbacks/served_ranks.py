"""Scenarios of `ParameterServerStrategy` on two ranks with checkpoints and with what watches over training."""

from __future__ import annotations

import contextlib
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning_async import (
    AsyncAveragingStrategy,
    DiLoCo,
    DivergenceMonitor,
    ParameterServerStrategy,
    ServerOptions,
    Timeouts,
    TwoBit,
)
from lightning_async.algorithms import SaveProgress
from lightning_async.callbacks.checkpoint import FaultTolerantCheckpoint
from lightning_async.errors import PeerLost
from tests.callbacks.checkpoint_ranks import Interrupted, interrupt, settled
from tests.callbacks.problem import Line
from tests.callbacks.ranks import HISTORY, NAN, Paced, on_rank_1
from tests.callbacks.ranks import fit as fit_line
from tests.callbacks.window_ranks import BATCHES, STOP, AtBatch, goes_on, told, train
from tests.strategies import problem
from tests.strategies.workers import logged, rank, scenario

HUGE = 1e30
"""A factor that is finite itself: gradients that are not never come to the servers."""
DUE = BATCHES + 8
"""A step after which one rank wants a save."""


def servers(mode: str = "sync", **options: Any) -> Any:
    """Buffers are each worker's: else they are averaged at each save, and a training without saves has others."""
    return ParameterServerStrategy(mode, **{"min_replicas": 2, "buffers": "keep", **options})


def killed(folder: str) -> Any:
    """Rank 1 is killed within the second epoch."""
    with contextlib.suppress(PeerLost):
        dies = AtBatch(STOP, lambda: os.kill(os.getpid(), signal.SIGKILL) if rank() == 1 else None)
        train(Path(folder), servers(timeouts=Timeouts(dead_after=timedelta(seconds=3))), dies)
    return "lost"


@scenario
def after_a_kill(folder: Path) -> Any:
    """What an earlier pair of processes has left goes on, with other servers."""
    return told(folder.parent / "left", lambda: servers(num_servers=2, options=ServerOptions(bigarray_bound=10)))


@scenario
def own_optimizers(folder: Path) -> Any:
    return goes_on(folder, lambda: servers(update_on_server=False))


@scenario
def carried_residual(folder: Path) -> Any:
    """What compressed pushes have yet to deliver goes on with its worker."""
    return goes_on(folder, lambda: servers(compression=TwoBit(0.05)))


@scenario
def warmed_up(folder: Path) -> Any:
    """In step at first: a save is called for in the last step of these, and made behind it."""
    return goes_on(folder, lambda: servers("async", warmup_steps=BATCHES + 3))


@scenario
def asynchronous(folder: Path) -> Any:
    return goes_on(folder, lambda: servers("async"))


class DueOnOne:
    """What only one rank knows, as its clock."""

    def due(self, progress: SaveProgress) -> bool:
        return rank() == 1 and progress.step >= DUE > progress.saved_step

    def __repr__(self) -> str:
        return "DueOnOne()"


@scenario
def due_on_one(folder: Path) -> Any:
    """The call goes with the step before, and all save behind that step."""
    with contextlib.suppress(Interrupted, PeerLost):
        train(folder, servers(), AtBatch(STOP, interrupt), every=1000, save=DueOnOne())
    return told(folder, servers)


@scenario
def preempted(folder: Path) -> Any:
    """One rank alone is told to go."""
    code: Any = None
    tells = AtBatch(BATCHES + 1, lambda: os.kill(os.getpid(), signal.SIGTERM) if rank() == 1 else None)
    try:
        train(folder, servers(), tells, every=1000)
    except SystemExit as error:
        code = error.code
    return told(folder, servers, every=1000) | {"code": code}


@scenario
def fails(folder: Path) -> Any:
    """Rank 1 fails in its forward pass, and saves alone what the servers have."""
    error = None
    try:
        fails = AtBatch(STOP, interrupt if rank() == 1 else lambda: None)
        train(folder, servers(), fails, every=1000, save_on_exception=True)
    except (Interrupted, PeerLost) as raised:
        error = type(raised).__name__
    return told(folder, servers, every=1000) | {"error": error}


def moved(folder: Path, first: Any, second: Any) -> Any:
    with contextlib.suppress(Interrupted, PeerLost):
        train(folder, first, AtBatch(STOP, interrupt))
    entry = settled(folder)[0]
    rest = train(folder, second)
    values = problem.flat(rest)
    return {"saved": entry.step, "first": min(rest.seen), "seen": len(rest.seen), "values": values}


@scenario
def to_replicas(folder: Path) -> Any:
    """Replicas that average go on from what servers had."""
    return moved(folder, servers(), replicas())


@scenario
def from_replicas(folder: Path) -> Any:
    return moved(folder, replicas(), servers())


@scenario
def to_another_mode(folder: Path) -> Any:
    return moved(folder, servers("async"), servers("ssp", num_servers=2, options=ServerOptions(bigarray_bound=10)))


def replicas() -> Any:
    return AsyncAveragingStrategy(DiLoCo(), min_replicas=2)


# ---- what watches over training ----


@scenario
def not_finite() -> Any:
    """A gradient of one worker's is not pushed, and the other one's is."""
    return fit_line(servers(), Line(on_rank_1({9: NAN})), DivergenceMonitor(), n=24)


@scenario
def not_finite_async() -> Any:
    return fit_line(servers("async"), Line(on_rank_1({9: NAN})), DivergenceMonitor(), n=24)


@scenario
def stops() -> Any:
    wrong = on_rank_1(dict.fromkeys(range(60, 70), 1e4))
    monitor = DivergenceMonitor(signals=["loss"], remedies=["log", "stop"], history=HISTORY)
    return fit_line(servers("async"), Paced(wrong), monitor, n=120)


def _rolled_back(folder: Path, strategy: Any) -> Any:
    wrong = on_rank_1(dict.fromkeys((60, 61, 62, 63), 1e4))
    monitor = DivergenceMonitor(signals=["loss"], remedies=["log", "roll_back", "stop"], history=HISTORY)
    saved = FaultTolerantCheckpoint(folder, every_n_train_steps=5, good_after=3, busy="wait")
    module = Paced(wrong)
    with logged() as said:
        told = fit_line(strategy, module, monitor, saved, n=120, enable_checkpointing=True)
    return told | {"rollbacks": monitor.rollbacks, "said": said, "batches": len(module.history)}


@scenario
def rolled_back(folder: Path) -> Any:
    """A loss that is far off, and finite, on one rank: all go back to a checkpoint, and so do the servers."""
    return _rolled_back(folder, servers())


@scenario
def rolled_back_async(folder: Path) -> Any:
    return _rolled_back(folder, servers("async"))


@scenario
def broken(folder: Path) -> Any:
    """Losses of the servers' weights are not finite: all are called together, and go back."""
    monitor = DivergenceMonitor(remedies=["log", "roll_back", "stop"], history=HISTORY)
    saved = FaultTolerantCheckpoint(folder, every_n_train_steps=5, good_after=3, busy="wait")
    module = Paced(on_rank_1({60: HUGE}))
    told = fit_line(servers("async"), module, monitor, saved, n=120, enable_checkpointing=True)
    return told | {"rollbacks": monitor.rollbacks}
